"""Random schedules that are right by construction and that no planner made.

Planners make tidy schedules: trees and rings, reductions first, copies later. An engine or a lowering that only ever
sees those may lean on habits that `Schedule` does not promise. Here is everything else that a step may do: two chips
that add each other up in one step, a chip that is read and overwritten in the same step, copies of copies, stale
values that are written over, steps that achieve nothing, runs of any length that are split and joined on the way,
transfers between chips far apart; on meshes and tori of one to three axes with failed chips and cables.

Each run of chunks is followed by *parts*: a part is a set of chips whose contributions have been summed, and its
holders are the chips that hold exactly that sum. Two parts become one when a holder of the one adds to a holder of
the other; all other holders of the two are stale from then on, and a stale chip may be written over with anything.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from meshmend import Collective, Mesh, Op, Schedule
from strategies import tear

COLLECTIVES = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
STALE = -1
"""In place of a part's number: what the chip holds is of no use to anybody."""

Writes = dict[int, tuple[int, Op] | None]
"""A step in the making: for each destination the source and the op, or None where nothing is written."""


def random_schedule(
    seed: int, *, collective: Collective | None = None, max_chips: int = 12, max_chunks: int = 12
) -> Schedule:
    """Return a valid schedule, always the same one for the same arguments; it is not proven yet.

    Any collective unless one is named. A mesh has 1 to `max_chips` live chips and is connected. In about half of the
    schedules all transfers are between neighbours. In an all-reduce, an owner is a chip where its
    chunk is first complete.

    >>> random_schedule(3, collective=Collective.ALL_GATHER).collective
    <Collective.ALL_GATHER: 'all-gather'>
    """
    rng = random.Random(seed)  # repeatable, not secret
    mesh = _random_mesh(rng, max_chips)
    collective = collective or rng.choice(COLLECTIVES)
    return _Maker(rng, mesh, collective, rng.randint(1, max_chunks)).make()


def _random_mesh(rng: random.Random, max_chips: int) -> Mesh:
    shape: list[int] = []
    room = max_chips
    for _ in range(rng.choice([1, 2, 2, 3, 3])):
        shape.append(rng.randint(1, room) if rng.random() < 0.5 else rng.randint(1, min(4, room)))
        room //= shape[-1]
    rng.shuffle(shape)
    wrap = tuple(rng.random() < 0.3 for _ in shape)
    lost_chips, lost_cables = rng.choice([0.0, 0.0, 0.15, 0.3]), rng.choice([0.0, 0.0, 0.1, 0.25])
    return tear(tuple(shape), wrap, lost_chips, lost_cables, rng.getrandbits(32))


@dataclass
class _Run:
    """A run of chunks first … last−1 that has travelled together so far: which part each chip holds the sum of."""

    first: int
    last: int
    part_of: list[int]
    now: int = 0
    """The step in which it may move next."""
    owner: int = STALE
    tidy: float = 0.5
    """How likely it is that a step does only what brings the sum forward."""


