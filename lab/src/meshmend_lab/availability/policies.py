"""What a job may do about failures, as its policies: four of the paper's introduction, and three of later machines.

A policy tracks what is down and decides what the job runs on. The job asks it after each change; it keeps no clock.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from meshmend.topology import Mesh, Region
from meshmend_lab.availability.assumptions import Assumptions, Level
from meshmend_lab.availability.boxes import largest_box
from meshmend_lab.availability.history import FailureEvent, regions
from meshmend_lab.availability.throughput import Throughput, chips_of, largest_part, outermost, whole_parts

Part = tuple[int, int]
"""A level's number and the number of a part of it."""


@dataclass(frozen=True)
class Allocation:
    """What a job runs on: its rate relative to the whole machine (0: it waits), and the chips it uses."""

    rate: float
    chips: NDArray[np.bool_]


class Policy(ABC):
    """Keeps track of what is down, and chooses what the job runs on."""

    name: ClassVar[str]

    def __init__(self, assumptions: Assumptions, throughput: Throughput, parts: list[list[Region]]) -> None:
        self.assumptions = assumptions
        self._throughput = throughput
        self._parts = parts
        self._down: set[Part] = set()
        self._known: dict[frozenset[Part], Allocation] = {}
        self._whole = Allocation(1.0, np.ones(assumptions.mesh.shape, dtype=np.bool_))
        self._nothing = Allocation(0.0, np.zeros(assumptions.mesh.shape, dtype=np.bool_))

    @property
    def start_h(self) -> float:
        """Time from the decision to the first step."""
        return self.assumptions.restart_s / 3600

    @property
    def owned_chips(self) -> int:
        """Chips that are paid for."""
        return self.assumptions.mesh.size

    @property
    def price_h(self) -> float:
        """What an hour costs."""
        return self.owned_chips * self.assumptions.price

    def repair_h(self, level: Level) -> float:
        """Return the mean time to repair a part."""
        return level.repair_h

    def lost_h(self, trained_h: float) -> float:
        """Return how much training a failure loses that has just been recorded, of that since the last checkpoint."""
        return min(trained_h, self.assumptions.copies_s / 3600)

    def fail(self, failure: FailureEvent) -> Region | None:
        """Record a failure; return the chips that are lost, or None if the part was already down."""
        part = (failure.level, failure.part)
        if part in self._down:
            return None
        self._down.add(part)
        return self._parts[failure.level][failure.part]

    def repair(self, failure: FailureEvent) -> None:
        """Record a repair."""
        self._down.discard((failure.level, failure.part))

    def reset(self) -> None:
        """Start another run with nothing down, and keep the results for states seen before."""
        self._down.clear()

    def allocation(self) -> Allocation:
        """Return what the job runs on in the current state."""
        if not self._down:
            return self._whole
        key = frozenset(self._down)
        if key not in self._known:
            self._known[key] = self._choose()
        return self._known[key]

    @abstractmethod
    def _choose(self) -> Allocation:
        """Choose what to run on, with something down."""

    @property
    def holes(self) -> list[Region]:
        """What is down, as regions that do not overlap."""
        return outermost([self._parts[level][part] for level, part in self._down])

    def _live(self) -> NDArray[np.bool_]:
        live = np.ones(self.assumptions.mesh.shape, dtype=np.bool_)
        for hole in self.holes:
            live[hole.slices] = False
        return live


@final
class QuickRepair(Policy):
    """The job waits until everything is repaired, by a crew on site."""

    name = "quick repair"

    @property
    def price_h(self) -> float:
        """The crew is paid as well."""
        return super().price_h + self.assumptions.crew_price

    def repair_h(self, level: Level) -> float:  # noqa: ARG002  # a crew takes equally long for every part
        """Return how long the crew takes."""
        return self.assumptions.quick_repair_h

    def _choose(self) -> Allocation:
        return self._nothing


