"""What a file says about a machine, before anybody knows where its chips lie: every reader returns one of these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from meshmend.errors import Coordinate, MachineError, MeshError
from meshmend.machines.grid import Grid
from meshmend.topology import parse_shape

MAX_CHIPS = 2**16
"""Descriptions name every chip: more than this is a mistake."""

Pair = tuple[str, str]


@dataclass(frozen=True)
class Chip:
    """A chip as its operator knows it: its name, the host or board that it is on, and whether it has failed.

    `device` is the number by which the machine's runtime knows it, where the description has one. A chip that is a host
    has an `address`, and `ports`: its interface towards each neighbour, by the neighbour's name.
    """

    name: str
    host: str | None = None
    failed: bool = False
    coordinate: Coordinate | None = None
    device: int | None = None
    address: str | None = None
    ports: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Description:
    """The facts of one file.

    `chips` are by a key that stays the same as long as the chip does, its unique id where there is one. `cables` are by
    two such keys, with the number of channels that work. `channel_ends` are these channels by their number at either
    end, where the description has them. `grids` are the shapes that the machine may have, None if nothing names them.
    With `lists_cables` a cable that is not listed is missing; without, all cables of the grid are there but those that
    are listed as failed or slow.
    """

    format: str
    file: str
    chips: dict[str, Chip] = field(default_factory=dict)
    cables: dict[Pair, int] = field(default_factory=dict)
    channel_ends: dict[Pair, list[tuple[int, int]]] = field(default_factory=dict)
    grids: list[Grid] | None = None
    lists_cables: bool = True
    channels: int | None = None
    least_chips: int = 0
    failed_coordinates: list[Coordinate] = field(default_factory=list)
    failed_cables: list[tuple[Coordinate, Coordinate]] = field(default_factory=list)
    rates: dict[tuple[Coordinate, Coordinate], Fraction] = field(default_factory=dict)
    hardware: str | None = None
    notes: list[str] = field(default_factory=list)

    def add_chip(self, key: str, chip: Chip) -> None:
        """Add a chip; each key and each name once."""
        if key in self.chips:
            raise MachineError(f"{self.file}: expected each chip once, got {chip.name} twice.", file=self.file)
        if len(self.chips) >= MAX_CHIPS:
            raise MachineError(f"{self.file}: expected at most {MAX_CHIPS:,} chips, got more.", file=self.file)
        self.chips[key] = chip

    def add_channel(self, a: str, b: str, channels: int = 1, ends: tuple[int, int] | None = None) -> None:
        """Add channels to the cable between two chips; `ends` are the numbers of one channel at both chips."""
        pair = (a, b) if a < b else (b, a)
        self.cables[pair] = self.cables.get(pair, 0) + channels
        if ends is not None:
            self.channel_ends.setdefault(pair, []).append(ends if a < b else ends[::-1])


def read_topology(text: str, file: str) -> tuple[int, ...]:
    """Return a shape as descriptions write it. Twisted tori are refused by name."""
    if "twisted" in text.lower():
        raise MachineError(
            f"{file}: the topology {text[:40]!r} is a twisted torus: its wrap cables lead to other rows, which no mesh "
            f"or torus here can express. Ask for the slice without the twist, or plan for its long axes alone.",
            file=file,
            expected="a mesh or a torus",
            got=text[:40],
        )
    try:
        return parse_shape(text)
    except MeshError as error:
        raise MachineError(f"{file}: {error}", file=file, expected="a shape", got=text[:40]) from None
