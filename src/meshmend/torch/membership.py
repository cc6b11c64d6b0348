"""What the members of a new quorum tell each other through the store, and what follows for all of them alike."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from meshmend.errors import Coordinate, MeshError, name_chip
from meshmend.topology import Cable, name_cable, parse_chip


@dataclass(frozen=True)
class Introduction:
    """What a member says of itself.

    >>> said = Introduction((2, 3), "meshmend 1.0, 4x4", frozenset({((0, 0), (0, 1))}), 1700)
    >>> str(said)
    '1700|2,3|meshmend 1.0, 4x4|0,0-0,1'
    >>> Introduction.read(str(said)) == said
    True
    """

    chip: Coordinate
    terms: str
    """What all members must have alike."""
    cables: frozenset[Cable]
    """Cables in quarantine that it knows of."""
    at_ms: int

    def __str__(self) -> str:
        chip, cables = ",".join(map(str, self.chip)), ";".join(sorted(map(name_cable, self.cables)))
        return f"{self.at_ms}|{chip}|{self.terms}|{cables}"

    @classmethod
    def read(cls, text: str) -> Introduction:
        """Read what a member has written; the terms of another version are at least other terms."""
        at_ms, chip, rest = text.split("|", 2)
        terms, is_named, named = rest.rpartition("|")
        if not is_named:
            return cls(parse_chip(chip), rest, frozenset(), int(at_ms))
        cables = [tuple(map(parse_chip, name.split("-"))) for name in named.split(";") if name]
        return cls(parse_chip(chip), terms, frozenset((a, b) for a, b in cables), int(at_ms))

    @staticmethod
    def now_ms() -> int:
        """Return the time in milliseconds."""
        return time.time_ns() // 10**6


def compare(own: Introduction, all_of_them: Iterable[Introduction]) -> frozenset[Cable]:
    """Return the cables that any member knows to be in quarantine; raise if they cannot train together."""
    cables: frozenset[Cable] = frozenset()
    for other in all_of_them:
        if other.terms != own.terms:
            raise MeshError(
                f"Chip {name_chip(own.chip)} runs {own.terms}, but chip {name_chip(other.chip)} runs {other.terms}. "
                f"Every member needs the same shape or machine, hardware, plan and version."
            )
        cables |= other.cables
    return cables
