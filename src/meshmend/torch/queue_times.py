"""What a chip's queues say about time: how long it computed between calls, and when each message left and arrived.

Kept by a channel while somebody watches it (`meshmend.torch.queue_watch`). Two readings of the clock per message:
nothing else is added to a call.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

MOST_MESSAGES = 64
"""Messages of a step, per link, that are looked at: the first ones. Both ends of a link count the same ones."""
ALREADY_THERE_S = 1e-4
"""A wait that is over so soon was for a message that had arrived before: nobody knows when."""


@dataclass
class Messages:
    """Messages over one link: when each left or arrived, in seconds on this chip's clock, and its size in bytes."""

    at: list[float] = field(default_factory=list)
    n_bytes: list[int] = field(default_factory=list)

    def add(self, at: float, n_bytes: int) -> None:
        """Note the next message, in order."""
        if len(self.at) < MOST_MESSAGES:
            self.at.append(at)
            self.n_bytes.append(n_bytes)


@dataclass
class StepTimes:
    """The times of one chip in one step; messages by the group's number of the member at the other end.

    `compute_s` is not a number in the first step: it began before anybody watched. An arrival is not a number where
    the message had arrived before this chip asked for it.
    """

    compute_s: float = 0.0
    step_s: float = 0.0
    n_calls: int = 0
    sent: dict[int, Messages] = field(default_factory=lambda: defaultdict(Messages))
    arrived: dict[int, Messages] = field(default_factory=lambda: defaultdict(Messages))


class QueueTimes:
    """Collects the times of the step under way, from all threads of one chip's engines."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._step = StepTimes(compute_s=math.nan)
        self._began_at = self._since = time.monotonic()
        self._n_apart = 0

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around a call, with all that it waits for."""
        with self._guard:
            self._step.n_calls += 1
        with self.apart():
            yield

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Around what is not this chip's computing: a call, or waiting for a quorum, which the slowest one delays."""
        with self._guard:
            if self._n_apart == 0:
                self._step.compute_s += time.monotonic() - self._since
            self._n_apart += 1
        try:
            yield
        finally:
            with self._guard:
                self._n_apart -= 1
                self._since = time.monotonic()

    def sent(self, member: int, n_bytes: int) -> None:
        """Note that a message is handed to the group."""
        self._step.sent[member].add(time.monotonic(), n_bytes)

    def arrived(self, member: int, n_bytes: int, asked_at: float) -> None:
        """Note that a message is there, which this chip has waited for since `asked_at`."""
        now = time.monotonic()
        self._step.arrived[member].add(now if now - asked_at > ALREADY_THERE_S else math.nan, n_bytes)

    def end_step(self) -> StepTimes:
        """Return the times of the step that ends here, between two calls."""
        now = time.monotonic()
        with self._guard:
            ended, self._step = self._step, StepTimes()
            if self._n_apart == 0:
                ended.compute_s += now - self._since
            self._since = now
            ended.step_s, self._began_at = now - self._began_at, now
        return ended
