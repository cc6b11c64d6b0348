"""Who is in a round, and when one starts and ends: decisions of the store, with a clock of our own."""

from __future__ import annotations

import random

import pytest

from launch.simulated_job import CLAIM, Job, running
from meshmend.launch.membership import Message, RefusedError


def test_the_first_round_starts_when_all_hosts_have_come_in_any_order() -> None:
    job = Job(4)
    job.arrive(2, 0, 3)
    job.join(3, 0, 2)
    assert all(not received for received in job.received.values())
    job.arrive(1)
    job.join(1)
    job.started(0, 1, 2, 3)


@pytest.mark.parametrize(
    ("address", "store_at", "coordinator"),
    [
        ("127.0.0.1", "", "127.0.0.1:7000"),
        ("127.0.0.1", "10.0.0.7", "10.0.0.7:7000"),
        ("::1", "fd00::7", "[fd00::7]:7000"),
        ("10.0.0.8", "10.0.0.7", "10.0.0.8:7000"),
    ],
)
def test_a_host_that_comes_over_loopback_is_where_the_others_reach_the_store(
    address: str, store_at: str, coordinator: str
) -> None:
    job = Job(1, store_at=store_at)
    job.arrive(0, address=address)
    job.join(0)
    assert (job.last(0)["coordinator"], job.last(0)["store_at"]) == (coordinator, store_at)


def test_the_first_round_goes_without_hosts_that_do_not_come() -> None:
    job = Job(4, least=2, start_s=30)
    job.arrive(3)
    job.join(3)
    job.wait(60)
    assert not job.received[3]  # one is not enough, however long it waits
    job.arrive(1)
    job.join(1)
    job.wait(29)
    assert not job.received[1]
    job.wait(2)
    job.started(1, 3)


def test_a_lost_host_ends_the_round_at_once_and_the_next_waits_for_nobody() -> None:
    job = running(4)
    job.leave(0)
    for host in (1, 2, 3):
        assert job.last(host)["type"] == "stop"
        assert job.last(host)["lost"] == 0
        assert "host 0 is lost: its connection to the store broke" in job.last(host)["why"]
    job.join(3, 1)
    assert job.last(1)["type"] == "stop"  # host 2 has not stopped its worker yet
    job.join(2)
    job.started(1, 2, 3)
    assert job.last(1)["number"] == 2


def test_a_second_host_may_be_lost_while_the_others_ask_for_a_round() -> None:
    job = running(4)
    job.leave(0)
    job.join(1, 2)
    job.leave(3)
    job.started(1, 2)


def test_a_worker_that_fails_starts_everybody_again() -> None:
    job = running(3)
    job.say(1, type="join", port=7001, why="its worker ended with SIGKILL")
    assert "host 1 starts again: its worker ended with SIGKILL" in job.last(0)["why"]
    job.join(0, 2)
    job.started(0, 1, 2)


def test_a_script_that_raises_on_every_host_ends_the_job() -> None:
    job = running(3)
    for host in range(3):
        assert job.membership.over is None
        job.say(host, type="raised", why=f"ValueError: boom of {host}")
    assert job.membership.over == {
        "ok": False,
        "why": "the script raised an error on every host: ValueError: boom of 0",
    }


def test_a_script_that_raises_on_some_hosts_starts_everybody_again() -> None:
    """After a while, in which the others might have come to the same line; and it counts for that round alone."""
    job = running(3)
    job.say(2, type="raised", why="ValueError: boom")
    job.say(1, type="raised", why="ValueError: boom")
    job.wait(4.0)
    assert job.membership.round is not None
    job.wait(2.0)
    assert job.last(0)["why"] == "host 1 starts again: its script raised ValueError: boom"
    job.join(0, 1, 2)
    assert job.last(0)["number"] == 2
    job.say(0, type="raised", why="ValueError: boom")
    assert job.membership.over is None


def test_a_script_that_raises_because_a_host_is_lost_starts_again() -> None:
    job = running(3)
    job.say(0, type="raised", why="RuntimeError: no answer")
    job.leave(2)
    job.say(1, type="raised", why="RuntimeError: no answer")
    job.join(0, 1)
    assert job.membership.over is None
    assert job.last(0)["hosts"] == (0, 1)


def test_a_script_that_raises_after_others_have_finished_ends_the_job() -> None:
    job = running(2)
    job.say(0, type="done")
    job.say(1, type="raised", why="ValueError: boom")
    assert job.membership.over is not None
    why = "the script raised an error on host 1, after host 0 had finished: ValueError: boom"
    assert job.membership.over["why"] == why


