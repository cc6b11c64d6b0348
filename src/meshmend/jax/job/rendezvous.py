"""The rendezvous before JAX starts: each process reports which host it is on, and learns about all others.

Processes can then be numbered in the order of their hosts, whatever ranks the launcher gave them. The same hole always
gives the same program on the same device numbers, and a compiled program is found again; and mistakes in the
description of the machine are reported on every process before any of them waits.

`messages` says what travels, `rendezvous_host` what process 0 does.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import time
import warnings
from typing import Any

from meshmend.errors import RestartError
from meshmend.jax.job.launch import Launch
from meshmend.jax.job.rendezvous_host import VISITOR_S, Fact, RendezvousHost
from meshmend.launch.messages import (
    CHALLENGE_BYTES,
    MAX_HELLO_BYTES,
    MessageError,
    make_key,
    make_nonce,
    pack,
    read_challenge,
    read_frame,
    unpack,
)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
"""Interval between attempts to reach process 0: it may still be starting, or an earlier one may still be there."""
ADDRESS_BYTES = 256
"""What process 0 adds to a fact, at most."""


def rendezvous(launch: Launch, fact: Fact, *, timeout_s: float) -> list[Fact]:
    """Send a fact (that JSON can encode) to all processes of a launch; return the facts of all, by the launcher's rank.

    Each comes with the `address` under which process 0 sees it. Processes prove to each other that they know the
    job's name and its secret; others are rejected. A process that leaves while others still wait ends the
    rendezvous for all at once.
    """
    name, port = launch.coordinator.rsplit(":", 1)
    until = time.monotonic() + timeout_s
    if launch.n_processes == 1:
        return [{**fact, "address": name}]
    try:
        if launch.process == 0:
            return _host(launch, name, int(port), fact, until)
        return _visit(launch, name, int(port), fact, until)
    except (OSError, ValueError) as error:
        raise RestartError(
            f"Process {launch.process} of {launch.n_processes} could not complete the rendezvous at "
            f"{launch.coordinator} within {timeout_s:g} s: {error}. A host that died while the job was starting causes "
            "this; the launcher will try again."
        ) from error


def _host(launch: Launch, name: str, port: int, mine: Fact, until: float) -> list[Fact]:
    local = _is_loopback(name)
    if not launch.secret and not local:
        warnings.warn(
            f"The rendezvous at {launch.coordinator} is open to the network and has no secret: whoever reaches it and "
            "knows the job's name may join the job. Set MESHMEND_SECRET to the same random text on all hosts, for "
            "example the output of `openssl rand -hex 32`.",
            stacklevel=3,
        )
    server = _listen(name if local else "", port, until)
    with RendezvousHost(server, launch.n_processes, make_key(launch.secret, launch.job)) as host:
        facts = {0: {**mine, "address": name}, **host.gather(until)}
        everybody = [facts[process] for process in range(launch.n_processes)]
        host.tell(everybody, until)
        return everybody


def _listen(address: str, port: int, until: float) -> socket.socket:
    while True:
        try:
            return socket.create_server((address, port))
        except OSError as error:
            # A process 0 of an earlier attempt may still be ending.
            if error.errno != errno.EADDRINUSE or time.monotonic() + LONGEST_PAUSE_S > until:
                raise
            time.sleep(FIRST_PAUSE_S)


def _visit(launch: Launch, name: str, port: int, fact: Fact, until: float) -> list[Fact]:
    """Try to join until the timeout, whatever answers; then wait for the others."""
    key, nonce = make_key(launch.secret, launch.job), make_nonce()
    hello = {"n_processes": launch.n_processes, "process": launch.process, "fact": fact, "nonce": nonce.hex()}
    pause, last = FIRST_PAUSE_S, "nobody answered"
    while True:
        try:
            connection = socket.create_connection((name, port), timeout=min(VISITOR_S, _left(until, last)))
        except OSError as error:
            if time.monotonic() >= until:
                raise
            last = str(error)
        else:
            with connection:
                try:
                    _introduce(connection, hello, key, nonce, min(until, time.monotonic() + VISITOR_S))
                except MessageError as error:
                    # The peer that rejected it may be another job's process 0, or one of an earlier attempt.
                    last = f"process 0 rejected this process: {error}"
                except OSError as error:
                    last = str(error)
                else:
                    return _await_everybody(connection, launch.n_processes, key, nonce, until)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        time.sleep(min(pause, _left(until, last)))


def _introduce(connection: socket.socket, hello: dict[str, Any], key: bytes, nonce: bytes, until: float) -> None:
    challenge = bytearray()
    while len(challenge) < CHALLENGE_BYTES:
        more = _receive(connection, CHALLENGE_BYTES - len(challenge), until)
        if not more:
            raise ConnectionError("whoever listens there closed the connection")
        challenge += more
    try:
        theirs = read_challenge(bytes(challenge))
    except MessageError:
        raise ConnectionError("what listens there is not a rendezvous of this version of meshmend") from None
    connection.settimeout(_left(until))
    connection.sendall(pack("hello", hello, key, theirs, limit=MAX_HELLO_BYTES))
    unpack("welcome", read_frame(lambda size: _receive(connection, size, until), MAX_HELLO_BYTES), key, nonce)


def _await_everybody(connection: socket.socket, n_processes: int, key: bytes, nonce: bytes, until: float) -> list[Fact]:
    try:
        limit = n_processes * (MAX_HELLO_BYTES + ADDRESS_BYTES)
        frame = read_frame(lambda size: _receive(connection, size, until), limit)
    except ConnectionError as error:
        raise ConnectionError(f"process 0 went away: {error}") from error
    everybody = unpack("everybody", frame, key, nonce).get("everybody")
    if not isinstance(everybody, list) or len(everybody) != n_processes:
        raise MessageError("malformed")
    return everybody


def _receive(connection: socket.socket, size: int, until: float) -> bytes:
    connection.settimeout(_left(until))
    return connection.recv(size)


def _left(until: float, last: str = "") -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"time is up; {last}" if last else "time is up")
    return left


def _is_loopback(name: str) -> bool:
    """Whether only processes of this machine can reach an address."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
