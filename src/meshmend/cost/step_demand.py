"""The demand of a schedule: the load of the busiest link and of the busiest chip in each step.

It depends on the schedule only, so it is computed once; evaluating it for a payload and hardware then costs
microseconds, however many transfers the schedule has.

A step's transfers start together. The data of a transfer over h links begins to flow after h hop latencies, and
the transfers on a link share it. So a link that is kept busy by the transfers of h or more hops is done no earlier
than h latencies and their bytes after the step began, and the latest such moment, over all links and all h, ends
the step. The demand keeps, for each step and each h that occurs, the most that any link carries for transfers of
h hops or more, in chunks at full rate (a chunk over a link of rate 1/2 counts as two); and the same for what any chip
sends and receives, for engines that drive only some of their links. Where messages have a price, it counts the most
that any chip sends or receives in a step; for engines that run lanes, all permutes of the step's loop and what they
move (`Hardware.runs_lanes`); where chips share the cores of one machine, the messages and chunks of all of them.

Of a repeated schedule (template of L steps, period T, R repeats) step s holds the template's steps t ≡ s modulo T with
s − (R−1)·T ≤ t ≤ s. For s ≥ L − 1 the upper limit excludes no step of the template, and for s ≤ (R−1)·T the lower limit
excludes none: between the two, what a step asks for depends on s modulo T alone. So as many repeats are followed as it
takes to see one whole period of that, and its steps count as often as it lasts: the figures are those of all R repeats.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshmend.cost.hardware import Hardware, Network
from meshmend.cost.paths import TransferPaths, link_load
from meshmend.schedule import Op, Schedule
from meshmend.schedule.lanes import count_lanes

BINS = 2**22
"""Counters held at a time when the transfers of many steps are summed by link."""

ADDED = 2.5
"""What a core does with a chunk that is received and added, where one that is received in place counts as one: fitted
together with the preset gloo-loopback."""
CORES_PER_MESSAGE = 1.5
"""How many cores a single message keeps busy at most, as its sender and its receiver work at once: fitted, too."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class _Demand:
    """Rows in order of step: transfers of `hops` or more ask for up to `chunks` chunks from one link (or chip)."""

    step: Ints
    hops: Ints
    chunks: Floats


