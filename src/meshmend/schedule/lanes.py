"""From a schedule to the tables that a program of permutes reads: loops of steps, and in each loop a few lanes.

A *lane* is one `lax.ppermute` with a fixed permutation and a fixed run length. A *loop* is a stretch of steps that
are all served by the same lanes, so that it can be one `lax.scan`; for each of its steps and lanes a chip has a row
of its table: which chunks to send, and where to put what arrives.

The (src, dst) pairs of a stretch are a bipartite graph, and its lanes are an edge colouring: by König's theorem as
few as the largest number of runs that any chip sends or receives. Where a step has more than one run length, each
length has lanes of its own.

A repeated schedule becomes one loop whose tables have a row per step of the period, however often it is repeated. Step
s = c + m·T takes row c, and with it all of the template's steps t = c + j·T: those move the chunks of repeat m − j. So
the tables hold the template's chunks less j·N, the loop adds m·N, and what is then no chunk of the payload belongs to a
repeat before the first or after the last: it is not moved.

The JAX engine runs these tables, and `meshmend.cost` counts their permutes (`count_lanes`) where each has its price.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from meshmend.schedule.collective import Collective
from meshmend.schedule.schedule import Schedule

MAX_COUNT = 2**31
"""Chunks are counted in 32 bits."""
MAX_LOOPS = 16
"""A program has no more loops than this, however long the schedule."""
FEW_STEPS = 24
"""A schedule of so few steps may have a loop for each: partners that change in every step, as in recursive doubling,
would be as many lanes of one loop, all but one idle."""
FEW_MERGE_COST = 0.05
"""The same fraction for steps of one kind there: a loop for each would cost more than it saves."""
MERGE_COST = 0.01
"""Neighbouring stretches become one loop if that moves at most this fraction more: a loop costs compile time."""
MIXED_COST = 1.25
"""What a move costs where some chips add and others replace, against a loop in which all do the same."""
MAX_UNROLLED = 96
"""Steps of a plan that are written out one by one inside a loop body, at most: the code grows with them. Computing runs
beside those alone."""
KEEP = 2
"""Besides `Op.REDUCE` and `Op.COPY`: nothing arrives on this lane, and the chip keeps what it holds."""

Owned = Annotated[NDArray[np.int32], "int32[N, R]"]
"""For each rank the chunks that it owns."""


@dataclass(frozen=True)
class Lane:
    """One permute: pairs of ranks that it joins, how many chunks it carries, and what chips do with what arrives.

    `ops` lists all that ever happens on this lane; where that is more than one thing, the tables say which.
    """

    pairs: tuple[tuple[int, int], ...]
    run: int
    ops: tuple[int, ...]


@dataclass(frozen=True)
class Loop:
    """Steps that share their lanes. The tables have one entry for each rank, step and lane.

    `send` and `receive` are first chunks; `ops` says what to do with what arrives: an `Op`, or KEEP.
    """

    lanes: tuple[Lane, ...]
    send: Annotated[NDArray[np.int32], "int32[N, T, L]"]
    receive: Annotated[NDArray[np.int32], "int32[N, T, L]"]
    ops: Annotated[NDArray[np.uint8], "uint8[N, T, L]"]

    @property
    def n_steps(self) -> int:
        """Steps of this loop."""
        return int(self.send.shape[1])

    @property
    def reads_ops(self) -> bool:
        """Whether the table of `ops` is needed: some lane does more than one thing."""
        return any(len(lane.ops) > 1 for lane in self.lanes)


@dataclass(frozen=True)
class Repeat:
    """How a loop's rows are repeated: row s modulo `period` in step s, with `n_chunks` chunks more in every period."""

    period: int
    n_chunks: int
    n_steps: int


@dataclass(frozen=True)
class ProgramShape:
    """All of a lowered schedule that is the same on every chip; equal shapes can share a compiled program."""

    n_chips: int
    total_chunks: int
    collective: Collective
    lanes: tuple[tuple[Lane, ...], ...] = field(repr=False)
    owned: tuple[tuple[int, ...], ...] = field(repr=False)
    """For each rank the chunks that it owns, in ascending order, padded with `total_chunks` to the longest list."""
    repeat: Repeat | None = None
    """Where the schedule is repeated, how its only loop is."""

    @cached_property
    def digest(self) -> str:
        """A name for the content. Lanes are long: JAX asks for the hash and for equality at every call."""
        facts: tuple[object, ...] = (self.n_chips, self.total_chunks, self.collective.value, self.lanes, self.owned)
        if self.repeat is not None:
            facts += (self.repeat,)
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProgramShape) and self.digest == other.digest


