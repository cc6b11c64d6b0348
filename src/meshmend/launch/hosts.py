"""Which host has which chips: a mesh cut into equal tiles, one per host, numbered in row-major order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from pathlib import Path

from meshmend.errors import Coordinate, RestartError, name_chip
from meshmend.machines import read_machine
from meshmend.topology import Mesh, Region, all_placements, name_shape, parse_chip, parse_shape, parse_wrap

MOST_NAMED = 16
"""Hosts, or ranges of hosts, in a line for people."""


@dataclass(frozen=True)
class Hosts:
    """The machine as its hosts see it: a mesh of `shape`, which axes wrap, and the `tile` of chips that a host drives.

    >>> hosts = Hosts.of("8x8", "4x2")
    >>> len(hosts), str(hosts.tiles[5]), hosts.number("4,2")
    (8, '4x2@4,2', 5)
    >>> str(Hosts.of("4x8", "4x2", wrap=(False, True)))
    '4x8 wrapped on axis 1 in hosts of 4x2'
    """

    shape: Coordinate
    tile: Coordinate
    tiles: tuple[Region, ...] = field(repr=False)
    wrap: tuple[bool, ...]

    @classmethod
    def of(cls, shape: Sequence[int] | str, tile: Sequence[int] | str, *, wrap: bool | Sequence[bool] = False) -> Hosts:
        """Cut a mesh into hosts; both are given as in "8x8" and "4x2", and the axes that wrap as in a `Mesh`."""
        mesh = Mesh(shape, wrap=wrap)
        whole = mesh.shape
        chips = parse_shape(tile) if isinstance(tile, str) else tuple(int(n) for n in tile)
        if len(chips) != len(whole) or any(h < 1 or n % h for n, h in zip(whole, chips, strict=True)):
            *others, last = [name_shape(shape) for shape in host_shapes(whole, chips)]
            near = f"{', '.join(others)} or {last}" if others else last
            raise RestartError(
                f"Hosts of {name_shape(chips)} chips do not tile a {name_shape(whole)} mesh. Give another shape for a "
                f"host, as in {near}."
            )
        return cls(whole, chips, tuple(all_placements(whole, chips, align=chips)), mesh.wrap)

    @classmethod
    def described(
        cls,
        shape: Sequence[int] | str | None,
        tile: Sequence[int] | str,
        *,
        machine: Path | str | None = None,
        wrap: str | None = None,
    ) -> Hosts:
        """Cut the machine that a file describes into hosts, or a mesh whose axes wrap as in "0,1"; either says all."""
        if machine is None:
            if shape is None:
                raise RestartError(
                    "The shape of the machine is not known. Give a shape, as in 8x8, or a file that describes it."
                )
            n_axes = Mesh(shape).n_axes
            wraps = parse_wrap(wrap or "none", n_axes, given=f"The axes that wrap are given as {wrap!r},")
            return cls.of(shape, tile, wrap=wraps)
        mesh = read_machine(machine).mesh
        if shape is not None and Mesh(shape).shape != mesh.shape:
            raise RestartError(
                f"{machine} describes a {name_shape(mesh.shape)} mesh, got the shape {name_shape(Mesh(shape).shape)}. "
                "Leave the shape out, or correct the file."
            )
        return cls.of(mesh.shape, tile, wrap=mesh.wrap)

    @classmethod
    @lru_cache(maxsize=16)  # each scrape of a job's metrics asks for the same ones
    def read(cls, text: str) -> Hosts:
        """Return the hosts that `str` describes, as in "8x8 in hosts of 4x2" or "4x8 torus in hosts of 4x2"."""
        mesh, _, tile = text.partition(" in hosts of ")
        shape, _, axes = mesh.partition(" wrapped on axis ")
        if mesh.endswith(" torus"):
            shape, axes = mesh.removesuffix(" torus"), "all"
        wraps = parse_wrap(axes.replace(" ", "") or "none", Mesh(shape).n_axes, given=f"The machine is {text[:80]!r},")
        return cls.of(shape, tile, wrap=wraps)

    def __len__(self) -> int:
        return len(self.tiles)

    @cached_property
    def chips_per_host(self) -> int:
        """Chips that one host drives."""
        return self.tiles[0].n_chips

    def number(self, position: int | str | Sequence[int]) -> int:
        """Return a host's number from its number or from the coordinate of its first chip, as in 5, "5" or "4,2"."""
        if isinstance(position, str):
            position = int(position) if position.isdecimal() else parse_chip(position)
        if isinstance(position, int):
            if 0 <= position < len(self):
                return position
            raise RestartError(f"There is no host {position}: {self} has hosts 0 to {len(self) - 1}.", host=position)
        at = tuple(int(x) for x in position)
        for number, tile in enumerate(self.tiles):
            if tile.at == at:
                return number
        raise RestartError(
            f"No host of {self} begins at {name_chip(at)}: the first chips of hosts are multiples of "
            f"{name_shape(self.tile)}, as in {name_chip(self.tiles[-1].at)}."
        )

    def chips(self, number: int) -> list[Coordinate]:
        """Return the coordinates of a host's chips, in row-major order: the order of its devices."""
        tile = self.tiles[number]
        return list(product(*(range(at, at + n) for at, n in zip(tile.at, tile.shape, strict=True))))

    def largest_group(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Return the most of these hosts that cables join to each other; of equally large groups, the first.

        >>> Hosts.of("4x8", "4x2").largest_group([0, 2, 3])
        (2, 3)
        >>> Hosts.of("4x8", "4x2", wrap=True).largest_group([0, 2, 3])
        (0, 2, 3)
        """
        grid = [n // h for n, h in zip(self.shape, self.tile, strict=True)]
        here = set(numbers)
        absent = [at for number, at in enumerate(product(*map(range, grid))) if number not in here]
        mesh = Mesh(grid, wrap=self.wrap, failed=absent)
        groups: dict[int, list[int]] = {}
        for number, group in zip(sorted(here), mesh.component_of.tolist(), strict=True):
            groups.setdefault(group, []).append(number)
        largest = max(groups.values(), key=len)
        return tuple(largest)

    def check_devices(self, held: Mapping[int, int]) -> None:
        """Raise a `RestartError` if a host (its number) has another number of devices than a tile has chips."""
        for number, n_devices in sorted(held.items()):
            if n_devices != self.chips_per_host:
                raise RestartError(
                    f"Host {number} has {n_devices} devices, expected {self.chips_per_host}, one for each chip of its "
                    f"{name_shape(self.tile)} tile. On CPU, set "
                    f"XLA_FLAGS=--xla_force_host_platform_device_count={self.chips_per_host} on every host.",
                    host=number,
                )

    def __str__(self) -> str:
        return f"{Mesh(self.shape, wrap=self.wrap)} in hosts of {name_shape(self.tile)}"


def host_shapes(whole: Coordinate, like: Coordinate, most: int = 6) -> list[Coordinate]:
    """Return shapes of hosts that tile a mesh, those with about as many chips as another shape first.

    >>> host_shapes((4, 6), (4, 4))
    [(4, 3), (2, 6), (4, 2), (4, 6), (2, 3), (1, 6)]
    """
    divisors = [[side for side in range(1, n + 1) if n % side == 0] for n in whole]
    sides = like if len(like) == len(whole) else whole

    def distance(shape: Coordinate) -> tuple[int, int]:
        return abs(prod(shape) - prod(like)), sum(abs(a - b) for a, b in zip(shape, sides, strict=True))

    return sorted(product(*divisors), key=distance)[:most]


def ranges_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and the last of each range of numbers: a few, where the hosts of a large job are listed.

    >>> ranges_of([3, 1, 2, 7])
    [(1, 3), (7, 7)]
    """
    listed = sorted(numbers)
    firsts = [number for number, before in zip(listed, [None, *listed], strict=False) if before != number - 1]
    lasts = [number for number, after in zip(listed, [*listed[1:], None], strict=False) if after != number + 1]
    return list(zip(firsts, lasts, strict=True))


def name_hosts(numbers: Iterable[int]) -> str:
    """Write hosts by their numbers; more than a line takes, as ranges.

    >>> name_hosts([3, 2]), name_hosts([1])
    ('hosts 2, 3', 'host 1')
    >>> name_hosts([*range(500), *range(501, 10000)])
    'hosts 0-499, 501-9999'
    """
    listed = sorted(numbers)
    parts = [str(number) for number in listed]
    if len(listed) > MOST_NAMED:
        parts = [str(a) if a == b else f"{a}-{b}" for a, b in ranges_of(listed)]
        if len(parts) > MOST_NAMED:
            parts = [*parts[:MOST_NAMED], f"… ({len(listed)} in all)"]
    return f"host{'s' * (len(listed) != 1)} {', '.join(parts)}"
