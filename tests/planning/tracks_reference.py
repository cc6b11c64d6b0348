"""The rules of `tracks`, in plain Python: to be read before it. Tests hold the masks and caches to it, step by step.

A tree is placed run by run, from its root outwards. Nothing of it is taken until all of it has its place.

1. A *track* of a line and a direction is a number below the period. On link l (between positions l and l + 1), what
   moves towards growing positions on track t moves in steps that are l + t modulo the period; what moves back, in steps
   that are t − l − 1. So a link has each track once per period.
2. `fit`: of a run, the longest part round its top that has a free track in each direction, as far on one side as on
   the other. If not even one link on both sides has, the upper side alone. What is left over hangs below as runs of
   their own.
3. `choose`: sums must be at the top before the top sends, copies leave it after the top has its own. Each may wait.
   How long decides the track: of the free ones, the one that waits least, where each step beyond the `limit` costs
   `LATE`, and a track that nothing on the line has taken yet `FRESH_TRACK`. No two sums arrive at a chip in one step.
4. `place`: the root has its sum after step 0, 1, −1, 2, … Of the first few that work, the cheapest is taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from meshmend.planning.weave.runs import MeshLines, TreeRun, TreeRuns
from meshmend.planning.weave.tracks import ENOUGH_PHASES, FRESH_TRACK, LATE, MAX_PHASES

UP, BACK = 0, 1
"""The directions of a line: of growing positions, and of falling ones."""


class Hop(NamedTuple):
    """A sum (`up`) or a copy of a tree that crosses a link: it leaves from, or comes to, the chip farther outside."""

    line: int
    way: int
    link: int
    step: int
    chip: int
    up: bool


class Placement(NamedTuple):
    """A tree with the steps of all its hops."""

    hops: list[Hop]
    extent: int
    cost: float
    n_parts: int


class Reference:
    """The tracks that are taken, as a set."""

    def __init__(self, lines: MeshLines, period: int) -> None:
        self.lines, self.period = lines, period
        self.taken: set[tuple[int, int, int, int]] = set()
        """Line, direction, link and track."""

    def track(self, way: int, link: int, step: int) -> int:
        """Return the track of what crosses a link in a step."""
        return (step - link if way == UP else step + link + 1) % self.period

    def free(self, run: TreeRun, way: int) -> set[int]:
        """Return the tracks that are free on all links of a run."""
        links = range(run.low, run.high)
        return {t for t in range(self.period) if all((run.line, way, link, t) not in self.taken for link in links)}

    def add(self, placement: Placement) -> None:
        """Take the tracks of a tree."""
        self.taken |= {(hop.line, hop.way, hop.link, self.track(hop.way, hop.link, hop.step)) for hop in placement.hops}

    def place(self, tree: TreeRuns, limit: int) -> Placement | None:
        """Return the cheapest placement of a tree among the phases that are tried."""
        best: Placement | None = None
        n_tried = 0
        for k in range(self.period):
            phase = (k + 1) // 2 if k % 2 else -(k // 2)
            found = Growth(self, tree, phase, limit).placement
            if found is None:
                continue
            if best is not None and LATE * (found.extent - limit) > best.cost and found.n_parts:
                continue  # it was given up on the way, and does not count as tried
            best = found if best is None or found.cost < best.cost else best
            n_tried += 1
            if n_tried == MAX_PHASES or (n_tried >= ENOUGH_PHASES and best.extent <= limit):
                break
        return best


class Growth:
    """A tree that is placed at a phase, run by run. `placement` is None if a run finds no track."""

    def __init__(self, taken: Reference, tree: TreeRuns, phase: int, limit: int) -> None:
        self.taken, self.tree, self.limit = taken, tree, limit
        self.sends, self.comes = {tree.root: phase + 1}, {tree.root: phase}
        """Of each chip that has its place: when it sends its sum, and when its copy comes."""
        self.arrivals: dict[int, set[int]] = defaultdict(set)
        self.hops: list[Hop] = []
        self.extent, self.waited, self.n_parts = 0, 0, 0
        queue = [(run.depth, number, run) for number, run in enumerate(tree.runs)]
        n_runs, is_placed = len(queue), True
        while queue and is_placed:
            queue.sort(key=lambda entry: entry[:2])
            _, _, run = queue.pop(0)
            part = self.fit(run)
            is_placed = part is not None and self.choose(part)
            for rest in cut(tree, run, part, taken.lines.chips[run.line]) if part is not None else ():
                queue.append((rest.depth, n_runs, rest))
                n_runs += 1
        self.placement: Placement | None = None
        if is_placed:
            cost = LATE * max(self.extent - limit, 0) + self.waited / self.n_parts
            self.placement = Placement(self.hops, self.extent, cost, self.n_parts)

    def fit(self, run: TreeRun) -> TreeRun | None:
        """Return the longest part of a run round its top that has a free track in both directions."""
        for side in (run, replace(run, low=run.top)):
            for reach in range(max(side.top - side.low, side.high - side.top), 0, -1):
                part = replace(side, low=max(side.low, side.top - reach), high=min(side.high, side.top + reach))
                if self.taken.free(part, UP) and self.taken.free(part, BACK):
                    return part
            if not run.low < run.top < run.high:
                break
        return None

    def waits(self, slack: int, has_sums: bool, has_copies: bool) -> Iterator[tuple[float, int, int]]:
        """Yield how long sums may wait before a top and copies after it, and what that costs."""
        period = self.taken.period
        if not has_sums:
            yield from ((float(late), (slack - late) % period, late) for late in range(period))
            return
        for early in range(self.taken.lines.n_directions * period):
            late = (slack - early) % period if has_copies else 0
            yield early + late + 0.01 * abs(early - late) if has_copies else float(early), early, late

    def choose(self, part: TreeRun) -> bool:
        """Choose the tracks of a part, and with them its steps; return False if none is free."""
        taken, tree, top = self.taken, self.tree, part.top
        chips = taken.lines.chips[part.line]
        last, soonest = self.sends[chips[top]] - 1, self.comes[chips[top]] + 1
        slack = (last + 1 - soonest) % taken.period
        for way, ahead in ((UP, 1), (BACK, -1)):
            # Sums come from one side of the top, and copies go on to the other.
            behind, before = (part.low, part.high) if way == UP else (part.high, part.low)
            has_sums, has_copies = behind != top, before != top
            free = taken.free(part, way)
            ever = {track for line, direction, _, track in taken.taken if (line, direction) == (part.line, way)}
            found = []
            for wait, early, late in self.waits(slack, has_sums, has_copies):
                track = (last + 1 - early - ahead * top) % taken.period
                if track not in free:
                    continue
                if has_sums and last - early in self.arrivals[chips[top]]:
                    continue
                begin = tree.below[chips[top - ahead]] - part.depth - 1 - last + early if has_sums else 0
                end = soonest + late + tree.below[chips[top + ahead]] - part.depth - 1 if has_copies else 0
                cost = wait + LATE * (max(begin, end) - self.limit) if max(begin, end) > self.limit else wait
                cost = cost if track in ever else cost + FRESH_TRACK
                found.append((cost, wait, early, late, max(begin, end)))
            if not found:
                return False
            _, _, early, late, far = min(found)
            self.extent, self.waited = max(self.extent, far), self.waited + early + late
            for position in range(behind, top, ahead):
                link = position if way == UP else position - 1
                step = last - early - (abs(top - position) - 1)
                self.hops.append(Hop(part.line, way, link, step, chips[position], up=True))
                self.sends[chips[position]] = step
            for position in range(top + ahead, before + ahead, ahead):
                link = position - 1 if way == UP else position
                step = soonest + late + (abs(position - top) - 1)
                self.hops.append(Hop(part.line, way, link, step, chips[position], up=False))
                self.comes[chips[position]] = step
            if has_sums:
                self.arrivals[chips[top]].add(last - early)
        self.n_parts += 1
        for position in range(part.low + 1, part.high):
            if position != top:
                # What comes along the run arrives just before the chip sends on.
                self.arrivals[chips[position]].add(self.sends[chips[position]] - 1)
        return True


def cut(tree: TreeRuns, run: TreeRun, part: TreeRun, chips: list[int]) -> list[TreeRun]:
    """Return what is left of a run on both sides of a part, as runs that hang below it."""
    sides = ((run.low, part.low, part.low), (part.high, run.high, part.high))
    return [TreeRun(tree.depth[chips[top]], run.line, low, high, top, ()) for low, high, top in sides if low < high]


def place_all(
    lines: MeshLines, trees: Sequence[TreeRuns], order: Sequence[int], period: int, limit: int
) -> dict[int, Placement]:
    """Return a placement of each tree, taken in this order."""
    taken, found = Reference(lines, period), dict[int, Placement]()
    for number in order:
        placement = taken.place(trees[number], limit)
        assert placement is not None, "a tree finds no track although its cables have room"
        taken.add(placement)
        found[number] = placement
    return found
