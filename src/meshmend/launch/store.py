"""The rendezvous store: one small server between the hosts of a job, on a machine that does not die with one of them.

It needs neither torch nor JAX. Hosts keep a connection to it; a host that dies breaks its connection, which ends the
round at once. `membership` decides who is in a round, this serves the sockets. All are served by one thread that never
waits for one of them. Health probes, port scanners and processes of other jobs are turned away one by one: each has its
own limits of time and bytes, and none is listened to before it has proven that it knows the job's secret.

If the store is lost, training continues: the hosts keep their round, look for the store until it is back at the same
address, and tell the new one what they run.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from meshmend.errors import LaunchError
from meshmend.launch.hosts import name_hosts
from meshmend.launch.membership import BEAT_S, Membership, Message, RefusedError
from meshmend.launch.messages import (
    HEADER_BYTES,
    MAX_HELLO_BYTES,
    NONCE_BYTES,
    MessageError,
    Talk,
    frame_bytes,
    make_challenge,
    make_key,
    make_nonce,
    pack_refusal,
    unpack,
)

DEFAULT_PORT = 29400
CALLER_S = 10.0
"""How long a caller may take from connecting to the end of its hello."""
MAX_STRANGERS = 128
"""Callers at once that have not proven anything yet: 128 × 16 KiB of memory at most."""
LINGER_S = 5.0
"""How long the store waits, when the job is over, for its hosts to hear of it."""


@dataclass(eq=False)
class Caller:
    """One connection."""

    connection: socket.socket
    address: str
    until: float
    nonce: bytes = field(default_factory=make_nonce, repr=False)
    data: bytearray = field(default_factory=bytearray, repr=False)
    talk: Talk | None = None
    """None as long as it is a stranger."""


class Store:
    """The store of one job. Use it in a `with` block; `serve` returns when the job is over.

    `address` is where it listens; without a secret it listens on this machine only. `tell` is called with a line for
    people whenever something happens.
    """

    def __init__(
        self,
        membership: Membership,
        *,
        job: str,
        secret: str,
        address: str = "127.0.0.1",
        port: int = 0,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        if not secret and not is_loopback(address):
            raise LaunchError(
                f"The store would listen on {address} without a secret: whoever reaches it could join the job. Make "
                "one with `openssl rand -hex 32 > secret`, and give it to the store and all hosts as --secret-file "
                "or MESHMEND_SECRET; or listen on 127.0.0.1."
            )
        self.membership = membership
        self._key = make_key(secret, job)
        self._tell = tell
        self._callers: dict[Caller, None] = {}  # in the order of their arrival
        try:
            self._server = socket.create_server((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise LaunchError(
                    f"Port {port} of {address} is in use: perhaps another store runs there. Choose another one, as in "
                    f"--listen {address}:{port + 1}, and give it to all hosts as --store."
                ) from error
            raise LaunchError(f"The store cannot listen on {address}:{port}: {error.strerror or error}.") from error
        self._server.setblocking(False)
        self.port = int(self._server.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._beat_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for caller in list(self._callers):
            self._close(caller)
        self._selector.close()
        self._server.close()

    def serve(self, until: Callable[[], bool] = lambda: False) -> Message:
        """Serve until the job is over, and return how it ended; or until `until` says so."""
        over_at = None
        while not until():
            now = time.monotonic()
            if self.membership.over is not None:
                over_at = over_at or now
                if not self.membership.members or now > over_at + LINGER_S:
                    return self.membership.over
            self._serve_once(now)
        return {"ok": False, "why": "the store was stopped"}

    def _serve_once(self, now: float) -> None:
        next_beat = max(0.0, self._beat_at - now)
        ready = self._selector.select(min(self.membership.due(now), next_beat, BEAT_S))
        # What has arrived is read before new callers replace the oldest.
        for selected, _ in ready:
            if selected.data is not None and selected.data in self._callers:
                self._read(selected.data)
        if any(selected.data is None for selected, _ in ready):
            self._accept()
        now = time.monotonic()
        for caller in [each for each in self._callers if each.talk is None and each.until <= now]:
            self._turn_away(caller, "slow")
        self.membership.tick(now)
        if now >= self._beat_at:
            self._beat_at = now + BEAT_S
            self.membership.outbox += [(key, {"say": "beat"}) for key in self.membership.members]
        self._send_all()

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._server.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                strangers = [each for each in self._callers if each.talk is None]
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM) or not strangers:
                    raise
                self._turn_away(strangers[0], "full")
                return
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            strangers = [each for each in self._callers if each.talk is None]
            if len(strangers) >= MAX_STRANGERS:
                self._turn_away(strangers[0], "full")
            caller = Caller(connection, str(address[0]), time.monotonic() + CALLER_S)
            self._callers[caller] = None
            self._selector.register(connection, selectors.EVENT_READ, caller)
            self._send(caller, make_challenge(caller.nonce))

    def _read(self, caller: Caller) -> None:
        try:
            more = caller.connection.recv(HEADER_BYTES + MAX_HELLO_BYTES)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        if not more:
            self._close(caller)
            return
        caller.data += more
        try:
            while caller in self._callers:
                size = frame_bytes(caller.data, MAX_HELLO_BYTES)
                if size is None or len(caller.data) < size:
                    return
                frame, caller.data = caller.data[:size], caller.data[size:]
                self._take(caller, frame)
        except (MessageError, KeyError, TypeError, ValueError) as error:
            self._turn_away(caller, error.code if isinstance(error, MessageError) else "malformed")

    def _take(self, caller: Caller, frame: bytearray) -> None:
        now = time.monotonic()
        if caller.talk is not None:
            self.membership.hear(caller, caller.talk.unpack(frame), now)
            return
        hello = unpack("hello to a store", frame, self._key, caller.nonce)
        theirs = bytes.fromhex(hello["nonce"])
        if len(theirs) != NONCE_BYTES:
            raise MessageError("malformed")
        caller.talk = Talk(self._key, caller.nonce, theirs, to="a host", of="the store")
        try:
            self.membership.arrive(caller, hello, caller.address, now)
            self._tell(f"host {int(hello['host'])} has joined from {caller.address}")
        except RefusedError as error:
            self._tell(f"a host from {caller.address} was refused: {error}")
            self._send(caller, caller.talk.pack({"say": "refused", "why": str(error), "for_now": error.for_now}))
            if caller in self._callers:
                self._close(caller)

    def _send_all(self) -> None:
        while self.membership.outbox:
            key, message = self.membership.outbox.pop(0)
            if isinstance(key, Caller) and key in self._callers and key.talk is not None:
                if message["say"] != "beat":
                    self._tell_people(message, key)
                self._send(key, key.talk.pack(message))
                if message["say"] == "dropped" and key in self._callers:
                    self._close(key)

    def _tell_people(self, message: Message, key: Caller) -> None:
        """Report a message once, though it goes to all."""
        if message["say"] == "round" and message["process"] == 0:
            self._tell(f"round {message['number']}: {name_hosts(message['hosts'])}")
        elif message["say"] == "short" and key is next(iter(self.membership.members), None):
            self._tell(f"the job waits: it needs {message['least']} hosts, and has {name_hosts(message['hosts'])}")
        elif message["say"] in ("stop", "over") and key is next(iter(self.membership.members), None):
            self._tell(message["why"])

    def _send(self, caller: Caller, data: bytes) -> None:
        """Send a few bytes; close the connection to a host whose buffer is full, which has not read for minutes."""
        try:
            if caller.connection.send(data) == len(data):
                return
        except OSError:
            pass
        self._close(caller)

    def _turn_away(self, caller: Caller, code: str) -> None:
        self._tell(f"a caller from {caller.address} was turned away: {MessageError(code)}")
        with contextlib.suppress(OSError):
            caller.connection.send(pack_refusal(code))
        self._close(caller)

    def _close(self, caller: Caller) -> None:
        del self._callers[caller]
        self._selector.unregister(caller.connection)
        caller.connection.close()
        if caller in self.membership.members:
            self.membership.leave(caller, "its connection to the store broke", time.monotonic())


def is_loopback(name: str) -> bool:
    """Whether only processes of this machine can reach an address."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def main(where: str, job: str, silent_s: str, start_s: str) -> None:
    """Serve a job on this machine: how `LocalJob` starts its store."""
    address, port = where.rsplit(":", 1)
    membership = Membership(silent_s=float(silent_s), start_s=float(start_s))
    with Store(membership, job=job, secret=os.environ["MESHMEND_SECRET"], address=address, port=int(port)) as store:
        store.serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
