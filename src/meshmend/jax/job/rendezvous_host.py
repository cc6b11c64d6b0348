"""Process 0's side of a rendezvous: it admits the job's processes, and rejects every other connection.

Health probes, port scanners and processes of other jobs connect to a port that is open to a network. None of them
may end or delay the rendezvous: each visitor has its own time limit and byte limit, the number of pending ones is
limited (a new one replaces the oldest), and all are served by one thread that never blocks on one of them. Only a
process that proves that it knows the job's key is admitted.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Self

from meshmend.launch.messages import (
    HEADER_BYTES,
    MAX_HELLO_BYTES,
    NONCE_BYTES,
    MessageError,
    frame_bytes,
    make_challenge,
    make_nonce,
    pack,
    pack_refusal,
    unpack,
)

Fact = dict[str, Any]

VISITOR_S = 10.0
"""How long a visitor may take from connecting to the end of its hello."""
MAX_UNDECIDED = 128
"""Visitors at once that are not authenticated yet: 128 × 16 KiB of memory at most."""
ACCEPTED_AT_ONCE = 32


@dataclass(eq=False)
class Visitor:
    """One connection, and what it has sent so far."""

    connection: socket.socket
    address: str
    until: float
    nonce: bytes = field(default_factory=make_nonce, repr=False)
    data: bytearray = field(default_factory=bytearray, repr=False)
    process: int | None = None
    """Its number, once it is admitted."""
    their_nonce: bytes = b""
    fact: Fact = field(default_factory=dict)


class RendezvousHost:
    """Listens on a server socket for the processes 1 to n − 1 of a job. Use it in a `with` block.

    It takes over the socket, and closes it and all connections at the end.
    """

    def __init__(self, server: socket.socket, n_processes: int, key: bytes, *, visitor_s: float = VISITOR_S) -> None:
        self.n_processes = n_processes
        self.key = key
        self.visitor_s = visitor_s
        self.counted: dict[int, Visitor] = {}
        self.turned_away: Counter[str] = Counter()
        """How many visitors were rejected, by code of `REFUSALS`."""
        self._last = ""
        self._undecided: dict[Visitor, None] = {}  # in the order of their arrival
        self._server = server
        server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)

    def gather(self, until: float) -> dict[int, Fact]:
        """Return the facts of all visitors by their process, each with its address, when the last one is here.

        Raises `TimeoutError` at `until`, and `ConnectionError` as soon as an admitted one leaves: the launcher will
        restart all of them, so there is no reason to wait any longer.
        """
        while len(self.counted) < self.n_processes - 1:
            now = time.monotonic()
            if now >= until:
                raise TimeoutError(f"time is up; {self.describe()}")
            first = min((visitor.until for visitor in self._undecided), default=until)
            ready = self._selector.select(max(0.0, min(first, until) - now))
            # Data that have arrived are read before new visitors replace the oldest.
            for selected, _ in ready:
                if selected.data is not None:
                    self._hear(selected.data)
            if any(selected.data is None for selected, _ in ready):
                self._accept()
            now = time.monotonic()
            for visitor in [visitor for visitor in self._undecided if visitor.until <= now]:
                self._turn_away(visitor, "slow")
        return {process: {**visitor.fact, "address": visitor.address} for process, visitor in self.counted.items()}

    def tell(self, everybody: list[Fact], until: float) -> None:
        """Send the facts of all to all admitted visitors."""
        for process, visitor in self.counted.items():
            try:
                visitor.connection.settimeout(max(0.001, until - time.monotonic()))
                visitor.connection.sendall(pack("everybody", {"everybody": everybody}, self.key, visitor.their_nonce))
            except OSError as error:
                raise ConnectionError(f"process {process} went away: {error}") from error

    def describe(self) -> str:
        """Describe who is here, who is missing, and who was rejected."""
        missing = [str(process) for process in range(1, self.n_processes) if process not in self.counted]
        text = f"{len(self.counted) + 1} of {self.n_processes} processes are here"
        if missing:
            more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
            text += f", missing: {', '.join(missing[:10])}{more}"
        if self._last:
            text += f"; {self.turned_away.total()} visitors were rejected, the last one, {self._last}"
        return text

    def close(self) -> None:
        """Close all connections and the server socket."""
        for visitor in (*self._undecided, *self.counted.values()):
            visitor.connection.close()
        self._undecided.clear()
        self._selector.close()
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, address = self._server.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                scarce = error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
                if not scarce or not self._undecided:
                    raise
                self._turn_away(next(iter(self._undecided)), "full")
                return
            connection.setblocking(False)
            visitor = Visitor(connection, str(address[0]), time.monotonic() + self.visitor_s)
            if len(self._undecided) >= MAX_UNDECIDED:
                self._turn_away(next(iter(self._undecided)), "full")
            self._undecided[visitor] = None
            self._selector.register(connection, selectors.EVENT_READ, visitor)
            self._send(visitor, make_challenge(visitor.nonce))

    def _hear(self, visitor: Visitor) -> None:
        """Read what a visitor has sent; admit or reject it when that is enough."""
        if visitor.process is not None:
            self._check_waiting(visitor)
            return
        try:
            more = visitor.connection.recv(HEADER_BYTES + MAX_HELLO_BYTES + 1 - len(visitor.data))
        except BlockingIOError:
            return
        except OSError:
            self._turn_away(visitor, "gone")
            return
        visitor.data += more
        try:
            if not more:
                raise MessageError("gone")
            size = frame_bytes(visitor.data, MAX_HELLO_BYTES)
            if size is None or len(visitor.data) < size:
                return
            if len(visitor.data) > size:
                raise MessageError("malformed")
            self._count(visitor, unpack("hello", visitor.data, self.key, visitor.nonce))
        except MessageError as error:
            self._turn_away(visitor, error.code)

    def _count(self, visitor: Visitor, hello: dict[str, Any]) -> None:
        process, fact, nonce = hello.get("process"), hello.get("fact"), hello.get("nonce")
        if hello.get("n_processes") != self.n_processes:
            raise MessageError("size")
        if type(process) is not int or not 0 < process < self.n_processes:
            raise MessageError("process")
        if process in self.counted:
            raise MessageError("taken")
        if not isinstance(fact, dict) or not isinstance(nonce, str):
            raise MessageError("malformed")
        try:
            visitor.their_nonce = bytes.fromhex(nonce)
        except ValueError:
            raise MessageError("malformed") from None
        if len(visitor.their_nonce) != NONCE_BYTES:
            raise MessageError("malformed")
        if self._send(visitor, pack("welcome", {}, self.key, visitor.their_nonce)):
            visitor.process, visitor.fact, visitor.data = process, fact, bytearray()
            del self._undecided[visitor]
            self.counted[process] = visitor

    def _check_waiting(self, visitor: Visitor) -> None:
        """Raise if a process that only waits for the others has left, or has sent more than the protocol allows."""
        try:
            more = visitor.connection.recv(1)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        raise ConnectionError(
            f"process {visitor.process} {'sent unexpected data' if more else 'went away'}; {self.describe()}"
        )

    def _send(self, visitor: Visitor, data: bytes) -> bool:
        """Send a few bytes, which fit a new connection's buffer; reject a visitor whose buffer is full."""
        try:
            if visitor.connection.send(data) == len(data):
                return True
        except OSError:
            pass  # gone, or never reads: the same to us
        self._turn_away(visitor, "gone")
        return False

    def _turn_away(self, visitor: Visitor, code: str) -> None:
        with contextlib.suppress(OSError):
            visitor.connection.send(pack_refusal(code))
        self._selector.unregister(visitor.connection)
        visitor.connection.close()
        del self._undecided[visitor]
        self.turned_away[code] += 1
        self._last = f"from {visitor.address}: {MessageError(code)}"
