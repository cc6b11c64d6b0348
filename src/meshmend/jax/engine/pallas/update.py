"""A fused update inside the kernel: an optimizer's formula on a block of a chunk at a time.

The kernel has no values of its surroundings but what it is given. So the update is traced for one block, and whatever
in it depends on single numbers alone (the count of steps, the learning rate, the divisor of a mean) is computed
outside; those numbers are given to the kernel in scalar memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var, jaxpr_as_fun

from meshmend.errors import ParameterError
from meshmend.jax.engine.jaxprs import Equation, interpret


@dataclass(frozen=True)
class OwnerUpdate:
    """An update of a chip's own chunks, one per row: of the weights, and of the optimizer's state."""

    weights: jax.Array
    state: Sequence[jax.Array]
    formula: Callable[..., Sequence[jax.Array]]
    """From sums, state and weights (blocks of one shape) to new weights and state; each element by itself."""


class NoLayers:
    """Stands in for `ShardedLayers`: the kernel knows neither layers nor norms, and says so."""

    limits: tuple[jax.Array, ...] = ()

    def __getattr__(self, name: str) -> NoReturn:
        raise ParameterError(
            f"engine='pallas' updates each weight by itself, but this optimizer asks for {name}: a mask, or a norm as "
            "for clipping. Use one without, install with update='replicated', or with engine='xla'."
        )


def only_weights(weights: Sequence[jax.Array]) -> jax.Array:
    """Return the weights; refuse those that travel in several dtypes."""
    if len(weights) != 1:
        raise ParameterError(
            f"engine='pallas' updates weights that travel in one dtype, got {len(weights)} dtypes. Give "
            "accumulate_dtype=jnp.float32, convert the weights, or install with engine='xla'."
        )
    return weights[0]


def hoist(
    formula: Callable[..., Sequence[jax.Array]], blocks: Sequence[jax.ShapeDtypeStruct]
) -> tuple[list[jax.Array], Callable[..., list[jax.Array]]]:
    """Return the single numbers that a formula needs beside its blocks, and the rest of it: of those and the blocks."""
    traced = jax.make_jaxpr(formula)(*blocks)
    jaxpr = traced.jaxpr
    names = jaxpr.debug_info.with_unknown_names()
    outside, inside = list[Equation](), list[Equation]()

    def sort(equation: Equation, known: list[bool]) -> list[bool]:
        is_outside = all(known) and not any(variable.aval.shape for variable in equation.outvars)
        (outside if is_outside else inside).append(equation)
        return [is_outside] * len(equation.outvars)

    interpret(jaxpr, traced.consts, [False] * len(jaxpr.invars), constant=lambda _: True, rule=sort)
    known = {*jaxpr.constvars, *(variable for one in outside for variable in one.outvars)}
    used = [atom for atoms in (jaxpr.outvars, *(one.invars for one in inside)) for atom in atoms]
    needed = list(dict.fromkeys(atom for atom in used if not hasattr(atom, "val") and atom in known))
    arrays = [variable.aval.shape for variable in needed if variable.aval.shape]
    if arrays:
        raise ParameterError(
            f"This optimizer uses an array of shape {arrays[0]} beside weights and state, which the kernel of "
            "engine='pallas' does not have. Install with engine='xla'."
        )

    def part(equations: list[JaxprEqn], inputs: list[Var], outputs: Sequence[object]) -> Callable[..., list[jax.Array]]:
        some = jaxpr.replace(constvars=[], invars=inputs, outvars=outputs, eqns=equations, debug_info=names)
        function: Callable[..., list[jax.Array]] = jaxpr_as_fun(ClosedJaxpr(some, []))
        return function

    rest = part(inside, [*needed, *jaxpr.invars], jaxpr.outvars)

    def apply(scalars: Sequence[jax.Array], *values: jax.Array) -> list[jax.Array]:
        numbers = [x.astype(one.aval.dtype) for one, x in zip(needed, scalars, strict=True)]
        return rest(*numbers, *values)

    numbers = part(outside, jaxpr.constvars, needed)(*traced.consts)
    return [x.astype(jnp.int32) if x.dtype == jnp.bool_ else jnp.asarray(x) for x in numbers], apply
