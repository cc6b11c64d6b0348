"""The rendezvous: everybody of the job is counted, and nobody else."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_engine.job.rendezvous_cases import KEY, PATIENCE_S, SECRET, Hosting, answer, hello, visitor
from meshmend.errors import RestartError
from meshmend.jax.job import Launch
from meshmend.jax.job.rendezvous import rendezvous
from meshmend.jax.job.rendezvous_host import Fact
from meshmend.launch import messages
from meshmend.launch.messages import MAGIC, MAX_HELLO_BYTES, MessageError
from meshmend.launch.processes import free_port

WRONG_NUMBERS: tuple[Any, ...] = (0, 4, -1, True, 1.0, "1", None, [])
WRONG_NONCES: tuple[Any, ...] = ("", "zz", "00" * 31, 7)
TEXT = st.text('a\0\n"é→', max_size=5)


def hold(n: int, facts: list[Fact], secret: str = "") -> list[list[Fact]]:
    port = free_port()
    launches = [Launch(f"127.0.0.1:{port}", n, process, secret=secret) for process in range(n)]
    with ThreadPoolExecutor(n) as pool:
        calls = [
            pool.submit(rendezvous, launch, fact, timeout_s=PATIENCE_S)
            for launch, fact in zip(launches, facts, strict=True)
        ]
        return [call.result() for call in calls]


@pytest.mark.parametrize("secret", ["", SECRET])
def test_all_processes_learn_everybodys_facts_in_the_same_order(secret: str) -> None:
    seen = hold(4, [{"host": host} for host in (3, 1, 0, 2)], secret)
    assert all(one == seen[0] for one in seen)
    assert [fact["host"] for fact in seen[0]] == [3, 1, 0, 2]
    assert {fact["address"] for fact in seen[0]} == {"127.0.0.1"}
    assert hold(1, [{"host": 5}], secret) == [[{"host": 5, "address": "127.0.0.1"}]]


def test_a_rendezvous_that_someone_misses_ends_with_an_error() -> None:
    launch = Launch(f"127.0.0.1:{free_port()}", 3, 0)
    with pytest.raises(
        RestartError, match=r"Process 0 of 3 could not complete .* within 0.2 s: .* 1 of 3 .* missing: 1, 2"
    ):
        rendezvous(launch, {}, timeout_s=0.2)
    with pytest.raises(RestartError, match=r"Process 1 of 3 could not complete .* time is up; .*Connection refused"):
        rendezvous(Launch(launch.coordinator, 3, 1), {}, timeout_s=0.2)


def test_a_port_that_is_still_taken_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as earlier, ThreadPoolExecutor(2) as pool:
        coordinator = f"127.0.0.1:{earlier.getsockname()[1]}"
        host = pool.submit(rendezvous, Launch(coordinator, 2, 0), {"host": 0}, timeout_s=PATIENCE_S)
        time.sleep(0.2)
        earlier.close()
        guest = pool.submit(rendezvous, Launch(coordinator, 2, 1), {"host": 1}, timeout_s=PATIENCE_S)
        assert host.result() == guest.result()


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\n", b"[]\n", b"{}\n", b"", None])
def test_a_stray_connection_does_not_end_a_rendezvous(words: bytes | None) -> None:
    coordinator = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as stray:
        host = pool.submit(rendezvous, Launch(coordinator, 2, 0), {"host": 0}, timeout_s=PATIENCE_S)
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            with contextlib.suppress(ConnectionRefusedError):
                connection = stray.enter_context(socket.create_connection(("127.0.0.1", int(coordinator[10:]))))
                break
        if words is None:
            connection.close()
        else:
            connection.sendall(words)
        guest = pool.submit(rendezvous, Launch(coordinator, 2, 1), {"host": 1}, timeout_s=PATIENCE_S)
        assert [fact["host"] for fact in host.result()] == [0, 1]
        assert guest.result() == host.result()


def test_facts_that_are_too_long_are_refused_by_their_own_process() -> None:
    with Hosting(2) as hosting, pytest.raises(RestartError, match="has 20124 bytes, expected at most 16384"):
        rendezvous(hosting.launch(1), {"error": "x" * 20_000}, timeout_s=PATIENCE_S)


def test_a_rendezvous_without_a_secret_on_a_network_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str, port: int, until: float) -> socket.socket:
        assert address == ""
        raise OSError("no traffic in tests")

    def host(name: str, secret: str = "") -> None:
        with pytest.raises(RestartError, match="no traffic in tests"):
            rendezvous(Launch(f"{name}:{free_port()}", 2, 0, secret=secret), {}, timeout_s=1.0)

    monkeypatch.setattr("meshmend.jax.job.rendezvous._listen", refuse)
    with pytest.warns(UserWarning, match="open to the network and has no secret.* Set MESHMEND_SECRET"):
        host("tpu-003")
    host("tpu-003", SECRET)
    monkeypatch.setattr("meshmend.jax.job.rendezvous._listen", lambda address, *_: refuse("", *_) if address else None)
    host("127.0.0.1")
    host("localhost")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (lambda nonce: hello(1, nonce), "welcome"),
        (lambda nonce: hello(1, bytes(32)), "key"),
        (lambda nonce: hello(1, nonce, key=messages.make_key("sardine", "job")), "key"),
        (lambda nonce: hello(1, nonce, key=messages.make_key(SECRET, "other")), "key"),
        (lambda nonce: messages.pack("welcome", {}, KEY, nonce), "key"),
        (lambda nonce: hello(1, nonce, n=5), "size"),
        *((partial(hello, wrong), "process") for wrong in WRONG_NUMBERS),
        *((partial(hello, 1, nonce=wrong), "malformed") for wrong in WRONG_NONCES),
        (lambda nonce: hello(1, nonce, fact=[]), "malformed"),
        (lambda nonce: hello(1, nonce, fact={"x": float("nan")}), "malformed"),
        (lambda nonce: messages.pack("hello", [], KEY, nonce), "malformed"),
        (lambda nonce: hello(1, nonce) + b"x", "malformed"),
        (lambda nonce: MAGIC + struct.pack(">I", MAX_HELLO_BYTES + 1), "malformed"),
        (lambda nonce: MAGIC + b"\xff" * 4, "malformed"),
        (lambda nonce: b"GET / HTTP/1.1\r\n\r\n", "malformed"),
        (lambda nonce: b"[]\n", "malformed"),
    ],
)
def test_a_visitor_is_welcome_or_hears_why_not(words: Callable[[bytes], bytes], code: str) -> None:
    with Hosting(4) as hosting, visitor(hosting.port) as (connection, nonce):
        connection.sendall(words(nonce))
        assert answer(connection) == code
        # The host answers before it counts.
        hosting.until_true(lambda: len(hosting.host.counted) + hosting.host.turned_away.total() == 1)
        assert set(hosting.host.counted) == ({1} if code == "welcome" else set())


def test_deeply_nested_json_under_the_right_tag_is_malformed() -> None:
    body = b"[" * (MAX_HELLO_BYTES - 10)
    with Hosting(4) as hosting, visitor(hosting.port) as (connection, nonce):
        tag = messages._tag("hello", body, KEY, nonce)
        connection.sendall(MAGIC + struct.pack(">I", len(body)) + tag + body)
        assert answer(connection) == "malformed"


def test_a_counted_process_that_goes_away_ends_the_rendezvous_at_once() -> None:
    with Hosting(4, timeout_s=1e6) as hosting:
        waiting = hosting.join(2)
        hosting.until_true(lambda: 2 in hosting.host.counted)
        with visitor(hosting.port) as (connection, nonce):
            connection.sendall(hello(1, nonce))
            assert answer(connection) == "welcome"
        with pytest.raises(ConnectionError, match=r"process 1 went away; 3 of 4 processes are here, missing: 3"):
            hosting.result.result()
        with pytest.raises(RestartError, match="process 0 went away"):
            waiting.result()


def test_only_the_first_process_of_a_number_is_counted() -> None:
    with Hosting(3) as hosting:
        first = hosting.join(1)
        hosting.until_true(lambda: 1 in hosting.host.counted)
        with visitor(hosting.port) as (connection, nonce):
            connection.sendall(hello(1, nonce, n=3))
            assert answer(connection) == "taken"
        second = hosting.join(2)
        assert [fact["host"] for fact in first.result()] == [0, 1, 2]
        assert second.result() == first.result()


@pytest.mark.parametrize("others", [{"secret": "sardine"}, {"job": "another"}, {"secret": ""}])
def test_a_process_of_another_job_or_secret_is_not_counted_and_both_sides_say_why(others: dict[str, str]) -> None:
    with Hosting(2) as hosting:
        with pytest.raises(RestartError, match=r"rejected this process: its secret or its job is another one"):
            rendezvous(hosting.launch(1, **others), {"host": 9}, timeout_s=2.0)
        assert set(hosting.host.turned_away) == {"key"}
        assert "the last one, from 127.0.0.1: its secret or its job is another one" in hosting.host.describe()
        assert [fact["host"] for fact in hosting.join(1).result()] == [0, 1]


@pytest.mark.parametrize("first", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 3, messages.make_challenge(bytes(32))])
def test_a_visitor_does_not_trust_a_host_that_has_no_key(first: bytes) -> None:
    """Whoever listens on the port of process 0 cannot hand this process a false list of hosts."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        asked = threading.Event()

        def impersonate() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    asked.set()
                    with connection, contextlib.suppress(OSError):
                        connection.sendall(first)
                        stolen = messages.make_key("", "job")
                        everybody = {"everybody": [{"host": 0}, {"host": 1}]}
                        connection.sendall(messages.pack("welcome", {}, stolen, bytes(32)))
                        connection.sendall(messages.pack("everybody", everybody, stolen, bytes(32)))

        thread = threading.Thread(target=impersonate)
        thread.start()
        launch = Launch(f"127.0.0.1:{server.getsockname()[1]}", 2, 1, secret=SECRET)
        with pytest.raises(RestartError, match="could not complete the rendezvous"):
            rendezvous(launch, {}, timeout_s=0.5)
        assert asked.is_set()
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@given(st.dictionaries(TEXT, st.integers() | TEXT), st.binary(max_size=40), st.lists(st.integers(1, 9)))
def test_a_frame_comes_through_in_any_pieces(message: dict[str, Any], after: bytes, sizes: list[int]) -> None:
    frame = messages.pack("hello", message, KEY, bytes(32))
    stream, sizes = frame + after, [*sizes, len(frame)]

    def receive(size: int) -> bytes:
        nonlocal stream
        piece = stream[: min(size, sizes[0] if len(sizes) == 1 else sizes.pop(0))]
        stream = stream[len(piece) :]
        return piece

    assert messages.read_frame(receive, 1 << 20) == frame
    assert stream == after
    assert messages.unpack("hello", frame, KEY, bytes(32)) == message


@given(st.binary(max_size=200), st.booleans())
def test_bytes_that_are_no_frame_are_a_message_error_or_too_few(data: bytes, magic: bool) -> None:
    data = MAGIC + data if magic else data
    pieces = iter([data, b""])
    with pytest.raises((MessageError, ConnectionError)):
        messages.unpack("hello", messages.read_frame(lambda _: next(pieces, b""), 64), KEY, bytes(32))
