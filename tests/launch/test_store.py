"""The store and its hosts over real sockets: who is let in, who is heard, and what happens when one of them is lost."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.serving import JOB, SECRET, Serving, connected, joined, lone_host, running
from meshmend.errors import LaunchError
from meshmend.launch.membership import SILENT_S, Membership
from meshmend.launch.messages import (
    HEADER_BYTES,
    MAGIC,
    MAX_HELLO_BYTES,
    AuthenticatedChannel,
    MessageError,
    _seal,
    derive_key,
    make_key,
    make_nonce,
    pack,
    read_frame,
    unpack,
)
from meshmend.launch.store import Store
from network import has_ipv6

needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")


def test_hosts_meet_and_hear_of_a_death_at_once(serving: Serving) -> None:
    first, second = running(serving)
    died_at = time.monotonic()
    second.close()
    stopped = first.wait_stopped(10)
    assert time.monotonic() - died_at < SILENT_S / 2  # no heartbeat had to be missed
    assert stopped is not None
    assert stopped["lost"] == 1
    assert joined(first)[0].hosts == (0,)


@needs_ipv6
def test_hosts_meet_over_ipv6() -> None:
    with Serving(address="::1") as serving:
        places = joined(serving.member(0, "[::1]"), serving.member(1, "[::1]"))
        assert {one.coordinator for one in places} == {"[::1]:7000"}, "as gRPC reads it"
        assert {one.address for one in places} == {"::1"}
        assert any(line.endswith(f"listens on [::1]:{serving.port}") for line in serving.lines), serving.lines


@needs_ipv6
def test_a_store_for_the_whole_network_takes_hosts_of_both_kinds() -> None:
    with Serving(address="::") as serving:
        places = joined(serving.member(0, "127.0.0.1"), serving.member(1, "[::1]"))
        assert [one.address for one in places] == ["127.0.0.1", "::1"]
        assert {one.coordinator for one in places} == {"127.0.0.1:7000"}


def test_an_address_that_is_given_with_brackets_is_told_without(serving: Serving) -> None:
    (place,) = joined(serving.member(0, address="[fd00::7]", hosts=(1, 1)))
    assert (place.address, place.coordinator) == ("fd00::7", "[fd00::7]:7000")


def test_training_goes_on_while_the_store_is_lost_and_a_new_one_takes_over(serving: Serving) -> None:
    first, second = running(serving)
    serving.stop()
    with Serving(port=serving.port) as again:
        again.wait_for("joined: 2 of 2")
        assert first.wait_stopped(1.5) is None  # nobody was stopped
        assert serving.received[1] == ["round", "unreachable"]
        second.close()
        stopped = first.wait_stopped(10)
        assert stopped is not None
        assert stopped["lost"] == 1


def test_a_frozen_host_is_dropped_and_may_come_back() -> None:
    with Serving(silent_s=1.5) as serving:
        first, second = running(serving)
        with second._changed:  # its heartbeats need this lock
            stopped = first.wait_stopped(10)
            assert stopped is not None
            assert "host 1 is lost: not heard from for" in stopped["why"]
            assert joined(first)[0].hosts == (0,)
        assert second.wait_stopped(10) is not None
        with ThreadPoolExecutor(1) as pool:
            back = pool.submit(second.join, 7001)
            assert first.wait_stopped(10) is not None
            assert joined(first)[0].hosts == back.result(timeout=10).hosts == (0, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"secret": "other", "reach_s": 0.5}, "refuses this host: its secret or its job is another one"),
        ({"job": "other", "reach_s": 0.5}, "refuses this host: its secret or its job is another one"),
        ({"hosts": (2, 3)}, "refuses this host: it wants 2 to 3 hosts, the others 1 to 2"),
    ],
)
def test_hosts_that_do_not_belong_are_told_why(serving: Serving, settings: dict[str, Any], message: str) -> None:
    first, _ = running(serving)
    with pytest.raises(LaunchError, match=message):
        serving.member(1, **settings).join(7001)
    assert first.wait_stopped(0.2) is None


def test_two_hosts_of_the_same_index_are_told_so(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshmend.launch.member.MOST_REFUSALS", 2)
    first, _ = running(serving)
    with pytest.raises(LaunchError, match=r"another process, at 127\.0\.0\.1, is host 1 already"):
        serving.member(1).join(7001)
    assert first.wait_stopped(0.2) is None


def test_a_host_without_a_store_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    alone = lone_host(port, reach_s=0.2)
    with pytest.raises(
        LaunchError, match=rf"No store answers at 127\.0\.0\.1:{port} .*Connection refused.*meshmend store"
    ):
        alone.join(7000)
    alone.close()


def test_a_host_says_now_and_then_that_the_store_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where, for how long and why, though it waits for one that has accepted the connection and says nothing."""
    monkeypatch.setattr("meshmend.launch.member.BEAT_S", 0.05)
    monkeypatch.setattr("meshmend.launch.member.AWAY_S", 0.2)
    monkeypatch.setattr("meshmend.launch.member.STILL_AWAY_S", 0.4)
    told: list[dict[str, Any]] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        alone = lone_host(silent.getsockname()[1], on_message=told.append, silent_s=60)
        until = time.monotonic() + 10
        while len(told) < 3 and time.monotonic() < until:
            time.sleep(0.02)
        alone.close()
    assert [(one["type"], one["where"], one["why"], one["reached"]) for one in told] == [
        ("unreachable", where, "no answer", False)
    ] * 3
    first, second, third = (one["for_s"] for one in told)
    assert first >= 0.2
    assert min(second - first, third - second) >= 0.4