@final
class SubMesh(Policy):
    """The job continues on the largest healthy rectangle of whole hosts."""

    name = "sub-mesh"

    def _choose(self) -> Allocation:
        host = self.assumptions.host
        box = largest_box(whole_parts(self._live(), host))
        if box is None:
            return self._nothing
        chips = chips_of(box, host)
        inside = self._nothing.chips.copy()
        inside[chips.slices] = True
        return Allocation(self._throughput.rate(chips.n_chips, self._throughput.full_s(chips.shape)), inside)


class Spares(Policy):
    """A spare replaces the unit with the failure; with none left, the job waits for a repair."""

    def __init__(self, assumptions: Assumptions, throughput: Throughput, parts: list[list[Region]]) -> None:
        super().__init__(assumptions, throughput, parts)
        self._unit, self._n_spares, self._swap_s = self._stock()
        self._left = self._n_spares
        self._empty: deque[int] = deque()

    @abstractmethod
    def _stock(self) -> tuple[tuple[int, ...], int, float]:
        """Return which chips are replaced together, how many such units are kept ready, and the seconds of a swap."""

    @property
    def owned_chips(self) -> int:
        """Spares are paid for whether they are needed or not."""
        return super().owned_chips + self._n_spares * math.prod(self._unit)

    @property
    def start_h(self) -> float:
        """Swapping comes before the restart."""
        return (self._swap_s + self.assumptions.restart_s) / 3600

    def reset(self) -> None:
        """Start another run with all spares in the pool."""
        super().reset()
        self._left = self._n_spares
        self._empty.clear()

    def fail(self, failure: FailureEvent) -> Region | None:
        """Send the part's unit to repair; return the part's chips, or None if its place is empty."""
        position = _position(self._parts[failure.level][failure.part], self.assumptions.mesh.shape, self._unit)
        if position in self._empty:
            return None
        if self._left:
            self._left -= 1
        else:
            self._empty.append(position)
        return self._parts[failure.level][failure.part]

    def repair(self, failure: FailureEvent) -> None:  # noqa: ARG002  # units are interchangeable
        """Put the repaired unit where one has been missing longest, or into the pool."""
        if self._empty:
            self._empty.popleft()
        else:
            self._left += 1

    def allocation(self) -> Allocation:
        """Return the whole machine, or nothing while a unit is missing."""
        return self._nothing if self._empty else self._whole

    def _choose(self) -> Allocation:
        return self._nothing


@final
class HotSpares(Spares):
    """A spare host replaces a failed one."""

    name = "hot spares"

    def _stock(self) -> tuple[tuple[int, ...], int, float]:
        return self.assumptions.host, self.assumptions.spares, self.assumptions.swap_s


@final
class OpticalCubes(Spares):
    """Optical switches put a spare cube in the place of the one with the failure, as in TPU v4 and v5p."""

    name = "optical cubes"

    def _stock(self) -> tuple[tuple[int, ...], int, float]:
        # Cables inside a cube are fixed, so it is replaced as a whole.
        return self.assumptions.cube, self.assumptions.spare_cubes, self.assumptions.ocs_s


@final
class DynamicSlices(Policy):
    """The job restarts on a smaller slice of the cubes that are whole, as with GKE's dynamic slicing of TPU7x.

    A failure anywhere in a cube takes all of it out. Optical switches join any cubes, so that the slice is the box of
    most cubes that there are, on no axis longer than the machine.
    """

    name = "dynamic slices"

    @property
    def start_h(self) -> float:
        """Switching comes before the restart."""
        return (self.assumptions.ocs_s + self.assumptions.restart_s) / 3600

    def _choose(self) -> Allocation:
        cube = self.assumptions.cube
        whole = whole_parts(self._live(), cube)
        box = _largest_of(whole.shape, int(whole.sum()))
        if box is None:
            return self._nothing
        used = np.zeros_like(whole)
        used.flat[np.flatnonzero(whole)[: math.prod(box)]] = True
        for axis, n in enumerate(cube):
            used = np.repeat(used, n, axis=axis)
        shape = tuple(n * side for n, side in zip(box, cube, strict=True))
        return Allocation(self._throughput.rate(math.prod(shape), self._throughput.full_s(shape)), used)


