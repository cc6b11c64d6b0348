"""Tracks: the steps of one period, for a family of trees that is repeated every `period` steps.

Along one direction of its line, sums of a run move up to its top and copies move on from there, one hop per step. Both
keep to a *track*: the step minus the position, modulo the period. Below, the period is 4. Sums of run a (and copies, A)
are on track 0, those of run b on track 3, and both tops are the chip between links 2 and 3:

    step modulo 4   link 0   1   2   top   3   4   5
          0              a   b   .         .   A   B
          1              .   a   b         .   .   A
          2              .   .   a         B   .   .
          3              b   .   .         A   B   .

Two runs meet on a link only if they have the same track there, so finding steps is colouring intervals with as many
colours as the period has steps, and the period need be no longer than the busiest link's load. The track decides how
long sums wait before the top and copies after it: together w + a multiple of the period, where w follows from the tree,
so a bend costs half a period on average. A run for which no track is free along all of it is cut in two, which costs a
bend.

Trees are placed one after the other, each at the phase that suits it best. The trees that were placed worst go earlier
in the next attempt. How long that goes on is counted in runs that are given tracks, not timed: every host must find the
same plan.

Read first the same rules in plain Python: `tests/planning/tracks_reference.py`, which the tests hold it to.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshmend.planning.weave.runs import MeshLines, TreeRun, TreeRuns

Ints = NDArray[np.int64]

SLACK = 2
"""Steps by which a tree may begin earlier, or end later, than the deepest tree must, at no cost."""
LATE = 1000.0
"""Cost of each step beyond that, in steps of waiting."""
FRESH_TRACK = 3.0
"""Cost of a track that is free on its whole line: those are kept for runs along whole lines."""
MAX_PHASES, ENOUGH_PHASES, MAX_ATTEMPTS = 8, 2, 6
"""Phases at which a tree is tried; how many are enough if it begins and ends in time; attempts beyond which little is
gained."""


@dataclass(frozen=True)
class Steps:
    """When each chip sends its sum up (row i: tree i) and when its copy comes down; steps may be negative."""

    up: Ints
    down: Ints


@dataclass(frozen=True)
class _Placed:
    """A run with its tracks in both directions: when sums arrive at its top, and when copies leave it.

    The first of a pair is for the direction of growing positions: sums from below the top, copies to above it.
    """

    run: TreeRun
    tracks: tuple[int, int]
    arrive: tuple[int, int]
    leave: tuple[int, int]

    def sends(self, position: int) -> int:
        """Return the step in which the chip there, which is not the top, sends its sum towards the top."""
        top = self.run.top
        return self.arrive[0] - (top - 1 - position) if position < top else self.arrive[1] - (position - top - 1)

    def comes(self, position: int) -> int:
        """Return the step in which its copy comes."""
        top = self.run.top
        return self.leave[1] + (top - 1 - position) if position < top else self.leave[0] + (position - top - 1)


@dataclass(frozen=True)
class _Placement:
    """A tree with its tracks; no transfer is more than `extent` steps from step 0."""

    placed: tuple[_Placed, ...]
    extent: int
    cost: float


def find_tracks(lines: MeshLines, trees: Sequence[TreeRuns], period: int, *, budget: int) -> Steps:
    """Return steps for all trees, with as few from the first to the last as are found within the budget.

    The budget is how often the tracks of a run are chosen; the first attempt is always finished. No cable may be in
    more trees than the period has steps: then every run, cut or not, finds a track.
    """
    radius = np.array([max(tree.below) for tree in trees])
    hardness = 100.0 * np.array([tree.bends for tree in trees]) + radius
    # Where sums end at a root, waiting before a top and after it add up to about a period.
    limit = int(radius.max()) + SLACK + period // 2
    chance = np.random.default_rng(0)
    taken = _Taken(lines, period)
    best = _attempt(taken, trees, np.argsort(-hardness, kind="stable"), limit)
    if not isinstance(best, list):
        raise AssertionError(f"tree {best} finds no track although its cables have room: this is a bug in meshmend")
    best_hardness = hardness
    for _ in range(MAX_ATTEMPTS - 1):
        budget -= taken.n_choices
        extents = np.array([placement.extent for placement in best])
        if budget <= 0 or int(extents.max()) <= limit:
            break
        taken = _Taken(lines, period, budget=budget)
        found = _attempt(taken, trees, np.argsort(-hardness, kind="stable"), limit, int(extents.max()))
        if found is None:
            break
        if isinstance(found, int):
            spread = float(best_hardness.std())
            hardness = best_hardness + chance.normal(0, 0.2 * spread + 1, len(trees))
            hardness[found] += 2 * spread + 1
        else:
            best, best_hardness = found, hardness
            hardness = 0.5 * hardness + np.array([placement.extent for placement in found])
    return _steps(lines, best)


def _attempt(
    taken: _Taken, trees: Sequence[TreeRuns], order: Ints, limit: int, least: int | None = None
) -> list[_Placement] | int | None:
    """Place the trees in that order; or say which one could not be, or not nearer to step 0 than `least`; or stop."""
    found: dict[int, _Placement] = {}
    for tree in order.tolist():
        best = taken.place(trees[tree], limit)
        if best is None or (least is not None and best.extent >= least):
            return int(tree)
        if taken.n_choices > taken.budget:
            return None
        taken.add(best)
        found[tree] = best
    return [found[tree] for tree in range(len(trees))]


class _Taken:
    """The tracks that are taken: for each line and direction a mask for every link, a bit for every track."""

    def __init__(self, lines: MeshLines, period: int, *, budget: float = np.inf) -> None:
        self.period = period
        self.n_choices, self.budget = 0, budget
        self._full = (1 << period) - 1
        self._chips = lines.chips
        self._links = [([0] * len(chips), [0] * len(chips)) for chips in lines.chips]
        self._ever = [[0, 0] for _ in lines.chips]
        self._n_periods = lines.n_directions
        self._orders: dict[int, list[tuple[float, int, int]]] = {}
        self._known: dict[tuple[int, int, int, int], tuple[TreeRun | None, tuple[int, int]]] = {}

    def add(self, placement: _Placement) -> None:
        """Take the tracks of a tree."""
        for placed in placement.placed:
            run = placed.run
            for way in (0, 1):
                bit = 1 << placed.tracks[way]
                links = self._links[run.line][way]
                for link in range(run.low, run.high):
                    links[link] |= bit
                self._ever[run.line][way] |= bit

    def place(self, tree: TreeRuns, limit: int) -> _Placement | None:
        """Return the best placement of a tree over all phases that are tried."""
        # While one tree is placed nothing is taken: its runs share no link.
        self._known.clear()
        best: _Placement | None = None
        tried = 0
        for k in range(self.period):
            phase = (k + 1) // 2 if k % 2 else -(k // 2)
            placement = self._place_at(tree, phase, limit, np.inf if best is None else best.cost)
            if placement is None:
                continue
            if best is None or placement.cost < best.cost:
                best = placement
            tried += 1
            if tried == MAX_PHASES or (tried >= ENOUGH_PHASES and best.extent <= limit):
                break
        return best

    def _place_at(self, tree: TreeRuns, phase: int, limit: int, most: float) -> _Placement | None:
        """Place a tree whose root has the sum after step `phase`, at a cost of no more than `most`."""
        queue = [(run.depth, number, run) for number, run in enumerate(tree.runs)]
        number = len(queue)
        # Of chips where runs meet: when each sends its sum, when its copy comes, when sums arrive.
        meetings = _Meetings(self._chips, tree.root, phase)
        placed: list[_Placed] = []
        extent, wait = 0, 0
        heapq.heapify(queue)
        while queue:
            _, _, run = heapq.heappop(queue)
            part, free = self._fit(run)
            if part is None:
                return None
            chips = self._chips[run.line]
            rests, part = _cut(tree, run, part, chips)
            for rest in rests:
                heapq.heappush(queue, (rest.depth, number, rest))
                number += 1
            chosen = self._choose_tracks(tree, part, free, meetings, limit)
            if chosen is None:
                return None
            now, late, waited = chosen
            extent, wait = max(extent, late), wait + waited
            if LATE * (extent - limit) > most:
                return None
            placed.append(now)
            meetings.note(now)
        cost = LATE * max(extent - limit, 0) + wait / len(placed)
        return _Placement(tuple(placed), extent, cost)

    def _fit(self, run: TreeRun) -> tuple[TreeRun | None, tuple[int, int]]:
        """Return the longest part of a run round its top that has a free track in both directions, and those tracks."""
        key = run.line, run.low, run.high, run.top
        if key not in self._known:
            self._known[key] = self._grow(run)
        return self._known[key]

    def _grow(self, run: TreeRun) -> tuple[TreeRun | None, tuple[int, int]]:
        """Grow a part from the top outwards, on both sides alike, while one of the tracks is free in each direction."""
        on, back = self._links[run.line]
        low = high = run.top
        free = self._full, self._full
        while low > run.low or high < run.high:
            next_low, next_high = max(run.low, low - 1), min(run.high, high + 1)
            taken_on = taken_back = 0
            for link in ((next_low,) if next_low < low else ()) + ((high,) if next_high > high else ()):
                taken_on |= on[link]
                taken_back |= back[link]
            left = free[0] & ~taken_on, free[1] & ~taken_back
            if not (left[0] and left[1]):
                break
            low, high, free = next_low, next_high, left
        if low < high:
            return replace(run, low=low, high=high), free
        # Not even the first links on both sides have a track in common: each side goes on its own.
        if run.low < run.top < run.high:
            return self._grow(replace(run, low=run.top))
        return None, free

    def _waits(self, slack: int, has_up: bool, has_down: bool) -> list[tuple[float, int, int]]:
        """Return the waits before and after a top, those that cost least first, as (cost, before, after).

        Where sums go up and copies down, the two add up to `slack` modulo the period. As many periods before
        the top as a chip has links: no two sums may arrive in the same step, and then one of these is free.
        """
        key = slack if has_up and has_down else -1 if has_up else -2 - slack
        if key not in self._orders:
            period = self.period
            if has_up and has_down:
                pairs = [(early, (slack - early) % period) for early in range(self._n_periods * period)]
                waits = [(early + late + 0.01 * abs(early - late), early, late) for early, late in pairs]
            elif has_up:
                waits = [(float(early), early, 0) for early in range(self._n_periods * period)]
            else:
                waits = [(float(late), (slack - late) % period, late) for late in range(period)]
            self._orders[key] = sorted(waits)
        return self._orders[key]

    def _choose_tracks(
        self, tree: TreeRuns, run: TreeRun, free: tuple[int, int], meetings: _Meetings, limit: int
    ) -> tuple[_Placed, int, int] | None:
        """Choose a run's tracks; return it with them, how far from step 0 it reaches, and how long it waits."""
        self.n_choices += 1
        chips, period, top = self._chips[run.line], self.period, run.top
        last, soonest, meeting = meetings.at(chips[top])
        slack = (last + 1 - soonest) % period
        tracks, arrive, leave = [0, 0], [0, 0], [0, 0]
        reach, waited = 0, 0
        for way, ahead in ((0, 1), (1, -1)):
            has_up, has_down = (top > run.low, top < run.high)[::ahead]
            up_height = tree.below[chips[top - ahead]] - run.depth if has_up else 0
            down_height = tree.below[chips[top + ahead]] - run.depth if has_down else 0
            track = (last + 1 - ahead * top) % period
            ever = self._ever[run.line][way]
            best: tuple[float, int, int, int] | None = None
            for cost, early, late in self._waits(slack, has_up, has_down):
                if best is not None and cost >= best[0]:
                    break
                bit = 1 << (track - early) % period
                if not free[way] & bit or (has_up and last - early in meeting):
                    continue
                begin = up_height - 1 - last + early if has_up else 0
                end = soonest + late + down_height - 1 if has_down else 0
                if begin > limit or end > limit:
                    cost += LATE * (max(begin, end) - limit)
                if not ever & bit:
                    cost += FRESH_TRACK
                if best is None or cost < best[0]:
                    best = cost, early, late, max(begin, end)
            if best is None:
                return None
            _, early, late, far = best
            reach, waited = max(reach, far), waited + early + late
            tracks[way] = (track - early) % period
            arrive[way], leave[way] = last - early, soonest + late
            if has_up:
                meeting.add(arrive[way])
        return _Placed(run, (tracks[0], tracks[1]), (arrive[0], arrive[1]), (leave[0], leave[1])), reach, waited


