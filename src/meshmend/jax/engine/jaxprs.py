"""Walk through jaxprs: what a traced function computes, equation by equation, and in the functions that it calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from jax.extend.core import Jaxpr, Literal

T = TypeVar("T")
Equation = Any
"""A `JaxprEqn`: its variables have an `aval` with a shape and a dtype, which its own annotations do not say."""


class InnerJaxpr(NamedTuple):
    """A jaxpr that an equation calls, and its constants; a closed jaxpr has the same two."""

    jaxpr: Jaxpr
    consts: Sequence[Any]


def inner_jaxprs(equation: Equation) -> list[InnerJaxpr]:
    """Return the jaxprs that an equation calls: of a jitted function, the body of a loop, the branches of a `cond`."""
    found = []
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            jaxpr: Any = getattr(item, "jaxpr", item)
            if hasattr(jaxpr, "eqns"):
                found.append(InnerJaxpr(jaxpr, getattr(item, "consts", ())))
    return found


def equations(jaxpr: Jaxpr) -> Iterator[Equation]:
    """Return the equations of a jaxpr, each followed by those of the jaxprs that it calls.

    >>> import jax
    >>> traced = jax.make_jaxpr(lambda x: jax.lax.cond(x > 0, jax.numpy.sin, jax.numpy.cos, x))(1.0)
    >>> sorted({equation.primitive.name for equation in equations(traced.jaxpr)} & {"gt", "cond", "sin", "cos"})
    ['cond', 'cos', 'gt', 'sin']
    """
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from equations(inner.jaxpr)


def interpret(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    inputs: Sequence[T],
    *,
    constant: Callable[[Any], T],
    rule: Callable[[Equation, list[T]], Sequence[T]],
) -> list[T]:
    """Return what stands for each output of a jaxpr, where `inputs` stand for its inputs: values, marks, formulas.

    `constant(value)` stands for a constant, or a literal, and `rule(equation, inputs)` says what stands for an
    equation's outputs; it is called once per equation, in order.

    >>> import jax
    >>> traced = jax.make_jaxpr(lambda x, y: (2 * x, x * y))(1.0, 1.0)
    >>> def depends(equation, marks):
    ...     return [any(marks)] * len(equation.outvars)
    >>> interpret(traced.jaxpr, traced.consts, [False, True], constant=lambda _: False, rule=depends)  # on y?
    [False, True]
    """
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    known.update(zip(jaxpr.constvars, map(constant, consts), strict=True))

    def read(atom: Any) -> T:
        return constant(atom.val) if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        found = rule(equation, list(map(read, equation.invars)))
        known.update(zip(equation.outvars, found, strict=True))
    return list(map(read, jaxpr.outvars))


def carried_operands(equation: Equation) -> range:
    """Return which operands of a loop it carries from one turn to the next."""
    settings = equation.params
    if equation.primitive.name == "scan":
        body = settings["jaxpr"].jaxpr

        def n_rows(outside: Sequence[Any], inside: Sequence[Any]) -> int:
            """Return how many arrays a turn has one row of. What is fixed comes first, then what is carried."""
            return sum(a.aval.ndim > b.aval.ndim for a, b in zip(outside, inside, strict=True))

        end = len(body.invars) - n_rows(equation.invars, body.invars)
        return range(end - len(body.outvars) + n_rows(equation.outvars, body.outvars), end)
    if equation.primitive.name == "while":
        return range(settings["cond_nconsts"] + settings["body_nconsts"], len(equation.invars))
    return range(0)
