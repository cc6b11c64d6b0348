"""Job: a training job on a machine that fails and is repaired, as a simpy process.

The events are strikes, repairs, and the job's reactions. Checkpoints are not events: between two interruptions they
come at fixed intervals, so the work they keep is computed by a division instead of thousands of wake-ups.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from meshmend.availability.answers import Answer, Footing
from meshmend.availability.history import Strike
from meshmend.errors import MissingExtraError
from meshmend.extras import install_hint

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


def live_through(
    answer: Answer,
    strikes: Sequence[Strike],
    hours: float,
    *,
    first_start_h: float = 0.0,
    regrow_h: float | None = None,
) -> TimeSpent:
    """Simulate one run: `hours` of a machine with these strikes, under one answer.

    The job takes `first_start_h` to its first step, and `regrow_h` to take chips back, by default as long as to
    restart. What is struck at 0 is down before it starts.
    """
    answer.reset()
    return _Life(answer, strikes, hours, first_start_h, answer.start_h if regrow_h is None else regrow_h).play()


class _Life:
    def __init__(
        self, answer: Answer, strikes: Sequence[Strike], hours: float, first_start_h: float, regrow_h: float
    ) -> None:
        library = require_simpy()
        self._env: simpy.Environment = library.Environment()
        self._interrupt: type[simpy.Interrupt] = library.Interrupt
        self._answer = answer
        self._strikes = strikes
        self._hours = hours
        self._regrow_h = regrow_h
        self._spent = TimeSpent()
        self._footing: Footing | None = None
        """What the job runs on or is starting on: a failure elsewhere does not affect it."""
        self._doing: Literal["waiting", "restarting", "training"] = "waiting"
        self._since = 0.0
        self._changed = self._env.event()
        assumptions = answer.assumptions
        self._interval_h = assumptions.checkpoint_min / 60
        self._save_h = assumptions.save_s / 3600
        self._detect_h = assumptions.detect_s / 3600
        for strike in strikes:
            if strike.at_h <= 0 and answer.strike(strike) is not None:
                self._env.process(self._repair(strike))
        self._job = self._env.process(self._train_forever(first_start_h))

    def play(self) -> TimeSpent:
        self._env.process(self._fail())
        self._env.run(until=self._hours)
        # The run is a window of a longer job: what is under way is counted up to the end, and no work is lost by it.
        if self._doing == "training" and self._footing is not None:
            self._book(self._footing, kept=True)
        else:
            self._turn_to("waiting")
        return self._spent

    def _fail(self) -> Process:
        for strike in self._strikes:
            if strike.at_h <= 0:
                continue
            yield self._env.timeout(strike.at_h - self._env.now)
            chips = self._answer.strike(strike)
            if chips is None:
                continue
            self._env.process(self._repair(strike))
            if self._footing is not None and self._footing.chips[chips.slices].any():
                self._footing = None
                self._job.interrupt(_FAILURE)

    def _repair(self, strike: Strike) -> Process:
        level = self._answer.assumptions.levels[strike.level]
        yield self._env.timeout(strike.repair_factor * self._answer.repair_h(level))
        self._answer.mend(strike)
        self._changed.succeed()
        self._changed = self._env.event()
        if self._doing == "training" and self._footing is not None:
            self._job.interrupt(_REPAIR)

    def _train_forever(self, start_h: float) -> Process:
        while True:
            footing = self._answer.footing()
            if footing.rate <= 0:
                self._turn_to("waiting")
                yield self._changed
                continue
            self._turn_to("restarting")
            self._footing = footing
            try:
                yield self._env.timeout(start_h)
                failed = False
            except self._interrupt:
                failed = True
            if not failed:
                failed = yield from self._train(footing)
            start_h = self._answer.start_h if failed else self._regrow_h
            if failed:
                self._spent.interruptions += 1
                self._turn_to("restarting")
                yield self._env.timeout(self._detect_h)
            else:
                self._spent.regrowths += 1

    def _train(self, footing: Footing) -> Generator[Any, Any, bool]:
        """Train until a failure ends it (True), or a stop that was planned to take repaired chips back (False)."""
        self._turn_to("training")
        stop_at: float | None = None
        while True:
            if stop_at is None and self._worth_growing(footing):
                stop_at = self._next_stop()
            try:
                yield self._env.event() if stop_at is None else self._env.timeout(stop_at - self._env.now)
            except self._interrupt as cut:
                if cut.cause == _FAILURE:
                    self._book(footing, kept=False)
                    return True
            else:
                at_once = self._answer.assumptions.grow == "at-once"
                self._book(footing, kept=True, saved_last_h=self._save_h if at_once else 0.0)
                return False

    def _worth_growing(self, footing: Footing) -> bool:
        policy, better = self._answer.assumptions.grow, self._answer.footing()
        gain = better.rate - footing.rate
        if policy == "failure" or gain <= 1e-12:
            return False
        if policy != "worth":
            return True
        failures_per_h = self._answer.assumptions.failures_per_h
        return not failures_per_h or gain / failures_per_h > better.rate * self._answer.start_h

    def _next_stop(self) -> float:
        """Return when a planned stop has its checkpoint: the next regular one, or an extra one."""
        now = float(self._env.now)
        if self._answer.assumptions.grow == "at-once":
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

    def _book(self, footing: Footing, *, kept: bool, saved_last_h: float = 0.0) -> None:
        """Count the training that ends now. If it is not kept, what the answer says is lost since the last checkpoint.

        The last `saved_last_h` went into an extra checkpoint.
        """
        took = self._env.now - self._since
        cycle = self._interval_h + self._save_h
        # A planned stop coincides with the end of a checkpoint; a rounding error must not lose that checkpoint.
        regular = took - saved_last_h + 1e-9
        checkpoints = math.floor(regular / cycle)
        safe = checkpoints * self._interval_h
        trained = max(0.0, min(regular - 1e-9 - checkpoints * cycle, self._interval_h))
        lost = 0.0 if kept else self._answer.lost_h(trained)
        chips = int(footing.chips.sum())
        self._spent.kept_h[chips] = self._spent.kept_h.get(chips, 0.0) + safe + trained - lost
        self._spent.useful_h += (safe + trained - lost) * footing.rate
        self._spent.lost_h += lost * footing.rate
        self._spent.short_h += (safe + trained) * (1 - footing.rate)
        self._spent.saving_h += took - safe - trained
        self._doing, self._since = "restarting", self._env.now


_FAILURE, _REPAIR = "failure", "repair"


def require_simpy() -> Any:
    """Return simpy; raise an error that says how to install it."""
    try:
        import simpy
    except ImportError:
        raise MissingExtraError("A study of availability", "simpy", install_hint("availability")) from None
    return simpy
