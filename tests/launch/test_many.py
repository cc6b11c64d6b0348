"""What the store's decisions cost when there are many hosts."""

from __future__ import annotations

import time

import pytest

from launch.simulated_job import Job, running
from meshmend.launch.messages import MAX_HELLO_BYTES, AuthenticatedChannel, pack, pack_hosts


def test_hosts_that_fall_silent_together_are_lost_together() -> None:
    job = running(1200)
    half = tuple(range(600))
    job.wait(12, silent=half)
    assert len(job.membership.members) == 600
    stops = [message for message in job.received[700] if message["type"] == "stop"]
    assert [stop["why"] for stop in stops] == ["hosts 0-599 are lost: not heard from for 10 s"]
    assert [job.last(host)["type"] for host in half] == ["dropped"] * 600
    job.join(*range(600, 1200))
    assert job.last(700)["hosts"] == tuple(range(600, 1200))


def test_a_loss_costs_three_messages_per_host() -> None:
    """Of the store: stop, round; of each host: join. And two lines for people."""
    for n in (10, 1000):
        job = running(n)
        said = sum(map(len, job.received.values()))
        job.membership.news.clear()
        job.leave(3)
        job.join(*(host for host in range(n) if host != 3))
        assert sum(map(len, job.received.values())) - said == 2 * (n - 1)
        assert len(job.membership.news) == 2
        assert max(map(len, job.membership.news)) < 200


def test_a_heartbeat_costs_the_same_with_any_number_of_hosts() -> None:
    def seconds(n: int) -> float:
        job = running(n)
        times = []
        for i in range(200):
            began = time.perf_counter()
            job.membership.on_message(i % n, {"type": "beat"}, job.now)
            job.membership.tick(job.now)
            job.membership.due(job.now)
            times.append(time.perf_counter() - began)
        return min(times)

    assert seconds(5000) < 10 * seconds(10)  # it was 500 times as much


@pytest.mark.parametrize("hole", [range(5, 6), range(0, 20_000, 2)], ids=["one is lost", "every second is lost"])
def test_a_round_of_twenty_thousand_hosts_fits_a_message(hole: range) -> None:
    job = Job(20_000, start_s=0)
    job.arrive(*(host for host in range(20_000) if host not in hole))
    hosts = tuple(member.host for member in job.membership.members.values())
    job.join(*hosts)
    job.wait(1)
    store, member = (
        AuthenticatedChannel(b"key", *nonces, to=to, of=of)
        for nonces, to, of in (((b"a", b"b"), "a host", "the store"), ((b"b", b"a"), "the store", "a host"))
    )
    frame = store.pack(job.last(hosts[-1]))
    assert len(frame) < MAX_HELLO_BYTES / 2
    assert member.unpack(frame)["hosts"] == hosts
    # And so does the hello of a host that comes back from it.
    claim = {"number": 1, "name": "0123456789abcdef", "hosts": pack_hosts(hosts)}
    assert len(pack("hello", job.hello(1, running=claim), b"key", b"nonce")) < MAX_HELLO_BYTES / 2
