"""Verify: proves that a schedule is what it says it is, over live chips and cables only.

This file is the specification of the collectives and shares no code with any planner. It follows, for every
chunk, how often each chip's contribution is in what each chip holds. A correct all-reduce has every contribution
exactly once at every chip.

Two ways of counting, and the result says which was used:

- *exact*: a count for every (chip, chunk, contributor). For small problems.
- *fingerprint*: contributor i gets a random number rᵢ below the prime p = 2⁶¹ − 1, and a chip holds the sum of what it
  received, modulo p. Beside it travels the number of contributions in that sum. A wrong schedule passes with
  probability at most 1/p, whatever it does:

  1. Let mᵢ be how often contribution i is in what one chip holds of one chunk, and T = Σ mᵢ. The number that travels
     is min(T, L) for L = 2³². It starts at 1, a COPY brings its own along, and a REDUCE keeps it so because min(min(a,
     L) + min(b, L), L) = min(a + b, L). It never wraps, and where it says P < L, T is P.
  2. A wrong schedule leaves some chip with a wrong chunk. Which one is fixed before the numbers are drawn. If T ≠ P
     there, it is caught. If T = P, then 0 ≤ mᵢ ≤ P < p, and some mᵢ − 1 is not 0, hence not 0 modulo p. So
     Σ (mᵢ − 1) rᵢ is a linear form over the field of p elements that is not 0, and independent, uniform rᵢ make it
     vanish with probability 1/p exactly.
  3. The schedule passes only if this chunk does. Other chips, chunks and blocks of chunks can only catch more.

  In an all-gather T must be 1. Then one contribution is there, and another chip's has the owner's number with
  probability 1/p.

An **all-reduce with an update** is an all-reduce that may be interrupted. Once the owner of a chunk has its last REDUCE
of it, the owner may put another value in its place, and every chip ends with that. `fused_update` follows where a chip
holds what the owner had after that moment, handed on by COPYs alone. If that is so everywhere at the end, then (as the
schedule is an all-reduce) the owner had the sum. Had it been another value, every chip would end with that one.

A repeated schedule is proven by its template. Let the template have N chunks and the period be T. A transfer reads and
writes one cell (chip, chunk) per chunk that it carries, with the same chunk on both sides. Those of repeat r carry
chunks r·N … (r+1)·N − 1 only. So no repeat reads or writes a cell of another, and no two repeats write the same cell in
a step. So the transfers of repeat r alone decide what happens to its cells. They are the template's, with r·N added to
each chunk and r·T to each step. That changes neither the order of two steps nor what is in one step. So in every repeat
the cells end as those of the template do, and collide in a step if and only if those do. The owners are shifted
likewise. Hence the whole keeps its promise if and only if the template does, whatever T and R are. ∎

Chunks that always travel together are followed as one, so the work depends on the schedule, not on K. The work is
estimated from the schedule's numbers first: a schedule that would take too long, or too much memory, is refused before
anything is expanded.
"""

from __future__ import annotations

import decimal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from meshmend import routing
from meshmend.errors import RoutingError, VerificationError, WrongSumError, name_chip
from meshmend.schedule import Collective, Op, Schedule
from meshmend.schedule.classes import ChunkClasses
from meshmend.schedule.faults import raise_collision, raise_dead_path, raise_wrong_sum
from meshmend.schedule.fused_update import check_updates
from meshmend.topology import Mesh

__all__ = ["Proof", "ensure_proven", "verify"]

PRIME = np.uint64(2**61 - 1)
MANY = np.uint64(2**32)
"""Where the count of contributions stops: far above any number of chips, far below what 64 bits hold twice."""
EXACT_CELLS = 2**24
"""Largest (chips × chunks × chips) that is counted exactly by default: 16 MB of counters."""
MAX_WORK = 2**33
"""Limit of numbers moved, some ten minutes of work. A schedule that needs more is refused."""
STEP_WORK = 2**10
"""The overhead of a step, in numbers moved."""
MAX_STATE_BYTES = 2**26
"""Contributions are followed for as many chunks at a time as fit in this; a step in the works takes five times more."""

Method = Literal["exact", "fingerprint"]
Words = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Proof:
    """The result of a proof, as `verify` returns it; a schedule that fails raises instead."""

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
        up = decimal.Context(prec=1, rounding=decimal.ROUND_CEILING)
        bound = up.create_decimal_from_float(self.false_pass_probability)
        updated = ", each of which can be updated at its owner" * (self.collective is Collective.ALL_REDUCE_WITH_UPDATE)
        how = "counted exactly" if self.method == "exact" else f"error below {bound:.0e}"
        return (
            f"proven {self.collective}: every contribution of {self.chips:,} chips exactly once in "
            f"{self.chunks:,} chunk{'s' * (self.chunks != 1)}{updated} ({how}; {self.seconds:.2f} s)"
        )


