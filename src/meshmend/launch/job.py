"""The hosts that one `meshmend run` has started: one on a cluster, all of them of a job on one machine.

Each host is a process with its agent and its worker below it. They write to pipes, so that their lines can be shown in
one stream; they end when this process ends, and only they are ever killed.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from meshmend.errors import LaunchError
from meshmend.launch.agent import SAVE_S
from meshmend.launch.host import HostDescription
from meshmend.launch.nursery import ForkedHost
from meshmend.launch.processes import die_with_parent, kill_tree

Report = dict[str, Any]
"""What a host's agent writes to the process that has started it: "event" and "host", and facts."""

HostProcess = subprocess.Popen[bytes] | ForkedHost

LEAVE_S = SAVE_S + 3.0
"""How long hosts may take to save their state and leave, before they are killed."""


@dataclass(eq=False)
class _Running:
    process: HostProcess
    kinds: dict[int, str]
    """What is read from each file descriptor: lines, or events."""
    rest: dict[int, bytes] = field(default_factory=dict)
    """By file descriptor: the beginning of a line that has not ended yet."""


class HostProcesses:
    """Hosts that can be started, watched and killed. Leaving the `with` block ends all of them.

    `on_line` is called with each line that a host's worker writes, `on_event` with what its agent reports.
    """

    def __init__(
        self,
        *,
        secret: str,
        on_line: Callable[[int, str], None] = lambda *_: None,
        on_event: Callable[[Report], None] = lambda _: None,
    ) -> None:
        self._secret = secret
        self._on_line = on_line
        self._on_event = on_event
        self._hosts: dict[int, _Running] = {}
        self._selector = selectors.DefaultSelector()
        self.statuses: dict[int, int] = {}
        """Exit status of each host that has ended by itself, below zero for a signal."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all hosts."""
        self.stop()
        self._selector.close()

    @property
    def running(self) -> list[int]:
        """Hosts that have not ended."""
        return list(self._hosts)

    def start_host(self, what: HostDescription) -> None:
        """Start a host, also one that has ended before."""
        if what.host in self._hosts:
            raise LaunchError(f"Host {what.host} is already running.")
        (events, write), (output, their_output) = os.pipe(), os.pipe()
        environment = {**os.environ, "MESHMEND_SECRET": self._secret, "PYTHONUNBUFFERED": "1"}
        process = self._begin(what, environment, write, their_output)
        os.close(write)
        os.close(their_output)
        running = self._hosts[what.host] = _Running(process, {output: "line", events: "event"})
        for descriptor, kind in running.kinds.items():
            os.set_blocking(descriptor, False)
            running.rest[descriptor] = b""
            self._selector.register(descriptor, selectors.EVENT_READ, (what.host, kind))
        self.statuses.pop(what.host, None)

    def _begin(self, what: HostDescription, environment: Mapping[str, str], events: int, output: int) -> HostProcess:
        """Start the process of a host that reports to one descriptor and writes to another."""
        process = subprocess.Popen(  # noqa: S603  # our own interpreter and module
            [sys.executable, "-c", "from meshmend.launch.host import run_host; run_host()", str(events)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=[events],
            start_new_session=True,  # Ctrl-C is for this process, which then tells its hosts
            preexec_fn=die_with_parent,
            env=environment,
        )
        assert process.stdin is not None  # noqa: S101  # it is a pipe
        process.stdin.write(what.to_json().encode())
        process.stdin.close()
        return process

    def kill(self, host: int) -> float:
        """Kill a host as a power cut would, agent and worker by SIGKILL; return when, as seconds since the epoch."""
        at = time.time()
        kill_tree(self._hosts[host].process.pid)
        self._end(host)
        del self.statuses[host]
        return at

    def watch(self, timeout_s: float) -> None:
        """Pass on what the hosts write and report for so long, or until one of them has ended."""
        until = time.monotonic() + timeout_s
        while self._hosts and (left := until - time.monotonic()) > 0:
            for selected, _ in self._selector.select(min(left, 0.5)):
                self._read(selected.fd, *selected.data)
            ended = [host for host, running in self._hosts.items() if running.process.poll() is not None]
            for host in ended:
                self._end(host)
            if ended:
                return

    def stop(self) -> None:
        """Ask all hosts to end their workers and leave the job; kill those that do not, and all at an interrupt."""
        for running in self._hosts.values():
            running.process.send_signal(signal.SIGTERM)
        until = time.monotonic() + LEAVE_S
        try:
            while self._hosts and time.monotonic() < until:
                self.watch(until - time.monotonic())
        finally:
            for host in list(self._hosts):
                self.kill(host)

    def _read(self, descriptor: int, host: int, kind: str) -> bool:
        """Pass on what a host has written; return whether there was anything."""
        rest = self._hosts[host].rest
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._forget(descriptor)
        *lines, rest[descriptor] = (rest[descriptor] + (data or b"\n" * bool(rest[descriptor]))).split(b"\n")
        for line in lines:
            if kind == "line":
                self._on_line(host, line.decode(errors="replace"))
            elif line:
                self._on_event(json.loads(line))
        return bool(data)

    def _end(self, host: int) -> None:
        """Collect a host that has ended, and everything that it still had to say."""
        running = self._hosts[host]
        self.statuses[host] = running.process.wait()
        for descriptor, kind in running.kinds.items():
            while self._read(descriptor, host, kind):
                pass
            self._forget(descriptor)
            os.close(descriptor)
        del self._hosts[host]

    def _forget(self, descriptor: int) -> None:
        if descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)
