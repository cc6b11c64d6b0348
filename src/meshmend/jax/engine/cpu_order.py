"""One collective after the other, where messages are told apart by their order alone.

XLA on CPU starts the collectives of a program in the same order on all devices, but goes on past a loop that is not
over yet: what comes after it, and does not need its result, then runs beside it. Between processes the messages of
both go over one connection of Gloo, which knows them by their order, and mix: a sum gets the wrong addends, or, where
the sizes differ, the process ends with "collective mismatch". So the order is made a matter of data: every operation
that communicates is given its operands only when the one before it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from meshmend.jax.engine.fabric import Fabric
from meshmend.jax.engine.jaxprs import InnerJaxpr, carried_operands, equations, inner_jaxprs, interpret
from meshmend.jax.engine.loops import hidden_zero
from meshmend.jax.engine.program import Program

COLLECTIVES = {
    *("ppermute", "psum", "psum_invariant", "pmin", "pmax", "all_gather", "all_gather_invariant", "reduce_scatter"),
    *("all_to_all", "ragged_all_to_all", "pbroadcast"),
}
LOOPS = ("scan", "while", "cond")
"""Operations that XLA runs as a whole: they are over once their results are there."""


def in_order(function: Callable[..., Any], fabric: Fabric) -> Callable[..., Any]:
    """Return the function, with its collectives one after the other where they may mix: see `mixes_messages`.

    Once XLA (JAX 0.10.2) has loaded a fused update, from a file or JAX's cache, they mix in one process, too.
    """
    if fabric.platform != "cpu":
        return function

    @wraps(function)
    def run(*args: Any, **settings: Any) -> Any:
        is_fused = any(isinstance(x, Program) and x.update == "fused" for x in (*args, *settings.values()))
        return (one_by_one(function) if is_fused or mixes_messages(fabric) else function)(*args, **settings)

    return run


def mixes_messages(fabric: Fabric) -> bool:
    """Whether collectives that run side by side may get each other's messages: CPU devices of several processes."""
    return fabric.platform == "cpu" and len({device.process_index for device in fabric.jax_mesh.devices.flat}) > 1


def one_by_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the same results, in which no two collectives run side by side."""

    @wraps(function)
    def ordered(*args: Any, **settings: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args, **settings)
        found, _ = _evaluate(closed, jax.tree.leaves((args, settings)), [])
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return ordered


Values = list[Any]


def _evaluate(closed: ClosedJaxpr | InnerJaxpr, given: Sequence[Any], before: Values) -> tuple[Values, Values]:
    """Run operations, communicating ones in order, after `before`; return results, and the last communicating one's."""

    def run(operation: JaxprEqn, operands: Values) -> Values:
        nonlocal before
        if not _communicates(operation):
            return _bind(operation, operands, closed.jaxpr.debug_info)
        found, before = _communicate(operation, operands, before, closed.jaxpr.debug_info)
        return found

    results = interpret(closed.jaxpr, closed.consts, given, constant=lambda value: value, rule=run)
    return results, before


def _communicates(operation: JaxprEqn) -> bool:
    inside = (one for inner in inner_jaxprs(operation) for one in equations(inner.jaxpr))
    return any(one.primitive.name in COLLECTIVES for one in chain([operation], inside))


def _needs_order(closed: InnerJaxpr) -> bool:
    """Whether something that communicates may run beside a loop that does."""
    all_of_them = list(filter(_communicates, closed.jaxpr.eqns))
    inner = [inner for operation in all_of_them for inner in inner_jaxprs(operation)]
    return bool(inner) and (len(all_of_them) > 1 or any(map(_needs_order, inner)))


def _bind(operation: JaxprEqn, operands: Values, debug_info: Any) -> Values:
    """Run one operation as it is."""
    given = {v: x for v, x in zip(operation.invars, operands, strict=True) if not isinstance(v, Literal)}
    alone = Jaxpr((), list(given), operation.outvars, [operation], operation.effects, debug_info)
    found: Values = jaxpr_as_fun(ClosedJaxpr(alone, ()))(*given.values())
    return found


def _communicate(operation: JaxprEqn, operands: Values, before: Values, debug_info: Any) -> tuple[Values, Values]:
    """Run an operation that communicates; return its results, and what is there when it is complete."""
    name, settings = operation.primitive.name, operation.params
    inner = inner_jaxprs(operation)
    if name == "shard_map":
        return _shard_map(settings, inner[0], operands, before)
    if inner and name not in LOOPS:
        # A call, whose operations XLA puts among those around it.
        return _evaluate(inner[0], operands, before)
    operands = _once_there(before, operation, operands)
    if not any(map(_needs_order, inner)):
        found = _bind(operation, operands, debug_info)
    elif name == "scan":
        found = _scan(operation, operands)
    elif name == "while":
        found = _while(settings, operands)
    else:
        branches = [lambda *given, closed=closed: _evaluate(closed, given, [])[0] for closed in settings["branches"]]
        found = lax.switch(operands[0], branches, *operands[1:])
    return found, found


