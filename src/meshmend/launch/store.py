"""The rendezvous store: one small server between the hosts of a job, on a machine that does not die with one of them.

It does not need JAX. Hosts keep a connection to it; a host that dies breaks its connection, which ends the
round at once. `membership` decides who is in a round, this serves the sockets. All are served by one thread that never
waits for one of them. Health probes, port scanners and processes of other jobs are refused one by one: each has its
own limits of time and bytes, and none is listened to before it has proven that it knows the job's secret.

It also keeps what hosts and their workers have to tell (`delivery`), in its folder, and waits for no disk.

If the store is lost, training continues: the hosts keep their round, look for the store until it is back at the same
address, and tell the new one what they run. Hosts that have no round to run wait for it half an hour.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import resource
import selectors
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from meshmend.errors import LaunchError
from meshmend.launch.addresses import is_loopback, join_address, listen, split_address
from meshmend.launch.delivery import Inbox
from meshmend.launch.hosts import name_hosts
from meshmend.launch.membership import BEAT_S, Membership, Message, RefusedError
from meshmend.launch.messages import (
    HEADER_BYTES,
    HELLO,
    MAX_BODY_BYTES,
    MAX_HELLO_BYTES,
    NONCE_BYTES,
    AuthenticatedChannel,
    MessageError,
    frame_bytes,
    make_challenge,
    make_key,
    make_nonce,
    pack_refusal,
    unpack,
    unpack_hosts,
)
from meshmend.launch.processes import raise_file_limit

HELLO_S = 10.0
"""How long a peer may take from connecting to the end of its hello."""
MAX_UNAUTHENTICATED = 1024
"""Connections at once that have not proven anything yet: 16 MiB of memory at most."""
PATIENCE_S = 0.25
"""How long an unauthenticated connection is kept while others wait. A host proves itself within a round trip, so that
neither unauthenticated connections nor ten thousand hosts that come at once push it out; those that send nothing make
room."""
ACCEPTED_AT_ONCE = 128
"""Connections that are accepted before those that are here are read again."""
BACKLOG = 4096
"""Connections that the kernel holds for the store; it cuts this to net.core.somaxconn."""
OWN_FILES = 16
"""Descriptors that the store needs for itself."""
SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
LINGER_S = 5.0
"""How long the store waits, when the job is over, for its hosts to hear of it."""


@dataclass(eq=False, slots=True)
class Peer:
    """One connection."""

    connection: socket.socket
    address: str
    until: float
    nonce: bytes = field(default_factory=make_nonce, repr=False)
    data: bytearray = field(default_factory=bytearray, repr=False)
    channel: AuthenticatedChannel | None = None
    """None as long as it is unauthenticated."""


class Store:
    """The store of one job. Use it in a `with` block; `serve` returns when the job is over.

    `address` is where it listens; without a secret it listens on this machine only. `folder` is where the events of its
    hosts are kept; without one they are not. `log` is called with a line for
    people whenever something happens, from a thread of its own: it may fail, or take its time.
    """

    def __init__(
        self,
        membership: Membership,
        *,
        job: str,
        secret: str,
        address: str = "127.0.0.1",
        port: int = 0,
        folder: Path | None = None,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        if not secret and not is_loopback(address):
            raise LaunchError(
                f"The store would listen on {address} without a secret: whoever reaches it could join the job. Make "
                "one with `openssl rand -hex 32 > secret`, and give it to the store and all hosts as --secret-file "
                "or MESHMEND_SECRET; or listen on 127.0.0.1."
            )
        self.membership = membership
        self._key = make_key(secret, job)
        try:
            self._server = listen(address, port, BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise LaunchError(
                    f"Port {port} of {address} is in use: perhaps another store runs there. Choose another one, as in "
                    f"--listen {join_address(address, port + 1)}, and give it to all hosts as --store."
                ) from error
            where = join_address(address, port)
            raise LaunchError(f"The store cannot listen on {where}: {error.strerror or error}.") from error
        self._server.setblocking(False)
        self.port = int(self._server.getsockname()[1])
        self._peers: set[Peer] = set()
        self._unauthenticated: OrderedDict[Peer, None] = OrderedDict()  # in the order of their arrival
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most_peers = (1 << 20 if files == resource.RLIM_INFINITY else files) - OWN_FILES
        self._selector = selectors.DefaultSelector()
        self._is_listening = False
        self._listens_at = 0.0
        """When the store listens again, after the system had nothing left for a new connection."""
        self._beat_at = 0.0
        self._joined: list[int] = []
        self._refused: dict[str, tuple[int, str]] = {}
        """Why connections were, how many since the last line about it, and from where the last one came."""
        self._log = _Log(log)
        self._woken, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._woken)
        self._events = Inbox(folder, wake=self._wake, log=self._log.put)
        membership.rounds_before = max(membership.rounds_before, self._events.rounds_before)
        self._log.put(f"the store of {job} listens on {join_address(address, self.port)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in list(self._peers):
            self._close(peer)
        self._events.close()
        self._selector.close()
        self._server.close()
        self._woken.close()
        self._wakes.close()
        self._log.close()

    def _wake(self) -> None:
        """Have this served at once, from another thread."""
        with contextlib.suppress(OSError):  # it has been woken often enough, or has ended
            self._wakes.send(b".")

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
        """Hear all that has arrived by now, and only then judge who was silent, and who was slow, until now."""
        self._listen(now >= self._listens_at and self._has_room(now))
        wait_s = BEAT_S if self._is_listening else PATIENCE_S / 10
        ready = self._selector.select(min(self.membership.due(now), max(0.0, self._beat_at - now), wait_s))
        is_called = False
        for selected, _ in ready:
            if selected.data is None:
                is_called = True
            elif selected.data is self._woken:
                self._woken.recv(1 << 16)
            elif selected.data in self._peers:
                self._read(selected.data)
        if is_called:
            self._accept()
        while self._unauthenticated and (first := next(iter(self._unauthenticated))).until <= now:
            self._refuse(first, "slow")
        self.membership.tick(now)
        if now >= self._beat_at:
            self._beat_at = now + max(BEAT_S, self.membership.silent_s / 4)
            beat = {"type": "beat"}
            self.membership.outbox += [(key, beat) for key in self.membership.members]
            self._report_connections()
        while self._events.answers:
            self.membership.outbox.append(self._events.answers.popleft())
        self._send_all()

    def _has_room(self, now: float) -> bool:
        """Whether there is room for another connection. Those that find none wait in the kernel's queue."""
        if len(self._unauthenticated) < MAX_UNAUTHENTICATED:
            return True
        return next(iter(self._unauthenticated)).until <= now + HELLO_S - PATIENCE_S

    def _listen(self, is_wanted: bool) -> None:
        if is_wanted != self._is_listening:
            self._is_listening = is_wanted
            if is_wanted:
                self._selector.register(self._server, selectors.EVENT_READ)
            else:
                self._selector.unregister(self._server)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            now = time.monotonic()
            if not self._has_room(now):
                return
            try:
                connection, address = self._server.accept()
            except OSError as error:
                if error.errno in SCARCE:
                    self._log.put(f"{len(self._peers)} connections are all that the system allows: {error.strerror}")
                    self._listens_at = now + 1.0
                return
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = Peer(connection, str(address[0]), now + HELLO_S)
            self._peers.add(peer)
            self._unauthenticated[peer] = None
            self._selector.register(connection, selectors.EVENT_READ, peer)
            self._send(peer, make_challenge(peer.nonce))
            if len(self._peers) > self._most_peers:
                # The oldest may be the new one itself: members keep their connections.
                self._refuse(next(iter(self._unauthenticated)), "files")
            elif len(self._unauthenticated) > MAX_UNAUTHENTICATED:
                self._refuse(next(iter(self._unauthenticated)), "full")

    def _read(self, peer: Peer) -> None:
        try:
            more = peer.connection.recv(HEADER_BYTES + MAX_HELLO_BYTES)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        if not more:
            self._close(peer)
            return
        peer.data += more
        try:
            while peer in self._peers:
                size = frame_bytes(peer.data, MAX_HELLO_BYTES if peer.channel is None else MAX_BODY_BYTES)
                if size is None or len(peer.data) < size:
                    return
                frame, peer.data = peer.data[:size], peer.data[size:]
                self._take(peer, frame)
        except (MessageError, KeyError, TypeError, ValueError) as error:
            self._refuse(peer, error.code if isinstance(error, MessageError) else "malformed")

    def _take(self, peer: Peer, frame: bytearray) -> None:
        now = time.monotonic()
        if peer.channel is not None:
            message = peer.channel.unpack(frame)
            if peer in self.membership.members and message["type"] == "events":
                self._events.put(peer, self.membership.members[peer].host, message)
            elif peer in self.membership.members:
                self.membership.on_message(peer, message, now)
            else:
                self._send_last(peer, {"type": "dropped"})  # another process has taken its place
            return
        hello = unpack(HELLO, frame, self._key, peer.nonce)
        theirs = bytes.fromhex(hello["nonce"])
        if len(theirs) != NONCE_BYTES:
            raise MessageError("malformed")
        if hello.get("running") is not None:
            hello["running"]["hosts"] = unpack_hosts(hello["running"]["hosts"])
        peer.channel = AuthenticatedChannel(self._key, peer.nonce, theirs, to="a host", of="the store")
        del self._unauthenticated[peer]
        try:
            self.membership.arrive(peer, hello, peer.address, now)
        except RefusedError as error:
            if self.membership.over is not None:
                self._send_last(peer, {"type": "over", **self.membership.over})
                return
            self._count(f"was refused: {error}", peer)
            facts = {"retryable": error.retryable, "is_certain": error.is_certain}
            self._send_last(peer, {"type": "refused", "why": str(error), **facts})
            return
        here = str(peer.connection.getsockname()[0]).removeprefix("::ffff:")
        if not is_loopback(here):
            self.membership.store_at = here
        self._joined.append(int(hello["host"]))
        self._send(peer, peer.channel.pack({"type": "beat"}))  # so that it knows that this is the store

    def _send_all(self) -> None:
        """Send what the membership has decided. A message to many is encoded once."""
        last, body = None, b""
        while self.membership.outbox:  # a connection that turns out to be broken makes more of them
            outbox, self.membership.outbox = self.membership.outbox, []
            for key, message in outbox:
                if not isinstance(key, Peer) or key not in self._peers or key.channel is None:
                    continue
                if message is not last:
                    last, body = message, AuthenticatedChannel.encode(message)
                self._send(key, key.channel.seal(body))
                if message["type"] == "dropped":
                    self._close(key)
        for line in self.membership.news:
            self._log.put(line)
        self.membership.news.clear()

    def _report_connections(self) -> None:
        """Report who came, and who was refused: many at once are one line, for anybody can fill this log."""
        if self._joined:
            here, most = len(self.membership.members), self.membership.most
            self._log.put(
                f"{name_hosts(self._joined)} {'has' if len(self._joined) == 1 else 'have'} joined: {here} of {most}"
            )
            self._joined.clear()
        for why, (n, address) in self._refused.items():
            others = f" (and {n - 1} more since the last line)" * (n > 1)
            self._log.put(f"a connection from {address} {why}{others}")
        self._refused.clear()

    def _count(self, why: str, peer: Peer) -> None:
        self._refused[why] = self._refused.get(why, (0, ""))[0] + 1, peer.address

    def _send(self, peer: Peer, data: bytes) -> None:
        """Send a few bytes; close the connection to a host whose buffer is full, which has not read for minutes."""
        try:
            if peer.connection.send(data) == len(data):
                return
        except OSError:
            pass
        self._close(peer)

    def _send_last(self, peer: Peer, message: Message) -> None:
        if peer.channel is not None:
            self._send(peer, peer.channel.pack(message))
        self._close(peer)

    def _refuse(self, peer: Peer, code: str) -> None:
        more = f" (the limit is {self._most_peers + OWN_FILES}: start the store with a higher `ulimit -n`)"
        self._count(f"was refused: {MessageError(code)}{more * (code == 'files')}", peer)
        with contextlib.suppress(OSError):
            peer.connection.send(pack_refusal(code))
        self._close(peer)

    def _close(self, peer: Peer) -> None:
        if peer not in self._peers:
            return
        self._peers.remove(peer)
        self._unauthenticated.pop(peer, None)
        self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer in self.membership.members:
            self.membership.leave(peer, "its connection to the store broke", time.monotonic())


class _Log:
    """Lines for people, written by a thread: a full disk, or a reader that stands still, must not stop the store."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._lines: queue.Queue[str | None] = queue.Queue(maxsize=1000)
        self._n_lost = 0
        self._thread = threading.Thread(target=self._run, name="meshmend-log", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """Have a line written, unless too many wait already."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._n_lost += 1

    def close(self) -> None:
        """Write what is left, if that is possible at once."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(1.0)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            n_lost, self._n_lost = self._n_lost, 0
            with contextlib.suppress(OSError, ValueError):
                if n_lost:
                    self._write(f"{n_lost} lines are left out: they could not be written in time")
                self._write(line)


def main(where: str, job: str, silent_s: str, start_s: str, folder: str) -> None:
    """Serve a job on this machine: how `LocalJob` starts its store."""
    raise_file_limit()
    address, port = split_address(where)
    membership = Membership(silent_s=float(silent_s), start_s=float(start_s))
    secret, kept = os.environ["MESHMEND_SECRET"], Path(folder)
    with Store(membership, job=job, secret=secret, address=address, port=port, folder=kept) as store:
        store.serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
