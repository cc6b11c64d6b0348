"""The process that starts workers does all that it is told, however its orders arrive."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshmend.launch.environment import FINAL

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
def warm(*, cold: bool = True) -> Iterator[Warm]:
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    words = [sys.executable, "-m", "meshmend.launch.warm", str(theirs.fileno()), *["--cold"] * cold]
    with subprocess.Popen(words, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE) as process, ours:
        theirs.close()
        assert process.stdout is not None
        one = Warm(ours, iter(process.stdout))
        assert one.answer()["ready"]
        try:
            yield one
        finally:
            one._lines.close()
            process.kill()


def start(script: Path) -> dict[str, Any]:
    return {"start": {"argv": [str(script)], "environment": dict(os.environ)}}


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


def test_an_error_that_would_come_again_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    ends = {
        "raise ParameterError('steps is -1')": FINAL,
        "raise PlanError('two-color', '4x4', 'no.')": FINAL,
        "raise RestartError('a disk is away')": 1,
        "raise SystemExit(3)": 3,
    }
    with warm(cold=False) as one:
        for line, code in ends.items():
            script.write_text(f"from meshmend.errors import *\n{line}\n")
            one.order(start(script))
            assert one.answer()["pid"]
            assert one.answer() == {"ended": code}, line
