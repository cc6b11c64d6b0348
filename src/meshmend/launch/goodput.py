"""Where a job's time went: goodput, and badput by cause, from the timelines of its hosts.

Goodput is the share of the time that went into steps that count. All other time has a cause: a stage of a start or
recovery, a checkpoint that training waited for, data that it waited for, or steps that had to be done again. The
causes and the training add up to the time from the first start to the last event, so nothing is left out.

Under `meshmend run` every round begins with new processes. Under torchft the survivors' processes go on, and a round
begins with a quorum.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from meshmend.launch.events import (
    Alert,
    CompiledAhead,
    Copies,
    Event,
    Restored,
    RoundBegins,
    Start,
    StepDone,
    read_event,
)
from meshmend.launch.timeline import STAGES, Line

AGAIN = "steps done again"
CAUSES = (*STAGES, "checkpoint", "data", AGAIN, "under way")
"""What time is spent on that is not training. "under way" is a step, or a recovery, that has not ended yet."""
MAX_MARKS = 4096
"""Steps of one round whose times are remembered; in a longer one every second is dropped, again and again."""
MEDIAN_MARKS = 256
"""Of these, the last ones that make up the median time of a step."""
RECENT = 60
"""Losses of the last steps that are remembered."""
NUMBERED = (Start, Restored, StepDone)
"""Events that say which round a host is in. An agent writes of the next one while its worker still ends the last."""


@dataclass
class HostRound:
    """One host's part in a round: from the start of its process, or a quorum, on. `HostHistory` fills it."""

    started: float
    number: int = 0
    """The same on all hosts, and later ones are larger; 0 if it ended before it was given one."""
    chips: int = 0
    hosts: tuple[int, ...] = ()
    ended: float = 0.0
    """Time of the last event."""
    gave_up: float | None = None
    over: bool = False
    """Whether the job is done."""
    resumed: int = 0
    source: str = ""
    survives: str = ""
    """Which failures the copies in memory survive."""
    stages: list[tuple[str, float, float]] = field(default_factory=list)
    """What was done before the first step: a stage, its start and its end."""
    marks: list[tuple[int, float]] = field(default_factory=list)
    """Steps and when they were done, in order."""
    checkpoint_s: float = 0.0
    data_s: float = 0.0
    again_s: float = 0.0
    """Steps that were refused and done again, without a new quorum."""
    machine: str = ""
    """As `Hosts.read` reads it; empty where devices report their coordinates."""
    examples: int = 0
    """Per step."""
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    covered: set[int] = field(default_factory=set)
    """Hosts whose loss is planned and compiled for."""
    lost: set[int] = field(default_factory=set)
    """Hosts that were lost since it started."""
    short: Alert | None = None
    """That the job waits, with too few hosts."""
    kept: int = 0
    kept_at: float = 0.0
    kept_every: int = 1
    """Steps between two copies in memory."""
    saved: int = 0
    """The last step with a checkpoint on disk, also one of an earlier round."""
    saved_at: float = 0.0

    def done_at(self, step: int) -> float:
        """Return when a step was done, between marks in proportion."""
        position = bisect_left(self.marks, step, key=lambda mark: mark[0])
        if position in (0, len(self.marks)):
            return self.marks[max(0, position - 1)][1]
        (before, since), (after, until) = self.marks[position - 1 : position + 1]
        return since + (until - since) * (step - before) / (after - before)

    @property
    def last(self) -> int:
        """The last step that is done; that of the restored state if there is none."""
        return self.marks[-1][0] if self.marks else self.resumed

    def stages_since(
        self, since: float, gave_up: Sequence[float], short: Sequence[float] = (), until: float | None = None
    ) -> dict[str, float]:
        """Split the time from the last step before, or from a failure, to the first step. The stages add up to it.

        `gave_up` is when any host did so: until then is "detect", and until the new process starts "rendezvous", or
        "waiting" from when too few hosts were left, as in `short`. Both are sorted, because every round of a scrape
        looks into those of all hosts and rounds.
        "start" is the interpreter, its imports, joining and the fabric; "first step" is what remains: reading data,
        connecting, and the step itself, which was done at `until`, by default when this host wrote so.
        """
        done = self.marks[0][1] if until is None else until
        # In a quorum, who has noticed nothing asks first, and waits for those that have.
        formed = max((end for stage, _, end in self.stages if stage == "rendezvous"), default=self.started)
        noticed = _before(formed, gave_up, bisect_right(gave_up, since), since)
        stages = dict.fromkeys(STAGES, 0.0) | {"detect": noticed - since}
        for stage, begin, end in self.stages:
            # A chip that joins a running job has started while the others trained, or were still unaware of a loss.
            if (seconds := min(end, done) - max(begin, noticed)) > 0.0:
                stages[stage] = stages.get(stage, 0.0) + seconds
        before = sum(max(0.0, min(end, self.started) - max(begin, noticed)) for _, begin, end in self.stages)
        between = max(0.0, self.started - noticed - before)
        waiting = min(between, self.started - _before(self.started, short, bisect_left(short, noticed), self.started))
        stages["rendezvous"] += between - waiting
        stages["waiting"] += waiting
        stages["first step"] = max(0.0, done - since - sum(stages.values()))
        return stages

    def consists_of(self, event: Start) -> None:
        """Take from an event which hosts take part."""
        self.chips = self.chips if event.chips is None else event.chips
        self.hosts = self.hosts if event.hosts is None else tuple(event.hosts)
        self.machine = self.machine if event.machine is None else event.machine

    def mark(self, step: int, at: float) -> None:
        """Remember when a step was done."""
        if self.marks and step <= self.marks[-1][0]:
            return
        self.marks.append((step, at))
        if len(self.marks) > MAX_MARKS:
            del self.marks[1:-1:2]