def _largest_of(most: tuple[int, ...], count: int) -> tuple[int, ...] | None:
    """Return the box of most cubes, of at most `count`, with no side longer than `most`; of equal ones the squarest.

    >>> _largest_of((4, 4), 15), _largest_of((4, 4), 7), _largest_of((2, 2), 0)
    ((3, 4), (2, 3), None)
    """
    boxes = [box for box in product(*(range(1, n + 1) for n in most)) if math.prod(box) <= count]
    return max(boxes, key=lambda box: (math.prod(box), -sum(box)), default=None)


@final
class ElasticSlices(Policy):
    """The job trains data-parallel over slices; without those that failed, until they are replaced.

    Each slice has the whole state, so nothing is trained again while one is left. The all-reduce over all slices is
    taken to be as fast as that of the whole mesh, whatever joins them.
    """

    name = "elastic slices"

    @property
    def start_h(self) -> float:
        """The other slices go on in the same process."""
        return self.assumptions.elastic_s / 3600

    def repair_h(self, level: Level) -> float:
        """Return the mean time until the slice is there again."""
        return level.repair_h if self.assumptions.replace_h is None else self.assumptions.replace_h

    def lost_h(self, trained_h: float) -> float:
        """Return nothing while another slice has the state, else what other jobs lose."""
        return 0.0 if self.allocation().rate > 0 else super().lost_h(trained_h)

    def _choose(self) -> Allocation:
        part = self.assumptions.slice_shape
        live = whole_parts(self._live(), part)
        for axis, n in enumerate(part):
            live = np.repeat(live, n, axis=axis)
        return Allocation(float(live.mean()), live) if live.any() else self._nothing


def _position(chips: Region, shape: tuple[int, ...], unit: tuple[int, ...]) -> int:
    """Return the number of the unit that these chips are in."""
    grid = tuple(n // u for n, u in zip(shape, unit, strict=True))
    return int(np.ravel_multi_index([a // u for a, u in zip(chips.at, unit, strict=True)], grid))


@final
class FaultTolerant(Policy):
    """The job continues on all remaining chips, round the holes; on the largest group, if they are not connected."""

    name = "fault-tolerant"

    @property
    def start_h(self) -> float:
        """Planning comes before the restart."""
        return (self.assumptions.replan_s + self.assumptions.restart_s) / 3600

    def _choose(self) -> Allocation:
        part = largest_part(self._live(), self.assumptions.mesh)
        count = int(part.sum())
        if not count:
            return self._nothing
        return Allocation(self._throughput.rate(count, self._throughput.holed_s(self.holes)), part)

    def check(self, n_states: int) -> list[tuple[Mesh, float, float]]:
        """Plan states of the simulation in full: each with its estimated and its exact all-reduce time.

        Those with the most holes come first: they are the hardest to estimate from single holes.
        """
        found = []
        trained = [key for key, allocation in self._known.items() if allocation.rate > 0]
        for key in sorted(trained, key=lambda key: (-len(key), sorted(key)))[:n_states]:
            holes = outermost([self._parts[level][part] for level, part in key])
            lost = np.argwhere(~self._known[key].chips)
            mesh = self.assumptions.mesh.fail(*lost.tolist())
            found.append((mesh, self._throughput.holed_s(holes), self._throughput.exact(mesh)))
        return found


POLICIES: tuple[type[Policy], ...] = (
    QuickRepair,
    SubMesh,
    HotSpares,
    OpticalCubes,
    DynamicSlices,
    ElasticSlices,
    FaultTolerant,
)


def make_policies(
    assumptions: Assumptions, throughput: Throughput, kinds: Sequence[type[Policy]] = POLICIES
) -> list[Policy]:
    """Return the policies for one machine."""
    parts = regions(assumptions)
    return [kind(assumptions, throughput, parts) for kind in kinds]
