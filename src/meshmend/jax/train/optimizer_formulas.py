"""Whether an optimizer does the same to all layers: what it computes for each weight, as a formula without shapes.

A shard is a flat piece of all layers, so an optimizer may run on it only if it would do the same to every element of
every layer. Python code can distinguish layers before JAX sees anything: by `ndim`, by shape, by name, by a mask. So
the update is traced twice, for the layers as they are and for the shards, and both jaxprs are read into formulas: one
number per formula, the same number for the same formula, whatever the shape of the arrays in it.

It can distinguish layers by their dtype, too, and shards have the dtype of sums: a bfloat16 layer is part of a float32
shard. So the layers are traced in both dtypes, and the two formulas of each must be the same apart from rounding.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from meshmend.jax.engine.jaxprs import inner_jaxprs, interpret

FormulasByKind = dict[tuple[str, str], set[int]]
"""For each kind of result (an update, or a place in the optimizer's state) and dtype of the weights: the formulas."""

SHAPES = frozenset({"shape", "broadcast_dimensions", "sharding", "out_sharding", "weak_type", "name"})
"""Parameters of operations that do not affect what happens to an element."""
FLOATS = re.compile(r"\b(bf|f|c|bfloat|float|complex)\d+\w*")
"""Names of floating-point dtypes, as jaxprs and dtypes are printed: float32, bf16, float8_e4m3fn."""


class Formulas:
    """Numbers for formulas; compare outcomes of the same `Formulas` only.

    With `any_width`, the floating-point dtypes in a formula do not count, nor do conversions between them.
    """

    def __init__(self, *, any_width: bool = False) -> None:
        self.any_width = any_width
        self._numbers: dict[tuple[tuple[Any, ...], tuple[int, ...]], int] = {}

    def of_update(self, update: Callable[..., Any], state: Any, tree: Any) -> FormulasByKind:
        """Trace `update(gradients, state, weights)` for weights like `tree`, and read what it computes."""
        jaxpr = jax.make_jaxpr(update)(tree, state, tree)
        kinds = [kind for name in ("gradient", "state", "weight") for kind in self._kinds(name, state, tree)]
        inputs = [self._number(("input", *kind)) for kind in kinds]
        outputs = self._read(jaxpr.jaxpr, jaxpr.consts, inputs)
        outcome: FormulasByKind = {}
        wanted = [*self._kinds("update", state, tree), *self._kinds("state", state, tree)]
        for kind, number, variable in zip(wanted, outputs, jaxpr.jaxpr.outvars, strict=True):
            # A layer without weights is not computed with: JAX leaves out what it can.
            if variable.aval.size:
                outcome.setdefault(kind, set()).add(number)
        return outcome

    def are_alike(self, update: Callable[..., Any], one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
        """Whether an update computes the same for two (state, weights) that differ in floating-point dtypes only."""
        structures: list[Any] = [jax.tree.structure(given) for given in (one, other)]
        if structures[0] != structures[1]:
            return False
        read = []
        for state, tree in (one, other):
            outputs = jax.tree.leaves(jax.eval_shape(update, tree, state, tree))
            numbers = self.of_outputs(update, tree, state, tree)
            # A layer without weights is not computed with.
            read.append([number for number, output in zip(numbers, outputs, strict=True) if output.size])
        return len(read[0]) == len(read[1]) and self._match(list(zip(*read, strict=True)))

    def of_outputs(self, function: Callable[..., Any], *args: Any) -> list[int]:
        """Trace a function, and return the number of the formula of each array that it returns."""
        jaxpr = jax.make_jaxpr(function)(*args)
        inputs = [self._number(("input", i)) for i in range(len(jaxpr.jaxpr.invars))]
        return self._read(jaxpr.jaxpr, jaxpr.consts, inputs)

    def _match(self, pairs: list[tuple[int, int]]) -> bool:
        """Whether the formulas of each pair are the same, apart from the rounding of their constants."""
        terms = list(self._numbers)
        todo, seen = list(pairs), set[tuple[int, int]]()
        while todo:
            pair = todo.pop()
            if pair in seen or pair[0] == pair[1]:
                continue
            seen.add(pair)
            (facts, inputs), (other_facts, other_inputs) = (terms[number] for number in pair)
            if facts[0] == other_facts[0] == "constant":
                if not _same_but_rounded(facts, other_facts):
                    return False
            elif facts != other_facts or len(inputs) != len(other_inputs):
                return False
            todo.extend(zip(inputs, other_inputs, strict=True))
        return True

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

    def _number(self, facts: tuple[Any, ...], inputs: tuple[int, ...] = ()) -> int:
        return self._numbers.setdefault((facts, inputs), len(self._numbers))

    def _read(self, jaxpr: Any, consts: Any, inputs: list[int]) -> list[int]:
        """Return the number of each output of a jaxpr, given those of its inputs."""
        return interpret(jaxpr, consts, inputs, constant=self._constant, rule=self._equation)

    def _constant(self, value: Any) -> int:
        if jnp.issubdtype(getattr(value, "dtype", np.dtype(object)), jax.dtypes.prng_key):
            return self._number(("key", str(jax.random.key_data(value))))
        array = np.asarray(value)
        return self._number(("constant", array.dtype, array.shape, array.tobytes()))

    def _equation(self, equation: Any, inputs: list[int]) -> list[int]:
        name, inner = equation.primitive.name, inner_jaxprs(equation)
        if name == "cond":
            index, *operands = inputs
            branches = [self._read(jaxpr, consts, operands) for jaxpr, consts in inner]
            return [self._number((name,), (index, *ways)) for ways in zip(*branches, strict=True)]
        if len(inner) == 1 and len(inner[0][0].invars) == len(inputs) and name not in ("while", "scan"):
            return self._read(*inner[0], inputs)
        # A number is the same number for each element; and what has its dtype already is not changed.
        if name == "broadcast_in_dim" and not equation.invars[0].aval.shape:
            return inputs
        if name == "convert_element_type":
            before, after = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
            if before == after or (self.any_width and _kind(before) == _kind(after) is not None):
                return inputs
        facts = [(key, str(value)) for key, value in equation.params.items() if key not in SHAPES]
        if self.any_width:
            facts = [(key, FLOATS.sub(_without_width, text)) for key, text in facts]
        return [self._number((name, *sorted(facts), i), tuple(inputs)) for i in range(len(equation.outvars))]


def keeps_layers_apart(update: Callable[..., Any], state: Any, tree: Any) -> bool:
    """Whether what `update(gradients, state, weights)` returns for a layer depends on numbers and this layer only."""
    weights = dict(jax.tree_util.tree_leaves_with_path(tree))
    own = [frozenset({path}) for path in weights]
    of_state = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        layer = next((path[i:] for i in range(len(path) + 1) if _belongs(leaf, weights.get(path[i:]))), None)
        if leaf.ndim and layer is None:
            return False
        of_state.append(frozenset() if layer is None else frozenset({layer}))
    jaxpr = jax.make_jaxpr(update)(tree, state, tree)
    found = _reached(jaxpr.jaxpr, jaxpr.consts, [*own, *of_state, *own])
    return all(reached <= layer for reached, layer in zip(found, [*own, *of_state], strict=True))


def _reached(jaxpr: Any, consts: Any, inputs: list[frozenset[Any]]) -> list[frozenset[Any]]:
    """Return the union of the inputs that each output of a jaxpr depends on."""

    def rule(equation: Any, inputs: list[frozenset[Any]]) -> list[frozenset[Any]]:
        name, inner = equation.primitive.name, inner_jaxprs(equation)
        if name == "cond":
            index, *operands = inputs
            branches = [_reached(*branch, operands) for branch in inner]
            return [index.union(*ways) for ways in zip(*branches, strict=True)]
        if len(inner) == 1 and len(inner[0][0].invars) == len(inputs) and name not in ("while", "scan"):
            return _reached(*inner[0], inputs)
        return [frozenset().union(*inputs)] * len(equation.outvars)

    return interpret(jaxpr, consts, inputs, constant=lambda _: frozenset(), rule=rule)


def _belongs(leaf: Any, weight: Any) -> bool:
    return weight is not None and leaf.shape == weight.shape and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _kind(dtype: Any) -> str | None:
    """Return whether a dtype is of real or of complex numbers; None for all others."""
    kinds = {"real": jnp.floating, "complex": jnp.complexfloating}
    return next((name for name, kind in kinds.items() if jnp.issubdtype(dtype, kind)), None)


def _without_width(name: re.Match[str]) -> str:
    return "complex" if name[0].startswith("c") else "float"


def _same_but_rounded(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two constants (dtype, shape, bytes) are the same number in dtypes of different width."""
    (_, dtype, shape, data), (_, other_dtype, other_shape, other_data) = one, other
    if shape != other_shape or dtype == other_dtype or not _kind(dtype) == _kind(other_dtype) is not None:
        return False
    coarse = max((jnp.finfo(dtype), jnp.finfo(other_dtype)), key=lambda info: float(info.eps))

    def parts(data: bytes, dtype: Any) -> NDArray[np.float64]:
        values = np.frombuffer(data, dtype).astype(np.complex128).view(np.float64)
        # What is above the largest number of the narrower dtype is infinite in it.
        return np.clip(values, -float(coarse.max), float(coarse.max))

    # And what is below its smallest is 0.
    rtol, atol = float(coarse.eps), float(coarse.tiny)
    return np.allclose(parts(data, dtype), parts(other_data, other_dtype), rtol, atol, equal_nan=True)