def test_hosts_that_come_together_cause_one_restart() -> None:
    job = running(4)
    job.leave(2)
    job.leave(3)
    job.join(0, 1)
    job.started(0, 1)
    job.arrive(3)
    job.join(3)
    job.wait(0.5)
    job.arrive(2)
    job.join(2)
    job.wait(0.5)
    assert job.last(0)["type"] == "round"
    job.wait(1)
    assert job.last(0)["why"] == "hosts 2, 3 have joined"
    job.join(0, 1)
    job.started(0, 1, 2, 3)


def test_a_silent_host_is_dropped_and_one_that_beats_is_not() -> None:
    job = running(3, silent_s=5)
    job.wait(4, silent=(1,))
    assert job.last(0)["type"] == "round"
    job.wait(2, silent=(1,))
    assert job.last(1)["type"] == "dropped"
    assert "host 1 is lost: not heard from for" in job.last(0)["why"]
    job.join(0, 2)
    job.started(0, 2)


def test_a_host_that_does_not_ask_is_not_waited_for_without_end() -> None:
    """Its process beats, but its worker does not end."""
    job = running(4, ask_s=20)
    job.leave(0)
    job.join(1, 2)
    job.wait(19)
    assert job.last(1)["type"] == "stop"
    job.wait(2)
    job.started(1, 2)
    job.join(3)
    job.wait(2)
    assert job.last(1)["why"] == "host 3 has joined"
    job.join(1, 2)
    job.started(1, 2, 3)


@pytest.mark.parametrize("slept_s", [4.6, 9.0, 60.0])
def test_a_store_that_slept_drops_nobody(slept_s: float) -> None:
    job = running(3, silent_s=5)
    job.membership.tick(job.now + 0.9)  # almost a second after their heartbeats
    job.now += 0.9 + slept_s
    job.membership.on_message(0, {"type": "beat"}, job.now)  # the first that it reads
    job.membership.tick(job.now)
    job.deliver()
    assert [job.last(host)["type"] for host in range(3)] == ["round"] * 3


def test_a_new_store_takes_over_a_round_that_runs() -> None:
    old = running(3)
    claim = {"number": 7, "name": old.last(0)["name"], "hosts": [0, 1, 2]}
    job = Job(3, silent_s=5)
    job.arrive(0, 1, 2, running=claim, number=7)
    job.wait(20)
    assert all(not received for received in job.received.values())  # nobody was disturbed
    job.leave(1)
    job.join(0, 2)
    job.started(0, 2)
    assert job.last(0)["number"] == 8


def test_a_new_store_ends_a_round_whose_host_does_not_come_back() -> None:
    job = Job(3, silent_s=5)
    job.arrive(0, 2, running=CLAIM, number=7)
    job.wait(6)
    assert "host 1 is lost: it did not come back to the store" in job.last(0)["why"]
    job.join(0, 2)
    job.started(0, 2)


def test_a_new_store_waits_as_long_as_hosts_of_the_round_come_back() -> None:
    """Ten thousand do not come back at once."""
    claim = {"number": 7, "name": "abc", "hosts": list(range(10))}
    job = Job(10, silent_s=5)
    for host in range(9):
        job.arrive(host, running=claim, number=7)
        job.wait(4)
    assert all(not received for received in job.received.values())
    job.wait(2)
    assert "host 9 is lost: it did not come back to the store" in job.last(0)["why"]


@pytest.mark.parametrize("first", [0, 1])
def test_a_new_store_ends_a_round_whose_host_has_started_again(first: int) -> None:
    """The store and host 1 were killed together: host 1 is back, but its worker is not."""
    job = Job(3, silent_s=5)
    for host in (first, 1 - first):
        job.arrive(host, **({} if host == 1 else {"running": CLAIM, "number": 7}))
    assert job.last(0)["type"] == "stop"
    job.join(0, 1)
    assert job.last(0)["type"] == "stop"  # host 2 is on its way back
    job.arrive(2, running=CLAIM, number=7)
    assert job.last(2)["type"] == "stop"
    job.join(2)
    job.started(0, 1, 2)
    assert job.last(0)["number"] == 8