def _scan(operation: JaxprEqn, operands: Values) -> Values:
    settings, carries = operation.params, carried_operands(operation)
    n_carried = len(carries)
    fixed, carried, rows = operands[: carries.start], operands[carries.start : carries.stop], operands[carries.stop :]

    def body(carried: Values, row: Values) -> tuple[Values, Values]:
        found, _ = _evaluate(settings["jaxpr"], [*fixed, *carried, *row], [])
        return found[:n_carried], found[n_carried:]

    how = {name: settings[name] for name in ("length", "reverse", "unroll")}
    carried, results = lax.scan(body, carried, rows, **how)
    return [*carried, *results]


def _while(settings: dict[str, Any], operands: Values) -> Values:
    n_asked, n_fixed = settings["cond_nconsts"], settings["body_nconsts"]
    asked, fixed, carried = operands[:n_asked], operands[n_asked : n_asked + n_fixed], operands[n_asked + n_fixed :]
    found: Values = lax.while_loop(
        lambda carried: _evaluate(settings["cond_jaxpr"], [*asked, *carried], [])[0][0],
        lambda carried: _evaluate(settings["body_jaxpr"], [*fixed, *carried], [])[0],
        carried,
    )
    return found


def _shard_map(settings: dict[str, Any], closed: InnerJaxpr, operands: Values, before: Values) -> tuple[Values, Values]:
    whole = jax.sharding.PartitionSpec()
    found: Values = jax.shard_map(
        lambda zero, *given: _evaluate(closed, given, [zero] if before else [])[0],
        mesh=settings["mesh"],
        in_specs=(whole, *settings["in_specs"]),
        out_specs=list(settings["out_specs"]),
        axis_names=set(settings["newly_manual_axes"]),
        check_vma=settings["check_vma"],
    )(_zero_after(before), *operands)
    return found, found


def _once_there(before: Values, operation: JaxprEqn, operands: Values) -> Values:
    """Return an operation's operands as they are, available only once `before` is.

    A loop waits for all that it reads. Its integers (a program's tables) are enough, if it has any, and an element of
    what it carries (a payload, which stays where it is; of one chunk tables say nothing). A literal never waits.
    """
    if not before or _waits_anyway(before, operation, operands):
        return operands
    zero = _zero_after(before)
    waits = [_is_array(x) and not isinstance(v, Literal) for v, x in zip(operation.invars, operands, strict=True)]
    whole = [yes and jnp.issubdtype(x.dtype, jnp.integer) for yes, x in zip(waits, operands, strict=True)]
    if operation.primitive.name not in LOOPS or not any(whole):
        return [_plus(zero, x) if yes else x for yes, x in zip(waits, operands, strict=True)]
    carried = carried_operands(operation)
    return [
        _plus(zero, x) if whole[i] else _plus_first(zero, x) if waits[i] and i in carried else x
        for i, x in enumerate(operands)
    ]


def _waits_anyway(before: Values, operation: JaxprEqn, operands: Values) -> bool:
    """Whether all that a loop sends is made of `before`, as where one loop goes on with the payload of another.

    To wait for its first element too would keep the payload alive while the loop writes into it: XLA would copy it.
    """
    if operation.primitive.name != "scan" or len(before) != 1 or len(carried_operands(operation)) != 1:
        return False
    (carried,), body = carried_operands(operation), operation.params["jaxpr"].jaxpr
    made = {body.invars[carried]}
    for inner in body.eqns:
        taken = [v in made for v in inner.invars if not isinstance(v, Literal)]
        if _communicates(inner) and not (inner.primitive.name in COLLECTIVES and all(taken)):
            return False
        made.update(inner.outvars if any(taken) else ())
    return operands[carried] is before[0]


def _plus(zero: jax.Array, value: Any) -> Any:
    """Return a value with the same bits, available only once the zero is."""
    if jnp.issubdtype(value.dtype, jnp.integer):
        return value + zero.astype(value.dtype)
    # Adding 0.0 would make 0.0 of -0.0.
    return jnp.where(zero == 0, value, jnp.zeros_like(value))


def _plus_first(zero: jax.Array, value: jax.Array) -> jax.Array:
    """Return the same, with a single element that is written once the zero is there."""
    first = lax.slice(value, (0,) * value.ndim, (1,) * value.ndim)
    return lax.dynamic_update_slice(value, _plus(zero, first), (0,) * value.ndim)


def _zero_after(values: Values) -> jax.Array:
    """Return a zero that is available only once all values are."""
    return sum(map(hidden_zero, filter(_is_array, values)), jnp.zeros((), jnp.int32))


def _is_array(value: Any) -> bool:
    """Whether this has elements that are numbers: not a random key, nor the derivative of an integer."""
    dtype = jnp.result_type(value) if not hasattr(value, "dtype") else value.dtype
    return bool(np.size(value)) and dtype != jax.dtypes.float0 and not jnp.issubdtype(dtype, jax.dtypes.extended)
