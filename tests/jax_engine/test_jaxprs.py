"""One walker of jaxprs: it sees into every kind of call, and with values for marks it is an interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.sharding import PartitionSpec

from meshmend.jax.engine.jaxprs import carried_operands, equations, interpret

TABLE = np.arange(4.0, dtype=np.float32)


@jax.custom_jvp
def own_rule(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


own_rule.defjvps(lambda tangent, _, x: tangent * jnp.cos(x))


def mapped(x: jax.Array) -> jax.Array:
    mesh = jax.make_mesh((1,), ("i",), devices=jax.devices()[:1])
    function: Callable[[jax.Array], jax.Array] = jax.shard_map(
        jnp.sin, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec()
    )
    return function(x)


CALLS: dict[str, Callable[[jax.Array], Any]] = {
    "plain": lambda x: jnp.sin(x) * TABLE + 2.0,
    "jit": lambda x: jax.jit(lambda y: jnp.sin(y) + TABLE)(x),
    "cond": lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
    "switch": lambda x: lax.switch(1, [jnp.cos, jnp.sin, jnp.tan], x),
    "scan": lambda x: lax.scan(lambda c, row: (jnp.sin(c) * row, c), jnp.ones(()), x),
    "while": lambda x: lax.while_loop(lambda y: y[0] < 0.5, lambda y: jnp.sin(y) + 1, x),
    "custom": own_rule,
    "remat": jax.checkpoint(jnp.sin),
    "shard_map": mapped,
    "nested": lambda x: lax.scan(lambda c, _: (lax.cond(c[0] > 0, jax.jit(jnp.sin), jnp.cos, c), None), x, length=2),
}


@pytest.mark.parametrize("kind", CALLS)
def test_equations_inside_every_kind_of_call_are_seen(kind: str) -> None:
    traced = jax.make_jaxpr(CALLS[kind])(TABLE)
    assert "sin" in {equation.primitive.name for equation in equations(traced.jaxpr)}


@pytest.mark.parametrize("kind", CALLS)
def test_with_values_it_computes_what_the_function_does(kind: str) -> None:
    traced = jax.make_jaxpr(CALLS[kind])(TABLE)
    seen = []

    def run(equation: JaxprEqn, values: list[Any]) -> list[Any]:
        """Evaluate one equation by itself, as JAX does."""
        seen.append(equation)
        given = {v: x for v, x in zip(equation.invars, values, strict=True) if not isinstance(v, Literal)}
        names = traced.jaxpr.debug_info.with_unknown_names()
        alone = Jaxpr((), list(given), equation.outvars, [equation], equation.effects, names)
        found: list[Any] = jaxpr_as_fun(ClosedJaxpr(alone, ()))(*given.values())
        return found

    found = interpret(traced.jaxpr, traced.consts, [jnp.asarray(TABLE)], constant=lambda value: value, rule=run)
    assert seen == traced.jaxpr.eqns
    for one, expected in zip(found, jax.tree.leaves(CALLS[kind](jnp.asarray(TABLE))), strict=True):
        np.testing.assert_array_equal(one, expected)


def test_constants_and_literals_are_asked_for() -> None:
    traced = jax.make_jaxpr(lambda x: (x + jnp.asarray(TABLE), 3.0))(TABLE)
    asked: list[Any] = []

    def constant(value: Any) -> str:
        asked.append(np.asarray(value).tolist())
        return "constant"

    found = interpret(
        traced.jaxpr, traced.consts, ["x"], constant=constant, rule=lambda _, words: ["+".join(sorted(words))]
    )
    assert found == ["constant+x", "constant"]
    assert asked == [TABLE.tolist(), 3.0]


def test_what_a_loop_carries_is_between_what_is_fixed_and_its_rows() -> None:
    def scanned(fixed: jax.Array, carried: jax.Array, rows: jax.Array) -> Any:
        return lax.scan(lambda c, row: (c * fixed + row, c), carried, rows)

    (scan,) = jax.make_jaxpr(scanned)(jnp.ones(()), jnp.ones(()), TABLE).jaxpr.eqns
    assert carried_operands(scan) == range(1, 2)

    def repeated(limit: jax.Array, fixed: jax.Array, carried: jax.Array) -> Any:
        return lax.while_loop(lambda c: c < limit, lambda c: c * fixed, carried)

    (loop,) = jax.make_jaxpr(repeated)(jnp.ones(()), jnp.ones(()), jnp.ones(())).jaxpr.eqns
    assert carried_operands(loop) == range(2, 3)
