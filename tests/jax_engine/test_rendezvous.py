"""The rendezvous: everybody of the job is counted, nobody else, and no visitor can end it or hold it up."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.errors import RestartError
from meshmend.jax.restart import Launch, messages, rendezvous_host
from meshmend.jax.restart.meet import free_port, meet
from meshmend.jax.restart.messages import MAGIC, MAX_HELLO_BYTES, MessageError
from meshmend.jax.restart.rendezvous_host import Fact, RendezvousHost

SECRET = "swordfish"  # noqa: S105  # of these tests
KEY = messages.make_key(SECRET, "job")
TEXT = st.text('a\0\n"é→', max_size=5)
PATIENCE_S = 60.0
"""Far more than anything here takes, for machines that are busy with something else."""


def rendezvous(n: int, facts: list[Fact], secret: str = "") -> list[list[Fact]]:
    port = free_port()
    launches = [Launch(f"127.0.0.1:{port}", n, process, secret=secret) for process in range(n)]
    with ThreadPoolExecutor(n) as pool:
        calls = [
            pool.submit(meet, launch, fact, timeout_s=PATIENCE_S) for launch, fact in zip(launches, facts, strict=True)
        ]
        return [call.result() for call in calls]


@pytest.mark.parametrize("secret", ["", SECRET])
def test_all_processes_learn_everybodys_facts_in_the_same_order(secret: str) -> None:
    seen = rendezvous(4, [{"host": host} for host in (3, 1, 0, 2)], secret)
    assert all(one == seen[0] for one in seen)
    assert [fact["host"] for fact in seen[0]] == [3, 1, 0, 2]
    assert {fact["address"] for fact in seen[0]} == {"127.0.0.1"}
    assert rendezvous(1, [{"host": 5}], secret) == [[{"host": 5, "address": "127.0.0.1"}]]


def test_a_rendezvous_that_someone_misses_ends_with_an_error() -> None:
    launch = Launch(f"127.0.0.1:{free_port()}", 3, 0)
    with pytest.raises(RestartError, match=r"Process 0 of 3 did not meet .* within 0.2 s: .* 1 of 3 .* missing: 1, 2"):
        meet(launch, {}, timeout_s=0.2)
    with pytest.raises(RestartError, match=r"Process 1 of 3 did not meet .* time is up; .*Connection refused"):
        meet(Launch(launch.coordinator, 3, 1), {}, timeout_s=0.2)


def test_a_port_that_is_still_taken_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as earlier, ThreadPoolExecutor(2) as pool:
        coordinator = f"127.0.0.1:{earlier.getsockname()[1]}"
        host = pool.submit(meet, Launch(coordinator, 2, 0), {"host": 0}, timeout_s=PATIENCE_S)
        time.sleep(0.2)
        earlier.close()
        guest = pool.submit(meet, Launch(coordinator, 2, 1), {"host": 1}, timeout_s=PATIENCE_S)
        assert host.result() == guest.result()


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\n", b"[]\n", b"{}\n", b"", None])
def test_a_stray_connection_does_not_end_a_rendezvous(words: bytes | None) -> None:
    coordinator = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as stray:
        host = pool.submit(meet, Launch(coordinator, 2, 0), {"host": 0}, timeout_s=PATIENCE_S)
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            with contextlib.suppress(ConnectionRefusedError):
                connection = stray.enter_context(socket.create_connection(("127.0.0.1", int(coordinator[10:]))))
                break
        if words is None:
            connection.close()
        else:
            connection.sendall(words)
        guest = pool.submit(meet, Launch(coordinator, 2, 1), {"host": 1}, timeout_s=PATIENCE_S)
        assert [fact["host"] for fact in host.result()] == [0, 1]
        assert guest.result() == host.result()


def test_facts_that_are_too_long_are_refused_by_their_own_process() -> None:
    with Hosting(2) as hosting, pytest.raises(RestartError, match="has 20124 bytes, expected at most 16384"):
        meet(hosting.launch(1), {"error": "x" * 20_000}, timeout_s=PATIENCE_S)


def test_a_rendezvous_without_a_secret_on_a_network_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str, port: int, until: float) -> socket.socket:
        assert address == ""
        raise OSError("no traffic in tests")

    def host(name: str, secret: str = "") -> None:
        with pytest.raises(RestartError, match="no traffic in tests"):
            meet(Launch(f"{name}:{free_port()}", 2, 0, secret=secret), {}, timeout_s=1.0)

    monkeypatch.setattr("meshmend.jax.restart.meet._listen", refuse)
    with pytest.warns(UserWarning, match="open to the network and has no secret.* Set MESHMEND_SECRET"):
        host("tpu-003")
    host("tpu-003", SECRET)
    monkeypatch.setattr("meshmend.jax.restart.meet._listen", lambda address, *_: refuse("", *_) if address else None)
    host("127.0.0.1")
    host("localhost")


class Hosting:
    """A rendezvous of `n` processes whose process 0 runs in a thread."""

    def __init__(self, n: int, *, visitor_s: float = PATIENCE_S, timeout_s: float = PATIENCE_S) -> None:
        server = socket.create_server(("127.0.0.1", 0))
        self.n, self.port = n, int(server.getsockname()[1])
        self.host = RendezvousHost(server, n, KEY, visitor_s=visitor_s)
        self.until = time.monotonic() + timeout_s
        self.pool = ThreadPoolExecutor(n)
        self.result = self.pool.submit(self._run)

    def _run(self) -> list[Fact]:
        with self.host:
            facts = {0: {"host": 0}, **self.host.gather(self.until)}
            everybody = [facts[process] for process in range(self.n)]
            self.host.tell(everybody, self.until)
            return everybody

    def launch(self, process: int, **others: Any) -> Launch:
        return Launch(f"127.0.0.1:{self.port}", self.n, process, **{"secret": SECRET, **others})

    def join(self, process: int) -> Future[list[Fact]]:
        return self.pool.submit(meet, self.launch(process), {"host": process}, timeout_s=PATIENCE_S)

    def until_true(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < until
            assert not self.result.done(), self.result.exception()
            time.sleep(0.01)

    def __enter__(self) -> Hosting:
        return self

    def __exit__(self, *_: object) -> None:
        # If it still waits, nobody is missing any more when the next visitor wakes it up.
        self.host.n_processes = 1
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()
        self.pool.shutdown()


def read_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        assert more, "closed"
        data += more
    return data


@contextlib.contextmanager
def visitor(port: int) -> Iterator[tuple[socket.socket, bytes]]:
    """A connection, and what it was challenged by."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        yield connection, messages.read_challenge(read_exactly(connection, messages.CHALLENGE_BYTES))