class HostHistory:
    """The rounds of one host, from its timeline in order. Its size does not grow with the number of steps."""

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self.rounds: list[HostRound] = []
        self.began = 0.0
        self._refused: list[tuple[str, float, float]] = []
        self.least = self.most = 0
        """How many hosts a round needs, and how many there are."""
        for line in lines:
            self.add(line)

    def add(self, line: Line) -> None:
        """Take in the next line."""
        event = read_event(line)
        if not self.rounds:
            self.began = event.at
        # A process's first quorum belongs to its start.
        is_new_quorum = event.event == "quorum" and self.rounds and self.rounds[-1].number
        if event.event == "process" or is_new_quorum or not self.rounds:
            before = self.rounds[-1] if self.rounds else HostRound(event.at)
            self.rounds.append(HostRound(event.at, saved=before.saved, saved_at=before.saved_at))
        now = self.rounds[-1]
        now.ended = max(now.ended, event.ended)
        now.number = event.round if isinstance(event, NUMBERED) and event.round is not None else now.number
        self._fold(now, event)

    def _fold(self, now: HostRound, event: Event) -> None:
        kind, at = event.event, event.at
        match event:  # most lines are of the first two
            case StepDone():
                if event.first is not None:
                    now.mark(event.first, event.since)
                now.mark(event.step, at)
                if len(now.marks) > 1:
                    now.data_s += event.waited_s
                    now.again_s += sum(end - begin for _, begin, end in self._refused)
                self._refused = []
                now.examples = now.examples if event.examples is None else event.examples
                now.losses.extend([] if event.loss is None else [float(event.loss)])
            case Event(event="kept"):
                now.kept, now.kept_at = event.step, at
            case Start(event="quorum"):
                now.started, now.resumed, now.source = at, event.step, event.source
                now.stages += [("rendezvous", at, event.ended), *self._refused]
                self._refused = []
                now.consists_of(event)
            case Start():
                now.stages.append(("start", at, event.ended))
                now.consists_of(event)
            case Restored():
                if not now.marks:
                    now.stages.append((kind, at, event.ended))
                    now.resumed, now.source, now.survives = event.step, event.source, event.survives
                    if event.saved not in (None, now.saved):
                        now.saved, now.saved_at = event.saved or 0, at
                if event.source == "memory":
                    now.kept, now.kept_at = now.resumed, at
            case Copies():
                now.kept_every = event.every
            case CompiledAhead(lost=int(lost), problem=None):
                now.covered.add(lost)
            case RoundBegins():
                self.least, self.most = event.least, event.most
            case Alert(event="below minimum"):
                now.short = event
            case Alert(event="host lost"):
                now.lost.update(event.lost or ())
            case Event(event="refused"):
                self._refused.append((AGAIN, at, event.ended))
            case Event(event="gave up"):
                now.gave_up = at
            case Event(event="measuring"):  # it says so before, because it takes seconds, and only the first round does
                now.stages.append((kind, at, at))
            case Event(event="measure" | "plan" | "compile") if not now.marks:
                # Links are measured for the plan.
                now.stages.append(("plan" if kind == "measure" else kind, at, event.ended))
            case Event(event="checkpoint") if now.marks:
                now.checkpoint_s += event.seconds
            case Event(event="saved"):
                now.saved, now.saved_at = event.step, at
            case Event(event="done"):
                now.over = True


@dataclass(frozen=True)
class Recovery:
    """How a job came back: from the last step before, or from a failure, to the first step after it."""

    at: float
    step: int
    """The last step before it."""
    resumed: int
    source: str
    chips: int
    hosts: tuple[int, ...]
    lost: tuple[int, ...]
    joined: tuple[int, ...]
    stages_s: dict[str, float]

    @property
    def total_s(self) -> float:
        """Of all stages."""
        return sum(self.stages_s.values())


