"""Processes meet before JAX starts: each says which host it is on, and learns who else is there.

So that processes can be numbered in the order of their hosts, whatever ranks the launcher gave them. Then the same hole
always gives the same program on the same device numbers, and a compiled program is found again; and mistakes in the
description of the machine are told on every process before anything waits for anything.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

from meshmend.errors import RestartError
from meshmend.jax.restart.launch import Launch

Fact = dict[str, Any]


def meet(launch: Launch, fact: Fact, *, timeout_s: float) -> list[Fact]:
    """Tell all processes of a launch a fact (that JSON can write); return everybody's, by the launcher's rank.

    Each comes back with the `address` under which process 0 sees it. A process that goes away while others still wait
    ends the meeting for all, at once.
    """
    name, port = launch.coordinator.rsplit(":", 1)
    until = time.monotonic() + timeout_s
    greeting = {"job": launch.job, "n_processes": launch.n_processes, "process": launch.process}
    if launch.n_processes == 1:
        return [{**fact, "address": name}]
    try:
        if launch.process == 0:
            return _host(int(port), greeting, {**fact, "address": name}, until)
        return _visit(name, int(port), {**greeting, "fact": fact}, until)
    except (OSError, ValueError) as error:
        raise RestartError(
            f"Process {launch.process} of {launch.n_processes} did not meet the others at {launch.coordinator} within "
            f"{timeout_s:g} s: {error}. A host that died while the job was starting does this; the launcher will try "
            "again."
        ) from error


def free_port() -> int:
    """Return a port that nobody listens on at the moment."""
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])


def _host(port: int, greeting: Fact, mine: Fact, until: float) -> list[Fact]:
    facts, visitors = {0: mine}, {}
    with socket.create_server(("", port)) as server, contextlib.ExitStack() as open_ones:
        while len(facts) < greeting["n_processes"]:
            server.settimeout(_left(until))
            visitor, address = server.accept()
            open_ones.callback(visitor.close)
            visitor.settimeout(_left(until))
            line = json.loads(_read_line(visitor))
            # A process of another job, or of an earlier attempt of this one, has come to the wrong meeting.
            if any(line.get(name) != greeting[name] for name in ("job", "n_processes")):
                visitor.close()
                continue
            facts[int(line["process"])] = {**line["fact"], "address": address[0]}
            visitors[int(line["process"])] = visitor
            _check_present(visitors)
        everybody = [facts[process] for process in range(len(facts))]
        for visitor in visitors.values():
            visitor.sendall(json.dumps(everybody).encode() + b"\n")
        return everybody


def _visit(name: str, port: int, line: Fact, until: float) -> list[Fact]:
    while True:
        try:
            visitor = socket.create_connection((name, port), timeout=_left(until))
            break
        except ConnectionRefusedError:
            # Process 0 is still starting.
            time.sleep(min(0.05, _left(until)))
    with visitor:
        visitor.sendall(json.dumps(line).encode() + b"\n")
        visitor.settimeout(_left(until))
        found: list[Fact] = json.loads(_read_line(visitor))
        return found


def _check_present(visitors: dict[int, socket.socket]) -> None:
    for process, visitor in visitors.items():
        visitor.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            if not visitor.recv(1, socket.MSG_PEEK):
                raise ConnectionError(f"process {process} went away")
        visitor.setblocking(True)


def _read_line(visitor: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        more = visitor.recv(1 << 16)
        if not more:
            raise ConnectionError("process 0 or a visitor went away")
        data += more
    return data


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("time is up")
    return left
