"""When a job keeps its state: after which steps it copies it in memory, and begins a checkpoint on disk.

All processes must do the same after the same step, but each has its own clock. So they vote: after some steps, every
process says what it wants, one small collective finds the largest wish of all, and a few steps later, when the result
is there without anybody waiting for it, all of them act on it. There is a vote with each copy, and where copies are
rare, votes between them, about one per second.

A copy costs the seconds that devices take to cut it and, where they share the host's cores with the thread that writes
it, the seconds of writing. The next copy comes after 33 times as long, so that copies take 3 % of the time. The
caller's own code is never part of it. The first copy comes after four steps: what it costs is known then, and after a
restart the lost host's copies are gone.

A checkpoint is due after a number of steps, or by time. By time, the first comes a minute after each start, when there
is something to lose. Each process has its own clock for it, and the vote says whether one of them finds it due.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from meshmend.cost.units import parse_seconds

LARGEST_SLOWDOWN = 0.03
"""How much copies may slow down training: the share of its time that they cost."""
BUSIEST_WRITER = 0.5
"""The share of the time that a host may spend on writing copies, also where no device waits for that."""
FIRST_AFTER = 4
"""Steps from a start to its first copy, and to its first vote."""
KNOWN_AFTER = 3
"""Steps after which all processes look at a vote: it is there by then, as a loop waits for a step when two more are
under way."""
VOTE_EVERY_S = 1.0
"""Seconds between votes."""
REMEMBERED = 3
"""Copies whose cost is taken into account."""
FIRST_SAVE_S = 60.0
"""Seconds from the first step of a start to its first checkpoint, where these are due by time."""
LARGE_LOSS_S = 60.0
"""From so much training that the failure of a host would cost, people are told."""
NEVER = 1 << 30
"""Steps until something that nobody can say yet."""


class Wishes(NamedTuple):
    """A process's vote, or the largest of all; `vote_in` is the wish of process 0 alone, and 0 of others."""

    is_late: int = 0
    """Whether to leave out the copy that comes with this vote: the one before it is still being written."""
    every: int = 0
    """Steps between copies."""
    vote_in: int = 0
    """Steps to the next vote."""
    save: int = 0
    """Whether a checkpoint is due when this vote is known."""


Outcome = Callable[[], Wishes]
"""Reads the largest wishes of a vote; waits for them if they are not there."""


class CopyCost(NamedTuple):
    """Seconds that one copy took."""

    cut_s: float
    """On the devices."""
    write_s: float
    """In this host's memory, while the next steps run."""


