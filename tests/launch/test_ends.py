"""How a job ends, whatever the store hears first."""

from __future__ import annotations

import itertools

import pytest

from launch.simulated_job import CLAIM, Job, running
from meshmend.launch.membership import Message


def test_a_host_that_returns_while_the_job_finishes_changes_nothing() -> None:
    job = Job(3, least=2, start_s=0)
    job.arrive(0, 1)
    job.join(0, 1)
    job.wait(1)
    job.started(0, 1)
    job.say(0, type="done")
    job.arrive(2)
    job.wait(5)
    job.join(2)
    job.wait(5)
    assert job.last(1)["type"] == "round"
    job.say(1, type="done")
    assert job.membership.over == {"ok": True, "why": "all hosts have finished, except host 2"}
    assert job.last(2)["ok"]


FATES: dict[str, Message | None] = {
    "done": {"type": "done"},
    "stopped": {"type": "join", "port": 1, "why": ""},
    "fails": {"type": "join", "port": 1, "why": "its worker ended with exit code 1"},
    "lost": None,
}
"""What a host says last; None if it says nothing."""


@pytest.mark.parametrize("fates", list(itertools.combinations_with_replacement(FATES, 3)), ids="-".join)
def test_how_a_job_ends_does_not_depend_on_the_order_of_messages(fates: tuple[str, ...]) -> None:
    """One host has finished. What became of the others decides how the job ends, in whatever order that is heard.

    A worker that fails is at fault, unless a host was lost: then that is why. One that is only stopped asks again when
    the store has stopped it, and so after something else has happened.
    """
    ends = set()
    everybody = {0: "done", **dict(enumerate(fates, 1))}
    for order in itertools.permutations(everybody):
        job = running(4)
        left = list(order)
        while left:
            # The first in this order that has something to say: who is only stopped speaks when it is stopped.
            host = next((h for h in left if everybody[h] != "stopped" or job.last(h)["type"] == "stop"), None)
            if host is None:
                break
            left.remove(host)
            if (message := FATES[everybody[host]]) is None:
                job.leave(host)
            else:
                job.say(host, **message)
        for host in left:  # nobody has stopped them, so they finish
            job.say(host, type="done")
        assert job.membership.over is not None
        ends.add(job.membership.over["ok"])
    assert ends == {"fails" not in fates or "lost" in fates}


def test_a_host_that_has_finished_and_left_has_finished() -> None:
    job = running(3)
    job.say(0, type="done")
    job.leave(0)
    job.leave(1)
    assert job.last(2)["type"] == "round"
    job.say(2, type="done")
    assert job.membership.over == {"ok": True, "why": "all hosts have finished, except host 1"}


def test_a_new_store_does_not_end_a_job_before_it_knows_all_of_its_hosts() -> None:
    job = Job(3, silent_s=5)
    job.arrive(0, running=CLAIM, number=7)
    job.say(0, type="done")
    assert job.membership.over is None
    job.arrive(1, running=CLAIM, number=7)
    job.say(1, type="done")
    job.wait(4)
    assert job.membership.over is None
    job.wait(2)
    assert job.membership.over == {"ok": True, "why": "all hosts have finished, except host 2"}


NEWER = {"number": 8, "name": "def", "hosts": [0, 1, 2]}


@pytest.mark.parametrize("fails", [True, False])
def test_a_host_of_an_older_round_that_comes_first_says_nothing_about_a_newer_one(fails: bool) -> None:
    """Host 3 was cut off in round 7; the others are in round 8, and finish while the store is away (seed 16995)."""
    job = Job(4, least=3, silent_s=5)
    job.arrive(3, running=CLAIM | {"hosts": [0, 1, 2, 3]}, number=7)
    if fails:
        job.say(3, type="join", port=7003, why="its worker ended with SIGABRT")
    job.arrive(0, running=NEWER, number=8)
    told = [] if fails else [{"type": "stop", "why": "round 8 has begun since", "lost": None, "number": 7}]
    assert job.received[3] == told
    job.say(0, type="done")
    assert job.membership.over is None, "hosts 1 and 2 may still train"
    job.arrive(1, 2, running=NEWER, number=8)
    job.say(1, type="done")
    job.join(3)
    job.say(2, type="done")
    assert job.membership.over == {"ok": True, "why": "all hosts have finished, except host 3"}


def test_a_newer_round_that_lost_its_store_starts_again_when_all_of_it_have_come() -> None:
    job = Job(4, least=3, silent_s=5)
    job.arrive(3, running=CLAIM | {"hosts": [0, 1, 2, 3]}, number=7)
    job.arrive(0, 1, 2, running=NEWER, number=8)
    job.join(0, 1, 2, 3)
    job.started(0, 1, 2, 3)
    assert job.membership.number == 9
