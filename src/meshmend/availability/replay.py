"""Replay: the failures of a job that really ran, through the simulator.

What goes in is when which host was lost and came back, how long each stage of a recovery typically takes, and the time
of a step. What comes out is how many steps the job should have done in its time and where the rest of the time should
have gone, to be held against what it did; and the same for every other answer to the same failures. The measured
goodput and the measured sums are never an input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshmend.availability.answers import ANSWERS, Answer, FaultTolerant, SubMesh, make_answers
from meshmend.availability.assumptions import Assumptions, Level
from meshmend.availability.history import Strike
from meshmend.availability.job import TimeSpent, live_through
from meshmend.availability.throughput import Throughput
from meshmend.errors import ParameterError
from meshmend.topology import Mesh

DETECT, PLAN = "detect", "plan"
"""The stages of a recovery that the simulator knows by name; all others are its restart."""
TRAINING, AGAIN = "training", "steps done again"


@dataclass(frozen=True)
class HostFailure:
    """A host was lost `at_s` seconds after the job began, and back `away_s` later; None if it was not back by the end.

    `at_s` is 0 for a host that was missing from the start, `away_s` is 0 if the job stopped and no host was missing.
    """

    at_s: float
    host: int
    away_s: float | None


@dataclass(frozen=True)
class RecordedJob:
    """What is known of a job that ran: what the simulator is given, and `measured`, which it has to come close to."""

    shape: tuple[int, ...]
    host: tuple[int, ...]
    until_s: float
    """From the first start to the last step."""
    failures: tuple[HostFailure, ...]
    first_start_s: Mapping[str, float]
    """From the first start to the first step, by stage."""
    stages_s: Mapping[str, float]
    """Median of each stage of a recovery from a loss."""
    returns_s: Mapping[str, float]
    """Median of each stage of taking hosts back; as after a loss, without its detection, if none came back."""
    step_s: Mapping[int, float]
    """Median time between two steps, by the number of chips."""
    data_s: float
    """Typical wait for data per step."""
    checkpoint_steps: float
    """Steps between two checkpoints; infinite if there are none."""
    checkpoint_s: float
    """Median of how long training waits for a checkpoint."""
    steps_again: float
    """Median of the steps that are done again after a failure."""
    steps_on_start: float
    """Median of the steps that a recovery itself brings: its first one, and those whose end nobody could record."""
    measured: RunAccount
    wrap: tuple[bool, ...] = ()
    """For each axis, whether it wraps; empty if none does."""


@dataclass(frozen=True)
class RunAccount:
    """How a job spent its time on the clock, in seconds by cause; `TRAINING` is one of them."""

    steps: float
    spent_s: Mapping[str, float]
    stops: int

    @property
    def goodput(self) -> float:
        """Share of the time that went into steps that count."""
        return self.spent_s[TRAINING] / math.fsum(self.spent_s.values())


@dataclass(frozen=True)
class ReplayedAnswer:
    """What an answer gives for the failures of a job. `work` is relative to the whole machine without any failure."""

    name: str
    run: RunAccount
    work: float


@dataclass(frozen=True)
class Replay:
    """A job beside its simulation: `predicted` is the answer that it ran under, and one of `answers`."""

    job: RecordedJob
    assumptions: Assumptions
    answers: tuple[ReplayedAnswer, ...]

    @property
    def predicted(self) -> RunAccount:
        """What the simulator predicts for the job as it ran."""
        return next(one.run for one in self.answers if one.name == FaultTolerant.name)

    @property
    def goodput_error(self) -> float:
        """By how much the predicted goodput is above the measured one, relative to that."""
        return self.predicted.goodput / self.job.measured.goodput - 1


def replay(job: RecordedJob, kinds: Sequence[type[Answer]] = ANSWERS, **others: Any) -> Replay:
    """Simulate the failures of a job under each answer. `others` are assumptions that no timeline can tell."""
    assumptions = assume(job, **others)
    # A step's time is measured, so nothing needs to be planned.
    policies = make_answers(assumptions, Throughput(assumptions), kinds)
    strikes = sorted(
        Strike(one.at_s / 3600, 0, one.host, (job.until_s if one.away_s is None else one.away_s) / 3600)
        for one in job.failures
    )
    hours, start_h = job.until_s / 3600, math.fsum(job.first_start_s.values()) / 3600
    found = []
    for answer in policies:
        # What a spare takes, or a slice, is assumed; those that go on with what is left take hosts back as the job did.
        regrow_h = math.fsum(job.returns_s.values()) / 3600 if isinstance(answer, (SubMesh, FaultTolerant)) else None
        spent = live_through(answer, strikes, hours, first_start_h=start_h, regrow_h=regrow_h)
        found.append(ReplayedAnswer(answer.name, _as_run(job, answer, spent), spent.useful_h / hours))
    return Replay(job, assumptions, tuple(found))


def assume(job: RecordedJob, **others: Any) -> Assumptions:
    """Return the assumptions of a job's replay.

    Repairs take as long as they did, also the quick ones: a mean of an hour, and each failure's factor is its hours.
    """
    mesh = Mesh(job.shape, wrap=job.wrap or False)
    n_hosts = mesh.size // math.prod(job.host)
    for one in job.failures:
        if not 0 <= one.host < n_hosts:
            raise ParameterError(f"Host {one.host} was lost, but {mesh} has hosts 0 to {n_hosts - 1} only.")
    whole_s = step_time(job.step_s, mesh.size)
    restart_s = math.fsum(seconds for stage, seconds in job.stages_s.items() if stage not in (DETECT, PLAN))
    never_min = 1 + 2 * job.until_s / 60
    return Assumptions(
        mesh,
        job.host,
        (Level("host", job.host, math.inf, 1.0),),
        **{
            "quick_repair_h": 1.0,
            "checkpoint_min": min(job.checkpoint_steps * whole_s / 60, never_min),
            "save_s": job.checkpoint_s,
            "copies_s": job.steps_again * whole_s,
            "detect_s": job.stages_s.get(DETECT, 0.0),
            "replan_s": job.stages_s.get(PLAN, 0.0),
            "restart_s": restart_s,
            "compute_s": whole_s,
            "payload_bytes": 0.0,
            "grow": "at-once",
            **others,
        },
    )


def step_time(step_s: Mapping[int, float], chips: int) -> float:
    """Return the time of a step on so many chips: as measured, or from the nearest number that was.

    The global batch stays the same, so fewer chips take longer.

    >>> step_time({16: 1.0, 8: 1.5}, 16), step_time({16: 1.0, 8: 1.5}, 4)
    (1.0, 3.0)
    """
    nearest = min(step_s, key=lambda known: (abs(known - chips), known))
    return step_s[nearest] * nearest / chips


def _as_run(job: RecordedJob, answer: Answer, spent: TimeSpent) -> RunAccount:
    """Return a simulated run as a timeline's account has it: by the clock, with the stages of recoveries."""
    training_s, data_s, steps = 0.0, 0.0, 0.0
    for chips, hours in spent.kept_h.items():
        done = hours * 3600 / step_time(job.step_s, chips)
        waited = min(done * job.data_s, hours * 3600)
        steps, data_s, training_s = steps + done, data_s + waited, training_s + hours * 3600 - waited
    starts = spent.interruptions + spent.regrowths
    stages = _stages(job, answer, spent)
    parts = {
        **stages,
        "checkpoint": spent.saving_h * 3600,
        "data": data_s,
        "waiting": spent.waiting_h * 3600,
    }
    # What is left of the clock's time was trained and thrown away.
    again_s = max(0.0, job.until_s - training_s - math.fsum(parts.values()))
    # The first start brings one step; a later one brings those, too, whose end nobody could record.
    return RunAccount(
        steps + 1 + starts * job.steps_on_start,
        {TRAINING: training_s, **parts, AGAIN: parts.get(AGAIN, 0.0) + again_s},
        starts,
    )