def hello(process: Any, challenge: bytes, /, *, n: Any = 4, key: bytes = KEY, **others: Any) -> bytes:
    body = {"n_processes": n, "process": process, "fact": {"host": "forged"}, "nonce": bytes(32).hex(), **others}
    return messages.pack("hello", body, key, challenge)


def answer(connection: socket.socket) -> str:
    """What the host says to a hello: "welcome", or why it turns the visitor away."""
    frame = messages.read_frame(connection.recv, MAX_HELLO_BYTES)
    try:
        messages.unpack("welcome", frame, KEY, bytes(32))
    except MessageError as error:
        return error.code
    return "welcome"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (lambda nonce: hello(1, nonce), "welcome"),
        (lambda nonce: hello(1, bytes(32)), "key"),
        (lambda nonce: hello(1, nonce, key=messages.make_key("sardine", "job")), "key"),
        (lambda nonce: hello(1, nonce, key=messages.make_key(SECRET, "other")), "key"),
        (lambda nonce: messages.pack("welcome", {}, KEY, nonce), "key"),
        (lambda nonce: hello(1, nonce, n=5), "size"),
        *((partial(hello, wrong), "process") for wrong in (0, 4, -1, True, 1.0, "1", None, [])),
        *((partial(hello, 1, nonce=wrong), "malformed") for wrong in ("", "zz", "00" * 31, 7)),
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
        with pytest.raises(RestartError, match=r"turned this process away: its secret or its job is another one"):
            meet(hosting.launch(1, **others), {"host": 9}, timeout_s=2.0)
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
        with pytest.raises(RestartError, match="did not meet the others"):
            meet(launch, {}, timeout_s=0.5)
        assert asked.is_set()
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_silent_visitors_are_dropped_one_by_one_and_hold_nobody_up() -> None:
    with Hosting(2, visitor_s=0.05) as hosting, contextlib.ExitStack() as silent:
        for _ in range(20):
            silent.enter_context(socket.create_connection(("127.0.0.1", hosting.port)))
        hosting.until_true(lambda: hosting.host.turned_away["slow"] == 20)
        hosting.host.visitor_s = PATIENCE_S
        assert [fact["host"] for fact in hosting.join(1).result()] == [0, 1]


def test_a_flood_of_silent_visitors_makes_room_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_host, "MAX_UNDECIDED", 16)
    with Hosting(2) as hosting, contextlib.ExitStack() as silent:
        for i in range(100):
            one = silent.enter_context(socket.create_connection(("127.0.0.1", hosting.port)))
            one.sendall(MAGIC[: i % 4])
        hosting.until_true(lambda: hosting.host.turned_away["full"] == 84)
        assert len(hosting.host._undecided) == 16
        assert [fact["host"] for fact in hosting.join(1).result()] == [0, 1]