class Timetable:
    """Decides after which steps copies are kept: after every `memory_every`, or, if that is "auto", as they cost.

    And after which steps there are checkpoints: after every `disk_every`, or, if that is a time as in "10min", as soon
    as all processes know that it has passed on one of them.

    Call `tick` once after each step, `voted` after each vote, `copied` after each copy, and `saved` after each
    checkpoint; every process calls them alike. `shares_cores` says whether the thread that writes copies takes the
    devices' own cores. `leads` is for process 0.
    """

    def __init__(
        self,
        memory_every: int | str,
        step: int = 0,
        *,
        disk_every: int | str = 0,
        leads: bool = True,
        shares_cores: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_auto = memory_every == "auto"
        self.every = FIRST_AFTER if isinstance(memory_every, str) else memory_every
        """Steps between copies, as all processes have agreed."""
        self._leads = leads
        self._shares_cores = shares_cores
        self._clock = clock
        self._copied, self._has_copied = step, False
        self._disk_every = disk_every if isinstance(disk_every, int) else 0
        self._disk_every_s = parse_seconds(disk_every) if isinstance(disk_every, str) else math.inf
        self._save_due_at, self._saved, self._saves_now = math.inf, step, False
        self._has_votes = self.is_auto or isinstance(disk_every, str)
        self._next_vote = step + FIRST_AFTER if self._has_votes else NEVER
        self._vote_in = FIRST_AFTER
        self._votes: deque[tuple[int, Outcome]] = deque()
        """Step and outcome of the votes that nobody has looked at."""
        self._n_ticks, self._ticked = 0, 0.0
        self._steps: deque[float] = deque(maxlen=64)
        """Seconds of the last steps, with whatever their loop did."""
        self._costs: deque[CopyCost] = deque(maxlen=REMEMBERED)
        """Of the last copies: the thread that writes them adds to it."""
        self._began: float | None = None
        """When that thread began with the copy that is not written yet, and when devices had cut it."""
        self._cut: float | None = None

    def tick(self, step: int) -> None:
        """Count a step, and act on the votes that are known by now, the same on all processes."""
        now = self._clock()
        if self._n_ticks:
            self._steps.append(now - self._ticked)
        else:
            self._save_due_at = now + min(FIRST_SAVE_S, self._disk_every_s)
        self._saves_now = False
        self._ticked, self._n_ticks = now, self._n_ticks + 1
        while self._votes and self._votes[0][0] + KNOWN_AFTER <= step:
            at, outcome = self._votes.popleft()
            agreed = outcome()
            self._vote_in = max(1, agreed.vote_in)
            self._next_vote = min(self._next_vote, at + self._vote_in)
            self.every = agreed.every if self.is_auto else self.every
            self._saves_now |= bool(agreed.save) and at > self._saved

    def copy_due(self, step: int) -> bool:
        """Whether to keep a copy after this step."""
        if not self.is_auto:
            return self.every > 0 and step % self.every == 0
        return step >= self._copied + self.every

    def vote_due(self, step: int) -> bool:
        """Whether to vote after this step, where there is no copy, which comes with a vote."""
        return step >= self._next_vote

    def save_due(self, step: int) -> bool:
        """Whether to begin a checkpoint after this step."""
        return self._saves_now or (self._disk_every > 0 and step % self._disk_every == 0)

    def wishes(self, *, is_late: bool = False) -> Wishes:
        """Return what this process wants now."""
        if not self._has_votes:
            return Wishes(is_late)
        save = self._clock() + KNOWN_AFTER * self.step_s >= self._save_due_at
        # The first steps seem short: a loop waits for a step only when two more are under way.
        vote_in = min(self._in_steps(VOTE_EVERY_S), max(1, self._n_ticks)) if self._leads else 0
        return Wishes(is_late, NEVER if self.period_s is None else self._in_steps(self.period_s), vote_in, save)

    def voted(self, step: int, outcome: Outcome) -> None:
        """Take in a vote after this step, whose outcome `tick` reads later."""
        if self.is_auto or self.vote_due(step):
            self._votes.append((step, outcome))
            self._next_vote = step + self._vote_in

    def copied(self, step: int) -> None:
        """Count on from a copy after this step."""
        if self.is_auto and not self._has_copied:
            self.every = NEVER  # until a vote finds that all know what it cost
        self._copied, self._has_copied = step, True

    def saved(self, step: int) -> None:
        """Count on from a checkpoint after this step; what was voted up to here is about this one."""
        self._saved, self._save_due_at = step, self._clock() + self._disk_every_s

    def copy_begins(self) -> None:
        """Say that devices begin to cut a copy. For any thread, as are the next two."""
        self._began, self._cut = self._clock(), None

    def copy_is_cut(self) -> None:
        """Say that devices have cut it."""
        self._cut = self._clock()

    def copy_is_written(self) -> None:
        """Say that it is written."""
        if self._began is not None and self._cut is not None:
            self._costs.append(CopyCost(self._cut - self._began, self._clock() - self._cut))
        self._began = self._cut = None

    @property
    def step_s(self) -> float:
        """Seconds of a step, as most of the last ones took."""
        return max(median(self._steps), 1e-6) if self._steps else VOTE_EVERY_S

    @property
    def cost(self) -> CopyCost | None:
        """What a copy costs; None if that is not known yet. One that takes longer than those before counts at once."""
        costs, cut = tuple(self._costs), self._cut
        if not costs:
            return None
        late_s = 0.0 if cut is None else self._clock() - cut
        return CopyCost(median(cost.cut_s for cost in costs), max(median(cost.write_s for cost in costs), late_s))

    @property
    def period_s(self) -> float | None:
        """Seconds between copies that this process wants; None if it does not know yet what they cost."""
        cost = self.cost
        if cost is None:
            return None
        waiting_s = cost.cut_s + self._shares_cores * cost.write_s  # of the loop or its devices
        return max(waiting_s / LARGEST_SLOWDOWN, sum(cost) / BUSIEST_WRITER)

    @property
    def at_risk_s(self) -> float:
        """Seconds of training that the failure of a host costs, at most: a copy counts when all hosts have it."""
        return self.every * self.step_s + sum(self.cost or ())

    @property
    def at_risk(self) -> int:
        """The same, in steps."""
        return self._in_steps(self.at_risk_s)

    def _in_steps(self, seconds: float) -> int:
        return max(1, min(math.ceil(seconds / self.step_s), NEVER))