def _stages(job: RecordedJob, answer: Answer, spent: TimeSpent) -> dict[str, float]:
    """Split the simulated time in starts among stages, in the proportions in which they were given."""
    start_s = answer.start_h * 3600
    left_out = (DETECT,) if isinstance(answer, FaultTolerant) else (DETECT, PLAN)
    usual = {stage: seconds for stage, seconds in job.stages_s.items() if stage not in left_out}
    total = math.fsum(usual.values())
    weights = dict.fromkeys((*job.first_start_s, *job.stages_s, *job.returns_s), 0.0)
    for stage, seconds in job.first_start_s.items():
        weights[stage] += seconds
    weights[DETECT] = weights.get(DETECT, 0.0) + spent.interruptions * job.stages_s.get(DETECT, 0.0)
    regrown = job.returns_s if isinstance(answer, (SubMesh, FaultTolerant)) else {}
    restarts = spent.interruptions + (0 if regrown else spent.regrowths)
    for stage, seconds in usual.items():
        weights[stage] += restarts * start_s * (seconds / total if total else 0.0)
    for stage, seconds in regrown.items():
        weights[stage] += spent.regrowths * seconds
    whole = math.fsum(weights.values())
    return {stage: spent.restarting_h * 3600 * (one / whole if whole else 0.0) for stage, one in weights.items()}