def test_a_host_that_was_cut_off_is_stopped_before_it_may_take_part_again() -> None:
    job = running(3)
    claim = {"number": 1, "name": job.last(1)["name"], "hosts": [0, 1, 2]}
    job.leave(1)
    job.join(0, 2)
    job.started(0, 2)
    job.arrive(1, running=claim, number=1)
    assert job.last(1)["type"] == "stop"
    assert job.last(0)["type"] == "round"
    job.join(1)
    job.wait(2)
    job.join(0, 2)
    job.started(0, 1, 2)


def test_the_job_is_over_when_all_have_finished() -> None:
    job = running(3)
    job.say(0, type="done")
    job.say(2, type="done")
    assert job.membership.over is None
    job.say(1, type="done")
    assert job.membership.over == {"ok": True, "why": "all hosts have finished"}
    assert [job.last(host)["type"] for host in range(3)] == ["over"] * 3
    with pytest.raises(RefusedError, match="this job is over: all hosts have finished"):
        job.arrive(0)


def test_a_host_that_fails_after_others_have_finished_ends_the_job() -> None:
    job = running(3)
    job.say(0, type="done")
    job.say(1, type="join", port=7001, why="its worker ended with exit code 1")
    assert job.last(2)["type"] == "round"  # it may still save its state
    job.say(2, type="done")
    assert job.membership.over is not None
    assert not job.membership.over["ok"]
    assert job.membership.over["why"] == "host 1: its worker ended with exit code 1, after host 0 had finished"


def test_a_host_that_gives_up_ends_the_job_for_all() -> None:
    job = running(3)
    job.say(1, type="failed", why="no")
    assert [job.last(host)["why"] for host in range(3)] == ["host 1 gave up: no"] * 3


@pytest.mark.parametrize(
    ("hello", "message"),
    [
        ({"machine": "8x8 in hosts of 4x2"}, "it describes its machine as 8x8 in hosts of 4x2, but host 0 as 4x4"),
        ({"machine": "a machine"}, "it describes a machine that cannot be: 'a machine' is not a shape"),
        ({"machine": "4x4 in hosts of 2x2", "host": 4}, "it describes a machine that cannot be: There is no host 4"),
        ({"hosts": [2, 4]}, "it wants 2 to 4 hosts, the others 1 to 3. Give all the same --hosts"),
        ({"host": 3}, "the job has 3 hosts already"),
        ({"host": 1}, "another process, at 10.0.0.1, is host 1 already: give each its own --host-index"),
    ],
)
def test_hosts_that_do_not_belong_are_refused(hello: Message, message: str) -> None:
    job = running(3, machine="4x4 in hosts of 2x2")
    with pytest.raises(RefusedError, match=message) as caught:
        job.membership.arrive("new", {**job.hello(2), **hello}, "10.0.0.9", job.now)
    assert caught.value.retryable == (hello == {"host": 1})
    assert job.last(0)["type"] == "round"


def test_a_host_that_was_switched_off_and_on_replaces_what_is_left_of_it() -> None:
    job = running(3, silent_s=5)
    job.wait(3, silent=(1,))
    job.membership.arrive("again", job.hello(1), "10.0.0.1", job.now)
    job.received["again"] = []
    job.deliver()
    assert "host 1 is lost: its process was replaced by a new one" in job.last(0)["why"]


def test_a_pause_of_the_store_does_not_make_the_rest_of_a_host_seem_alive_for_good() -> None:
    """Whoever is refused then is not told that another process is certainly there."""
    job = running(2)
    for pause_s, is_certain in ((0.0, True), (1.0, True), (5.0, False), (5.0, False)):
        job.now += pause_s
        job.membership.tick(job.now)
        with pytest.raises(RefusedError, match="is host 1 already") as refused:
            job.membership.arrive("again", job.hello(1), "10.0.0.8", job.now)
        assert (refused.value.retryable, refused.value.is_certain) == (True, is_certain)
        job.wait(1.0, silent=(1,) if pause_s else ())
    job.wait(2.0, silent=(1,))
    job.received["again"] = []
    job.membership.arrive("again", job.hello(1), "10.0.0.8", job.now)


def test_two_rounds_train_only_where_a_round_needs_no_more_than_half_of_the_hosts() -> None:
    """Hosts 0 and 1 train on, cut off from a new store, and all of the others have been restarted."""
    for least, trains in ((2, True), (3, False)):
        job = Job(4, least=least, start_s=30)
        job.arrive(2, 3)
        job.join(2, 3)
        job.wait(300)
        assert (job.membership.round is not None) == trains


