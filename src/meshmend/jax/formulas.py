"""Whether an optimizer does the same to all layers: what it computes for each weight, as a formula without shapes.

A shard is a flat piece of all layers, so an optimizer may run on it only if it would do the same to every element of
every layer. Python code can distinguish layers before JAX sees anything: by `ndim`, by shape, by name, by a mask. So
the update is traced twice, for the layers as they are and for the shards, and both jaxprs are read into formulas: one
number per formula, the same number for the same formula, whatever the shape of the arrays in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FormulasByKind = dict[tuple[str, str], set[int]]
"""For each kind of result (an update, or a place in the optimizer's state) and dtype of the weights: the formulas."""

SHAPES = frozenset({"shape", "broadcast_dimensions", "sharding", "out_sharding", "weak_type", "name"})
"""Parameters of operations that do not affect what happens to an element."""


class Formulas:
    """Numbers for formulas; compare outcomes of the same `Formulas` only."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def of_update(self, update: Callable[..., Any], state: Any, tree: Any) -> FormulasByKind:
        """Trace `update(gradients, state, weights)` for weights like `tree`, and read what it computes."""
        jaxpr = jax.make_jaxpr(update)(tree, state, tree)
        kinds = [kind for name in ("gradient", "state", "weight") for kind in self._kinds(name, state, tree)]
        inputs = [self._number("input", *kind) for kind in kinds]
        outputs = self._read(jaxpr.jaxpr, jaxpr.consts, inputs)
        outcome: FormulasByKind = {}
        wanted = [*self._kinds("update", state, tree), *self._kinds("state", state, tree)]
        for kind, number, variable in zip(wanted, outputs, jaxpr.jaxpr.outvars, strict=True):
            # A layer without weights is not computed with: JAX leaves out what it can.
            if variable.aval.size:
                outcome.setdefault(kind, set()).add(number)
        return outcome

    def _kinds(self, name: str, state: Any, tree: Any) -> list[tuple[str, str]]:
        """Say of each leaf what it is, and the dtype of the weights that it belongs to."""
        weights = dict(jax.tree_util.tree_leaves_with_path(tree))
        if name != "state":
            return [(name, str(leaf.dtype)) for leaf in weights.values()]
        kinds = []
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            # A moment has the path of its weight at the end of its own, and its shape.
            own = next((i for i in range(len(path) + 1) if _belongs(leaf, weights.get(path[i:]))), None)
            of = leaf if own is None else weights[path[own:]]
            kinds.append((f"state{jax.tree_util.keystr(path[:own])}", str(of.dtype)))
        return kinds

    def _number(self, *facts: Any) -> int:
        return self._numbers.setdefault(facts, len(self._numbers))

    def _read(self, jaxpr: Any, consts: Any, inputs: list[int]) -> list[int]:
        """Return the number of each output of a jaxpr, given those of its inputs."""
        known = dict(zip(jaxpr.invars, inputs, strict=True))
        for variable, value in zip(jaxpr.constvars, consts, strict=True):
            known[variable] = self._constant(value)

        def number(atom: Any) -> int:
            return self._constant(atom.val) if hasattr(atom, "val") else known[atom]

        for equation in jaxpr.eqns:
            outputs = self._equation(equation, [number(atom) for atom in equation.invars])
            known.update(zip(equation.outvars, outputs, strict=True))
        return [number(atom) for atom in jaxpr.outvars]

    def _constant(self, value: Any) -> int:
        if jnp.issubdtype(getattr(value, "dtype", np.dtype(object)), jax.dtypes.prng_key):
            return self._number("key", str(jax.random.key_data(value)))
        array = np.asarray(value)
        return self._number("constant", str(array.dtype), array.shape, array.tobytes())

    def _equation(self, equation: Any, inputs: list[int]) -> list[int]:
        name, inner = equation.primitive.name, inner_jaxprs(equation)
        if name == "cond":
            index, *operands = inputs
            branches = [self._read(jaxpr, consts, operands) for jaxpr, consts in inner]
            return [self._number(name, index, *ways) for ways in zip(*branches, strict=True)]
        if len(inner) == 1 and len(inner[0][0].invars) == len(inputs) and name not in ("while", "scan"):
            return self._read(*inner[0], inputs)
        # A number is the same number for each element; and what has its dtype already is not changed.
        if name == "broadcast_in_dim" and not equation.invars[0].aval.shape:
            return inputs
        if name == "convert_element_type" and equation.invars[0].aval.dtype == equation.outvars[0].aval.dtype:
            return inputs
        facts = tuple(sorted((key, str(value)) for key, value in equation.params.items() if key not in SHAPES))
        return [self._number(name, facts, *inputs, i) for i in range(len(equation.outvars))]


def inner_jaxprs(equation: Any) -> list[tuple[Any, Any]]:
    """Return the jaxprs that an equation calls, each with its constants."""
    found = []
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(item, "jaxpr", item)
            if hasattr(jaxpr, "eqns"):
                found.append((jaxpr, getattr(item, "consts", ())))
    return found


def _belongs(leaf: Any, weight: Any) -> bool:
    return weight is not None and leaf.shape == weight.shape and jnp.issubdtype(leaf.dtype, jnp.inexact)
