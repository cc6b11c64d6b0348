"""Job: a training job on a machine that fails and is repaired, event by event.

The events are failures, repairs, and what the job does next. Checkpoints are not events: between two interruptions they
come at fixed intervals, so the work they keep is computed by a division instead of thousands of wake-ups.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from meshmend_lab.availability.history import FailureEvent
from meshmend_lab.availability.policies import Allocation, Policy

Phase = Literal["waiting", "detecting", "starting", "training"]
"""What a job does: it waits for chips, finds out that it has failed, starts, or trains."""


@dataclass
class TimeSpent:
    """Where the hours of a run went, each as hours of the whole machine; they add up to the run.

    `useful_h` was trained and kept, `lost_h` was trained and thrown away, `short_h` is what the missing chips and the
    slower steps cost while training, `saving_h` was spent on checkpoints, `restarting_h` on detecting a failure and
    restarting, `waiting_h` with nothing to run on. `interruptions` counts failures that stopped the job,
    `regrowths` the restarts to take repaired chips back. `kept_h` has the training that was kept once more, as time on
    the clock, by the number of chips that it ran on.
    """

    useful_h: float = 0.0
    lost_h: float = 0.0
    short_h: float = 0.0
    saving_h: float = 0.0
    restarting_h: float = 0.0
    waiting_h: float = 0.0
    interruptions: int = 0
    regrowths: int = 0
    kept_h: dict[int, float] = field(default_factory=dict)


def simulate_run(
    policy: Policy,
    failures: Sequence[FailureEvent],
    hours: float,
    *,
    first_start_h: float = 0.0,
    regrow_h: float | None = None,
) -> TimeSpent:
    """Simulate one run: `hours` of a machine with these failures, under one policy.

    The job takes `first_start_h` to its first step, and `regrow_h` to take chips back, by default as long as to
    restart. What is struck at 0 is down before it starts.
    """
    policy.reset()
    return _Life(policy, failures, hours, first_start_h, policy.start_h if regrow_h is None else regrow_h).play()


class _Life:
    """A run: the failures and repairs to come, what the job does, since when, and when it does something else."""

    def __init__(
        self, policy: Policy, failures: Sequence[FailureEvent], hours: float, first_start_h: float, regrow_h: float
    ) -> None:
        self._policy = policy
        self._failures = deque(failures)
        self._repairs: list[tuple[float, FailureEvent]] = []
        """A heap, by the time at which a part is back."""
        self._hours = hours
        self._start_h, self._regrow_h = first_start_h, regrow_h
        self._spent = TimeSpent()
        self._phase: Phase = "waiting"
        self._allocation: Allocation | None = None
        """What the job runs on or is starting on: a failure elsewhere does not affect it."""
        self._now = self._since = 0.0
        self._due = math.inf
        """When the job goes on by itself: it has found out, has started, or stops to take repaired chips back."""
        assumptions = policy.assumptions
        self._interval_h = assumptions.checkpoint_min / 60
        self._save_h = assumptions.save_s / 3600
        self._detect_h = assumptions.detect_s / 3600

    def play(self) -> TimeSpent:
        while self._failures and self._failures[0].at_h <= 0:
            self._fail(self._failures.popleft())
        self._begin()
        while True:
            failure = self._failures[0].at_h if self._failures else math.inf
            repair = self._repairs[0][0] if self._repairs else math.inf
            self._now = min(failure, repair, self._due)
            if self._now >= self._hours:
                break
            if self._now == self._due:
                self._go_on()
            elif self._now == repair:
                self._policy.repair(heapq.heappop(self._repairs)[1])
                if self._phase == "waiting":
                    self._begin()
                elif self._phase == "training":
                    self._plan_to_grow()
            else:
                self._fail(self._failures.popleft())
        self._now = self._hours
        # The run is a window of a longer job: what is under way is counted up to the end, and no work is lost by it.
        if self._phase == "training":
            self._book(kept=True)
        else:
            self._turn_to("waiting")
        return self._spent

    def _fail(self, failure: FailureEvent) -> None:
        chips = self._policy.fail(failure)
        if chips is None:
            return
        level = self._policy.assumptions.levels[failure.level]
        back_h = max(0.0, failure.at_h) + failure.repair_factor * self._policy.repair_h(level)
        heapq.heappush(self._repairs, (back_h, failure))
        if self._allocation is not None and self._allocation.chips[chips.slices].any():
            if self._phase == "training":
                self._book(kept=False)
            self._spent.interruptions += 1
            self._allocation, self._start_h = None, self._policy.start_h
            self._turn_to("detecting", for_h=self._detect_h)

    def _begin(self) -> None:
        """Start on what the policy chooses, or wait if that is nothing."""
        allocation = self._policy.allocation()
        if allocation.rate > 0:
            self._allocation = allocation
            self._turn_to("starting", for_h=self._start_h)
        else:
            self._turn_to("waiting")

    def _go_on(self) -> None:
        """Do what was due: begin after a failure was found out, train after a start, stop to take chips back."""
        if self._phase == "starting":
            self._turn_to("training")
            self._plan_to_grow()
            return
        if self._phase == "training":
            self._book(kept=True, saved_last_h=self._save_h if self._policy.assumptions.grow == "at-once" else 0.0)
            self._spent.regrowths += 1
            self._start_h = self._regrow_h
        self._begin()

    def _plan_to_grow(self) -> None:
        if self._due == math.inf and self._worth_growing():
            self._due = self._next_stop()

    def _worth_growing(self) -> bool:
        assert self._allocation is not None  # noqa: S101  # it trains
        grow, better = self._policy.assumptions.grow, self._policy.allocation()
        gain = better.rate - self._allocation.rate
        if grow == "failure" or gain <= 1e-12:
            return False
        if grow != "worth":
            return True
        failures_per_h = self._policy.assumptions.failures_per_h
        return not failures_per_h or gain / failures_per_h > better.rate * self._policy.start_h

    def _next_stop(self) -> float:
        """Return when a planned stop has its checkpoint: the next regular one, or an extra one."""
        if self._policy.assumptions.grow == "at-once":
            return self._now + self._save_h
        cycle = self._interval_h + self._save_h
        return self._since + (math.floor((self._now - self._since) / cycle) + 1) * cycle

    def _turn_to(self, phase: Phase, for_h: float = math.inf) -> None:
        """Count the wait or the restart that ends now, and begin what comes next, for as long as that takes."""
        took = self._now - self._since
        if self._phase == "waiting":
            self._spent.waiting_h += took
        elif self._phase != "training":  # that is booked
            self._spent.restarting_h += took
        self._phase, self._since, self._due = phase, self._now, self._now + for_h

    def _book(self, *, kept: bool, saved_last_h: float = 0.0) -> None:
        """Count the training that ends now. If it is not kept, what the policy says is lost since the last checkpoint.

        The last `saved_last_h` went into an extra checkpoint.
        """
        assert self._allocation is not None  # noqa: S101  # it trains
        took = self._now - self._since
        cycle = self._interval_h + self._save_h
        # A planned stop coincides with the end of a checkpoint; a rounding error must not lose that checkpoint.
        regular = took - saved_last_h + 1e-9
        checkpoints = math.floor(regular / cycle)
        safe = checkpoints * self._interval_h
        trained = max(0.0, min(regular - 1e-9 - checkpoints * cycle, self._interval_h))
        lost = 0.0 if kept else self._policy.lost_h(trained)
        chips = int(self._allocation.chips.sum())
        self._spent.kept_h[chips] = self._spent.kept_h.get(chips, 0.0) + safe + trained - lost
        self._spent.useful_h += (safe + trained - lost) * self._allocation.rate
        self._spent.lost_h += lost * self._allocation.rate
        self._spent.short_h += (safe + trained) * (1 - self._allocation.rate)
        self._spent.saving_h += took - safe - trained
        self._since = self._now