@pytest.mark.parametrize("seed", range(40))
def test_hosts_of_a_round_always_agree_on_it(seed: int) -> None:
    """Whatever is lost and comes back in whatever order: hosts that run the same round know the same hosts."""
    rng = random.Random(seed)
    job = Job(5, least=2, start_s=1, silent_s=5)
    here: set[int] = set()
    for _ in range(200):
        host = rng.randrange(5)
        if host not in here:
            job.arrive(host)
            job.join(host)
            here.add(host)
        elif rng.random() < 0.3:
            job.leave(host)
            here.remove(host)
        elif rng.random() < 0.3:
            job.join(host)
        for other in sorted(here):
            if job.received[other] and job.last(other)["type"] == "stop" and rng.random() < 0.7:
                job.join(other)
        job.wait(rng.choice([0.0, 0.5, 2.0]))
        current = job.membership.round
        if current is not None:
            running_now = {key for key, member in job.membership.members.items() if member.state == "running"}
            assert running_now == set(current.hosts)
            job.started(*current.hosts)
    for other in sorted(here):
        if job.received[other] and job.last(other)["type"] == "stop":
            job.join(other)
    job.wait(3)
    while job.membership.round is None and len(here) >= 2:
        job.join(*[host for host in sorted(here) if job.membership.members[host].state == "idle"])
        job.wait(2)
    assert (job.membership.round is not None) == (len(here) >= 2)


def test_where_the_mesh_is_cut_the_larger_part_trains_and_the_other_waits() -> None:
    """Hosts 0 to 3 in a row: without host 1, no cable joins host 0 to the others."""
    job = running(4, least=2, machine="4x8 in hosts of 4x2")
    job.leave(1)
    job.join(0, 2, 3)
    job.started(2, 3)
    assert job.last(2)["cut_off"] == [0]
    n_messages = len(job.received[2])
    job.wait(60)
    assert len(job.received[2]) == n_messages  # a host that waits does not end the round over and over
    job.arrive(1)
    job.join(1)
    job.wait(5)
    assert "hosts 0, 1 have joined" in job.last(2)["why"]
    job.join(2, 3)
    job.started(0, 1, 2, 3)


def test_a_part_that_is_too_small_waits() -> None:
    job = running(3, least=2, machine="2x6 in hosts of 2x2")
    job.leave(1)
    job.join(0, 2)
    job.wait(60)
    assert job.last(0) == job.last(2) == {"type": "short", "hosts": [0, 2], "least": 2, "number": 1}


def test_a_host_that_is_cut_off_does_not_keep_the_job_from_ending() -> None:
    job = running(4, machine="2x8 in hosts of 2x2")
    job.leave(1)
    job.join(0, 2, 3)
    job.say(2, type="done")
    job.say(3, type="done")
    assert [job.last(host)["ok"] for host in (0, 2, 3)] == [True] * 3


def test_a_job_with_too_few_hosts_says_so_once() -> None:
    job = Job(4, least=3)
    job.arrive(0, 1)
    job.join(0, 1)
    job.wait(60.0)
    assert all(
        message["type"] != "short" for host in (0, 1) for message in job.received[host]
    )  # it has not started yet
    job.arrive(2, 3)
    job.join(2, 3)
    job.leave(3)
    job.join(0, 1, 2)
    job.leave(2)
    job.leave(1)
    assert all(message["type"] != "short" for message in job.received[0])  # host 0 stops its worker first
    job.join(0)
    job.wait(60.0)
    said = [message for message in job.received[0] if message["type"] == "short"]
    assert said == [{"type": "short", "hosts": [0], "least": 3, "number": 2}]
    job.arrive(1, 2)
    job.join(1, 2)
    assert [message["number"] for message in job.received[0] if message["type"] == "round"] == [1, 2, 3]
    job.leave(2)
    job.join(0, 1)
    assert [message["number"] for message in job.received[0] if message["type"] == "short"] == [2, 3]


def test_rounds_are_counted_on_from_earlier_jobs_in_the_same_folder() -> None:
    job = Job(3, start_s=30.0, rounds_before=6)
    job.arrive(0)
    job.arrive(1)
    job.join(0, 1)
    job.wait(29.0)
    assert job.received[0] == [], "a new job gives its hosts the time that it always does"
    job.wait(2.0)
    assert (job.last(0)["number"], job.last(0)["before"]) == (7, 0)
    job.arrive(2)
    job.join(2)
    job.wait(3.0)
    job.join(0, 1)
    assert (job.last(2)["number"], job.last(2)["before"]) == (8, 7)