def verify(
    schedule: Schedule,
    *,
    mesh: Mesh | None = None,
    method: Method | None = None,
    seed: int | None = None,
) -> Proof:
    """Prove a schedule, or raise a `VerificationError` that names step, chips, chunk, expected and got.

    `mesh` checks the schedule against another state of the same machine, for example after a new
    failure. `method` forces a way of counting; `seed` makes fingerprints repeatable (otherwise they come from the
    operating system, so that no file can be made to fool them).

    >>> from meshmend import Mesh, plan, verify
    >>> verify(plan(Mesh("4x4"), planner="hamiltonian", verify=False)).method
    'exact'
    """
    started = time.perf_counter()
    # The first repeat is the template itself: what is said of the template's steps and chunks holds for the whole.
    template = schedule.template
    _check_transfers(template)
    _check_paths(template, mesh or schedule.mesh)
    classes = ChunkClasses(template)
    if method is None:
        cells = schedule.mesh.n_chips**2 * classes.n
        method = "exact" if cells <= EXACT_CELLS else "fingerprint"
    tally = _Tally(template, method, seed)
    _check_work(template, classes, tally)
    for block in tally.blocks(classes.n):
        held = tally.start(block.stop - block.start)
        _replay(template, classes, block.start, block.stop, tally, held)
        fault = tally.fault(held, classes.owners[block])
        if fault is not None:
            chip, chunk_class = fault
            raise_wrong_sum(template, chip, int(classes.starts[block.start + chunk_class]))
    if schedule.collective is Collective.ALL_REDUCE_WITH_UPDATE:
        check_updates(template, classes)
    # A proof for another mesh, or by fingerprints that a file's author could know, is no proof for an engine.
    if (mesh is None or mesh == schedule.mesh) and (method == "exact" or seed is None):
        schedule._is_proven = template._is_proven = True
    return Proof(
        collective=schedule.collective,
        method=method,
        chips=schedule.mesh.n_chips,
        chunks=schedule.total_chunks,
        steps=schedule.n_steps,
        transfers=schedule.n_transfers,
        false_pass_probability=0.0 if method == "exact" else 1 / float(PRIME),
        seconds=time.perf_counter() - started,
    )


def ensure_proven(schedule: Schedule) -> None:
    """Prove a schedule unless it is already proven; engines call this before they run anything.

    `plan` and the plan cache return proven schedules, so this is free for them. A schedule from a file, a
    pickle or a user is proven here, or refused with a `VerificationError`.
    """
    if not schedule.is_proven:
        verify(schedule)


def _check_transfers(schedule: Schedule) -> None:
    """Refuse schedules with too few transfers to be right, before any table of the mesh's size is built.

    Whatever the collective: all chips but one must send something, or all chips but one must be sent something.
    """
    least = schedule.mesh.n_chips - 1
    if schedule.n_transfers < least:
        raise WrongSumError(
            f"The {schedule.collective} of {least + 1:,} chips takes {least:,} transfers or more: "
            f"the schedule has {schedule.n_transfers:,}.",
            expected=f"{least:,} transfers or more",
            got=f"{schedule.n_transfers:,}",
        )


