"""A real store in this process, and members that join it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from meshmend.launch.member import Assignment, Member
from meshmend.launch.membership import Membership
from meshmend.launch.messages import (
    CHALLENGE_BYTES,
    AuthenticatedChannel,
    make_key,
    make_nonce,
    pack,
    read_challenge,
)
from meshmend.launch.store import Store

SECRET, JOB, MACHINE = "swordfish", "job", "4x4 in hosts of 2x2"


def lone_host(port: int, **settings: Any) -> Member:
    """Return the only host of a job."""
    return Member(f"127.0.0.1:{port}", host=0, hosts=(1, 1), machine="", job=JOB, secret=SECRET, **settings)


class Serving:
    """A store in a thread, and its hosts. Leaving the `with` block ends all of them."""

    def __init__(self, port: int = 0, address: str = "127.0.0.1", folder: Path | None = None, **settings: Any) -> None:
        self.lines: list[str] = []
        self.received: dict[int, list[str]] = {}
        """What each host was told."""
        self._members: list[Member] = []
        self._stop = threading.Event()
        where: dict[str, Any] = {"address": address, "port": port, "folder": folder}
        self.store = Store(Membership(**settings), job=JOB, secret=SECRET, log=self.lines.append, **where)
        self.port = self.store.port
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        self.over: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members:
            member._closed.set()
        for member in self._members:
            member.close()
        self.stop()

    def _serve(self) -> None:
        with self.store:
            self.over = self.store.serve(self._stop.is_set)

    @contextlib.contextmanager
    def paused(self, seconds: float) -> Iterator[None]:
        """Have the store's thread sleep for so long, between two looks at its sockets, and wait for that."""
        serve, begun, ended = self.store._serve_once, threading.Event(), threading.Event()

        def sleep(now: float) -> None:
            self.store._serve_once = serve  # type: ignore[method-assign]
            begun.set()
            time.sleep(seconds)
            ended.set()
            serve(now)

        self.store._serve_once = sleep  # type: ignore[method-assign]
        assert begun.wait(10)
        yield
        assert ended.wait(seconds + 10)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def member(self, host: int, at: str = "127.0.0.1", **more: Any) -> Member:
        received = self.received[host] = []
        settings = {"machine": MACHINE, "hosts": (1, 2), "secret": SECRET, "job": JOB, **more}
        settings |= {"on_message": lambda message: received.append(message["type"])}
        self._members.append(Member(f"{at}:{self.port}", host=host, **settings))
        return self._members[-1]

    def wait_for(self, words: str) -> None:
        until = time.monotonic() + 10
        while not any(words in line for line in self.lines):
            assert time.monotonic() < until, self.lines
            time.sleep(0.01)


def running(serving: Serving) -> tuple[Member, Member]:
    """Return two hosts in a round."""
    members = serving.member(0), serving.member(1)
    places = joined(*members)
    assert [assigned.process for assigned in places] == [0, 1]
    assert {assigned.coordinator for assigned in places} == {"127.0.0.1:7000"}
    return members


@contextlib.contextmanager
def connected(serving: Serving) -> Iterator[tuple[socket.socket, AuthenticatedChannel]]:
    """Speak as host 0, frame by frame."""
    key, mine = make_key(SECRET, JOB), make_nonce()
    with socket.create_connection(("127.0.0.1", serving.port), timeout=5) as connection:
        theirs = read_challenge(connection.recv(CHALLENGE_BYTES, socket.MSG_WAITALL))
        hello = {"host": 0, "hosts": [1, 2], "machine": MACHINE, "nonce": mine.hex()}
        connection.sendall(pack("hello to a store", hello, key, theirs))
        yield connection, AuthenticatedChannel(key, mine, theirs, to="the store", of="a host")


def joined(*members: Member) -> list[Assignment]:
    """Have hosts ask for a round at the same time, and return it."""
    with ThreadPoolExecutor(len(members)) as pool:
        asked: list[Future[Assignment]] = [pool.submit(member.join, 7000 + i) for i, member in enumerate(members)]
        return [future.result(timeout=20) for future in asked]
