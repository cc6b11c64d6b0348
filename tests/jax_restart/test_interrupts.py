"""SIGTERM and Ctrl-C in real jobs: all hosts save the same step, say so, and the next start goes on from it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from jax_restart.on_screen import environment, job_on_screen, matches, run, write
from meshmend.launch.agent import SAVE_S
from meshmend.launch.processes import children
from meshmend.launch.timeline import read_timeline, timeline_of

SLOWLY = "time.sleep(0.05)"
NOT_SOON = "time.sleep(10)"
HEAR = "import os, signal, sys; signal.signal(2, signal.default_int_handler); os.execv(sys.executable, sys.argv[1:])"
SAVED = re.compile(r"interrupted: all hosts are stopped; step (\d+) is saved: the same command goes on from there$")


class Shown:
    """A job of two hosts, and what it has shown so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.process = process
        self.stdout: IO[str] = process.stdout
        self.lines: list[str] = []

    def until(self, text: str) -> str:
        for line in self.stdout:
            self.lines.append(line.rstrip("\n"))
            if text in line:
                return self.lines[-1]
        raise AssertionError("\n".join(self.lines))

    def interrupt(self, number: signal.Signals, times: int = 1) -> tuple[str, int, float]:
        """Return the last line, the exit code and the seconds until then."""
        at = time.monotonic()
        for _ in range(times):
            self.process.send_signal(number)
            time.sleep(0.5 if times > 1 else 0)
        last = self.until("interrupted: all hosts are stopped")
        return last, self.process.wait(60), time.monotonic() - at


@contextmanager
def job(folder: Path) -> Iterator[Shown]:
    words = [sys.executable, "-m", "meshmend", "run", "--local", "2x4", "--host", "2x2", "train.py"]
    with subprocess.Popen(
        [sys.executable, "-c", HEAR, *words], cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True
    ) as driver:
        try:
            yield Shown(driver)
        finally:
            driver.kill()


def saved_in(line: str) -> int:
    found = SAVED.search(line)
    assert found is not None, line
    return int(found[1])


def events(folder: Path, host: int, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in read_timeline(timeline_of(folder / "shared", host)) if event["event"] in kinds]


def test_interrupts_save_a_step_and_say_which_and_a_second_job_is_refused(tmp_path: Path) -> None:
    write(tmp_path, SLOWLY, steps=100_000)
    with job(tmp_path) as one:
        one.until("step 1 is done")
        refused = run(tmp_path, "train.py", code=1)
        matches(
            refused,
            r"Error: Another `meshmend run` has a job in \S+/shared. Wait until it ends, or give this one a folder of "
            r"its own: --shared DIR.",
        )
        line, code, _ = one.interrupt(signal.SIGTERM)
        first = saved_in(line)
    assert code == 143
    assert [event["step"] for host in (0, 1) for event in events(tmp_path, host, "stopped")] == [first, first]
    # The next start goes on from exactly that step. Before its own next checkpoint it knows of the last one: the second
    # interrupt comes while the loop's body still keeps the first from saving anything.
    write(tmp_path, NOT_SOON, steps=100_000)
    with job(tmp_path) as two:
        assert f"from step {first} (disk)" in two.until(f"step {first + 1} is done")
        line, code, _ = two.interrupt(signal.SIGINT, times=2)
    assert code == 130
    assert re.search(
        rf"step {first} is saved: the same command goes on from there; steps up to {first + 1} were not saved$", line
    )
    # A third is ended before it trains: at once, and the checkpoint is still there.
    with job(tmp_path) as three:
        three.until("round 3: hosts 0, 1 start")
        line, code, _ = three.interrupt(signal.SIGINT)
    assert code == 130
    assert saved_in(line) == first


def test_a_host_that_is_asked_to_leave_repeats_no_step_of_the_others(tmp_path: Path) -> None:
    """As where a scheduler drains one node: the others go on without it, from the step that all of them have saved."""
    write(tmp_path, SLOWLY, steps=150)
    with job_on_screen(tmp_path) as (hosts, _, look):
        hosts.start()
        look(lambda: len(events(tmp_path, 0, "step")) > 5)
        hosts._hosts[1].process.send_signal(signal.SIGTERM)
        look(lambda: False)
        assert hosts.statuses == {0: 0, 1: 143}
    steps = [event["step"] for event in events(tmp_path, 0, "step")]
    assert steps == list(range(1, 151)), "each once"
    (stopped,) = events(tmp_path, 0, "stopped")
    resumed = events(tmp_path, 0, "restore")[-1]
    assert (resumed["step"], resumed["saved"]) == (stopped["step"], stopped["step"])


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


@pytest.mark.slow
def test_a_frozen_host_does_not_keep_the_others_from_ending(tmp_path: Path) -> None:
    write(tmp_path, SLOWLY, steps=100_000)
    with job(tmp_path) as one:
        one.until("step 1 is done")
        forked = [pid for pid in children(one.process.pid) if "nursery" in Path(f"/proc/{pid}/cmdline").read_text()]
        _, frozen = [pid for pid in forked if parent_of(parent_of(pid)) == one.process.pid]
        for pid in (frozen, *children(frozen)):
            os.kill(pid, signal.SIGSTOP)
        line, code, seconds = one.interrupt(signal.SIGTERM)
    assert code == 143
    assert seconds < SAVE_S + 15
    assert "no checkpoint is there yet" in line
