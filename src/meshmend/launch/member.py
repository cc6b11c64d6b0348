"""A host's connection to the store: a thread that keeps it up, and what the host's agent asks of it.

The agent must not wait for the network while its worker trains, so a thread reads what the store says and another sends
the heartbeats. A connection that breaks is made again, for as long as it takes, and the worker continues meanwhile.
`Conversation` decides what this host says and what the store's answers mean. `Member` has the sockets and the threads.

Only what the store has signed can end a host. Whatever else is said at the store's address, or not said, is a reason
to try again: the store may be crowded, or away, and somebody else may be in its place.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

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
MOST_REFUSALS = 6
"""How often in a row a host may be refused for now: as many attempts take 5 to 16 s. No clock says so, since it also
counts the time that this host was frozen."""
GONE_S = 1800.0
"""How long a host that waits for a round looks for a store that it has reached before: long enough to start another one
on another machine. Where it never comes back, the job is over, or nobody will start it again."""
FAIL_S = 30.0
"""How long a host that gives up tries to tell the store."""


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


@dataclass
class Conversation:
    """What a host says to the store, and what it makes of the answers: a value, without sockets, threads or a clock.

    Tell it what happens to the connection and what the store says; it returns what is to be said.
    """

    host: int
    hosts: tuple[int, int]
    machine: str
    where: str
    """The store's address."""
    now: float
    """When this host begins to look for the store."""
    reach_s: float = 60.0
    silent_s: float = SILENT_S
    assignment: Assignment | None = None
    stop: Message | None = None
    """Why the round has ended."""
    over: Message | None = None
    """How the job has ended."""
    error: LaunchError | None = None
    """Why this host gives up."""
    reached_at: str = ""
    """The address under which this host is reached."""
    is_admitted: bool = False
    """Whether there is a connection in which the store has admitted this host."""
    why: str = ""
    """Why the store could not be reached the last time."""
    uniform: Callable[[float, float], float] = field(default=random.uniform, repr=False)
    _number: int = 0
    _asked: Message | None = None
    """What was said last and has to be said again to a store that has been replaced."""
    _raised: Message | None = None
    """What was said of this round's worker, and has to be said again as well."""
    _port: int = 0
    _reached: bool = False
    """Whether the store has ever admitted this host."""
    _is_challenged: bool = False
    """Whether a store has challenged it in this connection."""
    _n_refusals: int = 0

    def __post_init__(self) -> None:
        self._began = self._seen = self.now
        self._pause_s = AGAIN_S
        self._due_s = AWAY_S  # for the next message about it, after the store has been seen

    @property
    def goes_on(self) -> bool:
        """Whether there is still something to say to a store."""
        return self.over is None and self.error is None

    @property
    def stopped(self) -> Message | None:
        """Why the round has ended for this host; None while it runs."""
        if self.error is not None:
            return {"why": str(self.error), "lost": None}
        return self.stop or self.over

    def check(self) -> None:
        """Raise what has ended this host."""
        if self.error is not None:
            raise self.error
        if self.over is not None:
            raise LaunchError(f"{OVER}{self.over['why']}.")

    def greet(self, address: str) -> list[Message]:
        """Return what to say to a store that has challenged this host: a hello, and what it has to hear again."""
        self._is_challenged, self.reached_at = True, address
        assigned = self.assignment if self.stop is None else None
        running: Message | None = None
        if assigned is not None:
            running = {"number": assigned.number, "name": assigned.name, "hosts": assigned.hosts}
        hello: Message = {"host": self.host, "hosts": self.hosts, "machine": self.machine, "address": address}
        hello |= {"running": running, "number": self._number}
        return [hello, *(one for one in (self._raised, self._asked) if one is not None)]

    def hear(self, message: Message) -> None:
        """Take what the store says. Raises `RefusedError` if that is a refusal."""
        kind = message["type"]
        if kind == "refused":
            is_certain = bool(message.get("is_certain", True))
            raise RefusedError(str(message["why"]), retryable=bool(message["retryable"]), is_certain=is_certain)
        if kind == "round":
            hosts, cut_off = message["hosts"], message["cut_off"]
            process = hosts.index(self.host)
            self.stop = self._asked = self._raised = None
            self._number = int(message["number"])
            name, coordinator, before = (message[fact] for fact in ("name", "coordinator", "before"))
            address = address_elsewhere(self.reached_at, message.get("store_at", ""))
            self.assignment = Assignment(self._number, name, hosts, process, coordinator, cut_off, before, address)
        elif kind in ("stop", "dropped"):
            self.stop = {"why": "the store had not heard from this host", "lost": None, **message}
        elif kind == "over":
            self.over = message
        self._reached = self.is_admitted = True
        self.why = ""

    def lose(self, error: Exception, now: float) -> float:
        """Judge why the connection ended, or could not be made; return after how many seconds to try again."""
        why = str(error)
        if isinstance(error, RefusedError):
            self._n_refusals = self._n_refusals + 1 if error.is_certain else 1
            if not error.retryable or self._n_refusals > MOST_REFUSALS:
                self.error = LaunchError(f"The store at {self.where} refuses this host: {error}.")
        elif isinstance(error, MessageError):
            why = f"the server there refuses this host: {error}"
            self._is_challenged = error.code not in FOREIGN
        if self._is_challenged:
            self._began = now  # it is there, and has too much to do
        if self.is_admitted:
            self._n_refusals, self._pause_s = 0, AGAIN_S
        if not self._reached and now > self._began + self.reach_s:
            self.error = LaunchError(
                f"No store answers at {self.where} ({why}). Start one with `meshmend store` on a machine that "
                "does not die with a host, and give its address as --store."
            )
        self.why = why
        # Ever longer, not the same for all hosts, and so that no host is missed when the store is back.
        self._is_challenged = self.is_admitted = False
        pause_s, longest_s = self._pause_s, min(LONGEST_AGAIN_S, self.silent_s / 3)
        self._pause_s = min(2 * pause_s, longest_s)
        return pause_s * self.uniform(0.5, 1.5)

    def beat(self, now: float) -> Message | None:
        """Return a message for people if the store has been away for so long that they should know.

        If it stays away, a host that waits for it gives up.
        """
        if self.is_admitted:
            self._seen, self._due_s = now, AWAY_S
        away_s = now - self._seen
        if away_s > GONE_S and self._reached and self._asked is not None and self.goes_on:
            self.error = LaunchError(
                f"The store at {self.where} has been away for {GONE_S / 60:g} minutes ({self.why or 'no answer'}), and "
                "this host has no round to run. If the job is not over, start the store again, and then this host."
            )
        if away_s < self._due_s or not self.goes_on:
            return None
        self._due_s = away_s + STILL_AWAY_S
        facts = {"why": self.why or "no answer", "where": self.where, "reached": self._reached}
        return {"type": "unreachable", "for_s": away_s, **facts}

    def join(self, port: int, why: str = "") -> Message:
        """Ask for the next round."""
        self.assignment = self.stop = self._raised = None
        self._port = port
        return self._ask({"type": "join", "port": port, "why": why})

    def join_again(self) -> Message | None:
        """Ask for another round where the one that was asked for has ended already; return None where it has not."""
        return None if self.assignment is None or self.stop is None else self.join(self._port)

    def raised(self, why: str) -> Message:
        """Report that this host's worker has raised an error."""
        self._raised = {"type": "raised", "why": why[:2000]}
        return self._raised

    def fail(self, why: str) -> Message:
        """Report that this host gives up."""
        return self._ask({"type": "failed", "why": why[:2000]})

    def finish(self) -> Message:
        """Report that this host's worker has finished."""
        return self._ask({"type": "done"})

    def _ask(self, message: Message) -> Message:
        self._asked = message
        return message


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
        self._address = (address or "").strip("[]")
        self._talk = Conversation(host, hosts, machine, store, time.monotonic(), reach_s=reach_s, silent_s=silent_s)
        self._key = make_key(secret, job)
        self._on_message = on_message
        self._silent_s = 3 * max(silent_s, BEAT_S)  # a lost store does no harm, so there is no hurry to give it up
        self._changed = threading.Condition()
        self._channel: AuthenticatedChannel | None = None
        self._connection: socket.socket | None = None
        self._closed = threading.Event()
        self._reader = threading.Thread(target=self._run, name="meshmend-store", daemon=True)
        self._reader.start()
        self._beater = threading.Thread(target=self._beat, name="meshmend-beat", daemon=True)
        self._beater.start()

    def join(self, port: int, why: str = "") -> Assignment:
        """Ask for the next round, and return it when it starts. Raises `LaunchError`, also when the job is over."""
        with self._changed:
            asks: Message | None = self._talk.join(port, why)
            while True:
                if asks is not None:
                    self._send_message(asks)
                self._talk.check()
                if self._talk.assignment is not None:
                    return self._talk.assignment
                self._changed.wait(BEAT_S)
                asks = self._talk.join_again()

    @property
    def over(self) -> Message | None:
        """How the job has ended, if it has."""
        with self._changed:
            return self._talk.over

    def wait_stopped(self, timeout_s: float) -> Message | None:
        """Return why the round has ended, as soon as it has; None if it still runs then."""
        until = time.monotonic() + timeout_s
        with self._changed:
            while (stopped := self._talk.stopped) is None and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            return stopped

    def finish(self, timeout_s: float) -> Message:
        """Report that this host's worker has finished; return how the job ended when all others have, too."""
        with self._changed:
            self._send_message(self._talk.finish())
            self._wait_over(timeout_s)
            if self._talk.over is None:
                self._talk.check()
            return self._talk.over or {"ok": True, "why": f"the others had not finished after {timeout_s:g} s"}

    def raised(self, why: str) -> None:
        """Report that this host's worker has raised an error: if those of all hosts do, the job ends with it."""
        with self._changed:
            self._send_message(self._talk.raised(why))

    def fail(self, why: str) -> None:
        """Report that this host gives up, which ends the job; return when the store has heard it, or after a while."""
        with self._changed:
            self._send_message(self._talk.fail(why))
            self._wait_over(FAIL_S)

    def send(self, message: Message) -> bool:
        """Send something to the store, if it is there; return whether it is."""
        with self._changed:
            return self._talk.is_admitted and self._send_message(message)

    def _wait_over(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while self._talk.goes_on and (left := until - time.monotonic()) > 0:
            self._changed.wait(min(BEAT_S, left))

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

    def _send_message(self, message: Message) -> bool:
        """Send to the store, if it can be reached; otherwise the next connection repeats what matters."""
        if self._connection is not None and self._channel is not None:
            with contextlib.suppress(OSError):
                self._connection.sendall(self._channel.pack(message))
                return True
        return False

    def _beat(self) -> None:
        """Send heartbeats, and say so when the store is away: the thread that reads may wait for an answer."""
        while self._goes_on():
            with self._changed:
                self._send_message({"type": "beat"})
                self._changed.wait(BEAT_S)
                away = self._talk.beat(time.monotonic())
                if self._talk.error is not None:
                    self._changed.notify_all()
            if away is not None:
                self._on_message(away)

    def _run(self) -> None:
        """Keep a connection to the store, and read what it says."""
        while self._goes_on():
            try:
                with socket.create_connection(self._store, timeout=self._silent_s) as connection:
                    self._converse(connection)
            except (RefusedError, OSError, ValueError) as error:  # a MessageError, too
                with self._changed:
                    why = self._talk.why
                    pause_s = self._talk.lose(error, time.monotonic())
                    self._changed.notify_all()
            if self._goes_on():
                if self._talk.why != why:
                    self._on_message({"type": "unreachable", "why": self._talk.why})
                self._closed.wait(pause_s)

    def _goes_on(self) -> bool:
        with self._changed:
            return not self._closed.is_set() and self._talk.goes_on

    def _converse(self, connection: socket.socket) -> NoReturn:
        """Introduce this host, and take messages until the connection ends, which is an error."""
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
        mine = make_nonce()
        with self._changed:
            hello, *again = self._talk.greet(self._address or str(connection.getsockname()[0]))
            if hello["running"] is not None:
                hello["running"]["hosts"] = pack_hosts(hello["running"]["hosts"])
            hello["nonce"] = mine.hex()
            connection.sendall(pack(HELLO, hello, self._key, theirs, limit=MAX_HELLO_BYTES))
            self._channel = AuthenticatedChannel(self._key, mine, theirs, to="the store", of="a host")
            self._connection = connection
            for message in again:
                self._send_message(message)
        try:
            while True:
                message = self._channel.unpack(read_frame(connection.recv, MAX_HELLO_BYTES))
                with self._changed:
                    self._talk.hear(message)
                    if message["type"] != "beat":
                        self._changed.notify_all()
                if message["type"] != "beat":
                    self._on_message(message)
        finally:
            with self._changed:
                self._connection = self._channel = None
