"""Hosts of a job on one machine: forks of one process that has imported what all of them need.

Importing JAX takes seconds, and six hosts that each do it take the same cores six times as long. On one machine a
process does it for all: it touches no device, starts no thread, and forks a host when it is asked to. The host forks
the process that starts its workers (`warm`) before it does anything else. Each dies with its parent, as elsewhere.

Packets of JSON go over a socket: `{"host": …, "environment": …}` comes in, with the descriptors for a host's events and
its output; `{"pid": …}` and `{"ended": [pid, code]}` go out.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from meshmend.errors import LaunchError
from meshmend.launch.host import HostDescription, be_host, end_host
from meshmend.launch.processes import die_with_parent
from meshmend.launch.worker import START_S

MOST_BYTES = 2**20


class Nursery:
    """The process that forks hosts, for the one that asks for them.

    Its environment is what Python, JAX and others have read when they started, so it is for hosts that have the same.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = _read_at_start(environment)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and module
            [sys.executable, "-c", f"from meshmend.launch.nursery import main; main({theirs.fileno()})"],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,
            # OpenBLAS would start threads when NumPy is imported; a process with threads must not fork.
            env={"OPENBLAS_NUM_THREADS": "1", **self._environment},
        )
        theirs.close()
        self._started: list[int] = []
        self._codes: dict[int, int] = {}
        self._ended = False

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Whether a host with this environment would find everything as it had started by itself."""
        return _read_at_start(environment) == self._environment

    def start(self, what: HostDescription, environment: Mapping[str, str], events: int, output: int) -> ForkedHost:
        """Fork a host that reports to one descriptor and writes to another."""
        wanted = json.dumps({"host": what.to_json(), "environment": dict(environment)}).encode()
        with contextlib.suppress(BrokenPipeError):
            socket.send_fds(self._socket, [wanted], [events, output])
        until = time.monotonic() + START_S
        while not self._started:
            self._read(until - time.monotonic())
            if self._ended or time.monotonic() > until:
                raise LaunchError(
                    f"The process that forks hosts starts none (exit status {self._process.poll()}). Its output is "
                    "above; --cold starts each host as a Python of its own."
                )
        return ForkedHost(self, self._started.pop())

    def code(self, pid: int, timeout_s: float = 0.0) -> int | None:
        """Return the exit code of a host, below zero for a signal, None while it runs; wait so long for it."""
        until = time.monotonic() + timeout_s
        while pid not in self._codes and not self._ended and self._read(until - time.monotonic()):
            pass
        return self._codes.get(pid, -signal.SIGKILL if self._ended else None)  # hosts die with it

    def close(self) -> None:
        """End the process, and with it all hosts that still run."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _read(self, timeout_s: float) -> bool:
        """Take a packet, and return whether there was one in time."""
        self._socket.settimeout(max(timeout_s, 1e-3))
        try:
            packet = self._socket.recv(MOST_BYTES)
        except TimeoutError:
            return False
        said = json.loads(packet or b"{}")
        self._ended = not said
        self._started += [said["pid"]] if "pid" in said else []
        self._codes.update([said["ended"]] if "ended" in said else [])
        return True


class ForkedHost:
    """A host, with as much of `subprocess.Popen` as is asked of one."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery = nursery
        self.pid = pid

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        return self._nursery.code(self.pid)

    def wait(self) -> int:
        """Wait for the end, and return the exit code."""
        while (code := self._nursery.code(self.pid, timeout_s=1.0)) is None:
            pass
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what may be read when a process starts or imports: all but our own variables, one of which is secret."""
    return {name: value for name, value in environment.items() if not name.startswith("MESHMEND_")}


def main(descriptor: int) -> None:
    """Import, then fork hosts for the process at the other end of a socket, until it closes it."""
    from meshmend.launch.warm import MODULES  # not above: `python -m` warns of a module that is there already

    die_with_parent()
    control = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    for module in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    gc.freeze()  # or each fork's collector would touch, and so copy, what all of them share
    hosts: dict[int, int] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for selected, _ in selector.select():
                if selected.fileobj is not control:
                    pid = hosts.pop(selected.fd)
                    selector.unregister(selected.fd)
                    os.close(selected.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    _tell(control, ended=(pid, code))
                    continue
                packet, given, _, _ = socket.recv_fds(control, MOST_BYTES, 2)
                if not packet:
                    return
                mine = os.getpid()
                if pid := os.fork():
                    for each in given:
                        os.close(each)
                    hosts[watch := os.pidfd_open(pid)] = pid
                    selector.register(watch, selectors.EVENT_READ)
                    _tell(control, pid=pid)
                    continue
                die_with_parent(mine)
                selector.close()
                control.close()
                for each in hosts:
                    os.close(each)
                events, output = given
                _be_host(events, output, **json.loads(packet))


def _be_host(events: int, output: int, host: str, environment: dict[str, str]) -> None:
    os.setsid()
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    np.random.seed()  # noqa: NPY002  # or scripts that draw from it would draw the same on all hosts
    end_host(be_host(events, HostDescription(**json.loads(host)), forks=True))


def _tell(control: socket.socket, **said: Any) -> None:
    with contextlib.suppress(BrokenPipeError):
        control.send(json.dumps(said).encode())