@dataclass(frozen=True)
class Lowered:
    """A schedule as loops and tables, and what all chips share of it."""

    shape: ProgramShape
    loops: tuple[Loop, ...]

    @property
    def owned(self) -> Owned:
        """The shape's `owned` as a table, one row per rank."""
        return np.array(self.shape.owned, dtype=np.int32)


@dataclass(frozen=True)
class LaneCount:
    """A loop's steps, how many permutes each of them runs, and how many chunks those move, idle lanes included."""

    n_steps: int
    lanes: int
    chunks: int
    longest: int
    """Chunks of its longest lane."""


def count_lanes(schedule: Schedule) -> list[LaneCount]:
    """Count the permutes of each loop that `lower` makes, without making its tables.

    >>> import meshmend as mm
    >>> count_lanes(mm.plan(mm.Mesh("4x4"), "hamiltonian"))[0]
    LaneCount(n_steps=15, lanes=2, chunks=2, longest=1)
    """
    if stays_folded(schedule):
        folded, n_steps = _folded(schedule)[0], _repeated_steps(schedule)
        stretches = [(_stretch(folded, 0, folded.n_steps), n_steps)] if folded.n_steps else []
    else:
        stretches = [(stretch, stretch.last - stretch.first) for stretch in _merge(_stretches(schedule))]
    found = []
    for stretch, n_steps in stretches:
        lanes = {run: _n_lanes(*pairs, stretch.n_chips) for run, pairs in stretch.pairs.items()}
        moved = sum(run * count for run, count in lanes.items())
        found.append(LaneCount(n_steps, sum(lanes.values()), moved, max(lanes)))
    return found


def lower(schedule: Schedule) -> Lowered:
    """Lower a proven schedule into loops, lanes and tables.

    >>> import meshmend as mm
    >>> [(loop.n_steps, len(loop.lanes)) for loop in lower(mm.plan(mm.Mesh("4x4"), "hamiltonian")).loops]
    [(15, 2), (15, 2)]
    """
    repeat: Repeat | None = None
    if stays_folded(schedule):
        loops, repeat = _lower_repeated(schedule)
    else:
        stretches = _merge(_stretches(schedule))
        loops = tuple(_loop(schedule, stretch) for stretch in stretches)
    shape = ProgramShape(
        n_chips=schedule.mesh.n_chips,
        total_chunks=schedule.total_chunks,
        collective=schedule.collective,
        lanes=tuple(loop.lanes for loop in loops),
        owned=tuple(map(tuple, owned_chunks(schedule).tolist())),
        repeat=repeat,
    )
    return Lowered(shape, loops)


def stays_folded(schedule: Schedule) -> bool:
    """Whether a repeated schedule becomes one loop over a period's rows: its chunks are counted in 32 bits."""
    template = schedule.template
    return (
        schedule.repeats > 1
        and schedule.total_chunks + template.total_chunks * (template.n_steps // schedule.period) < MAX_COUNT
    )


def _repeated_steps(schedule: Schedule) -> int:
    return (schedule.repeats - 1) * schedule.period + schedule.template.n_steps


def _folded(schedule: Schedule) -> tuple[Schedule, NDArray[np.int32]]:
    """Return the template's steps folded into one period, and the first chunk of each of its transfers."""
    template, period = schedule.template, schedule.period
    repeat, step = np.divmod(template.step, np.int32(period))
    order = np.argsort(step, kind="stable")
    folded = template.replace(order, step=step[order], may_idle=True)
    return folded, (folded.first_chunk - repeat[order] * template.total_chunks).astype(np.int32)


def _lower_repeated(schedule: Schedule) -> tuple[tuple[Loop, ...], Repeat]:
    """Lower one period of a repeated schedule."""
    period = schedule.period
    folded, first = _folded(schedule)
    loop = _loop(folded, _stretch(folded, 0, folded.n_steps), first)
    idle = [(0, 0), (0, period - loop.n_steps), (0, 0)]
    lanes = tuple(Lane(lane.pairs, lane.run, tuple(sorted({*lane.ops, KEEP}))) for lane in loop.lanes)
    ops = np.pad(loop.ops, idle, constant_values=KEEP)
    whole = Loop(lanes, np.pad(loop.send, idle), np.pad(loop.receive, idle), ops)
    return (whole,), Repeat(period, schedule.template.total_chunks, _repeated_steps(schedule))


@dataclass(frozen=True)
class _Stretch:
    """Steps first … last−1, with the pairs that each run length joins: their codes and how often in one step."""

    first: int
    last: int
    pairs: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]]
    ops: dict[int, frozenset[int]]
    n_chips: int

    @cached_property
    def cost(self) -> float:
        """Chunks that a chip moves, idle lanes included."""
        cost = 0.0
        for run, (codes, times) in self.pairs.items():
            mixed = MIXED_COST if len(self.ops[run]) > 1 else 1.0
            cost += run * _n_lanes(codes, times, self.n_chips) * mixed
        return cost * (self.last - self.first)

    def __add__(self, other: _Stretch) -> _Stretch:
        pairs, ops = dict(self.pairs), dict(self.ops)
        for run, (codes, times) in other.pairs.items():
            if run in pairs:
                codes = np.concatenate([pairs[run][0], codes])
                times = np.concatenate([pairs[run][1], times])
                codes, where = np.unique(codes, return_inverse=True)
                most = np.zeros(len(codes), dtype=np.int64)
                np.maximum.at(most, where, times)
                times = most
            pairs[run] = codes, times
            ops[run] = ops.get(run, frozenset()) | other.ops[run]
        return _Stretch(self.first, other.last, pairs, ops, self.n_chips)


