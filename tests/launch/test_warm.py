"""The process that starts workers does all that it is told, however its orders arrive."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshmend.launch.failure import FAILURE_FILE, FailureFile

DEAF = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(60)
"""


class Warm:
    """The process, and the agent's end of its socket."""

    def __init__(self, ours: socket.socket, output: Iterator[bytes]) -> None:
        self.socket = ours
        self.output = output
        self._lines = ours.makefile("r")

    def order(self, *messages: dict[str, Any]) -> None:
        """Send orders that arrive together."""
        self.socket.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in messages))

    def answer(self) -> Any:
        return json.loads(self._lines.readline())


@contextmanager
def warm(*inherited: int, cold: bool = True) -> Iterator[Warm]:
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    words = [sys.executable, "-m", "meshmend.launch.warm", str(theirs.fileno()), *["--cold"] * cold]
    with subprocess.Popen(words, pass_fds=[theirs.fileno(), *inherited], stdout=subprocess.PIPE) as process, ours:
        theirs.close()
        assert process.stdout is not None
        one = Warm(ours, iter(process.stdout))
        assert one.answer()["ready"]
        try:
            yield one
        finally:
            one._lines.close()
            process.kill()


def start(script: Path, **more: str) -> dict[str, Any]:
    return {"start": {"argv": [str(script)], "environment": {**os.environ, **more}}}


def test_a_deaf_worker_is_killed_though_both_signals_arrive_together(tmp_path: Path) -> None:
    script = tmp_path / "deaf.py"
    script.write_text(DEAF)
    with warm() as one:
        one.order(start(script))
        assert one.answer()["pid"]
        assert next(one.output) == b"up\n"
        one.order({"signal": signal.SIGTERM}, {"signal": signal.SIGKILL})
        assert one.answer() == {"ended": -signal.SIGKILL}


def test_a_start_and_a_signal_that_arrive_together_are_both_done(tmp_path: Path) -> None:
    script = tmp_path / "deaf.py"
    script.write_text(DEAF)
    with warm() as one:
        for _ in range(2):  # and the next worker is one like the first
            one.order(start(script), {"signal": signal.SIGKILL})
            assert one.answer()["pid"]
            assert one.answer() == {"ended": -signal.SIGKILL}


def test_a_worker_says_with_which_error_it_gives_up_and_waits_to_be_stopped(tmp_path: Path) -> None:
    script, failures = tmp_path / "train.py", FailureFile()
    kinds = {
        "raise ParameterError('steps is -1')": "final",
        "raise PlanError('two-color', '4x4', 'no.')": "final",
        "raise ValueError('no such layer')": "lasting",
        "raise TransientError('a port is taken')": "transient",
        "open('nowhere')": "lasting",
    }
    with warm(failures.descriptor, cold=False) as one:
        for line, kind in kinds.items():
            script.write_text(f"from meshmend.errors import *\n{line}\n")
            failures.clear()
            one.order(start(script, **{FAILURE_FILE: str(failures.descriptor)}))
            assert one.answer()["pid"]
            until = time.monotonic() + 30
            while (failure := failures.read()) is None and time.monotonic() < until:
                time.sleep(0.01)
            assert failure is not None, line
            assert failure.kind == kind
            assert failure.error.partition(":")[0] in failure.trace.splitlines()[-1]
            assert f'File "{script}", line 2' in failure.trace
            assert "runpy" not in failure.trace
            one.order({"signal": signal.SIGTERM})
            assert one.answer() == {"ended": -signal.SIGTERM}, line
        script.write_text("raise SystemExit(3)")
        one.order(start(script))
        assert [one.answer().get("ended") for _ in range(2)] == [None, 3]
    failures.close()