class _Tally:
    """The specification: what a chip holds at the start, and what the collective requires it to hold at the end.

    Contributions are rows of `marks`: unit vectors for the exact method, where a 2 stands for two or more, or a random
    number and a 1, the count, for fingerprints. In an all-gather only the owner's counts; the others hold junk.
    """

    def __init__(self, schedule: Schedule, method: Method, seed: int | None) -> None:
        self.collective = schedule.collective
        self.n_chips = schedule.mesh.n_chips
        self.is_exact = method == "exact"
        self.marks: Words
        self.total: Words
        if self.is_exact:
            if self.n_chips**2 > MAX_STATE_BYTES:
                raise VerificationError(
                    f"To count {self.n_chips:,} chips exactly takes {self.n_chips**2:,} bytes per chunk; at most "
                    f"{MAX_STATE_BYTES:,} are used. Use method='fingerprint'."
                )
            self.marks = np.eye(self.n_chips, dtype=np.uint8)
            self.total = np.ones(self.n_chips, dtype=np.uint8)
        else:
            draws = np.random.default_rng(seed).integers(0, PRIME, self.n_chips, dtype=np.uint64)
            self.marks = np.stack([draws, np.ones_like(draws)], axis=1)
            self.total = np.array([sum(map(int, draws)) % int(PRIME), self.n_chips], dtype=np.uint64)

    @property
    def width(self) -> int:
        """Classes of chunks that are followed at a time."""
        return max(1, MAX_STATE_BYTES // self.marks.nbytes)

    def blocks(self, n_classes: int) -> Iterator[slice]:
        """Cut the classes into blocks that fit in memory."""
        for first in range(0, n_classes, self.width):
            yield slice(first, min(first + self.width, n_classes))

    def start(self, n_classes: int) -> Words:
        """Return what each chip holds of each class before the first step: its own contribution."""
        return np.repeat(self.marks[:, None], n_classes, axis=1)

    def add(self, one: Words, other: Words) -> Words:
        """Return the contributions of both. No count wraps."""
        both: Words = one + other
        if self.is_exact:
            return np.minimum(both, np.uint8(2), out=both)
        both[:, 0] %= PRIME
        both[:, 1] = np.minimum(both[:, 1], MANY)
        return both

    def fault(self, held: Words, owners: NDArray[np.int64]) -> tuple[int, int] | None:
        """Return (chip, class) of the first wrong result, lowest class first."""
        wanted = self.marks[owners] if self.collective is Collective.ALL_GATHER else self.total
        wrong = (held != wanted).any(axis=2)
        if self.collective is Collective.REDUCE_SCATTER:
            wrong &= np.arange(self.n_chips)[:, None] == owners
        where = np.flatnonzero(wrong.T)
        if not len(where):
            return None
        chunk_class, chip = divmod(int(where[0]), self.n_chips)
        return chip, chunk_class


def _check_work(schedule: Schedule, classes: ChunkClasses, tally: _Tally) -> None:
    """Refuse a schedule that would take too long to follow."""
    n_blocks = -(-classes.n // tally.width)
    a_mark = -(-tally.marks.nbytes // (16 * tally.n_chips))
    work = (classes.n_moves + tally.n_chips * classes.n) * a_mark
    work += n_blocks * (schedule.n_transfers + schedule.n_steps * STEP_WORK)
    if work > MAX_WORK:
        raise VerificationError(
            f"To prove {schedule.n_transfers:,} transfers of {classes.n:,} different runs of chunks between "
            f"{tally.n_chips:,} chips takes {work:,} moves; at most {MAX_WORK:,} are made. Cut the payload into fewer "
            "chunks."
        )


def _replay(schedule: Schedule, classes: ChunkClasses, first: int, last: int, tally: _Tally, held: Words) -> None:
    """Run the steps over `held` in place: contributions instead of numbers."""
    width = held.shape[1]
    cells = held.reshape(held.shape[0] * width, -1)
    seen = np.zeros(len(cells), dtype=np.int64)
    starts = schedule.step_starts
    for step in range(schedule.n_steps):
        rows = slice(int(starts[step]), int(starts[step + 1]))
        row, column = classes.moves(rows, first, last, len(cells))
        target = schedule.dst[row].astype(np.int64) * width + column
        number = np.arange(len(row))
        seen[target] = number
        if not np.array_equal(seen[target], number):
            clash = int(np.flatnonzero(seen[target] != number)[0])
            other = int(seen[target[clash]])
            raise_collision(schedule, int(row[clash]), int(row[other]), int(classes.starts[first + column[clash]]))
        arriving = cells[schedule.src[row].astype(np.int64) * width + column]
        adds = schedule.op[row] == Op.REDUCE
        if adds.any():
            arriving[adds] = tally.add(arriving[adds], cells[target[adds]])
        cells[target] = arriving


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
        raise_dead_path(schedule, row, f"chip {name_chip(lost)} has failed", f"Plan again with failed=[{lost}].")
    if mesh.n_chips != planned.n_chips or (ranks < 0).any():
        raise VerificationError(
            f"The schedule serves {planned.n_chips} chips, but {mesh!r} has other survivors. Plan again."
        )
    rows = np.flatnonzero(mesh.link(ranks[schedule.src], ranks[schedule.dst]) < 0)
    if not len(rows):
        return
    pair = ranks[schedule.src[rows]].astype(np.int64) * mesh.n_chips + ranks[schedule.dst[rows]]
    pairs, where = np.unique(pair, return_index=True)
    src, dst = np.divmod(pairs, mesh.n_chips)
    row_of = rows[where]
    try:
        walk = routing.trace(mesh, src, dst)
    except RoutingError as error:
        raise VerificationError(f"Transfers between chips that are not neighbours have no routes. {error}") from error
    # Do not trust the router: follow the links and see where they lead.
    at = src.copy()
    order = np.argsort(walk.hop, kind="stable")
    edges = np.searchsorted(walk.hop[order], np.arange(walk.hop.max(initial=-1) + 2))
    for start, stop in pairwise(edges.tolist()):
        flow, link = walk.flow[order[start:stop]], walk.link[order[start:stop]]
        rank, direction = np.divmod(link, mesh.n_directions)
        beyond = mesh.neighbours[rank, direction]
        astray = np.flatnonzero((rank != at[flow]) | (beyond < 0))
        if len(astray):
            raise_dead_path(schedule, int(row_of[flow[astray[0]]]), "its route uses a failed chip or cable", "")
        at[flow] = beyond
    lost_flows = np.flatnonzero(at != dst)
    if len(lost_flows):
        raise_dead_path(
            schedule, int(row_of[lost_flows[0]]), "no live path joins them", "The survivors are not connected."
        )
