"""Job: a training job on a machine that fails and is repaired, as a simpy process.

The events are failures, repairs, and the job's reactions. Checkpoints are not events: between two interruptions they
come at fixed intervals, so the work they keep is computed by a division instead of thousands of wake-ups.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from meshmend.availability.history import FailureEvent
from meshmend.availability.policies import Allocation, Policy
from meshmend.extras import require

if TYPE_CHECKING:
    import simpy

Process = Generator[Any, Any, None]


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
    def __init__(
        self, policy: Policy, failures: Sequence[FailureEvent], hours: float, first_start_h: float, regrow_h: float
    ) -> None:
        library = require_simpy()
        self._env: simpy.Environment = library.Environment()
        self._interrupt: type[simpy.Interrupt] = library.Interrupt
        self._policy = policy
        self._failures = failures
        self._hours = hours
        self._regrow_h = regrow_h
        self._spent = TimeSpent()
        self._allocation: Allocation | None = None
        """What the job runs on or is starting on: a failure elsewhere does not affect it."""
        self._doing: Literal["waiting", "restarting", "training"] = "waiting"
        self._since = 0.0
        self._changed = self._env.event()
        assumptions = policy.assumptions
        self._interval_h = assumptions.checkpoint_min / 60
        self._save_h = assumptions.save_s / 3600
        self._detect_h = assumptions.detect_s / 3600
        for failure in failures:
            if failure.at_h <= 0 and policy.fail(failure) is not None:
                self._env.process(self._repair(failure))
        self._job = self._env.process(self._train_forever(first_start_h))

    def play(self) -> TimeSpent:
        self._env.process(self._fail())
        self._env.run(until=self._hours)
        # The run is a window of a longer job: what is under way is counted up to the end, and no work is lost by it.
        if self._doing == "training" and self._allocation is not None:
            self._book(self._allocation, kept=True)
        else:
            self._turn_to("waiting")
        return self._spent

    def _fail(self) -> Process:
        for failure in self._failures:
            if failure.at_h <= 0:
                continue
            yield self._env.timeout(failure.at_h - self._env.now)
            chips = self._policy.fail(failure)
            if chips is None:
                continue
            self._env.process(self._repair(failure))
            if self._allocation is not None and self._allocation.chips[chips.slices].any():
                self._allocation = None
                self._job.interrupt(_FAILURE)

    def _repair(self, failure: FailureEvent) -> Process:
        level = self._policy.assumptions.levels[failure.level]
        yield self._env.timeout(failure.repair_factor * self._policy.repair_h(level))
        self._policy.repair(failure)
        self._changed.succeed()
        self._changed = self._env.event()
        if self._doing == "training" and self._allocation is not None:
            self._job.interrupt(_REPAIR)

    def _train_forever(self, start_h: float) -> Process:
        while True:
            allocation = self._policy.allocation()
            if allocation.rate <= 0:
                self._turn_to("waiting")
                yield self._changed
                continue
            self._turn_to("restarting")
            self._allocation = allocation
            try:
                yield self._env.timeout(start_h)
                failed = False
            except self._interrupt:
                failed = True
            if not failed:
                failed = yield from self._train(allocation)
            start_h = self._policy.start_h if failed else self._regrow_h
            if failed:
                self._spent.interruptions += 1
                self._turn_to("restarting")
                yield self._env.timeout(self._detect_h)
            else:
                self._spent.regrowths += 1

    def _train(self, allocation: Allocation) -> Generator[Any, Any, bool]:
        """Train until a failure ends it (True), or a stop that was planned to take repaired chips back (False)."""
        self._turn_to("training")
        stop_at: float | None = None
        while True:
            if stop_at is None and self._worth_growing(allocation):
                stop_at = self._next_stop()
            try:
                yield self._env.event() if stop_at is None else self._env.timeout(stop_at - self._env.now)
            except self._interrupt as cut:
                if cut.cause == _FAILURE:
                    self._book(allocation, kept=False)
                    return True
            else:
                at_once = self._policy.assumptions.grow == "at-once"
                self._book(allocation, kept=True, saved_last_h=self._save_h if at_once else 0.0)
                return False

    def _worth_growing(self, allocation: Allocation) -> bool:
        grow, better = self._policy.assumptions.grow, self._policy.allocation()
        gain = better.rate - allocation.rate
        if grow == "failure" or gain <= 1e-12:
            return False
        if grow != "worth":
            return True
        failures_per_h = self._policy.assumptions.failures_per_h
        return not failures_per_h or gain / failures_per_h > better.rate * self._policy.start_h

    def _next_stop(self) -> float:
        """Return when a planned stop has its checkpoint: the next regular one, or an extra one."""
        now = float(self._env.now)
        if self._policy.assumptions.grow == "at-once":
            return now + self._save_h
        cycle = self._interval_h + self._save_h
        return self._since + (math.floor((now - self._since) / cycle) + 1) * cycle

    def _turn_to(self, what: Literal["waiting", "restarting", "training"]) -> None:
        """Count the wait or the restart that ends now, and begin the next activity."""
        took = self._env.now - self._since
        if self._doing == "waiting":
            self._spent.waiting_h += took
        elif self._doing == "restarting":
            self._spent.restarting_h += took
        self._doing, self._since = what, self._env.now

    def _book(self, allocation: Allocation, *, kept: bool, saved_last_h: float = 0.0) -> None:
        """Count the training that ends now. If it is not kept, what the policy says is lost since the last checkpoint.

        The last `saved_last_h` went into an extra checkpoint.
        """
        took = self._env.now - self._since
        cycle = self._interval_h + self._save_h
        # A planned stop coincides with the end of a checkpoint; a rounding error must not lose that checkpoint.
        regular = took - saved_last_h + 1e-9
        checkpoints = math.floor(regular / cycle)
        safe = checkpoints * self._interval_h
        trained = max(0.0, min(regular - 1e-9 - checkpoints * cycle, self._interval_h))
        lost = 0.0 if kept else self._policy.lost_h(trained)
        chips = int(allocation.chips.sum())
        self._spent.kept_h[chips] = self._spent.kept_h.get(chips, 0.0) + safe + trained - lost
        self._spent.useful_h += (safe + trained - lost) * allocation.rate
        self._spent.lost_h += lost * allocation.rate
        self._spent.short_h += (safe + trained) * (1 - allocation.rate)
        self._spent.saving_h += took - safe - trained
        self._doing, self._since = "restarting", self._env.now


_FAILURE, _REPAIR = "failure", "repair"


def require_simpy() -> Any:
    """Return simpy; raise an error that says how to install it."""
    require("simpy", needed_for="A study of availability", extra="availability")
    import simpy

    return simpy