def _n_lanes(codes: NDArray[np.int64], times: NDArray[np.int64], n_chips: int) -> int:
    src, dst = np.divmod(codes, n_chips)
    return int(max(np.bincount(end, weights=times).max() for end in (src, dst)))


def _stretches(schedule: Schedule) -> list[_Stretch]:
    """Cut the steps where the kinds of transfer (run length and op) change; in a short schedule also where pairs do."""
    runs, run_of = np.unique(schedule.n_chunks, return_inverse=True)
    kind = run_of.astype(np.int64) * 2 + schedule.op
    present = np.zeros((schedule.n_steps, 2 * len(runs)), dtype=np.bool_)
    present[schedule.step, kind] = True
    changes = np.flatnonzero((present[1:] != present[:-1]).any(axis=1)) + 1
    edges = [0, *changes.tolist(), schedule.n_steps] if schedule.n_steps else [0]
    if schedule.n_steps > FEW_STEPS:
        return [_stretch(schedule, first, last) for first, last in pairwise(edges)]
    found = []
    for first, last in pairwise(edges):
        found += _merge([_stretch(schedule, step, step + 1) for step in range(first, last)], FEW_MERGE_COST)
    return found


def _stretch(schedule: Schedule, first: int, last: int) -> _Stretch:
    rows = slice(int(schedule.step_starts[first]), int(schedule.step_starts[last]))
    n = schedule.mesh.n_chips
    codes = schedule.src[rows].astype(np.int64) * n + schedule.dst[rows]
    pairs, ops = {}, {}
    for run in np.unique(schedule.n_chunks[rows]).tolist():
        mine = schedule.n_chunks[rows] == run
        # How often a pair occurs in one step, at most: a chip may send a neighbour two runs that do not join.
        keys, times = np.unique(codes[mine] * schedule.n_steps + schedule.step[rows][mine], return_counts=True)
        found = keys // schedule.n_steps
        starts = np.flatnonzero(np.diff(found, prepend=-1))
        pairs[run] = found[starts], np.maximum.reduceat(times, starts)
        ops[run] = frozenset(schedule.op[rows][mine].tolist())
    return _Stretch(first, last, pairs, ops, n)


def _merge(stretches: list[_Stretch], worth: float = MERGE_COST) -> list[_Stretch]:
    """Join neighbouring stretches while that is nearly free, or while there are too many."""
    stretches = list(stretches)
    joined = [a + b for a, b in pairwise(stretches)]
    while joined:
        added = [both.cost - a.cost - b.cost for both, (a, b) in zip(joined, pairwise(stretches), strict=True)]
        best = int(np.argmin(added))
        total = sum(stretch.cost for stretch in stretches)
        if len(stretches) <= MAX_LOOPS and added[best] > worth * total:
            break
        stretches[best : best + 2] = [joined[best]]
        joined[best : best + 1] = []
        for i in (best - 1, best):
            if 0 <= i < len(joined):
                joined[i] = stretches[i] + stretches[i + 1]
    return stretches


