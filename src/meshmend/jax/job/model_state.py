"""What a model remembers from step to step: numbers are averaged over examples, whole numbers are kept exactly.

A loss returns the new state with one row per example, and the mean of the rows is the next state. A mean of whole
numbers (counters, flags) is not whole: rounding it would let a counter stand still. So they are not averaged: a whole
number must be the same for all examples, which holds if it does not depend on them. The loss is traced to know that,
and what depends on examples is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from meshmend.errors import ParameterError
from meshmend.jax.engine.collectives import Tree
from meshmend.jax.engine.jaxprs import carried_operands, inner_jaxprs, interpret


class ModelState:
    """The state that a new job begins with, and how the next one comes from what a loss returns."""

    def __init__(self, start: Tree) -> None:
        given = jax.tree_util.tree_leaves_with_path(start)
        self.names = [f"model_state{jax.tree_util.keystr(path)}" for path, _ in given]
        self.structure: Any = jax.tree.structure(start)
        self.leaves = [self._exact(name, np.asarray(leaf)) for name, (_, leaf) in zip(self.names, given, strict=True)]
        self.is_whole = [not jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in self.leaves]

    @property
    def start(self) -> Tree:
        """The state before the first step."""
        return jax.tree.unflatten(self.structure, self.leaves)

    def averaged(self, new: Tree) -> list[Tree]:
        """Return the rows of those arrays whose mean is the next state; refuse a state of other arrays or shapes."""
        self._check_new(new)
        return [leaf for leaf, whole in zip(jax.tree.leaves(new), self.is_whole, strict=True) if not whole]

    def next(
        self,
        means: Sequence[Tree],
        new_state: Callable[[Tree, Tree, Tree], Tree],
        params: Tree,
        state: Tree,
        data: Tree,
    ) -> Tree:
        """Return the next state: the means, and the whole numbers that `new_state(params, state, data)` has."""
        numbers, averages = iter(self._whole_numbers(new_state, params, state, data)), iter(means)
        found = [
            next(numbers) if whole else next(averages).astype(old.dtype)
            for whole, old in zip(self.is_whole, self.leaves, strict=True)
        ]
        return jax.tree.unflatten(self.structure, found)

    def _whole_numbers(
        self, new_state: Callable[[Tree, Tree, Tree], Tree], params: Tree, state: Tree, data: Tree
    ) -> list[Tree]:
        which = [i for i, whole in enumerate(self.is_whole) if whole]
        if not which:
            return []

        def first_rows(params: Tree, state: Tree, data: Tree) -> list[Tree]:
            new = jax.tree.leaves(new_state(params, state, data))
            for i in which:
                self._check_whole(i, new[i])
            return [new[i][0] for i in which]

        traced = jax.make_jaxpr(first_rows)(params, state, data)
        given, examples = jax.tree.leaves((params, state)), jax.tree.leaves(data)
        depend = outputs_that_depend(traced.jaxpr, [False] * len(given) + [True] * len(examples))
        for i, on_examples in zip(which, depend, strict=True):
            if on_examples:
                raise ParameterError(
                    f"{self.names[i]} is {self.leaves[i].dtype}, and what the loss returns for it depends on the "
                    "examples: the next state is their mean, which is not a whole number. Keep it as float32, or "
                    "return what is the same for all examples, as in a counter of steps."
                )
        found: list[Tree] = jax.extend.core.jaxpr_as_fun(_without_the_rest(traced))(*given, *examples)
        return found

    @staticmethod
    def _exact(name: str, leaf: Any) -> jax.Array:
        """Return an array as JAX has it; refuse a whole number that JAX would have to cut off."""
        array: jax.Array = jnp.asarray(leaf)
        if not jnp.issubdtype(leaf.dtype, jnp.inexact) and not np.array_equal(np.asarray(array), leaf):
            raise ParameterError(
                f"{name} has {leaf.dtype} numbers that {array.dtype}, which JAX makes of them, does not have. Enable "
                "jax_enable_x64, or begin with smaller ones."
            )
        return array

    def _check_whole(self, number: int, new: Tree) -> None:
        """Refuse whole numbers that have become something else: to convert them back could lose something."""
        expected = self.leaves[number].dtype
        if new.dtype != expected:
            raise ParameterError(
                f"{self.names[number]} is {expected}, and the loss returns {new.dtype} for it. Return whole numbers in "
                f"the dtype that they have, as in x.astype(jnp.{expected})."
            )

    def _check_new(self, new: Tree) -> None:
        """Refuse a new state that could not be the next step's: other arrays, or other shapes."""

        def shapes(tree: Tree, first: int) -> Tree:
            return jax.tree.map(lambda leaf: list(jnp.shape(leaf)[first:]), tree)

        expected, found = shapes(self.start, 0), shapes(new, 1)
        if expected != found or not all(jnp.ndim(leaf) for leaf in jax.tree.leaves(new)):
            raise ParameterError(
                f"The loss returns another model state than it was given: expected arrays of shapes {expected} for "
                f"each example, got {found}. Return (values, new state), each array with one row per example."
            )


def outputs_that_depend(jaxpr: Any, marked: Sequence[bool]) -> list[bool]:
    """Return which outputs of a jaxpr depend on its marked inputs."""
    return interpret(jaxpr, jaxpr.constvars, marked, constant=lambda _: False, rule=_through)


def _through(equation: Any, marked: list[bool]) -> list[bool]:
    """Return which outputs of an equation depend on its marked inputs; all of them where that is not known."""
    every, none = [True] * len(equation.outvars), [False] * len(equation.outvars)
    if not any(marked):
        return none
    inner = [jaxpr for jaxpr, _ in inner_jaxprs(equation)]
    name = equation.primitive.name
    if name == "scan":
        (body,), carries = inner, carried_operands(equation)
        while True:
            found = outputs_that_depend(body, marked)
            carried = marked[carries.start : carries.stop]
            more = [a or b for a, b in zip(carried, found, strict=False)]
            if more == carried:
                return carried + found[len(carries) :]
            marked = marked[: carries.start] + more + marked[carries.stop :]
    if name == "cond":
        branches = [outputs_that_depend(branch, marked[1:]) for branch in inner]
        return every if marked[0] else [any(ways) for ways in zip(*branches, strict=True)]
    if len(inner) == 1 and len(inner[0].invars) == len(marked) and len(inner[0].outvars) == len(every):
        return outputs_that_depend(inner[0], marked)
    return every


def _without_the_rest(traced: Any) -> Any:
    """Return a closed jaxpr without equations that its outputs do not need: no loss, and nothing printed twice."""
    jaxpr, kept = traced.jaxpr, []
    needed = {atom for atom in jaxpr.outvars if not hasattr(atom, "val")}
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            kept.append(equation)
            needed.update(atom for atom in equation.invars if not hasattr(atom, "val"))
    return jax.extend.core.ClosedJaxpr(jaxpr.replace(eqns=kept[::-1]), traced.consts)
