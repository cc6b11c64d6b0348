"""What the members of a new group tell each other through the store, and what follows for all of them alike."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from meshmend import __version__
from meshmend.errors import Coordinate, MeshError, name_chip
from meshmend.topology import Cable, Mesh, name_cable, parse_chip
from meshmend.torch.place import describe_machine
from meshmend.torch.plans import Plans
from meshmend.torch.rendezvous import exchange


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

    @classmethod
    def of(cls, chip: Coordinate, whole: Mesh, plans: Plans, cables: frozenset[Cable] = frozenset()) -> Introduction:
        """Return what the member on a chip says now."""
        wrap = "".join(str(int(w)) for w in whole.wrap)
        terms = f"meshmend {__version__}, {describe_machine(whole)}, wrap {wrap}, {plans}"
        return cls(chip, terms, cables, time.time_ns() // 10**6)


def introduce(
    store: dist.Store, rank: int, world_size: int, own: Introduction, patience: timedelta
) -> list[Introduction]:
    """Tell all members of a group about this one; return what they say, by rank."""
    members = [Introduction.read(word) for word in exchange(store, rank, world_size, str(own), patience)]
    compare(own, members)
    return members


def compare(own: Introduction, members: Sequence[Introduction]) -> None:
    """Raise `MeshError` if members cannot work together."""
    chips = [other.chip for other in members]
    for other in members:
        if other.terms != own.terms:
            raise MeshError(
                f"Chip {name_chip(own.chip)} runs {own.terms}, but chip {name_chip(other.chip)} runs {other.terms}. "
                f"Every member needs the same shape or machine, hardware, plan and version."
            )
        if chips.count(other.chip) > 1:
            raise MeshError(f"{chips.count(other.chip)} members say that they are chip {name_chip(other.chip)}.")


def survivors(whole: Mesh, members: Sequence[Introduction]) -> Mesh:
    """Return the machine without the chips that no member is on, and the cables that any knows to be in quarantine."""
    here = {member.chip for member in members}
    left = whole.fail(*(chip for chip in map(whole.chip, range(whole.n_chips)) if chip not in here))
    return left.with_failures(failed_cables=frozenset[Cable]().union(*(member.cables for member in members)))