class _Maker:
    """One schedule in the making."""

    def __init__(self, rng: random.Random, mesh: Mesh, collective: Collective, total_chunks: int) -> None:
        self.rng, self.mesh, self.collective, self.total_chunks = rng, mesh, collective, total_chunks
        self.chips = range(mesh.n_chips)
        near = [[int(peer) for peer in row if peer >= 0] for row in mesh.neighbours]
        # On an axis of two that wraps, or on a torus of three, a neighbour is listed once for each way to it.
        self.near = [sorted(set(peers) - {chip}) for chip, peers in enumerate(near)]
        far = rng.choice([0.0, 0.0, 0.2, 1.0])
        everyone = [[peer for peer in self.chips if peer != chip] for chip in self.chips]
        self.peers = [everyone[chip] if rng.random() < far else self.near[chip] for chip in self.chips]
        # Sums along trees, a transfer at a time and nothing useless: most of these have a neighbour form.
        self.plain = rng.random() < 0.3
        self.next_part = mesh.n_chips
        self.owners = np.zeros(total_chunks, dtype=np.int64)
        self.rows: list[tuple[int, int, int, int, int, int]] = []

    def make(self) -> Schedule:
        rng = self.rng
        first = 0
        runs = []
        while first < self.total_chunks:
            last = rng.randint(first + 1, self.total_chunks)
            runs.append(self._fresh(first, last))
            first = last
        while runs:
            run = runs.pop()
            while not self._is_done(run):
                self._advance(run)
                if run.last - run.first > 1 and rng.random() < 0.15:
                    # From here on the two halves of the run go their own ways.
                    cut = rng.randint(run.first + 1, run.last - 1)
                    runs.append(_Run(cut, run.last, list(run.part_of), run.now, run.owner, run.tidy))
                    run.last = cut
            for _ in range(0 if self.plain else rng.choice([0, 0, 1, 2])):
                self._emit(run, self._useless(run, dict.fromkeys(self.chips, None), run.part_of))
            self.owners[run.first : run.last] = run.owner
        return self._schedule()

    def _fresh(self, first: int, last: int) -> _Run:
        rng = self.rng
        tidy = 1.0 if self.plain else rng.choice([0.3, 0.6, 1.0])
        start = rng.randint(0, 6)
        if self.collective is Collective.ALL_GATHER:
            owner = rng.choice(self.chips)
            part_of = [owner if chip == owner else STALE for chip in self.chips]
            return _Run(first, last, part_of, start, owner, tidy)
        owner = rng.choice(self.chips) if self.collective is Collective.REDUCE_SCATTER else STALE
        return _Run(first, last, list(self.chips), start, owner, tidy)

    def _is_done(self, run: _Run) -> bool:
        parts = {part for part in run.part_of if part != STALE}
        if len(parts) > 1:
            return False
        if run.owner == STALE:
            run.owner = self.rng.choice([chip for chip in self.chips if run.part_of[chip] != STALE])
        if self.collective is Collective.REDUCE_SCATTER:
            return run.part_of[run.owner] != STALE
        return STALE not in run.part_of

    def _advance(self, run: _Run) -> None:
        """Make one step: merge some parts, spread some sums, and write some rubbish where it does no harm."""
        rng, before = self.rng, list(run.part_of)
        writes: Writes = dict.fromkeys(self.chips, None)
        merged = self._merge(run, before, writes)
        if not merged or rng.random() > run.tidy:
            self._spread(run, before, writes, merged)
        # Chips are joined: either two parts touch, or there is a stale chip beside a sum. So every run ends.
        assert any(writes.values()), "a step that brings nothing forward"
        if rng.random() > run.tidy:
            self._useless(run, writes, before)
        self._emit(run, writes)

    def _merge(self, run: _Run, before: list[int], writes: Writes) -> set[int]:
        rng = self.rng
        pairs = [(a, b) for a in self.chips for b in self.peers[a] if STALE not in (before[a], before[b])]
        pairs = [(a, b) for a, b in pairs if before[a] != before[b]]
        rng.shuffle(pairs)
        merged: set[int] = set()
        eager = 0.0 if self.plain else rng.choice([0.2, 0.7, 1.0])
        for a, b in pairs:
            x, y = before[a], before[b]
            if x in merged or y in merged or (merged and rng.random() > eager):
                continue
            merged |= {x, y}
            for chip in self.chips:
                if before[chip] in (x, y):
                    run.part_of[chip] = STALE
            self._write(run, writes, a, b, Op.REDUCE, self.next_part)
            match "one way" if self.plain else rng.choice(["one way", "one way", "exchange", "swap", "all"]):
                case "exchange":
                    self._write(run, writes, b, a, Op.REDUCE, self.next_part)
                case "swap":
                    self._write(run, writes, b, a, Op.COPY, STALE)
                case "all":
                    for c, d in pairs:
                        if (before[c], before[d]) in ((x, y), (y, x)) and writes[d] is None:
                            self._write(run, writes, c, d, Op.REDUCE, self.next_part)
            self.next_part += 1
        return merged

    def _spread(self, run: _Run, before: list[int], writes: Writes, merged: set[int]) -> None:
        """Copy sums to chips that hold nothing of use, also to those that were read in this very step."""
        moves = [(a, b) for a in self.chips for b in self.peers[a] if before[a] not in (STALE, *merged)]
        self.rng.shuffle(moves)
        eager = 0.0 if self.plain else self.rng.choice([0.0, 0.3, 1.0])
        wanted = 1
        for a, b in moves:
            if run.part_of[b] == STALE and writes[b] is None and (wanted > 0 or self.rng.random() < eager):
                self._write(run, writes, a, b, Op.COPY, before[a])
                wanted -= 1

    def _useless(self, run: _Run, writes: Writes, before: list[int]) -> Writes:
        """Write to chips that hold nothing of use, or write what is there already."""
        for chip in self.rng.sample(self.chips, self.rng.randint(0, len(self.chips))):
            if writes[chip] is not None or not self.peers[chip]:
                continue
            src = self.rng.choice(self.peers[chip])
            if run.part_of[chip] == STALE:
                self._write(run, writes, src, chip, self.rng.choice(list(Op)), STALE)
            elif before[src] == run.part_of[chip]:
                self._write(run, writes, src, chip, Op.COPY, before[src])
        return writes

    def _write(self, run: _Run, writes: Writes, src: int, dst: int, op: Op, part: int) -> None:
        assert writes[dst] is None, "a step writes a chunk of a chip once"
        writes[dst] = src, op
        run.part_of[dst] = part

    def _emit(self, run: _Run, writes: Writes) -> None:
        """Append a step's transfers, some of them in several shorter runs."""
        for dst, write in writes.items():
            if write is None:
                continue
            first = run.first
            while first < run.last:
                last = run.last if self.rng.random() < 0.8 else self.rng.randint(first + 1, run.last)
                self.rows.append((run.now, write[0], dst, first, last - first, int(write[1])))
                first = last
        run.now += self.rng.choice([1, 1, 1, 2, 4])

    def _schedule(self) -> Schedule:
        self.rng.shuffle(self.rows)
        columns = np.array(self.rows, dtype=np.int64).reshape(-1, 6).T
        n_phases = self.rng.randint(1, 3)
        return Schedule(
            self.mesh,
            total_chunks=self.total_chunks,
            step=np.unique(columns[0], return_inverse=True)[1],
            src=columns[1],
            dst=columns[2],
            first_chunk=columns[3],
            n_chunks=columns[4],
            op=columns[5],
            owners=self.owners,
            phase=[self.rng.randrange(n_phases) for _ in self.rows],
            phase_names=tuple(f"part {number}" for number in range(n_phases)),
            collective=self.collective,
            planner="random",
        )


def with_idle_steps(template: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule with some steps later than they need be, the first as well: a template to be repeated."""
    later = np.sort([rng.randint(0, template.n_transfers - template.n_steps) for _ in range(template.n_steps)])
    return template.replace(step=template.step + later[template.step], may_idle=True)


def repeated_with_idle_steps(seed: int, *, max_chips: int = 6) -> Schedule | None:
    """Return a random all-reduce that is repeated and whose template begins with an idle step; None for few seeds."""
    rng = random.Random(seed)
    template = random_schedule(seed, collective=Collective.ALL_REDUCE, max_chips=max_chips, max_chunks=4)
    if template.n_transfers == template.n_steps:
        return None  # there is no room for idle steps
    template = with_idle_steps(template, rng)
    if not template.step[0]:
        return None
    return template.repeated(rng.randint(2, 5), rng.randint(1, template.n_steps))
