"""What the members of a new group tell each other through the store, and what follows for all of them alike."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction

import torch.distributed as dist

from meshmend import __version__
from meshmend.errors import Coordinate, MeshError, name_chip
from meshmend.topology import Cable, Mesh, name_cable, name_shape, parse_chip
from meshmend.torch.plans import Plans
from meshmend.torch.rendezvous import exchange


@dataclass(frozen=True)
class MemberInfo:
    """What a member says of itself.

    >>> said = MemberInfo((2, 3), "meshmend 1.0, 4x4", frozenset({((0, 0), (0, 1))}), 1700, "10.0.0.7")
    >>> str(said)
    '1700|2,3|meshmend 1.0, 4x4|0,0-0,1|10.0.0.7'
    >>> MemberInfo.read(str(said)) == said
    True
    """

    chip: Coordinate
    config_id: str
    """What all members must have alike."""
    cables: frozenset[Cable]
    """Cables in quarantine that it knows of."""
    at_ms: int
    address: str = ""
    """At which its neighbours find its host; nothing where its network interface is not named."""

    def __str__(self) -> str:
        chip, cables = ",".join(map(str, self.chip)), ";".join(sorted(map(name_cable, self.cables)))
        return f"{self.at_ms}|{chip}|{self.config_id}|{cables}|{self.address}"

    @classmethod
    def read(cls, text: str) -> MemberInfo:
        """Read what a member has written; the terms of another version are at least other terms."""
        at_ms, chip, rest = text.split("|", 2)
        config_id, *more = rest.rsplit("|", 2)
        if len(more) < 2:
            return cls(parse_chip(chip), rest, frozenset(), int(at_ms))
        named, address = more
        cables = [tuple(map(parse_chip, name.split("-"))) for name in named.split(";") if name]
        return cls(parse_chip(chip), config_id, frozenset((a, b) for a, b in cables), int(at_ms), address)

    @classmethod
    def of(
        cls, chip: Coordinate, whole: Mesh, plans: Plans, cables: frozenset[Cable] = frozenset(), address: str = ""
    ) -> MemberInfo:
        """Return what the member on a chip says now."""
        wrap = "".join(str(int(w)) for w in whole.wrap)
        config_id = f"meshmend {__version__}, {describe_machine(whole)}, wrap {wrap}, {plans}"
        return cls(chip, config_id, cables, time.time_ns() // 10**6, address)


def introduce(store: dist.Store, rank: int, world_size: int, own: MemberInfo, patience: timedelta) -> list[MemberInfo]:
    """Tell all members of a group about this one; return what they say, by rank."""
    members = [MemberInfo.read(word) for word in exchange(store, rank, world_size, str(own), patience)]
    compare(own, members)
    return members


def compare(own: MemberInfo, members: Sequence[MemberInfo]) -> None:
    """Raise `MeshError` if members cannot work together."""
    claims = Counter(other.chip for other in members)
    for other in members:
        if other.config_id != own.config_id:
            raise MeshError(
                f"Chip {name_chip(own.chip)} runs {own.config_id}, but chip {name_chip(other.chip)} runs "
                f"{other.config_id}. Every member needs the same shape or machine, hardware, plan and version."
            )
        if claims[other.chip] > 1:
            raise MeshError(
                f"{claims[other.chip]} members say that they are chip {name_chip(other.chip)}. "
                "Give each process a chip of its own."
            )


def survivors(whole: Mesh, members: Sequence[MemberInfo]) -> Mesh:
    """Return the machine without the chips that no member is on, and the cables that any knows to be in quarantine."""
    here = {member.chip for member in members}
    left = whole.fail(*(chip for chip in map(whole.chip, range(whole.n_chips)) if chip not in here))
    return left.with_failures(failed_cables=frozenset[Cable]().union(*(member.cables for member in members)))


def with_rates(mesh: Mesh, rates: Mapping[str, Fraction]) -> Mesh:
    """Return a mesh some of whose cables have at most these rates; those at 0 have failed.

    >>> with_rates(Mesh("2x2", cable_rates={"0,0-0,1": "1/4"}), {"0,0-0,1": Fraction(1, 2), "0,0-1,0": Fraction(0)})
    Mesh(2x2 minus 1 cable with 1 slow cable: 4 chips)
    """
    known = {name_cable(cable): rate for cable, rate in mesh.cable_rates.items()}
    lower = {name: min(rate, known.get(name, rate)) for name, rate in rates.items()}
    failed, cables = mesh.holes, mesh.failed_cables
    return Mesh(mesh.shape, wrap=mesh.wrap, failed=failed, failed_cables=cables, cable_rates=known | lower)


def neighbours(mesh: Mesh, own: MemberInfo, members: Sequence[MemberInfo]) -> dict[Coordinate, str]:
    """Return the neighbours of a member in the mesh that all form, each with its address."""
    near = mesh.neighbours[mesh.rank(own.chip)]
    chips = {mesh.chip(int(rank)) for rank in near if rank >= 0}
    return {member.chip: member.address for member in members if member.chip in chips}


def describe_machine(whole: Mesh) -> str:
    """Describe a machine such that two that differ in any chip, cable or rate have different texts."""
    if whole.is_full and not whole.has_slow_cables:
        return name_shape(whole.shape)
    exact = repr((whole.holes, whole.failed_cables, sorted(whole.cable_rates.items())))
    return f"{whole} [{hashlib.sha256(exact.encode()).hexdigest()[:12]}]"
