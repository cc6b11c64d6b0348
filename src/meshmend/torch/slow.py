"""Slow cables: when a group measures its cables, how, and which rates follow.

A member asks for it where calls take clearly longer than they used to, and otherwise from time to time: a cable may be
slow from the start, or fast again. Then all members measure at the same place among their calls, and all hear all
results. So each finds the same rates, in proportion to the group's fastest cable. Measurements that change nothing
become rare: a job that is slow for another reason loses little by them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from fractions import Fraction

import numpy as np
import torch

from meshmend.errors import Coordinate
from meshmend.topology import Cable, Mesh, name_cable
from meshmend.torch.channel import Channel, Deadline

CALLS, LONGER = 5, 1.4
"""So many calls in a row, each so many times as long as is usual, are a reason to measure."""
FIRST_S, LONGEST_S = 30.0, 1800.0
"""Between two measurements without such a reason; each that changes nothing doubles it."""
HURRY = 10
"""With a reason, a tenth of that is enough."""
COST = 50
"""The least pause, in proportion to what the last measurement took."""

COUNTS = 0.55
"""A cable is slow from this part of the fastest one's rate down: a half, and what measurements are off by."""
HOLDS = 1.6
"""A rate that is known stays until the measured one differs by this factor: more than the half step of a change."""
SLOWEST = 4
"""Rates are 1/2, 1/4, … down to two to this power: plans leave out what is slower, where they can."""

FIRST_BYTES, MOST_BYTES = 2**15, 2**23
ENOUGH_S = 0.02
"""Messages grow until they take this long over the fastest cable: what a link sends at once then counts for little."""
REPEAT = 3
PATIENCE = timedelta(minutes=1)
"""The least timeout of a message that measures: over a very slow cable it takes longer than a job's own may."""

Lane = tuple[tuple[int, int], ...]
"""Pairs of neighbours that exchange messages, each chip in one of them at most."""


class Pace:
    """When a member asks for a measurement: a value that is told the time.

    >>> pace, calls = Pace(), [0.1] * 5 + [0.3] * 5
    >>> [pace.note("gradients", seconds, now) or pace.is_due(now) for now, seconds in enumerate(calls)].index(True)
    9
    """

    def __init__(self) -> None:
        self._wait_s = FIRST_S
        self._since: float | None = None
        self._recent: dict[object, deque[float]] = {}
        self._usual: dict[object, float] = {}
        self._is_slow = False

    def note(self, kind: object, seconds: float, now: float) -> None:
        """Take in what a call took; those of one kind move the same bytes by the same plan."""
        self._since = now if self._since is None else self._since
        recent = self._recent.setdefault(kind, deque(maxlen=CALLS))
        recent.append(seconds)
        if len(recent) == CALLS:
            # A single fast call is luck, and a single slow one another process.
            self._usual[kind] = min(self._usual.get(kind, math.inf), statistics.median(recent))
            self._is_slow |= min(recent) > LONGER * self._usual[kind]

    def is_due(self, now: float) -> bool:
        """Return whether it is time to measure."""
        wait_s = self._wait_s / HURRY if self._is_slow else self._wait_s
        return self._since is not None and now - self._since >= wait_s

    def measured(self, now: float, took_s: float, *, has_changed: bool) -> None:
        """Begin to wait for the next time. What calls take from now on is what is usual."""
        wait_s = FIRST_S if has_changed else min(2 * self._wait_s, LONGEST_S)
        self._wait_s, self._since = max(wait_s, COST * took_s), now
        self.forget()

    def forget(self) -> None:
        """Begin anew with what is usual, as plans have changed."""
        self._recent, self._usual, self._is_slow = {}, {}, False


