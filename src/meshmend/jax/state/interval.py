"""How often to keep a copy in memory: as often as training is slowed by no more than a few percent.

What a copy costs is measured where it counts: how much longer the steps take that begin while it is made and written,
compared with those without one. It depends on the model, on the devices, and on what else this host has to do.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import median

LARGEST_SLOWDOWN = 0.03
"""How much copies may slow down training: the share of its time that they cost."""
FIRST_AFTER = 4
"""Steps from a start to its first copy."""
FIRST_INTERVAL = 8
"""Steps between copies until it is known what they cost."""
NOTICED_AFTER = 5
"""Steps after a copy that may take longer because of it, however soon it is written. A loop waits for a step only when
two more are under way, so that what delays the devices is noticed that much later."""
FEWEST = 2
"""Copies after which it is known what they cost."""
REMEMBERED = 5
"""Copies whose cost is taken into account."""
LARGE_LOSS_S = 60.0
"""From so much training that the loss of a host would cost, people are told."""
LONGEST_INTERVAL = 10_000
"""Steps."""


class CopyInterval:
    """Decides after which steps copies are kept: after every `every`, or, if that is "auto", as the costs of them say.

    Call `due` after each step, and `begun` where a copy is made; every process calls them alike. `wanted` is what this
    process has measured, `agreed` what all processes use.
    """

    def __init__(self, every: int | str, step: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_auto = every == "auto"
        self.agreed = FIRST_INTERVAL if isinstance(every, str) else every
        self._clock = clock
        self._next = step + FIRST_AFTER
        self._copied = -math.inf
        """The step of the last copy."""
        self._last: float | None = None
        self._plain: deque[float] = deque(maxlen=64)
        """Seconds of steps without a copy."""
        self._slow: list[float] = []
        """Seconds of the steps since the last copy was begun, as long as it may slow them down."""
        self._costs: deque[float] = deque(maxlen=REMEMBERED)
        """Seconds that copies have cost."""

    def due(self, step: int, *, is_writing: bool) -> bool:
        """Whether to keep a copy after this step; `is_writing` says whether the one before is still being written."""
        if not self.is_auto:
            return self.agreed > 0 and step % self.agreed == 0
        now = self._clock()
        if self._last is not None:
            if is_writing or step <= self._copied + NOTICED_AFTER:
                self._slow.append(now - self._last)
            else:
                self._count_copy()
                self._plain.append(now - self._last)
        self._last = now
        return step >= self._next

    def begun(self, step: int, agreed: int | None) -> None:
        """Count on from a copy after this step, with the interval that all processes have agreed on, if it is known."""
        if self.is_auto:
            self._count_copy()
            self._copied = step
            self.agreed = self.agreed if agreed is None else agreed
            self._next = step + self.agreed

    def _count_copy(self) -> None:
        """Take the cost of the last copy into account, once all steps that it slows down are over."""
        if self._slow and self._plain:
            self._costs.append(sum(self._slow) - len(self._slow) * median(self._plain))
        self._slow = []

    @property
    def cost(self) -> float | None:
        """What a copy costs, in steps; None if that is not known yet."""
        if len(self._costs) < FEWEST or not self._plain:
            return None
        return max(0.0, median(self._costs)) / median(self._plain)

    @property
    def at_risk_s(self) -> float:
        """Seconds of training that the loss of a host costs, at most."""
        return (self.agreed + NOTICED_AFTER) * median(self._plain) if self._plain else 0.0

    def wanted(self, *, is_writing: bool) -> int:
        """Return how many steps there should be between two copies; twice as many as now if the last one is late.

        Never less than half as many as now: a few steps that were quick by chance are not believed at once.
        """
        if is_writing:
            return min(2 * self.agreed, LONGEST_INTERVAL)
        if self.cost is None:
            return self.agreed
        return max(1, self.agreed // 2, min(math.ceil(self.cost / LARGEST_SLOWDOWN), LONGEST_INTERVAL))