@dataclass(frozen=True)
class TimeAccount:
    """What a job's time was spent on."""

    began: float
    until: float
    training_s: float
    badput_s: dict[str, float]
    step: int
    loss: float | None
    step_s: float
    """Median time of a step, over the last of them since the last restart."""
    chips: int
    hosts: tuple[int, ...]
    """In the last round."""
    machine: str
    examples: int
    last_step_at: float
    least_hosts: int
    most_hosts: int
    """How many hosts the job needs, and how many there are; 0 if nobody has said so."""
    recoveries: tuple[Recovery, ...]

    @property
    def total_s(self) -> float:
        """From the first start to the last event."""
        return self.until - self.began

    @property
    def goodput(self) -> float:
        """Share of the time that went into steps that count."""
        return self.training_s / self.total_s if self.total_s else 0.0

    @property
    def examples_per_s(self) -> float:
        """Samples per second, at the median time of a step."""
        return self.examples / self.step_s if self.step_s else 0.0

    def facts(self) -> dict[str, Any]:
        """Return everything as JSON can write it."""
        return {
            **vars(self),
            "goodput": self.goodput,
            "badput": {cause: seconds / self.total_s for cause, seconds in self.badput_s.items() if self.total_s},
            "total_s": self.total_s,
            "examples_per_s": self.examples_per_s,
            "recoveries": [{**vars(one), "total_s": one.total_s} for one in self.recoveries],
        }


def summarize(hosts: Sequence[HostHistory], until: float | None = None) -> TimeAccount | None:
    """Return the account of a job from its hosts' histories; None if none of them has done a step.

    `until` is the time of the account, by default that of the last event.
    """
    rounds = rounds_of(hosts)
    if not rounds:
        return None
    gave_up = gave_up_at(hosts)
    short = short_at(hosts)
    badput = dict.fromkeys(CAUSES, 0.0)
    training, recoveries = 0.0, []
    began = min(host.began for host in hosts if host.rounds)
    before: HostRound | None = None
    for i, now in enumerate(rounds):
        since = began if before is None else before.marks[-1][1]
        stages = now.stages_since(since, gave_up, short)
        for stage, seconds in stages.items():
            badput[stage] += seconds
        if before is not None:
            recoveries.append(recovery_of(before, now, since, stages))
        following = rounds[i + 1] if i + 1 < len(rounds) else None
        counted = now.last if following is None else min(now.last, following.resumed)
        spent = now.marks[-1][1] - now.marks[0][1]
        again = min(spent, now.again_s + now.marks[-1][1] - now.done_at(max(counted, now.marks[0][0])))
        badput["checkpoint"] += min(now.checkpoint_s, spent)
        badput["data"] += min(now.data_s, spent)
        badput[AGAIN] += again
        training += spent - again - min(now.checkpoint_s, spent) - min(now.data_s, spent)
        before = now
    last = rounds[-1]
    end = max([last.marks[-1][1], until or 0.0, *(one.ended for host in hosts for one in host.rounds[-1:])])
    waiting = max((end - at for at in short if at > last.marks[-1][1]), default=0.0)
    badput["waiting"] += waiting
    badput["under way"] = end - last.marks[-1][1] - waiting
    return TimeAccount(
        began=began,
        until=end,
        training_s=max(0.0, training),
        badput_s=badput,
        step=last.last,
        loss=last.losses[-1] if last.losses else None,
        step_s=_median_step(last),
        chips=last.chips,
        hosts=last.hosts,
        machine=last.machine,
        examples=last.examples,
        last_step_at=last.marks[-1][1],
        least_hosts=max(host.least for host in hosts),
        most_hosts=max(host.most for host in hosts),
        recoveries=tuple(recoveries),
    )


def _before(limit: float, times: Sequence[float], position: int, default: float) -> float:
    """Return the time at a position, if that is there and before a limit."""
    return times[position] if position < len(times) and times[position] < limit else default


def rounds_of(hosts: Iterable[HostHistory]) -> list[HostRound]:
    """Return each round that has done a step, as the host that progressed furthest has it: they train in step."""
    found: dict[float, HostRound] = {}
    for host in hosts:
        for one in host.rounds:
            if one.marks:
                key = one.number or one.started
                if key not in found or one.marks[-1] > found[key].marks[-1]:
                    found[key] = one
    return sorted(found.values(), key=lambda one: one.started)


def gave_up_at(hosts: Iterable[HostHistory]) -> list[float]:
    """Return when hosts gave up, sorted."""
    return sorted(one.gave_up for host in hosts for one in host.rounds if one.gave_up is not None)


def short_at(hosts: Iterable[HostHistory]) -> list[float]:
    """Return when the job began to wait for hosts, sorted."""
    return sorted(one.short.at for host in hosts for one in host.rounds if one.short is not None)


def recovery_of(before: HostRound, now: HostRound, since: float, stages: dict[str, float]) -> Recovery:
    """Return how a round came after another one."""
    was, is_now = set(before.hosts), set(now.hosts)
    return Recovery(
        at=since,
        step=before.last,
        resumed=now.resumed,
        source=now.source,
        chips=now.chips,
        hosts=now.hosts,
        lost=tuple(sorted(was - is_now)),
        joined=tuple(sorted(is_now - was)),
        stages_s=stages,
    )


def _median_step(last: HostRound) -> float:
    # Not all of them: this is asked for at every scrape.
    marks = last.marks[-MEDIAN_MARKS:]
    steps = [(after - before) / (b - a) for (a, before), (b, after) in pairwise(marks)]
    return statistics.median(steps) if steps else 0.0
