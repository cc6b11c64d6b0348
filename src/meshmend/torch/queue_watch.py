"""Stragglers in the PyTorch engine: each chip's times, from its own queues, become signs against whoever is slow.

A chip computes from the end of one call to the beginning of the next. Where it waits for others outside calls, as for a
quorum, that is left out.

A cable's time is measured at both of its ends: the sender's moment at which a message was handed over, and the
receiver's at which it was there. A link is a queue, so a message occupies it from when it was sent, or when the one
before it had arrived if that is later, to when it arrives itself. All these times over all these bytes are what one
byte takes. How long a chip waits for a neighbour is no measure: most of a call it waits for all of them, whatever
holds them up; on the lab a cable at half rate made both of its ends wait 1.1 times as long as others, but took 2.4
times as long per byte.

The two clocks need not agree. By how much they differ follows from the fastest message either way, which take equally
long; what is wrong with that makes one direction look faster and the other slower, and a cable is judged by the faster
one. A message that was there before its receiver asked for it is left out, and so is the one behind it: nobody knows
when it arrived.

Every eighth step, neighbours exchange these moments, and all members the results, in ⌈log₂ n⌉ small messages. So all
of them feed the same numbers to `Stragglers`, and come to the same signs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from meshmend.errors import DisagreementError, ParameterError
from meshmend.quarantine import Sign, Stragglers
from meshmend.topology import Mesh
from meshmend.torch.channel import Channel, Deadline
from meshmend.torch.queue_times import QueueTimes, StepTimes

EVERY = 8
"""Steps between two exchanges of times."""

Times = NDArray[np.float64]


class QueueWatch:
    """Watches the times of all calls over a channel. `members[r]` is the group's number of the mesh's rank r.

    Every member makes one, between the same calls, and calls `add` in the channel's turn after the calls of each step.
    The channel is watched from then on, until `close`.
    """

    def __init__(self, channel: Channel, mesh: Mesh, members: Sequence[int]) -> None:
        if channel.times is not None:
            raise ParameterError("These calls are watched already: keep one QueueWatch for each channel.")
        self.stragglers = Stragglers(mesh)
        self.times = channel.times = QueueTimes()
        self._channel = channel
        self._members = list(members)
        rank = self._members.index(channel.rank)
        near = mesh.neighbours[rank].tolist()
        self._near = {way: self._members[other] for way, other in enumerate(near) if other >= 0}
        rates = {frozenset(map(mesh.rank, ends)): float(rate) for ends, rate in mesh.cable_rates.items()}
        self._rates = [rates.get(frozenset((rank, other)), 1.0) for other in near]
        self._steps: list[tuple[int, StepTimes]] = []

    def add(self, step: int, deadline: Deadline) -> tuple[Sign, ...]:
        """End a step; return the signs that the times of the last steps give, the same ones on all members.

        Times are exchanged at every eighth step by its number. If members have not all seen the same calls since then,
        because a step failed on some of them, all of them leave these times out.
        """
        self._steps.append((step, self.times.end_step()))
        if (step + 1) % EVERY:
            return ()
        ended, self._steps = self._steps, []
        with self.times.apart():
            calls = ", ".join(f"{times.n_calls} in step {number}" for number, times in ended)
            try:
                self._channel.agree(f"times of calls: {calls}", deadline)
            except DisagreementError:
                return ()
            own = self._rows([times for _, times in ended], deadline).astype(np.float32)
            found = self._channel.gather_agreed(own.tobytes(), deadline)
        told = np.stack([np.frombuffer(found[member], np.float32) for member in self._members])
        rows = told.reshape(len(told), len(ended), -1).astype(np.float64)  # [rank, step, time]
        signs: list[Sign] = []
        for number, (step, _) in enumerate(ended):
            step_s, compute_s, waits_s = rows[:, number, 0], rows[:, number, 1], rows[:, number, 2:]
            signs += self.stragglers.add(step, compute_s, waits_s, step_s=float(np.median(step_s)))
        return tuple(signs)

    def close(self) -> None:
        """Stop watching."""
        self._channel.times = None

    def _rows(self, ended: Sequence[StepTimes], deadline: Deadline) -> Times:
        """Return for each step its length, the compute time, and what a byte from each neighbour took."""
        rows = np.full((len(ended), 2 + len(self._rates)), np.nan)
        rows[:, 0] = [times.step_s for times in ended]
        rows[:, 1] = [times.compute_s for times in ended]
        for way, (sent, arrived, theirs) in self._moments(ended, deadline).items():
            left_there, came_there = np.split(theirs, [len(arrived)])
            left = left_there - clocks_apart(sent, came_there, left_there, arrived)
            messages = [times.arrived[self._near[way]] for times in ended]
            n_bytes = np.array([size for some in messages for size in some.n_bytes], dtype=np.float64)
            took = seconds_per_byte(left, arrived, n_bytes, [len(some.at) for some in messages])
            rows[:, 2 + way] = took * self._rates[way]
        return rows

    def _moments(self, ended: Sequence[StepTimes], deadline: Deadline) -> dict[int, tuple[Times, Times, Times]]:
        """Return, for each way that messages went, when they left here, when they arrived here, and both from there.

        What they have sent, this chip has received, and the other way round, so both know how much to expect.
        """
        found, works = {}, []
        for way, member in self._near.items():
            sent, arrived = (
                np.array([at for some in each for at in some.at], dtype=np.float64)
                for each in ([times.sent[member] for times in ended], [times.arrived[member] for times in ended])
            )
            if len(sent) and len(arrived):
                ours = torch.from_numpy(np.concatenate([sent, arrived]))
                theirs = torch.empty(len(ours), dtype=torch.float64)
                works.append((self._channel.recv(theirs, member, 0), member))
                works.append((self._channel.send(ours, member, 0), member))
                found[way] = (sent, arrived, theirs.numpy())
        for work, member in works:
            self._channel.wait(work, member, deadline)
        return found


def clocks_apart(left_here: Times, came_there: Times, left_there: Times, came_here: Times) -> float:
    """Return how far the clock there is ahead of the one here, if the fastest messages either way take equally long.

    >>> clocks_apart(np.array([1.0, 2.0]), np.array([6.2, 7.1]), np.array([6.0]), np.array([1.1]))
    5.0
    """
    there, here = came_there - left_here, came_here - left_there
    if np.isnan(there).all() or np.isnan(here).all():
        return float("nan")
    return float(np.nanmin(there) - np.nanmin(here)) / 2


def seconds_per_byte(left: Times, came: Times, n_bytes: Times, n_messages: Sequence[int]) -> Times:
    """Return, for each step, what a byte of its messages over one link took while the link was busy with it.

    `n_messages` says how many of them belong to each step.

    >>> seconds_per_byte(np.array([1.0, 1.0, 9.0]), np.array([2.0, 3.0, 9.5]), np.array([10.0, 10.0, 10.0]), [2, 1])
    array([0.1 , 0.05])
    """
    before = np.concatenate([[-np.inf], came[:-1]])[: len(came)]
    starts = np.cumsum([0, *n_messages[:-1]])
    before[starts[starts < len(came)]] = -np.inf  # whatever came last in the step before has long arrived
    busy = came - np.maximum(left, before)  # NaN where either is not known
    known, step = np.isfinite(busy), np.repeat(np.arange(len(n_messages)), n_messages)
    took = np.bincount(step[known], np.maximum(busy[known], 0), len(n_messages))
    moved = np.bincount(step[known], n_bytes[known], len(n_messages))
    found: Times = np.divide(took, moved, out=np.full(len(n_messages), np.nan), where=moved > 0)
    return found