def rates_of(seconds: Mapping[str, float], usual_s: float, known: Mapping[str, Fraction]) -> dict[str, Fraction]:
    """Return the rates of slow cables, from the best time of the same bytes over each, and the rates known before.

    `usual_s` is what they usually take over the fastest cable: where other processes disturb, nobody is accused whom a
    lucky time of another shows as slow. A cable that was not measured keeps its rate.

    >>> rates_of({"0,0-0,1": 1.0, "0,1-0,2": 2.1, "0,2-0,3": 1.6}, 1.0, {})
    {'0,1-0,2': Fraction(1, 2)}
    """
    found = {name: rate for name, rate in known.items() if name not in seconds}
    for name, own_s in seconds.items():
        part, rate = min(1.0, usual_s / own_s), known.get(name, Fraction(1))
        if not rate / HOLDS <= part <= rate * HOLDS:
            rate = Fraction(1, 2 ** min(SLOWEST, round(-math.log2(part)))) if part <= COUNTS else Fraction(1)
        if rate < 1:
            found[name] = rate
    return found


def find_rates(
    mesh: Mesh,
    members: Sequence[int],
    chips: Sequence[Coordinate],
    known: Mapping[str, Fraction],
    answering: Collection[Cable],
    timeout: timedelta,
    channel: Channel,
) -> dict[str, Fraction]:
    """Measure a group's cables, in one call of all its members; return the rates of slow ones, alike for all of them.

    `members` has the group's number of each rank of its mesh, and `chips` each member's chip in the whole machine. A
    cable counts if it is `answering` at both ends. Both directions are busy, and a chip uses one cable at a time.
    """
    rank, used = members.index(channel.rank), lanes_of(mesh)

    def cable_of(pair: tuple[int, int]) -> Cable:
        one, other = sorted(chips[members[end]] for end in pair)
        return one, other

    def measured(n_bytes: int) -> tuple[dict[str, float], float]:
        """Return the best time over each cable that counts, and what is usual over the fastest one."""
        leaving, arriving = torch.zeros(n_bytes, dtype=torch.uint8), torch.empty(n_bytes, dtype=torch.uint8)

        def swap(member: int, message: int, n: int) -> float:
            for work in (channel.recv(arriving[:n], member, message), channel.send(leaving[:n], member, message)):
                channel.wait(work, member, Deadline(timeout))
            return time.monotonic()

        own = np.zeros((len(used), 2))
        for row, lane in zip(own, used, strict=True):
            for pair in lane:
                if rank in pair:
                    other = members[sum(pair) - rank]
                    # A short message first: whoever comes late is no slow cable.
                    times = [max(-swap(other, 0, 1) + swap(other, 1, n_bytes), 1e-9) for _ in range(REPEAT)]
                    row[:] = (min(times), statistics.median(times)) if cable_of(pair) in answering else 0
        words = channel.gather("seconds of cables", own.tobytes(), Deadline(timeout))
        table = np.stack([np.frombuffer(words[member]).reshape(own.shape) for member in members])
        ends = {name_cable(cable_of(pair)): table[list(pair), k] for k, lane in enumerate(used) for pair in lane}
        both = {name: times.max(axis=0).tolist() for name, times in ends.items() if times.all()}
        return {name: best for name, (best, _) in both.items()}, min((usual for _, usual in both.values()), default=0.0)

    n_bytes = FIRST_BYTES
    best, usual_s = measured(n_bytes)
    while best and usual_s < ENOUGH_S and n_bytes < MOST_BYTES:
        n_bytes *= 4
        best, usual_s = measured(n_bytes)
    if rates_of(best, usual_s, known) != known:
        again, again_s = measured(n_bytes)
        best, usual_s = {name: min(own_s, again[name]) for name, own_s in best.items()}, max(usual_s, again_s)
    return rates_of(best, usual_s, known)


def lanes_of(mesh: Mesh, *, thirds: bool = True) -> list[Lane]:
    """Return lanes of cables: a chip is in one pair of each. An axis has two, and a third one if it is odd and wraps.

    >>> lanes_of(Mesh("1x4")), lanes_of(Mesh("1x3", wrap=True))
    ([((0, 1), (2, 3)), ((1, 2),)], [((0, 1),), ((1, 2),), ((2, 0),)])
    """
    found: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for rank, axis in np.argwhere(mesh.neighbours[:, ::2] >= 0).tolist():
        place, length = mesh.chip(rank)[axis], mesh.shape[axis]
        number = 2 if place == length - 1 and length % 2 else place % 2
        found[axis, number].append((rank, int(mesh.neighbours[rank, 2 * axis])))
    return [tuple(found[key]) for key in sorted(found) if thirds or key[1] < 2]
