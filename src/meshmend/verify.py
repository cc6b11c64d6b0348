"""Verify: proves that a schedule is what it says it is, over live chips and cables only.

This file holds the specification of the collectives and shares no code with any planner. It follows, for every
chunk, how often each chip's contribution is in what each chip holds. A correct all-reduce has every contribution
exactly once, everywhere.

Two ways of counting, and the result says which was used:

- *exact*: a count for every (chip, chunk, contributor). For small problems.
- *fingerprint*: each contributor gets a random number below the prime 2⁶¹ − 1, and a chip holds the sum of what it
  received, modulo that prime. Two different multisets of contributions have the same sum with probability below
  2⁻⁶⁰, whatever the schedule, because the numbers are drawn after the schedule is fixed.

Chunks that always travel together are followed as one, so the work depends on the schedule, not on K.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from meshmend import routing
from meshmend.errors import CollisionError, DeadPathError, VerificationError, WrongSumError, name_chip
from meshmend.schedule import Collective, Op, Schedule
from meshmend.topology import Mesh

PRIME = np.uint64(2**61 - 1)
EXACT_CELLS = 2**24
"""Largest (chips × chunks × chips) that is counted exactly by default: 16 MB of counters."""
MAX_MOVES = 2**36
"""Chunk moves beyond this would take hours: such a schedule is refused rather than followed."""

MAX_STATE_BYTES = 2**29
"""Contributions are followed for as many chunks at a time as fit in this."""
EXPLAIN_WIDTH = 1024
"""Contributors followed at a time when a fault is explained."""

Method = Literal["exact", "fingerprint"]
Words = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Proof:
    """What was checked, and how. Returned by `verify`; a schedule that fails raises instead."""

    collective: Collective
    method: Method
    chips: int
    chunks: int
    steps: int
    transfers: int
    false_pass_probability: float
    """Upper bound on the probability that a wrong schedule would have passed: 0 for the exact method."""
    seconds: float

    def __str__(self) -> str:
        how = "counted exactly" if self.method == "exact" else f"error below {self.false_pass_probability:.0e}"
        return (
            f"proven {self.collective}: every contribution of {self.chips:,} chips exactly once in "
            f"{self.chunks:,} chunk{'s' * (self.chunks != 1)} ({how}; {self.seconds:.2f} s)"
        )


def verify(
    schedule: Schedule,
    *,
    mesh: Mesh | None = None,
    method: Method | None = None,
    seed: int | None = None,
) -> Proof:
    """Prove a schedule, or raise a `VerificationError` that names step, chips, chunk, expected and got.

    `mesh` asks whether the schedule still holds on another state of the same machine: after a new failure,
    say. `method` forces a way of counting; `seed` makes fingerprints repeatable (otherwise they come from the
    operating system, so that no file can be made to fool them).

    >>> from meshmend import Mesh, plan, verify
    >>> verify(plan(Mesh("4x4"), planner="hamiltonian", verify=False)).method
    'exact'
    """
    started = time.perf_counter()
    _check_paths(schedule, mesh or schedule.mesh)
    classes = _Classes(schedule)
    if method is None:
        cells = schedule.mesh.n_chips**2 * classes.n
        method = "exact" if cells <= EXACT_CELLS else "fingerprint"
    ledger = _Ledger(schedule, method, seed)
    for block in ledger.blocks(classes.n):
        held = ledger.start(block.stop - block.start)
        _replay(schedule, classes, block.start, block.stop, held)
        fault = ledger.fault(held, classes.owners[block])
        if fault is not None:
            chip, chunk_class = fault
            _explain(schedule, chip, int(classes.starts[block.start + chunk_class]))
    # A proof for another mesh, or by fingerprints that a file's author could know, is no proof for an engine.
    if (mesh is None or mesh == schedule.mesh) and (method == "exact" or seed is None):
        schedule._is_proven = True
    return Proof(
        collective=schedule.collective,
        method=method,
        chips=schedule.mesh.n_chips,
        chunks=schedule.total_chunks,
        steps=schedule.n_steps,
        transfers=schedule.n_transfers,
        false_pass_probability=0.0 if method == "exact" else schedule.mesh.n_chips * classes.n / float(PRIME),
        seconds=time.perf_counter() - started,
    )


def ensure_proven(schedule: Schedule) -> None:
    """Prove a schedule unless that was done already; engines call this before they run anything.

    `plan` and the plan cache return proven schedules, so this is free for them. A schedule that comes from a file, a
    pickle or a user's hands is proven here, or refused with a `VerificationError`.
    """
    if not schedule.is_proven:
        verify(schedule)


class _Classes:
    """The schedule's runs, in terms of classes of chunks that always travel together and have one owner."""

    def __init__(self, schedule: Schedule) -> None:
        first = schedule.first_chunk.astype(np.int64)
        changes = np.flatnonzero(np.diff(schedule.owners)) + 1
        edges = [np.array([0, schedule.total_chunks]), first, first + schedule.n_chunks, changes]
        bounds = np.unique(np.concatenate(edges))
        self.starts = bounds[:-1]
        self.n = len(self.starts)
        self.owners = schedule.owners[self.starts].astype(np.int64)
        self.first = np.searchsorted(bounds, first)
        self.last = np.searchsorted(bounds, first + schedule.n_chunks)
        moves = int((self.last - self.first).sum())
        if moves > MAX_MOVES:
            raise VerificationError(
                f"The schedule moves {moves:,} chunks in all; following more than {MAX_MOVES:,} would take hours."
            )

    def moves(self, rows: slice, first: int, last: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (row, class) of everything that `rows` move within classes first … last−1, counted from `first`."""
        low = np.maximum(self.first[rows], first)
        length = np.maximum(np.minimum(self.last[rows], last) - low, 0)
        row = np.repeat(np.arange(rows.start, rows.stop), length)
        within = np.arange(len(row)) - np.repeat(np.cumsum(length) - length, length)
        return row, np.repeat(low, length) + within - first


class _Ledger:
    """The specification: what a chip holds to begin with, and what the collective wants it to hold in the end.

    Contributions are rows of `marks`: unit vectors for the exact method, where a 2 stands for two or more, or one
    random number each for fingerprints. In an all-gather only the owner's counts; the others hold junk.
    """

    def __init__(self, schedule: Schedule, method: Method, seed: int | None) -> None:
        self.collective = schedule.collective
        self.n_chips = schedule.mesh.n_chips
        self.marks: Words
        self.total: Words
        if method == "exact":
            self.marks = np.eye(self.n_chips, dtype=np.uint8)
            self.total = np.ones(self.n_chips, dtype=np.uint8)
        else:
            draws = np.random.default_rng(seed).integers(0, PRIME, self.n_chips, dtype=np.uint64)
            self.marks = draws[:, None]
            self.total = np.array([sum(map(int, draws)) % int(PRIME)], dtype=np.uint64)

    def blocks(self, n_classes: int) -> Iterator[slice]:
        """Cut the classes into blocks that fit in memory."""
        width = max(1, MAX_STATE_BYTES // (self.n_chips * self.marks.shape[1] * self.marks.itemsize))
        for first in range(0, n_classes, width):
            yield slice(first, min(first + width, n_classes))

    def start(self, n_classes: int) -> Words:
        """Return what each chip holds of each class before the first step: its own contribution."""
        return np.repeat(self.marks[:, None], n_classes, axis=1)

    def fault(self, held: Words, owners: NDArray[np.int64]) -> tuple[int, int] | None:
        """Return (chip, class) of the first place that breaks the promise, lowest class first."""
        wanted = self.marks[owners] if self.collective is Collective.ALL_GATHER else self.total
        wrong = (held != wanted).any(axis=2)
        if self.collective is Collective.REDUCE_SCATTER:
            wrong &= np.arange(self.n_chips)[:, None] == owners
        where = np.flatnonzero(wrong.T)
        if not len(where):
            return None
        chunk_class, chip = divmod(int(where[0]), self.n_chips)
        return chip, chunk_class


def _replay(schedule: Schedule, classes: _Classes, first: int, last: int, held: Words) -> None:
    """Run the steps over `held` in place: contributions instead of numbers."""
    width = held.shape[1]
    cells = held.reshape(held.shape[0] * width, -1)
    seen = np.zeros(len(cells), dtype=np.int64)
    starts = schedule.step_starts
    for step in range(schedule.n_steps):
        row, column = classes.moves(slice(int(starts[step]), int(starts[step + 1])), first, last)
        target = schedule.dst[row].astype(np.int64) * width + column
        number = np.arange(len(row))
        seen[target] = number
        if not np.array_equal(seen[target], number):
            clash = int(np.flatnonzero(seen[target] != number)[0])
            other = int(seen[target[clash]])
            _raise_collision(
                schedule, step, int(row[clash]), int(row[other]), int(classes.starts[first + column[clash]])
            )
        arriving = cells[schedule.src[row].astype(np.int64) * width + column]
        adds = schedule.op[row] == Op.REDUCE
        if adds.any():
            arriving[adds] += cells[target[adds]]
            if cells.dtype == np.uint64:
                arriving %= PRIME
            else:
                np.minimum(arriving, 2, out=arriving)
        cells[target] = arriving


def _raise_collision(schedule: Schedule, step: int, row: int, other: int, chunk: int) -> NoReturn:
    mesh = schedule.mesh
    dst = mesh.chip(int(schedule.dst[row]))
    one, two = (mesh.chip(int(schedule.src[r])) for r in (row, other))
    raise CollisionError(
        f"Step {step} writes chunk {chunk} of chip {name_chip(dst)} twice, from {name_chip(one)} and from "
        f"{name_chip(two)}. A step may write a chunk of a chip once: move one of the transfers to another step.",
        step=step,
        src=one,
        dst=dst,
        chunk=chunk,
        expected="one write",
        got="two writes",
    )


def _explain(schedule: Schedule, chip: int, chunk: int) -> NoReturn:
    """Follow one wrong chunk exactly and raise the error that says what happened to it."""
    mesh = schedule.mesh
    rows = np.flatnonzero((schedule.first_chunk <= chunk) & (chunk < schedule.first_chunk + schedule.n_chunks))
    into = rows[schedule.dst[rows] == chip]
    n_wrong, source, count, wanted, culprit, message = 0, -1, 0, 1, -1, ""
    for first in range(0, mesh.n_chips, EXPLAIN_WIDTH):
        sources = np.arange(first, min(first + EXPLAIN_WIDTH, mesh.n_chips))
        counts, doubled = _follow(schedule, rows, sources)
        expected = np.ones(len(sources), dtype=np.int64)
        if schedule.collective is Collective.ALL_GATHER:
            expected = (sources == schedule.owners[chunk]).astype(np.int64)
        off = np.flatnonzero(counts[chip] != expected)
        if len(off) and source < 0:
            source, count, wanted = int(sources[off[0]]), int(counts[chip, off[0]]), int(expected[off[0]])
            if count > wanted and int(off[0]) in doubled:
                culprit = doubled[int(off[0])]
        n_wrong += len(off)
    if source < 0:
        raise AssertionError("the fingerprints and the exact count disagree: this is a bug in meshmend")
    name = name_chip(mesh.chip(source))
    got = _times(count)
    message = f"expected the contribution of {name} {_times(wanted)}, got it {got}"
    if n_wrong > 1:
        message += f" ({n_wrong - 1} other contributions are wrong too)"
    if culprit >= 0:
        ends = (name_chip(mesh.chip(int(rank[culprit]))) for rank in (schedule.src, schedule.dst))
        message += f". Step {schedule.step[culprit]} counts it twice: it adds {' to '.join(ends)}, and both hold it."
    elif len(into):
        culprit = int(into[-1])
        how = Op(schedule.op[culprit]).name
        sender = name_chip(mesh.chip(int(schedule.src[culprit])))
        message += f". The last write there is step {schedule.step[culprit]}, a {how} from {sender}."
    else:
        message += ". No step ever writes this chunk there."
    raise WrongSumError(
        f"Chip {name_chip(mesh.chip(chip))} ends with a wrong chunk {chunk}: {message}",
        step=int(schedule.step[culprit]) if culprit >= 0 else None,
        src=mesh.chip(int(schedule.src[culprit])) if culprit >= 0 else None,
        dst=mesh.chip(chip),
        chunk=chunk,
        expected=f"the contribution of {name} {_times(wanted)}",
        got=got,
    )


def _follow(
    schedule: Schedule, rows: NDArray[np.int64], sources: NDArray[np.int64]
) -> tuple[NDArray[np.int64], dict[int, int]]:
    """Count some chips' contributions to one chunk, moved by `rows`, at every chip.

    Also returns, for each of `sources` that is ever counted twice, the first row that does so.
    """
    held = np.zeros((schedule.mesh.n_chips, len(sources)), dtype=np.int64)
    held[sources, np.arange(len(sources))] = 1
    doubled: dict[int, int] = {}
    for now in np.split(rows, np.flatnonzero(np.diff(schedule.step[rows])) + 1):
        dst, adds = schedule.dst[now], schedule.op[now] == Op.REDUCE
        arriving = held[schedule.src[now]]
        arriving[adds] += held[dst[adds]]
        np.minimum(arriving, 999, out=arriving)
        held[dst] = arriving
        for row, source in np.argwhere(arriving > 1):
            doubled.setdefault(int(source), int(now[row]))
    return held, doubled


def _times(n: int) -> str:
    return {0: "not at all", 1: "once", 2: "twice"}.get(n, f"{n} times")


def _check_paths(schedule: Schedule, mesh: Mesh) -> None:
    """Every transfer must have a live path on `mesh`: one link between neighbours, a route between others."""
    planned = schedule.mesh
    if (mesh.shape, mesh.wrap) != (planned.shape, planned.wrap):
        raise VerificationError(f"The schedule is for {planned}, which is not the same machine as {mesh}.")
    ranks = mesh.rank_of[tuple(planned.coords.T)]
    dead = np.flatnonzero((ranks[schedule.src] < 0) | (ranks[schedule.dst] < 0))
    if len(dead):
        row = int(dead[0])
        ends = (int(schedule.src[row]), int(schedule.dst[row]))
        lost = next(planned.chip(rank) for rank in ends if ranks[rank] < 0)
        _raise_dead(schedule, row, f"chip {name_chip(lost)} has failed", f"Plan again with failed=[{lost}].")
    if mesh.n_chips != planned.n_chips:
        raise VerificationError(
            f"The schedule serves {planned.n_chips} chips, but {mesh!r} has other survivors. Plan again."
        )
    rows = np.flatnonzero(mesh.link(ranks[schedule.src], ranks[schedule.dst]) < 0)
    if not len(rows):
        return
    ends = ranks[schedule.src[rows]].astype(np.int64) * mesh.n_chips + ranks[schedule.dst[rows]]
    pairs, where = np.unique(ends, return_index=True)
    src, dst = np.divmod(pairs, mesh.n_chips)
    row_of = rows[where]
    walk = routing.trace(mesh, src, dst)
    # Do not take the router's word for it: follow the links and see where they lead.
    at = src.copy()
    for hop in range(int(walk.hop.max(initial=-1)) + 1):
        now = walk.hop == hop
        flow, link = walk.flow[now], walk.link[now]
        rank, direction = np.divmod(link, mesh.n_directions)
        beyond = mesh.neighbours[rank, direction]
        astray = np.flatnonzero((rank != at[flow]) | (beyond < 0))
        if len(astray):
            _raise_dead(schedule, int(row_of[flow[astray[0]]]), "its route uses a failed chip or cable", "")
        at[flow] = beyond
    lost_flows = np.flatnonzero(at != dst)
    if len(lost_flows):
        _raise_dead(schedule, int(row_of[lost_flows[0]]), "no live path joins them", "The survivors are cut apart.")


def _raise_dead(schedule: Schedule, row: int, why: str, advice: str) -> NoReturn:
    mesh = schedule.mesh
    src, dst = mesh.chip(int(schedule.src[row])), mesh.chip(int(schedule.dst[row]))
    step, chunk = int(schedule.step[row]), int(schedule.first_chunk[row])
    raise DeadPathError(
        f"Step {step} sends chunk {chunk} over {name_chip(src)}→{name_chip(dst)}, but {why}. {advice}".rstrip(),
        step=step,
        src=src,
        dst=dst,
        chunk=chunk,
        expected="a live path",
        got=why,
    )