def test_a_host_that_has_reached_the_store_says_that_it_is_away(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshmend.launch.member.AWAY_S", 0.2)
    told: list[dict[str, Any]] = []
    member = lone_host(serving.port, on_message=told.append)
    member.join(7000)
    assert not any("for_s" in one for one in told)
    serving.stop()
    until = time.monotonic() + 10
    while not any("for_s" in one for one in told) and time.monotonic() < until:
        time.sleep(0.02)
    member.close()
    (away,) = [one for one in told if "for_s" in one]
    assert away["reached"]


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"Port {port} of 127.0.0.1 is in use.*--listen 127.0.0.1:{port + 1}"):
            Store(Membership(), job=JOB, secret=SECRET, port=port)


def test_beyond_this_machine_a_secret_is_asked_for() -> None:
    with pytest.raises(LaunchError, match=r"would listen on 0\.0\.0\.0 without a secret.*openssl rand -hex 32"):
        Store(Membership(), job=JOB, secret="", address="0.0.0.0")  # noqa: S104  # which is refused


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        MAGIC,
        MAGIC + b"\xff" * 200,
        b"",
        bytes(40_000),
        MAGIC + b"\0\0\0\2" + bytes(32) + b"{}",
    ],
)
def test_unauthenticated_connections_disturb_nobody(serving: Serving, data: bytes) -> None:
    first, _ = running(serving)
    outsider = socket.create_connection(("127.0.0.1", serving.port), timeout=5)
    with outsider, contextlib.suppress(OSError):
        outsider.sendall(data)
        outsider.shutdown(socket.SHUT_WR)
        while outsider.recv(1 << 16):
            pass
    assert first.wait_stopped(0.1) is None


def test_no_frame_can_be_repeated_left_out_or_sent_back() -> None:
    key, store, host = make_key(SECRET, JOB), make_nonce(), make_nonce()
    channel = AuthenticatedChannel(key, store, host, to="a host", of="the store")
    frames = [channel.pack({"type": str(i)}) for i in range(3)]

    def ear() -> AuthenticatedChannel:
        return AuthenticatedChannel(key, host, store, to="the store", of="a host")

    listener = ear()
    assert [listener.unpack(frame)["type"] for frame in frames] == ["0", "1", "2"]
    for order in ([1], [0, 0], [0, 2]):
        listener = ear()
        for i in order[:-1]:
            listener.unpack(frames[i])
        with pytest.raises(MessageError, match="its secret or its job is another one"):
            listener.unpack(frames[order[-1]])
    with pytest.raises(MessageError):
        AuthenticatedChannel(key, store, host, to="a host", of="the store").unpack(frames[0])


@given(
    st.dictionaries(st.text(max_size=20), st.integers() | st.text(max_size=20)),
    st.binary(max_size=40),
    st.lists(st.integers(1, 9)),
)
def test_a_frame_comes_through_in_any_pieces(message: dict[str, Any], after: bytes, sizes: list[int]) -> None:
    frame = pack("hello", message, make_key(SECRET, JOB), bytes(32))
    stream, sizes = frame + after, [*sizes, len(frame)]

    def receive(size: int) -> bytes:
        nonlocal stream
        piece = stream[: min(size, sizes[0] if len(sizes) == 1 else sizes.pop(0))]
        stream = stream[len(piece) :]
        return piece

    assert read_frame(receive, 1 << 20) == frame
    assert stream == after
    assert unpack("hello", frame, make_key(SECRET, JOB), bytes(32)) == message


@given(st.binary(max_size=200), st.booleans())
def test_bytes_that_are_no_frame_are_a_message_error_or_too_few(data: bytes, magic: bool) -> None:
    pieces = iter([MAGIC + data if magic else data, b""])
    with pytest.raises((MessageError, ConnectionError)):
        unpack("hello", read_frame(lambda _: next(pieces, b""), 64), make_key(SECRET, JOB), bytes(32))


@pytest.mark.parametrize("body", [b"[" * (MAX_HELLO_BYTES - 10), b"[]", b"NaN", b'{"a": NaN}', b"\xff"])
def test_a_body_under_the_right_tag_that_is_no_object_is_malformed(body: bytes) -> None:
    frame = _seal("hello", body, make_key(SECRET, JOB), bytes(32))
    with pytest.raises(MessageError, match="malformed"):
        unpack("hello", frame, make_key(SECRET, JOB), bytes(32))


def test_a_workers_key_is_of_one_secret_and_one_purpose_and_no_key_of_messages() -> None:
    keys = [derive_key(SECRET, "programs"), derive_key(SECRET, "others"), derive_key("another", "programs")]
    assert len({*keys, make_key(SECRET, JOB), make_key(SECRET, "programs")}) == 5
    assert derive_key(SECRET, "programs") == keys[0]


def test_a_message_that_makes_no_sense_costs_its_sender_the_connection(serving: Serving) -> None:
    with connected(serving) as (connection, channel):
        connection.sendall(channel.pack({"type": "join"}))  # without a port
        said: list[dict[str, Any]] = []
        while not said or "refused" not in said[-1]:
            frame = read_frame(connection.recv, MAX_HELLO_BYTES)
            said.append(json.loads(frame[HEADER_BYTES:]))
        assert said[-1] == {"refused": "malformed"}
        assert connection.recv(1) == b""
    serving.wait_for("refused: its message was malformed")


def test_the_job_ends_for_all_at_the_same_time(serving: Serving) -> None:
    members = running(serving)
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(member.finish, 10) for member in members]
        assert [end.result(timeout=10)["why"] for end in ends] == ["all hosts have finished"] * 2
    with pytest.raises(LaunchError, match="The job is over: all hosts have finished"):
        members[0].join(7000)