class _Meetings:
    """The chips where runs of a tree meet: when each sends its sum, when its copy comes, and when sums arrive at it."""

    def __init__(self, chips: list[list[int]], root: int, phase: int) -> None:
        self._chips = chips
        self._sends, self._comes = {root: phase + 1}, {root: phase}
        self._arrivals: dict[int, set[int]] = {}

    def at(self, chip: int) -> tuple[int, int, set[int]]:
        """Return the last step for sums to arrive in, the first for copies to leave, and the steps taken already."""
        return self._sends[chip] - 1, self._comes[chip] + 1, self._arrivals.setdefault(chip, set())

    def note(self, placed: _Placed) -> None:
        """Keep what was decided for the chips of a run where others meet it."""
        run, chips = placed.run, self._chips[placed.run.line]
        for position in set(run.joints) - {run.top}:
            chip = chips[position]
            self._sends[chip], self._comes[chip] = placed.sends(position), placed.comes(position)
            if run.low < position < run.high:
                self._arrivals.setdefault(chip, set()).add(self._sends[chip] - 1)


def _cut(tree: TreeRuns, run: TreeRun, part: TreeRun, chips: list[int]) -> tuple[list[TreeRun], TreeRun]:
    """Return what is left of a run on both sides of a part, as runs that hang below it; and the part, with joints."""
    rests = []
    joints = {joint for joint in run.joints if part.low <= joint <= part.high}
    for low, high, top in ((run.low, part.low, part.low), (part.high, run.high, part.high)):
        if low < high:
            inside = tuple(joint for joint in run.joints if low <= joint <= high and joint != top)
            rests.append(TreeRun(tree.depth[chips[top]], run.line, low, high, top, inside))
            joints.add(top)
    return rests, replace(part, joints=tuple(sorted(joints)))


def _steps(lines: MeshLines, placements: list[_Placement]) -> Steps:
    shape = (len(placements), lines.n_chips)
    up, down = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for i, placement in enumerate(placements):
        for placed in placement.placed:
            run = placed.run
            chips = lines.chips[run.line]
            before = np.arange(run.top - run.low)[::-1]
            after = np.arange(run.high - run.top)
            up[i, chips[run.low : run.top]] = placed.arrive[0] - before
            down[i, chips[run.low : run.top]] = placed.leave[1] + before
            up[i, chips[run.top + 1 : run.high + 1]] = placed.arrive[1] - after
            down[i, chips[run.top + 1 : run.high + 1]] = placed.leave[0] + after
    return Steps(up, down)
