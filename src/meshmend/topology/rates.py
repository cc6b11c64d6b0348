"""Rates: how fast a cable is, as a fraction of the hardware's link rate, and which cables a box names at once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import product

from meshmend.errors import MeshError
from meshmend.topology.region import Region
from meshmend.topology.text import Cable, name_cable

MAX_RATE_DENOMINATOR = 1000
"""A cable's rate is a fraction with a denominator of up to this: bounds are exact fractions of rates."""

RateLike = float | Fraction | str


def check_rate(value: RateLike) -> Fraction:
    """Return a rate as the nearest fraction with a small denominator; refuse all but 0 to 1.

    >>> check_rate(0.75), check_rate("1/3")
    (Fraction(3, 4), Fraction(1, 3))
    """
    try:
        if isinstance(value, str) and not re.fullmatch(r"\d{1,9}(\.\d{0,9}|/\d{1,9})?", value, re.ASCII):
            raise ValueError
        exact = Fraction(value)
    except (TypeError, ValueError, OverflowError, ZeroDivisionError):
        raise MeshError(
            f"{value!r} is not the rate of a cable. Write a number from 0 to 1, as in 0.75 or 3/4."
        ) from None
    if not 0 <= exact <= 1:
        raise MeshError(
            f"The rate of a cable is a part of the link rate, from 0 to 1: got {value}. Where some cables are faster "
            f"than the others, give the hardware their rate, and the others their part of it."
        )
    rate = exact.limit_denominator(MAX_RATE_DENOMINATOR)
    if rate == 0 < exact:
        raise MeshError(
            f"A cable at {value} of the link rate is too slow to plan with: 1/{MAX_RATE_DENOMINATOR} is the least. "
            "If it is not to be used, list it as failed."
        )
    return rate


def parse_cable_rate(text: str) -> tuple[str, str]:
    """Split a cable, or a box of them, from its rate, for `Mesh(cable_rates=…)`.

    >>> parse_cable_rate("0,4-0,5=1/2")
    ('0,4-0,5', '1/2')
    """
    cable, equals, rate = text.partition("=")
    if not equals:
        raise MeshError(f"{text!r} gives no cable its rate. Write its two chips = its rate, as in 0,4-0,5=1/2.")
    return cable.strip(), rate.strip()


def name_cable_rates(rates: Mapping[Cable, Fraction]) -> list[str]:
    """Write rates the way the command line and `parse_cable_rate` read them.

    >>> name_cable_rates({((0, 4), (0, 5)): Fraction(1, 2)})
    ['0,4-0,5=1/2']
    """
    return [f"{name_cable(cable)}={rate}" for cable, rate in rates.items()]


def cables_within(box: Region, shape: Sequence[int], wrap: Sequence[bool]) -> list[Cable]:
    """Return every cable of a mesh, live or not, whose two ends lie in a box.

    >>> cables_within(Region.parse("3x1@0,4"), (3, 8), (False, False))
    [((0, 4), (1, 4)), ((1, 4), (2, 4))]
    """
    found = []
    for chip in product(*(range(a, a + n) for a, n in zip(box.at, box.shape, strict=True))):
        for axis, (length, wrapped) in enumerate(zip(shape, wrap, strict=True)):
            beyond = (*chip[:axis], (chip[axis] + 1) % length, *chip[axis + 1 :])
            inside = box.at[axis] <= beyond[axis] < box.at[axis] + box.shape[axis]
            if inside and (wrapped or beyond[axis] > chip[axis]):
                found.append((min(chip, beyond), max(chip, beyond)))
    if not found:
        raise MeshError(f"No cable lies within {box}: a box for cable_rates holds at least two neighbours.")
    return found
