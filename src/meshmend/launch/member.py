"""A host's connection to the store: a thread that keeps it up, and what the host's agent asks of it.

The agent must not wait for the network while its worker trains, so a thread reads what the store says and another sends
the heartbeats. A connection that breaks is made again, for as long as it takes, and the worker continues meanwhile.

Only what the store has signed can end a host. Whatever else is said at the store's address, or not said, is a reason
to try again: the store may be crowded, or away, and somebody else may be in its place.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from meshmend.errors import LaunchError
from meshmend.launch.addresses import split_address
from meshmend.launch.membership import BEAT_S, SILENT_S, Message, RefusedError, address_elsewhere
from meshmend.launch.messages import (
    CHALLENGE_BYTES,
    HELLO,
    MAX_HELLO_BYTES,
    AuthenticatedChannel,
    MessageError,
    make_key,
    make_nonce,
    pack,
    pack_hosts,
    read_challenge,
    read_frame,
)

AGAIN_S, LONGEST_AGAIN_S = 0.5, 5.0
"""Interval between attempts to reach the store, at first and at most."""
FOREIGN = ("key", "malformed")
"""Answers, signed by nobody, of a store that is not this host's: wrong at the start, and nothing to wait for."""
AWAY_S, STILL_AWAY_S = 3.0, 15.0
"""When a host says that it cannot reach the store, and the interval at which it says so again."""
REFUSED_FOR_S = 15.0
"""How long a host that is refused for now tries again."""


@dataclass(frozen=True)
class Assignment:
    """A round as one host sees it: who runs, and which process this host's worker is."""

    number: int
    name: str
    hosts: tuple[int, ...]
    process: int
    coordinator: str
    cut_off: tuple[int, ...] = ()
    """Hosts that are there, but that no cable joins to these: they wait."""
    before: int = 0
    """Number of the job's round before this one."""
    address: str = ""
    """Under which the other hosts reach this one."""


OVER = "The job is over: "
"""How the error of a host begins whose job has ended without it."""


def pauses(longest_s: float) -> Iterator[float]:
    """Yield how long to wait before each attempt to reach the store: ever longer, and not the same for all hosts."""
    pause_s = AGAIN_S
    while True:
        yield pause_s * random.uniform(0.5, 1.5)  # noqa: S311  # nobody gains by guessing it
        pause_s = min(2 * pause_s, longest_s)


