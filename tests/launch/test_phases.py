"""The table of phases in `membership.py`: every row is made here, and whatever happens makes no other change."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from launch.simulated_job import CLAIM, TABLE, Job, running
from meshmend.launch.membership import JobPhase, RefusedError

Scenario = Callable[[], Job]


def gathering() -> Job:
    job = Job(3)
    job.arrive(0, 1)
    return job


def adopted(**settings: Any) -> Job:
    """Hosts 0 and 1 are back and train; host 2 has not come back to the new store."""
    job = Job(3, **settings)
    job.arrive(0, 1, running=CLAIM, number=7)
    return job


def restarting() -> Job:
    job = running(3)
    job.leave(2)
    return job


def finishing() -> Job:
    job = running(3)
    job.say(0, type="done")
    return job


PHASES: dict[str, Scenario] = {
    "gathering": gathering,
    "adopted": adopted,
    "running": lambda: running(3),
    "restarting": restarting,
    "finishing": finishing,
}


def hosts_of(job: Job) -> list[int]:
    return [host for host in range(3) if host in job.membership.members]


def all_ask(job: Job) -> None:
    job.arrive(*{0, 1, 2} - {*hosts_of(job)})
    job.join(0, 1, 2)


def one_raises(job: Job) -> None:
    job.say(1, type="raised", why="no")
    job.wait(6)


def all_raise(job: Job) -> None:
    for host in hosts_of(job):
        if job.membership.over is None:
            job.say(host, type="raised", why="no")


def all_finish(job: Job) -> None:
    for host in hosts_of(job):
        job.say(host, type="done")


CAUSES: dict[str, Callable[[Job], object]] = {
    "all hosts have asked": all_ask,
    "those that are there have asked": lambda job: job.join(0, 1),
    "a host trains in a round of an earlier store": lambda job: job.arrive(2, running=CLAIM, number=7),
    "a host comes without its worker": lambda job: job.arrive(2),
    "a host does not come back": lambda job: job.wait(11),
    "a host fails": lambda job: job.leave(1),
    "a host is silent": lambda job: job.wait(11, silent=(1,)),
    "a worker fails": lambda job: job.say(1, type="join", port=1, why="its worker ended with SIGKILL"),
    "the script raises an error on one host": one_raises,
    "the script raises an error on every host": all_raise,
    "a host has finished": lambda job: job.say(1, type="done"),
    "all hosts have finished": all_finish,
    "a host gives up": lambda job: job.say(1, type="failed", why="no"),
}
ROWS = [
    ("gathering", "running", "all hosts have asked"),
    ("gathering", "adopted", "a host trains in a round of an earlier store"),
    ("gathering", "finishing", "a host has finished"),
    ("gathering", "over", "a host gives up"),
    ("adopted", "running", "a host trains in a round of an earlier store"),
    ("adopted", "restarting", "a host does not come back"),
    ("adopted", "restarting", "a host comes without its worker"),
    ("adopted", "restarting", "a host fails"),
    ("adopted", "restarting", "a worker fails"),
    ("adopted", "finishing", "a host has finished"),
    ("adopted", "over", "a host gives up"),
    ("running", "restarting", "a host fails"),
    ("running", "restarting", "a host is silent"),
    ("running", "restarting", "a worker fails"),
    ("running", "restarting", "the script raises an error on one host"),
    ("running", "finishing", "a host has finished"),
    ("running", "over", "a host gives up"),
    ("running", "over", "the script raises an error on every host"),
    ("restarting", "running", "those that are there have asked"),
    ("restarting", "finishing", "a host has finished"),
    ("restarting", "over", "a host gives up"),
    ("finishing", "over", "all hosts have finished"),
    ("finishing", "over", "a host gives up"),
    ("finishing", "over", "the script raises an error on every host"),
]


@pytest.mark.parametrize(("phase", "following", "cause"), ROWS, ids=" - ".join)
def test_each_row_of_the_table_is_made(phase: str, following: str, cause: str) -> None:
    job = PHASES[phase]()
    assert job.membership.phase is JobPhase(phase)
    before = len(job.membership.changes)
    CAUSES[cause](job)
    assert job.membership.changes[before] == (phase, following)


def test_the_table_has_these_rows_and_no_others() -> None:
    assert {(phase, following) for phase, following, _ in ROWS} == TABLE
    assert {name for change in TABLE for name in change} == {phase.value for phase in JobPhase}


def test_hosts_that_come_end_a_round() -> None:
    job = restarting()
    job.join(0, 1)
    job.arrive(2)
    job.join(2)
    job.wait(2)
    assert job.membership.changes[-1] == ("running", "restarting")


def test_nobody_is_admitted_to_a_job_that_its_coming_ends() -> None:
    """Host 1 was switched off and on while host 0 finished: what is left of it was the last that ran."""
    job = running(2)
    job.say(0, type="done")
    job.wait(3, silent=(1,))
    with pytest.raises(RefusedError, match="this job is over: all hosts have finished, except host 1"):
        job.membership.arrive("again", job.hello(1), "10.0.0.1", job.now)
    assert "again" not in job.membership.members
    assert job.membership.phase is JobPhase.OVER


def test_no_round_starts_in_a_job_that_is_over() -> None:
    """Host 2 has asked long ago, and waits, when the script raises an error on the hosts that train."""
    job = Job(3, settle_s=1000.0, ask_s=1.0, start_s=0.0)
    job.arrive(0, 1)
    job.join(0, 1)
    job.wait(1)
    job.arrive(2)
    job.join(2)
    job.wait(2)
    for host in (0, 1):
        job.say(host, type="raised", why="no")
    assert job.membership.phase is JobPhase.OVER
    assert [job.last(host)["type"] for host in range(3)] == ["over"] * 3


@pytest.mark.parametrize("raises", [True, False])
def test_an_error_of_the_hosts_that_are_back_waits_for_the_others(raises: bool) -> None:
    """A host says again what its worker has raised. Those that are not back yet may have raised it, or not."""
    job = adopted()
    all_raise(job)
    assert job.membership.over is None
    job.arrive(2, running=CLAIM, number=7)
    if raises:
        job.say(2, type="raised", why="no")
    job.wait(6)
    assert job.membership.phase is (JobPhase.OVER if raises else JobPhase.RESTARTING)


def check(job: Job) -> None:
    """Check what each phase says about the round and the job."""
    now = job.membership
    if now.phase is not JobPhase.FINISHING:
        assert (now.round is not None) == (now.phase in (JobPhase.ADOPTED, JobPhase.RUNNING))
    assert (now.over is not None) == (now.phase is JobPhase.OVER)
    states = {member.state for member in now.members.values()}
    assert (
        now.phase in (JobPhase.ADOPTED, JobPhase.RUNNING, JobPhase.FINISHING, JobPhase.OVER) or "running" not in states
    )
    assert now.phase not in (JobPhase.GATHERING, JobPhase.RUNNING) or not now._fates.missing


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_makes_no_other_change(seed: int) -> None:
    """Hosts say anything at any time, fail, come back with old rounds, and the store pauses or is replaced."""
    rng = random.Random(seed)
    job = Job(4, least=rng.choice([1, 2, 3]), start_s=1.0, silent_s=5.0)
    made: set[tuple[str, str]] = set()
    for _ in range(200):
        host = rng.randrange(4)
        members = job.membership.members
        if host not in members:
            claim = {"number": 7, "name": "abc", "hosts": [0, 1, 2, 3][: rng.randint(host + 1, 4)]}
            with suppress(RefusedError):
                job.arrive(host, running=claim if rng.random() < 0.3 else None, number=rng.choice([0, 7]))
        elif rng.random() < 0.15:
            job.leave(host)
        else:
            weights = {"join": 60, "raised": 10, "done": 2, "failed": 1}
            (kind,) = rng.choices(list(weights), list(weights.values()))
            job.say(host, type=kind, port=1, why="no")
        check(job)
        job.wait(rng.choice([0.0, 0.5, 2.0, 7.0]), silent=(host,) if rng.random() < 0.1 else ())
        check(job)
        if rng.random() < 0.05:
            job.now += rng.choice([3.0, 60.0])  # the store pauses
        made |= set(job.membership.changes)
        if job.membership.phase is JobPhase.OVER or rng.random() < 0.02:
            job = Job(4, least=job.least, start_s=1.0, silent_s=5.0)
    assert made <= TABLE
    assert len(made) > 4