class Attack:
    """Malformed visitors, each of another kind; none of them may be counted."""

    def __init__(self, port: int, seed: int) -> None:
        self.port = port
        self.rng = random.Random(seed)
        self.recorded: list[bytes] = []
        self.kept: list[socket.socket] = []
        self.kinds: dict[str, Callable[[bytes], bytes | None]] = {
            "silence": lambda _: b"",
            "reset": lambda _: None,
            "random bytes": lambda _: self.rng.randbytes(self.rng.randrange(1, 300)),
            "random bytes after the magic": lambda _: MAGIC + self.rng.randbytes(self.rng.randrange(300)),
            "half a message": lambda nonce: self._cut(hello(2, nonce)),
            "a huge length": lambda nonce: MAGIC + struct.pack(">I", self.rng.randrange(1 << 15, 1 << 32)) + bytes(400),
            "replay": self._replay,
            "wrong secret": lambda nonce: hello(2, nonce, key=messages.make_key(str(self.rng.random()), "job")),
            "wrong job": lambda nonce: hello(2, nonce, key=messages.make_key(SECRET, f"job{self.rng.randrange(9)}")),
            "a host twice": lambda nonce: hello(1, nonce),
            "wrong number": lambda nonce: hello(self.rng.choice([0, -1, 4, 10**40, True, 2.0, "2", None]), nonce),
            "wrong size": lambda nonce: hello(2, nonce, n=self.rng.choice([3, 5, "4", None, 10**40])),
            "wrong nonce": lambda nonce: hello(2, nonce, nonce=self.rng.choice(["", "0", "q" * 64, "00" * 33, 5])),
            "wrong fact": lambda nonce: hello(2, nonce, fact=self.rng.choice([None, [], "x", 3])),
            "another kind": lambda nonce: messages.pack(self.rng.choice(["welcome", "everybody"]), {}, KEY, nonce),
            "not JSON": self._not_json,
            "a flipped bit": self._flip,
            "a probe": lambda _: b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
        }

    def visit(self, kind: str) -> None:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)
        nonce = messages.read_challenge(read_exactly(connection, messages.CHALLENGE_BYTES))
        words = self.kinds[kind](nonce)
        if words is None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif words:
            # What the host has heard enough of it may answer by closing.
            with contextlib.suppress(ConnectionError):
                connection.sendall(words)
        if words is not None and self.rng.random() < 0.1:
            self.kept.append(connection)
        else:
            connection.close()
        if len(self.kept) > 60:
            self.kept.pop(self.rng.randrange(60)).close()

    def close(self) -> None:
        for connection in self.kept:
            connection.close()

    def _cut(self, words: bytes) -> bytes:
        return words[: self.rng.randrange(1, len(words))]

    def _replay(self, nonce: bytes) -> bytes:
        self.recorded.append(hello(2, nonce))
        words = self.rng.choice(self.recorded[:-1] or [hello(2, bytes(32))])
        del self.recorded[:-50]
        return words

    def _not_json(self, nonce: bytes) -> bytes:
        body = self.rng.choice(
            [b"[" * 16_000, b"NaN", b"[]", b"", self.rng.randbytes(40), b"1" * 9000, b'{"process":2']
        )
        return MAGIC + struct.pack(">I", len(body)) + messages._tag("hello", body, KEY, nonce) + body

    def _flip(self, nonce: bytes) -> bytes:
        words = bytearray(hello(2, nonce))
        words[self.rng.randrange(len(words))] ^= 1 << self.rng.randrange(8)
        return bytes(words)


@pytest.mark.parametrize("n", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_malformed_visitors_neither_end_a_rendezvous_nor_join_it(n: int) -> None:
    """Processes 1 and 2 come while strangers do, and process 3 after them all: just these four are counted."""
    files, threads = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    undecided = 0
    with Hosting(4, timeout_s=1e6) as hosting:
        attack = Attack(hosting.port, seed=n)
        first = hosting.join(1)
        hosting.until_true(lambda: 1 in hosting.host.counted)
        kinds = sorted(attack.kinds)
        for i in range(n):
            attack.visit(kinds[i % len(kinds)])
            undecided = max(undecided, len(hosting.host._undecided))
            assert threading.active_count() <= threads + 4  # this test's own
            assert set(hosting.host.counted) <= {1, 2}
            if i == n // 2:
                second = hosting.join(2)
        hosting.until_true(lambda: hosting.host.turned_away.total() + len(hosting.host._undecided) == n)
        hosting.until_true(lambda: 2 in hosting.host.counted)
        assert not first.done()
        third = hosting.join(3)
        expected = [0, 1, 2, 3]
        for one in (hosting.result, first, second, third):
            assert [fact["host"] for fact in one.result()] == expected
        attack.close()
    assert undecided <= rendezvous_host.MAX_UNDECIDED
    assert {"malformed", "key", "taken", "size", "process", "gone"} <= set(hosting.host.turned_away)
    assert len(list(Path("/proc/self/fd").iterdir())) <= files


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