class StepDemand:
    """The demand of each step of a schedule, ready to be priced for any payload and hardware.

    >>> from meshmend import Mesh, plan
    >>> from meshmend.cost import find_hardware
    >>> demand = StepDemand(plan(Mesh("4x4"), "hamiltonian"))
    >>> demand.seconds(1e9, find_hardware("ideal"))     # 2·15 steps of 1/32 of the payload at 1 GB/s
    0.9375
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._rows = schedule.template
        length, period = self._rows.n_steps, schedule.period
        most = -(-length // period) + 2 if period else 1
        self._repeats = min(schedule.repeats, most)
        self._n_steps = (self._repeats - 1) * period + length
        self._times = np.ones(self._n_steps)
        if schedule.repeats > self._repeats:
            self._times[length - 1 : length - 1 + period] += schedule.repeats - self._repeats
        moved = np.bincount(self._rows.step, minlength=length) > 0
        self._is_busy = np.zeros(self._n_steps, dtype=np.bool_)
        for first in range(0, self._repeats * period or 1, period or 1):
            self._is_busy[first : first + length] |= moved

    def seconds(self, payload_bytes: float, hardware: Hardware) -> float:
        """Return the lock-step time of the whole schedule."""
        return hardware.start_s + float((self.step_seconds(payload_bytes, hardware) * self._times).sum())

    def phase_seconds(self, payload_bytes: float, hardware: Hardware) -> Floats:
        """Return the part of each phase in that time: a step's is shared by the chunks that it moves for each."""
        seconds = self.step_seconds(payload_bytes, hardware) * self._times
        first = self._phase_shares[:1].sum(axis=0)  # the start belongs to the first step; without a step there is none
        return np.asarray(seconds @ self._phase_shares + hardware.start_s * first)

    def step_seconds(self, payload_bytes: float, hardware: Hardware) -> Floats:
        """Return how long each step that is followed lasts, 0 if it is idle: all steps where nothing is repeated."""
        chunk_s = payload_bytes / self.schedule.total_chunks / hardware.link_bytes_per_s
        width = hardware.links_at_once
        match hardware.network:
            case Network.CABLES:
                busy = self._price(self._links, chunk_s, hardware.hop_latency_s, at_least=None)
            case Network.PAIRS:
                busy = self._price(self._pairs, chunk_s, hardware.hop_latency_s, at_least=None)
            case Network.CORES:
                _, handled, longest = self._sums
                busy = np.maximum(handled / (hardware.shared_cores or 1), longest / CORES_PER_MESSAGE) * chunk_s
                busy += np.where(self._is_busy, hardware.hop_latency_s, 0.0)
        if hardware.runs_lanes:
            lanes, moved, longest = self._lanes
            busy = np.maximum(busy, np.maximum(longest, moved / np.minimum(lanes, width or lanes)) * chunk_s)
        elif width is not None and (hardware.network is not Network.CABLES or width < self.schedule.mesh.n_directions):
            for demand in self._chips:
                busy = self._price(demand, chunk_s / width, hardware.hop_latency_s, at_least=busy)
        return np.asarray(self._beginning(hardware) + busy)

    def _beginning(self, hardware: Hardware) -> Floats:
        """Return what each step that is followed costs to begin. Where nothing is transferred nobody waits for it."""
        each = np.full(self._n_steps, hardware.step_latency_s)
        if hardware.message_s:
            if hardware.shared_cores is not None:
                count = np.maximum(self._sums[0] / hardware.shared_cores, 1 / CORES_PER_MESSAGE)
            else:
                count = self._lanes[0] if hardware.runs_lanes else self._messages
            each += hardware.message_s * count
        return np.where(self._is_busy, each, 0.0)

    def _price(self, demand: _Demand, chunk_s: float, hop_s: float, at_least: Floats | None) -> Floats:
        times = np.zeros(self._n_steps) if at_least is None else at_least.copy()
        np.maximum.at(times, demand.step, demand.hops * hop_s + demand.chunks * chunk_s)
        return times

    @cached_property
    def paths(self) -> TransferPaths:
        """The links of the template's transfers."""
        return TransferPaths.of(self._rows)

    @cached_property
    def link_load(self) -> Floats:
        """The payload fraction that each link carries over the whole schedule."""
        return link_load(self.schedule, self.paths)

    @cached_property
    def _phase_shares(self) -> Floats:
        """For each step (row) the share of each phase (column) in the chunks that it moves; rows sum to 1."""
        s, n_phases = self._rows, len(self.schedule.phase_names)
        key = s.step.astype(np.int64) * n_phases + s.phase
        moved = np.bincount(key, weights=s.n_chunks, minlength=s.n_steps * n_phases).reshape(s.n_steps, n_phases)
        total = np.zeros((self._n_steps, n_phases))
        for repeat in range(self._repeats):
            first = repeat * self.schedule.period
            total[first : first + s.n_steps] += moved
        return np.asarray(total / np.maximum(total.sum(axis=1, keepdims=True), 1.0))

    @cached_property
    def _links(self) -> _Demand:
        found, s = self.paths, self._rows
        if not len(found.far):
            # In chunks at full rate.
            asked = s.n_chunks / s.mesh.link_rates[found.link] if s.mesh.has_slow_cables else s.n_chunks
            return _join([self._busiest(s.step, found.link, asked, s.mesh.n_link_slots, hops=1)])
        near = found.link >= 0
        step = np.concatenate([s.step[near], s.step[found.far_row]])
        link = np.concatenate([found.link[near], found.far_link])
        chunks = np.concatenate([s.n_chunks[near], s.n_chunks[found.far_row]])
        hops = np.concatenate([np.ones(int(near.sum()), np.int64), np.repeat(found.far_hops, found.far_hops)])
        return self._by_hops(step, link, chunks / s.mesh.link_rates[link], hops, s.mesh.n_link_slots)

    @cached_property
    def _pairs(self) -> _Demand:
        """The longest message of each step, where every pair of chips has a link of its own."""
        most = np.zeros(self._n_steps)
        for repeat in range(self._repeats):
            np.maximum.at(most, self._rows.step + repeat * self.schedule.period, self._rows.n_chunks)
        busy = np.flatnonzero(most)
        return _Demand(busy, np.ones(len(busy), np.int64), most[busy])

    @cached_property
    def _messages(self) -> Floats:
        """The most messages that any chip sends, or receives, in each step."""
        s = self._rows
        most = np.zeros(self._n_steps)
        for rank in (s.src, s.dst):
            found = self._busiest(s.step, rank, np.ones(s.n_transfers), s.mesh.n_chips, hops=1)
            np.maximum.at(most, found.step, found.chunks)
        return most

    @cached_property
    def _sums(self) -> tuple[Floats, Floats, Floats]:
        """The messages of each step, the chunks that cores handle for all chips together, and those of the longest."""
        s, sums = self._rows, np.zeros((3, self._n_steps))
        handled = handled_chunks(s)
        for repeat in range(self._repeats):
            step = s.step + repeat * self.schedule.period
            sums[0] += np.bincount(step, minlength=self._n_steps)
            sums[1] += np.bincount(step, weights=handled, minlength=self._n_steps)
            np.maximum.at(sums[2], step, handled)
        return sums[0], sums[1], sums[2]

    @cached_property
    def _lanes(self) -> tuple[Floats, Floats, Floats]:
        """For each step the permutes of its loop, the chunks that they move, and those of the longest."""
        loops = count_lanes(self.schedule)
        times = [min(loop.n_steps, self._n_steps) for loop in loops]  # a repeated schedule is one loop
        rows = np.array([(loop.lanes, loop.chunks, loop.longest) for loop in loops], dtype=np.float64).reshape(-1, 3)
        lanes, moved, longest = np.repeat(rows, times, axis=0).T
        return lanes, moved, longest

    @cached_property
    def _chips(self) -> tuple[_Demand, _Demand]:
        """What is asked of the senders, and of the receivers."""
        return self._by_chip(self._rows.src), self._by_chip(self._rows.dst)

    def _by_chip(self, rank: NDArray[np.int32]) -> _Demand:
        s = self._rows
        if not len(self.paths.far):
            return _join([self._busiest(s.step, rank, s.n_chunks, s.mesh.n_chips, hops=1)])
        hops = np.ones(s.n_transfers, dtype=np.int64)
        hops[self.paths.far] = self.paths.far_hops
        return self._by_hops(s.step, rank, s.n_chunks, hops, s.mesh.n_chips)

    def _by_hops(
        self, step: NDArray[np.int32], key: NDArray[np.integer], chunks: NDArray[np.number], hops: Ints, n_keys: int
    ) -> _Demand:
        """Return the demand for every number of hops that occurs, each counting the transfers of more hops too."""
        order = np.argsort(step, kind="stable")
        step, key, chunks, hops = step[order], key[order], chunks[order], hops[order]
        parts = []
        for least in np.unique(hops):
            keep = hops >= least
            parts.append(self._busiest(step[keep], key[keep], chunks[keep], n_keys, hops=int(least)))
        return _join(parts)

    def _busiest(
        self,
        step: NDArray[np.int32],
        key: NDArray[np.integer],
        chunks: NDArray[np.number],
        n_keys: int,
        *,
        hops: int,
    ) -> _Demand:
        """Return the largest sum of `chunks` over any key, for each step; `step` ascends."""
        if self._repeats > 1:
            most = self._busiest_repeated(step, key, chunks, n_keys)
            busy = np.flatnonzero(most)
            return _Demand(busy, np.full(len(busy), hops), most[busy])
        n_steps = self._n_steps
        most = np.zeros(n_steps)
        block = max(1, BINS // n_keys)
        for first in range(0, n_steps, block):
            last = min(first + block, n_steps)
            rows = slice(*np.searchsorted(step, (first, last)))
            where = (step[rows].astype(np.int64) - first) * n_keys + key[rows]
            sums = np.bincount(where, weights=chunks[rows], minlength=(last - first) * n_keys)
            most[first:last] = sums.reshape(last - first, n_keys).max(axis=1)
        busy = np.flatnonzero(most)
        return _Demand(busy, np.full(len(busy), hops), most[busy])

    def _busiest_repeated(
        self, step: NDArray[np.int32], key: NDArray[np.integer], chunks: NDArray[np.number], n_keys: int
    ) -> Floats:
        """Return the same where repeats overlap: a step of the template is there from when its first repeat begins it.

        It is there in every period after that, until the last repeat has done it.
        """
        length, period = self._rows.n_steps, self.schedule.period
        starts = np.searchsorted(step, np.arange(length + 1))
        most = np.zeros(self._n_steps)
        for residue in range(period):
            asked = np.zeros(n_keys)
            for now in range(residue, self._n_steps, period):
                for begins, sign in ((now, 1.0), (now - self._repeats * period, -1.0)):
                    if 0 <= begins < length:
                        rows = slice(starts[begins], starts[begins + 1])
                        asked += np.bincount(key[rows], weights=sign * chunks[rows], minlength=n_keys)
                most[now] = asked.max()
        return most


def handled_chunks(schedule: Schedule) -> Floats:
    """Return what each transfer costs the core that handles it, in chunks that are received in place."""
    return np.where(schedule.op == int(Op.REDUCE), ADDED, 1.0) * schedule.n_chunks


def _join(parts: list[_Demand]) -> _Demand:
    return _Demand(
        np.concatenate([part.step for part in parts]),
        np.concatenate([part.hops for part in parts]),
        np.concatenate([part.chunks for part in parts]),
    )
