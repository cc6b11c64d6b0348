"""How shapes, chips, axes and cables are written and read: on the command line, in files and in messages."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence

from meshmend.errors import Coordinate, MeshError

Cable = tuple[Coordinate, Coordinate]
TIMES = "[xX×]"
"""What stands between the sides of a shape. We write x, which every keyboard has."""


def parse_shape(text: str) -> tuple[int, ...]:
    """Read a shape such as `16x32` or `4x4x8`; `16X32` and `16×32`, as people and papers write it, are the same.

    >>> parse_shape("16x32"), parse_shape("16×32")
    ((16, 32), (16, 32))
    """
    if not is_shape(text):
        raise MeshError(f"{text!r} is not a shape. Write rows x columns without spaces, as in 16x32.")
    return tuple(int(n) for n in re.split(TIMES, text.strip()))


def is_shape(text: str) -> bool:
    """Return whether a text is written as a shape.

    >>> is_shape("8X8"), is_shape("8y8")
    (True, False)
    """
    return re.fullmatch(rf"\d{{1,9}}({TIMES}\d{{1,9}})*", text.strip(), re.ASCII) is not None


def parse_chip(text: str) -> Coordinate:
    """Read a coordinate such as `6,8`.

    >>> parse_chip("6,8")
    (6, 8)
    """
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text.strip(), re.ASCII):
        raise MeshError(f"{text!r} is not a chip. Write row,column without spaces, counted from 0, as in 6,8.")
    return tuple(int(x) for x in text.strip().split(","))


def parse_wrap(text: str, n_axes: int, given: str) -> list[bool]:
    """Return for each axis whether it wraps; `given` starts an error message and names the source of the text.

    >>> parse_wrap("0,2", 3, given="--wrap 0,2:")
    [True, False, True]
    """
    if text in ("none", "all"):
        return [text == "all"] * n_axes
    axes, known = text.split(","), [str(axis) for axis in range(n_axes)]
    if not set(axes) <= set(known) or len(set(axes)) < len(axes):
        raise MeshError(f"{given} expected none, all, or axes from 0 to {n_axes - 1}, each once, as in 0,1.")
    return [axis in axes for axis in known]


def name_shape(shape: Sequence[int]) -> str:
    """Format a shape as the command line reads it."""
    return "x".join(str(n) for n in shape)


def name_cable(cable: Cable) -> str:
    """Format a cable as the command line reads it."""
    return "-".join(",".join(map(str, end)) for end in cable)


def whole_numbers(values: Sequence[int], what: str) -> tuple[int, ...]:
    """Return a coordinate or a shape as plain integers; `what` is how an error begins."""
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError:
        raise MeshError(f"{what} is whole numbers, as in (6, 8): got {values!r}.") from None
