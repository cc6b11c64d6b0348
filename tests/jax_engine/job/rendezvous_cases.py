"""A rendezvous in a thread, visitors that speak its language byte by byte, and strangers who speak it badly."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from meshmend.jax.job import Launch
from meshmend.jax.job.rendezvous import rendezvous
from meshmend.jax.job.rendezvous_host import Fact, RendezvousHost
from meshmend.launch import messages
from meshmend.launch.messages import MAGIC, MAX_HELLO_BYTES, MessageError

SECRET = "swordfish"  # noqa: S105  # of these tests
KEY = messages.make_key(SECRET, "job")
PATIENCE_S = 60.0
"""Far more than anything here takes, for machines that are busy with something else."""


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
        return self.pool.submit(rendezvous, self.launch(process), {"host": process}, timeout_s=PATIENCE_S)

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