class Member:
    """A host's membership in a job. `close` it at the end.

    `reach_s` is how long the store may be unreachable at the start, before this host has ever reached it.
    `on_message` is called with each message of the store, except its heartbeats, from the thread that reads them, and
    with {"type": "unreachable", "why": …} when it cannot be reached; with "where", "for_s" and "reached" as well when
    that lasts.
    """

    def __init__(
        self,
        store: str,
        *,
        host: int,
        hosts: tuple[int, int],
        machine: str,
        job: str,
        secret: str,
        address: str | None = None,
        reach_s: float = 60.0,
        silent_s: float = SILENT_S,
        on_message: Callable[[Message], None] = lambda _: None,
    ) -> None:
        self._store = split_address(store)
        self._where = store
        self._hello: Message = {"host": host, "hosts": hosts, "machine": machine}
        self._address = (address or "").strip("[]")
        self._reached_at = ""
        """Under which this host is reached: what was given, or the address from which it reaches the store."""
        self._key = make_key(secret, job)
        self._on_message = on_message
        self._reach_s = reach_s
        self._silent_s = 3 * max(silent_s, BEAT_S)  # a lost store does no harm, so there is no hurry to give it up
        self._longest_s = min(LONGEST_AGAIN_S, silent_s / 3)  # so that no host is missed when the store is back
        self._changed = threading.Condition()
        self._channel: AuthenticatedChannel | None = None
        self._connection: socket.socket | None = None
        self._assignment: Assignment | None = None
        self._number = 0
        self._asked: Message | None = None
        """What was said last and has to be said again to a store that has been replaced."""
        self._stop: Message | None = None
        self._over: Message | None = None
        self._error: LaunchError | None = None
        self._closed = threading.Event()
        self._reached = False
        """Whether the store has ever admitted this host."""
        self._challenged = self._admitted = False
        """Whether a store has challenged, and admitted, it in the last connection."""
        self._why = ""
        """Why the store could not be reached the last time."""
        self._reader = threading.Thread(target=self._run, name="meshmend-store", daemon=True)
        self._reader.start()
        self._beater = threading.Thread(target=self._beat, name="meshmend-beat", daemon=True)
        self._beater.start()

    def join(self, port: int, why: str = "") -> Assignment:
        """Ask for the next round, and return it when it starts. Raises `LaunchError`, also when the job is over."""
        with self._changed:
            self._assignment = self._stop = None
            self._asked = {"type": "join", "port": port, "why": why}
            self._send_message(self._asked)
            while self._assignment is None:
                self._check()
                self._changed.wait(BEAT_S)
            return self._assignment

    @property
    def stopped(self) -> Message | None:
        """Why the round has ended for this host; None while it runs."""
        with self._changed:
            if self._error is not None:
                return {"why": str(self._error), "lost": None}
            return self._stop or self._over

    @property
    def over(self) -> Message | None:
        """How the job has ended, if it has."""
        with self._changed:
            return self._over

    def wait_stopped(self, timeout_s: float) -> Message | None:
        """Return why the round has ended, as soon as it has; None if it still runs then."""
        until = time.monotonic() + timeout_s
        with self._changed:
            while (stopped := self.stopped) is None and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            return stopped

    def finish(self, timeout_s: float) -> Message:
        """Report that this host's worker has finished; return how the job ended when all others have, too."""
        with self._changed:
            self._asked = {"type": "done"}
            self._send_message(self._asked)
            until = time.monotonic() + timeout_s
            while self._over is None and time.monotonic() < until:
                self._check()
                self._changed.wait(BEAT_S)
            return self._over or {"ok": True, "why": f"the others had not finished after {timeout_s:g} s"}

    def raised(self, why: str) -> None:
        """Report that this host's worker has raised an error: if those of all hosts do, the job ends with it."""
        with self._changed:
            self._send_message({"type": "raised", "why": why[:2000]})

    def fail(self, why: str) -> None:
        """Report that this host gives up, which ends the job."""
        with self._changed:
            self._send_message({"type": "failed", "why": why[:2000]})

    def send(self, message: Message) -> bool:
        """Send something to the store, if it is there; return whether it is."""
        with self._changed:
            return self._admitted and self._send_message(message)

    def close(self) -> None:
        """Leave the job."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
            connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._reader.join(5)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._over is not None:
            raise LaunchError(f"{OVER}{self._over['why']}.")

    def _send_message(self, message: Message) -> bool:
        """Send to the store, if it can be reached; otherwise the next connection repeats what matters."""
        if self._connection is not None and self._channel is not None:
            with contextlib.suppress(OSError):
                self._connection.sendall(self._channel.pack(message))
                return True
        return False

    def _beat(self) -> None:
        """Send heartbeats, and say so when the store is away: the thread that reads may wait for an answer."""
        seen, due = time.monotonic(), AWAY_S
        while self._goes_on():
            with self._changed:
                self._send_message({"type": "beat"})
                self._changed.wait(BEAT_S)
                if self._connection is not None and self._admitted:
                    seen, due = time.monotonic(), AWAY_S
                facts = {"why": self._why or "no answer", "where": self._where, "reached": self._reached}
            if (away_s := time.monotonic() - seen) >= due and self._goes_on():
                due = away_s + STILL_AWAY_S
                self._on_message({"type": "unreachable", "for_s": away_s, **facts})

    def _run(self) -> None:
        """Keep a connection to the store, and read what it says."""
        began, refused_at, again = time.monotonic(), None, pauses(self._longest_s)
        while self._goes_on():
            why, self._challenged, self._admitted = "the connection was closed", False, False
            try:
                with socket.create_connection(self._store, timeout=self._silent_s) as connection:
                    self._converse(connection)
            except RefusedError as error:
                why = str(error)
                refused_at = refused_at or time.monotonic()
                if not error.retryable or time.monotonic() > refused_at + REFUSED_FOR_S:
                    self._fail(f"The store at {self._where} refuses this host: {error}.")
            except MessageError as error:
                why = f"what answers there refuses this host: {error}"
                self._challenged = error.code not in FOREIGN
            except (OSError, ValueError) as error:
                why = str(error)
            if self._challenged:
                began = time.monotonic()  # it is there, and has too much to do
            if self._admitted:
                refused_at, again = None, pauses(self._longest_s)
            if not self._reached and refused_at is None and time.monotonic() > began + self._reach_s:
                self._fail(
                    f"No store answers at {self._where} ({why}). Start one with `meshmend store` on a machine that "
                    "does not die with a host, and give its address as --store."
                )
            if self._goes_on():
                if why != self._why:
                    self._why = why
                    self._on_message({"type": "unreachable", "why": why})
                self._closed.wait(next(again))

    def _goes_on(self) -> bool:
        with self._changed:
            return not self._closed.is_set() and self._over is None and self._error is None

    def _fail(self, message: str) -> None:
        with self._changed:
            self._error = LaunchError(message)
            self._changed.notify_all()

    def _converse(self, connection: socket.socket) -> None:
        """Introduce this host, and take messages until the connection ends."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(self._silent_s)
        challenge = bytearray()
        while len(challenge) < CHALLENGE_BYTES:
            more = connection.recv(CHALLENGE_BYTES - len(challenge))
            if not more:
                raise ConnectionError("whoever listens there closed the connection")
            challenge += more
        try:
            theirs = read_challenge(bytes(challenge))
        except MessageError:
            raise ConnectionError("what listens there is not a store of this version of meshmend") from None
        self._challenged = True
        mine = make_nonce()
        with self._changed:
            self._reached_at = self._address or str(connection.getsockname()[0])
            assigned = self._assignment if self._stop is None else None
            running: Message | None = None
            if assigned is not None:
                running = {"number": assigned.number, "name": assigned.name, "hosts": pack_hosts(assigned.hosts)}
            hello = {**self._hello, "address": self._reached_at, "nonce": mine.hex(), "running": running}
            hello["number"] = self._number
            connection.sendall(pack(HELLO, hello, self._key, theirs, limit=MAX_HELLO_BYTES))
            self._channel = AuthenticatedChannel(self._key, mine, theirs, to="the store", of="a host")
            self._connection = connection
            if self._asked is not None:
                self._send_message(self._asked)
        try:
            while True:
                self._take(self._channel.unpack(read_frame(connection.recv, MAX_HELLO_BYTES)))
                self._reached = self._admitted = True
                self._why = ""
        finally:
            with self._changed:
                self._connection = self._channel = None

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "refused":
            raise RefusedError(str(message["why"]), retryable=bool(message["retryable"]))
        with self._changed:
            if kind == "round":
                hosts, cut_off = message["hosts"], message["cut_off"]
                process = hosts.index(self._hello["host"])
                self._stop = self._asked = None
                self._number = int(message["number"])
                name, coordinator, before = (message[fact] for fact in ("name", "coordinator", "before"))
                address = address_elsewhere(self._reached_at, message.get("store_at", ""))
                self._assignment = Assignment(self._number, name, hosts, process, coordinator, cut_off, before, address)
            elif kind in ("stop", "dropped"):
                self._stop = {"why": "the store had not heard from this host", "lost": None, **message}
            elif kind == "over":
                self._over = message
            if kind != "beat":
                self._changed.notify_all()
        if kind != "beat":
            self._on_message(message)
