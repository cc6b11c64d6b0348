"""The search behind a layout: all placements of chips on one grid, up to its symmetries.

Chips are placed one by one, each next to those that it is joined to. A branch ends as soon as it needs more missing or
extra cables than allowed, or leaves a chip without room or a position without a chip.

A general matcher of subgraphs (VF2, as networkx and rustworkx have it) does not replace it. It knows no extra cables: a
Blackhole Galaxy has 68, its torus 64. To see that a layout is the only one, it lists all mappings, where one of each
class of symmetric ones is enough: 384 times as many on a torus of 4x4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from meshmend.machines.grid import Grid

MOST_STEPS = 40_000
"""How many chips the search may place: a few seconds. Real machines take hundreds to thousands."""


@dataclass
class Fit:
    """A placement of all chips, by their number, and what does not fit."""

    grid: Grid
    at: tuple[int, ...]
    missing: int
    extra: int

    @property
    def missing_chips(self) -> int:
        """Positions without a chip."""
        return self.grid.size - len(self.at)


class GaveUp(Exception):  # noqa: N818  # control flow, never seen outside
    """The budget is spent."""


@dataclass
class Budget:
    """What is left of the steps that the search may take on all grids together."""

    steps: int = MOST_STEPS

    def spend(self) -> None:
        """Take a step; raise `GaveUp` after the last one."""
        self.steps -= 1
        if self.steps < 0:
            raise GaveUp

    @property
    def is_spent(self) -> bool:
        """Whether the search gave up."""
        return self.steps < 0


@dataclass
class Search:
    """All placements on one grid with at most that many missing and extra cables, each class once."""

    grid: Grid
    near: Sequence[set[int]]
    most_missing: int
    most_extra: int
    budget: Budget
    found: list[Fit] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.at = [-1] * len(self.near)
        self.chip_at: dict[int, int] = {}
        self.placed: set[int] = set()
        self.near = [set(others) for others in self.near]
        # Cables that positions have beyond those of their chips are missing at both ends, or lost with missing chips.
        self.most_short = 2 * self.most_missing + (self.grid.size - len(self.near)) * self.grid.degree
        self.wide = [near.bit_count() for near in self.grid.near]
        self.degree = [len(others) for others in self.near]
        # Cables that a chip has beyond those of any position: at least that many of them are extra.
        self.spare = [max(0, len(others) - self.grid.degree) for others in self.near]

    def run(self) -> list[Fit]:
        """Return the placements, one of each class of equivalent ones."""
        # The start has the most cables; its choices stand for all others that symmetries of the grid exchange.
        start = min(range(len(self.near)), key=lambda chip: (self.spare[chip], -len(self.near[chip])))
        for position in self.grid.orbits:
            symmetries = self.grid.fixing(position)
            here: list[Fit] = []
            self._put(start, position)
            short = max(0, self.wide[position] - self.degree[start])
            for fit in self._coordinate(1 << position, 0, 0, short):
                if not any(_equivalent(fit, other, symmetries) for other in here):
                    here.append(fit)
                if len(here) > 8:  # more than enough to call it ambiguous
                    self.budget.steps = -1
                    raise GaveUp
            self._take(start)
            self.found += here
        return self.found

    def _put(self, chip: int, position: int) -> None:
        self.at[chip] = position
        self.chip_at[position] = chip
        self.placed.add(chip)

    def _take(self, chip: int) -> None:
        del self.chip_at[self.at[chip]]
        self.at[chip] = -1
        self.placed.discard(chip)

    def _coordinate(self, used: int, missing: int, extra: int, short: int) -> Iterator[Fit]:
        chip = self._next()
        if chip is None:
            yield Fit(self.grid, tuple(self.at), missing, extra)
            return
        mine = self.near[chip] & self.placed
        for position in self._candidates(chip, mine, used, self.most_extra - extra):
            self.budget.spend()
            around = {self.chip_at[p] for p in _bits(self.grid.near[position] & used)}
            now_missing, strays = missing + len(around - mine), mine - around
            now_extra = extra + len(strays)
            free = (self.grid.near[position] & ~used).bit_count()
            # More cables to come than neighbours are left means more extra cables to come.
            to_come = len(self.near[chip]) - len(mine) - free
            if now_missing > self.most_missing or max(now_extra, now_extra + to_come) > self.most_extra:
                continue
            now_short = short + max(0, self.wide[position] - self.degree[chip])
            if now_short > self.most_short:
                continue
            spared = [other for other in strays if self.spare[other]] + [chip] * min(self.spare[chip], len(strays))
            for other in spared:
                self.spare[other] -= 1
            if now_extra + (sum(self.spare) + 1) // 2 <= self.most_extra:
                self._put(chip, position)
                if self._can_be_filled(used | 1 << position, self.most_missing - now_missing):
                    yield from self._coordinate(used | 1 << position, now_missing, now_extra, now_short)
                self._take(chip)
            for other in spared:
                self.spare[other] += 1
        if 0 < len(mine) <= self.most_extra - extra and mine != self.near[chip]:
            yield from self._without(chip, mine, used, missing, extra + len(mine), short)

    def _can_be_filled(self, used: int, slack: int) -> bool:
        """Return whether no more positions than chips are missing lack a chip that could come there."""
        around = 0
        for position in _bits(used):
            around |= self.grid.near[position]
        left = self.grid.size - len(self.near)
        for position in _bits(around & ~used):
            joined = [self.chip_at[p] for p in _bits(self.grid.near[position] & used)]
            if len(joined) <= max(1, slack):
                continue
            coming = set().union(*(self.near[chip] for chip in joined)) - self.placed
            if not any(sum(chip not in self.near[one] for chip in joined) <= slack for one in coming):
                left -= 1
                if left < 0:
                    return False
        return True

    def _without(self, chip: int, strays: set[int], used: int, missing: int, extra: int, short: int) -> Iterator[Fit]:
        """Go on as if these cables of a chip were not there: the chip is placed later, next to its other neighbours."""
        self.budget.spend()
        spared = [other for other in strays if self.spare[other]] + [chip] * min(self.spare[chip], len(strays))
        for other in spared:
            self.spare[other] -= 1
        if extra + (sum(self.spare) + 1) // 2 <= self.most_extra:
            self.near[chip] -= strays
            for other in strays:
                self.near[other].discard(chip)
            yield from self._coordinate(used, missing, extra, short)
            self.near[chip] |= strays
            for other in strays:
                self.near[other].add(chip)
        for other in spared:
            self.spare[other] += 1

    def _next(self) -> int | None:
        """Return the chip that is joined to most of those that are placed: it has the fewest positions to choose."""
        best, most = None, (-1, 0, 0)
        for chip, others in enumerate(self.near):
            if self.at[chip] < 0:
                rank = (len(others & self.placed), -self.spare[chip], len(others))
                if rank > most:
                    best, most = chip, rank
        return best

    def _candidates(self, chip: int, mine: set[int], used: int, extra_left: int) -> list[int]:
        """Return the positions next to most of the placed neighbours first."""
        times: dict[int, int] = {}
        for other in mine:
            for position in _bits(self.grid.near[self.at[other]] & ~used):
                times[position] = times.get(position, 0) + 1
        if mine == self.near[chip] and len(mine) <= extra_left:  # no other cable will say where it is
            for position in range(self.grid.size):
                if not used >> position & 1:
                    times.setdefault(position, 0)
        fitting = [position for position, n in times.items() if len(mine) - n <= extra_left]
        return sorted(fitting, key=lambda position: (-times[position], position))


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _equivalent(one: Fit, other: Fit, symmetries: Sequence[tuple[int, ...]]) -> bool:
    return any(all(image[a] == b for a, b in zip(one.at, other.at, strict=True)) for image in symmetries)