def _loop(schedule: Schedule, stretch: _Stretch, first_chunk: NDArray[np.int32] | None = None) -> Loop:
    """Return the lanes and tables of a stretch; `first_chunk` stands in for the schedule's own."""
    n = schedule.mesh.n_chips
    first = schedule.first_chunk if first_chunk is None else first_chunk
    rows = np.arange(schedule.step_starts[stretch.first], schedule.step_starts[stretch.last])
    lanes: list[Lane] = []
    tables = []
    for run in sorted(stretch.pairs):
        codes, times = stretch.pairs[run]
        edges = np.repeat(codes, times)
        colour, n_lanes = _colour(edges, n)
        mine = rows[schedule.n_chunks[rows] == run]
        code = schedule.src[mine].astype(np.int64) * n + schedule.dst[mine]
        step = schedule.step[mine].astype(np.int64) - stretch.first
        # The i-th transfer of a pair in one step takes the i-th of the pair's edges.
        key = step * (n * n) + code
        order = np.argsort(key, kind="stable")
        mine, code, step = mine[order], code[order], step[order]
        fresh = np.flatnonzero(np.diff(key[order], prepend=-1))
        ith = np.arange(len(code)) - np.repeat(fresh, np.diff(fresh, append=len(code)))
        lane = colour[np.searchsorted(edges, code) + ith]
        size = (n, stretch.last - stretch.first, n_lanes)
        send = np.zeros(size, dtype=np.int32)
        receive = np.zeros(size, dtype=np.int32)
        ops = np.full(size, KEEP, dtype=np.uint8)
        send[schedule.src[mine], step, lane] = first[mine]
        receive[schedule.dst[mine], step, lane] = first[mine]
        ops[schedule.dst[mine], step, lane] = schedule.op[mine]
        tables.append((send, receive, ops))
        for number in range(n_lanes):
            ends = [(int(e) // n, int(e) % n) for e in edges[colour == number]]
            lanes.append(Lane(tuple(ends), run, tuple(np.unique(ops[:, :, number]).tolist())))
    return Loop(tuple(lanes), *(np.concatenate(parts, axis=2) for parts in zip(*tables, strict=True)))


def _colour(edges: Annotated[NDArray[np.int64], "[E]"], n: int) -> tuple[Annotated[NDArray[np.int64], "[E]"], int]:
    """Colour the edges (src · n + dst, repeated ones side by side) so that no two of a colour share an end.

    König's construction: give an edge a colour that is free at both ends; if there is none, swap two colours along
    the path that starts at one end, which frees the colour there. Uses as many colours as the largest degree.
    """
    degree = max(int(np.bincount(end).max()) for end in np.divmod(edges, n))
    # at[side][chip][colour] is the edge of that colour at that end.
    at = [[[-1] * degree for _ in range(n)] for _ in range(2)]
    ends = [(int(e) // n, int(e) % n) for e in edges]
    colour = [0] * len(ends)
    for edge, (src, dst) in enumerate(ends):
        a = at[0][src].index(-1)
        b = at[1][dst].index(-1)
        if at[1][dst][a] >= 0:
            # Walk from dst along edges of colours a, b, a, …; the path cannot reach src, where a is free.
            path, side, chip, wanted = [], 1, dst, a
            while (found := at[side][chip][wanted]) >= 0:
                path.append(found)
                side, wanted = 1 - side, a + b - wanted
                chip = ends[found][side]
            for swapped in path:
                for side in (0, 1):
                    at[side][ends[swapped][side]][colour[swapped]] = -1
            for swapped in path:
                colour[swapped] = a + b - colour[swapped]
                for side in (0, 1):
                    at[side][ends[swapped][side]][colour[swapped]] = swapped
        colour[edge] = a
        at[0][src][a] = at[1][dst][a] = edge
    return np.array(colour, dtype=np.int64), degree


def owned_chunks(schedule: Schedule) -> Owned:
    """List every rank's chunks in ascending order; all lists are as long as the longest."""
    counts = np.bincount(schedule.owners, minlength=schedule.mesh.n_chips)
    owned = np.full((schedule.mesh.n_chips, counts.max()), schedule.total_chunks, dtype=np.int32)
    order = np.argsort(schedule.owners, kind="stable")
    within = np.arange(schedule.total_chunks) - np.repeat(np.cumsum(counts) - counts, counts)
    owned[schedule.owners[order], within] = order
    return owned
