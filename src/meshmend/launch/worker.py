"""The worker of a host, as its agent sees it: started from a warm process, watched, and stopped."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from meshmend.errors import LaunchError
from meshmend.launch.failure import FAILURE_FILE, FailureFile, WorkerFailure
from meshmend.launch.processes import die_with_parent

START_S = 120.0
"""How long the warm process may take to import everything, on an overloaded machine."""


class Workers:
    """Starts one worker at a time, with the output of this process. All that it has started dies with this process."""

    def __init__(self, *, warm: bool = True, fork_without: int | None = None) -> None:
        """Start the process that starts workers.

        A process that has one thread and has imported everything may fork it, `fork_without` a descriptor of its own.
        """
        ours, theirs = socket.socketpair()
        self._failures = FailureFile()
        forked = None if fork_without is None else _Fork(ours, theirs, fork_without)
        self._process = forked or self._start(theirs, warm)
        theirs.close()
        self._socket = ours
        self._lines = b""
        self.pid = 0
        """Of the worker that runs; 0 if none does."""
        self.code: int | None = None
        """Exit code of the last worker, below zero for a signal; None while it runs."""
        self._ready = False

    def _start(self, theirs: socket.socket, warm: bool) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "meshmend.launch.warm", str(theirs.fileno()), *([] if warm else ["--cold"])]
        # OpenBLAS would start threads when NumPy is imported; a process with threads must not fork workers.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": os.environ.get("OPENBLAS_NUM_THREADS", "1")}
        return subprocess.Popen(  # noqa: S603  # our own interpreter and module
            command,
            pass_fds=[theirs.fileno(), self._failures.descriptor],
            stdin=subprocess.DEVNULL,
            env=environment,
            preexec_fn=die_with_parent,
        )

    def start(self, argv: Sequence[str], environment: Mapping[str, str]) -> int:
        """Start a worker that runs a script and its arguments; return its process id."""
        self._until(lambda: self._ready, START_S, "is not ready")
        self.code, self.pid = None, 0
        self._failures.clear()
        facts = {**environment, FAILURE_FILE: str(self._failures.descriptor)}
        self._send_message({"start": {"argv": list(argv), "environment": facts}})
        self._until(lambda: bool(self.pid), START_S, "does not start a worker")
        return self.pid

    def poll(self) -> int | None:
        """Return the exit code of the worker, None while it runs."""
        self._read(0.0)
        return self.code

    def is_frozen(self) -> bool:
        """Whether a signal has stopped the worker, as SIGSTOP does, and none has continued it; a debugger may."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "T"
        except (OSError, ValueError):
            return False  # it has ended

    def failure(self) -> WorkerFailure | None:
        """Return the error that ends the worker, as soon as it has said so."""
        return self._failures.read()

    def ask_to_end(self, patience_s: float) -> None:
        """Ask the worker to end by SIGTERM, and wait so long: a job's saves its state first."""
        self._signal(signal.SIGTERM, patience_s)

    def stop(self) -> None:
        """End the worker at once: its peers are gone, and what it could still save they have."""
        self._signal(signal.SIGKILL, START_S)

    def _signal(self, number: signal.Signals, patience_s: float) -> None:
        """Send the worker a signal, if it runs, and wait until it has ended, or so long."""
        if not self.pid or self.poll() is not None:
            return
        self._send_message({"signal": int(number)})
        until = time.monotonic() + patience_s
        while self.code is None and time.monotonic() < until:
            self._read(until - time.monotonic())

    def close(self) -> None:
        """End the worker and the warm process."""
        self._socket.close()
        self._process.kill()
        self._process.wait()
        self._failures.close()

    def _until(self, condition: Callable[[], bool], patience_s: float, what: str) -> None:
        until = time.monotonic() + patience_s
        while not condition():
            if time.monotonic() > until or self._process.poll() is not None:
                raise LaunchError(
                    f"The process that starts workers {what} (exit status {self._process.poll()}). Its output is "
                    "above; --cold starts each worker as a Python of its own."
                )
            self._read(0.5)

    def _send_message(self, message: object) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _read(self, timeout_s: float) -> None:
        """Take what the warm process has said; wait for something for so long."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            if not selector.select(max(0.0, timeout_s)):
                return
        data = self._socket.recv(1 << 16)
        if not data:
            self._process.wait()
            if self.pid and self.code is None:
                self.code = -signal.SIGKILL  # it died with its parent
            return
        *lines, self._lines = (self._lines + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            self._ready = self._ready or "ready" in message
            self.pid = message.get("pid", self.pid)
            self.code = message.get("ended", self.code)


class _Fork:
    """The process that starts workers, as a fork of this one."""

    def __init__(self, ours: socket.socket, theirs: socket.socket, without: int) -> None:
        self._code: int | None = None
        self._pid = os.fork()
        if self._pid == 0:
            from meshmend.launch.warm import run  # not above: `python -m` warns of a module that is there already

            ours.close()
            os.close(without)
            run(theirs.detach())
            sys.exit()  # of the worker, too, when its script has ended

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        return self._wait(os.WNOHANG)

    def kill(self) -> None:
        """Kill it, if it still runs."""
        if self.poll() is None:
            os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> int | None:
        """Wait for the end, and return the exit code."""
        return self._wait(0)

    def _wait(self, how: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self._pid, how)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code
