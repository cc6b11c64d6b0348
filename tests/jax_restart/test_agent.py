"""Agents and their workers: real processes that are killed, frozen and left without a store.

The workers here do nothing but wait, so these tests take seconds.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshmend.launch import Hosts, LocalJob
from meshmend.launch.processes import children

WORKER = """
import json, os, sys, time
from pathlib import Path
folder, host = Path(sys.argv[1]), os.environ["MESHMEND_HOST"]
facts = json.loads(os.environ["MESHMEND_ROUND"])
assert facts["hosts"][facts["process"]] == int(host)
assert "MESHMEND_SECRET" not in os.environ and len(bytes.fromhex(os.environ["MESHMEND_FILE_KEY"])) == 32
print("hosts", *facts["hosts"], "in", facts["number"], "pid", os.getpid())
while not (folder / "end").exists():
    time.sleep(0.05)
    if (folder / f"fail-{host}").exists():
        (folder / f"fail-{host}").unlink()
        sys.exit(3)
    if (folder / f"always-{host}").exists():
        sys.exit(int((folder / f"always-{host}").read_text()))
"""


class Watched:
    """A job of three hosts, and what it has said so far."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        script = folder / "worker.py"
        script.write_text(WORKER)
        self.folder = folder
        self.lines: list[tuple[int, str]] = []
        self.events: list[dict[str, Any]] = []
        machine = Hosts.of("6x2", "2x2")
        self.job = LocalJob(
            [str(script), str(folder)],
            machine,
            folder / "shared",
            warm=False,
            on_line=lambda host, line: self.lines.append((host, line)),
            on_event=self.events.append,
            **settings,
        )

    def rounds(self, host: int) -> list[str]:
        """The hosts that a host's workers ran with, one entry per start."""
        return [names for names, _ in self._starts(host)]

    def _starts(self, host: int) -> list[tuple[str, str]]:
        """The hosts of each start, and its round."""
        found = (re.match(r"hosts ([\d ]+) in (\d+)", line) for h, line in self.lines if h == host)
        return [(one[1], one[2]) for one in found if one is not None]

    def until(self, condition: Callable[[], Any], timeout_s: float = 60.0) -> float:
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < timeout_s, (self.lines, self.events)
            self.job.watch(0.05)
        return time.monotonic() - began

    def until_together(self, *hosts: int) -> float:
        """Wait until these hosts, and no others, run in the same round: the line of one may come late."""
        names = " ".join(map(str, hosts))

        def are_together() -> bool:
            last = [self._starts(host)[-1:] for host in hosts]
            return last[0] != [] and last[0][0][0] == names and all(one == last[0] for one in last)

        return self.until(are_together)

    def finish(self) -> dict[int, int]:
        (self.folder / "end").touch()
        return self.job.wait(30)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    one = Watched(tmp_path, silent_s=3.0)
    with one.job:
        one.job.start()
        one.until_together(0, 1, 2)
        yield one


def test_killed_frozen_failing_and_without_a_store(watched: Watched) -> None:
    job = watched.job
    # A host is killed: the others start again at once. It comes back: all start again with it.
    job.kill(0)
    assert watched.until_together(1, 2) < 5.0
    job.start(0)
    watched.until_together(0, 1, 2)
    # A host freezes: it is dropped when it has been silent for too long, and taken back when it thaws.
    pid = job._hosts[2].process.pid
    frozen = [pid, *children(pid)]
    for each in frozen:
        os.kill(each, signal.SIGSTOP)
    assert watched.until_together(0, 1) > 1.0
    assert any("host 2 is lost: not heard from for" in event.get("why", "") for event in watched.events)
    for each in frozen:
        with contextlib.suppress(ProcessLookupError):  # the worker of the round before was just ending
            os.kill(each, signal.SIGCONT)
    watched.until_together(0, 1, 2)
    # A worker fails: everybody starts again, and nobody is lost.
    starts = [len(watched.rounds(host)) for host in range(3)]
    (watched.folder / "fail-1").touch()
    watched.until(lambda: [len(watched.rounds(host)) for host in range(3)] == [n + 1 for n in starts])
    watched.until_together(0, 1, 2)
    assert any("host 1 starts again: its worker ended with exit code 3" in e.get("why", "") for e in watched.events)
    # The store is lost: the workers do not notice. The new one knows them, and hears of the next death.
    starts = [len(watched.rounds(host)) for host in range(3)]
    job.kill_store()
    watched.until(lambda: sum(e.get("type") == "unreachable" for e in watched.events) >= 3)
    job.start_store()
    time.sleep(4.0)  # longer than a new store waits for the hosts of a round
    job.watch(0.2)
    assert [len(watched.rounds(host)) for host in range(3)] == starts
    job.kill(0)
    watched.until_together(1, 2)
    assert watched.finish() == {1: 0, 2: 0}


def test_a_script_that_always_fails_ends_the_job_everywhere(tmp_path: Path) -> None:
    one = Watched(tmp_path, max_restarts=1)
    (tmp_path / "always-1").write_text("4")
    with one.job:
        one.job.start()
        assert set(one.job.wait(90).values()) == {1}
    assert len(one.rounds(1)) == 2
    errors = [event["message"] for event in one.events if event["event"] == "error"]
    assert any("made no new step; at the last one its worker ended with exit code 4" in error for error in errors)
