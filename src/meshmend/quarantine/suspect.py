"""What may be quarantined: a chip, a cable or a host, written as the command line writes them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from meshmend.errors import Coordinate, MeshError, QuarantineError
from meshmend.topology import Mesh, name_cable, parse_chip

MAX_TEXT = 200
"""Characters of a suspect: a cable between chips of eight axes fits."""
HOST = re.compile(r"host\s+(\d{1,9})", re.ASCII)


class ChipsOfHosts(Protocol):
    """Which chips each host drives, as `meshmend.launch.Hosts` says it."""

    @property
    def shape(self) -> Coordinate:
        """Chips along each axis of the whole machine."""

    @property
    def chips_per_host(self) -> int:
        """Chips that one host drives."""

    def __len__(self) -> int: ...

    def chips(self, number: int) -> list[Coordinate]:
        """Return the coordinates of a host's chips."""


@dataclass(frozen=True, order=True)
class Suspect:
    """A chip, a cable (the two chips it joins) or a host (its number).

    >>> [str(Suspect.parse(text)) for text in ("2,3", "2,4-2,3", "host 5")]
    ['2,3', '2,3-2,4', 'host 5']
    >>> Suspect.parse("2,3").kind, Suspect.parse("2,4-2,3").kind, Suspect.parse("host 5").kind
    ('chip', 'cable', 'host')
    """

    ends: tuple[Coordinate, ...] = ()
    """The chip, or the two chips of a cable, the smaller coordinate first; none for a host."""
    host: int | None = None

    def __post_init__(self) -> None:
        if (self.host is None) != (len(self.ends) in (1, 2)) or (self.host is not None and self.ends):
            raise _refused(repr((self.ends, self.host)))
        chips = tuple(sorted(tuple(int(x) for x in end) for end in self.ends))
        if len(chips) == 2 and (len(chips[0]) != len(chips[1]) or chips[0] == chips[1]):
            raise _refused(name_cable((chips[0], chips[1])))
        object.__setattr__(self, "ends", chips)

    @classmethod
    def chip(cls, at: Sequence[int]) -> Suspect:
        """Return a chip as a suspect."""
        return cls((tuple(at),))

    @classmethod
    def parse(cls, text: str) -> Suspect:
        """Read a suspect: "2,3" is a chip, "2,3-2,4" a cable, "host 5" a host."""
        words = text.strip() if len(text) <= MAX_TEXT else ""
        if found := HOST.fullmatch(words):
            return cls(host=int(found[1]))
        try:
            return cls(tuple(parse_chip(end) for end in words.split("-")))
        except MeshError as error:
            raise _refused(text) from error

    @property
    def kind(self) -> str:
        """One of "cable", "chip" and "host"."""
        return "host" if self.host is not None else "chip" if len(self.ends) == 1 else "cable"

    def check(self, shape: Coordinate, n_hosts: int | None = None, wrap: bool | Sequence[bool] = True) -> None:
        """Raise `QuarantineError` if a machine has no such chip, cable or host."""
        if self.host is not None:
            if n_hosts is not None and self.host >= n_hosts:
                raise QuarantineError(f"There is no {self}: the machine has hosts 0 to {n_hosts - 1}.")
            return
        mesh = Mesh(shape, wrap=wrap)
        try:
            ranks = [mesh.rank(end) for end in self.ends]
        except MeshError as error:
            raise QuarantineError(f"There is no {self.kind} {self} in this machine: {error}") from error
        if len(ranks) == 2 and ranks[1] not in mesh.neighbours[ranks[0]]:
            raise QuarantineError(
                f"No cable joins the two chips of {self} in a {'x'.join(map(str, shape))} mesh: name two neighbours."
            )

    def chips(self, hosts: ChipsOfHosts | None) -> tuple[Coordinate, ...]:
        """Return the chips that are left out with it: none for a cable, those of a host by `hosts`."""
        if self.kind == "cable":
            return ()
        if self.host is None:
            return self.ends
        if hosts is None:
            raise QuarantineError(
                f"Which chips {self} has is not known here, because the devices report their coordinates themselves. "
                "Quarantine its chips, each by its coordinate, as in 2,3."
            )
        self.check(hosts.shape, len(hosts))
        return tuple(hosts.chips(self.host))

    def __str__(self) -> str:
        if self.host is not None:
            return f"host {self.host}"
        return "-".join(",".join(map(str, end)) for end in self.ends)


def _refused(got: str) -> QuarantineError:
    return QuarantineError(
        f"{got[:MAX_TEXT]!r} is no suspect. Write a chip as 2,3, a cable as 2,3-2,4, a host as 'host 5'."
    )
