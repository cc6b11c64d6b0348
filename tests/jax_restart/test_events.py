"""A real job's events, in its timelines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshmend.launch.processes import kill_tree
from meshmend.launch.timeline import Line, read_timeline

WORKER = """
import json, os, time
from pathlib import Path
from meshmend.launch import Timeline

facts = json.loads(os.environ["MESHMEND_ROUND"])
host = int(os.environ["MESHMEND_HOST"])
notes = Timeline(
    os.environ["MESHMEND_TIMELINE"], job=os.environ["MESHMEND_JOB"], round=facts["number"], host=host
)
notes.note("process", seconds=0.0)
notes.note("fabric", chips=4 * len(facts["hosts"]), hosts=facts["hosts"], machine="2x6 in hosts of 2x2")
step, kept = 0, Path("step")
while True:
    step = max(step, int(kept.read_text() or 0) if kept.exists() else 0) + 1
    time.sleep(0.02)
    notes.note("step", step=step)
    if facts["process"] == 0:
        Path("draft").write_text(str(step))
        Path("draft").replace(kept)
"""


def environment() -> dict[str, str]:
    hidden = ("XLA_FLAGS", "MESHMEND_SHAPE", "MESHMEND_HOST", "http_proxy", "HTTP_PROXY")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"PYTHONPATH": os.pathsep.join(sys.path), "NO_COLOR": "1", "COLUMNS": "200"}


def until(condition: Callable[[], Any], timeout_s: float = 120.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def hosts_of(driver: subprocess.Popen[bytes]) -> list[int]:
    """Processes of the hosts of `meshmend run --local`, which starts them in order."""
    mine = [int(pid) for pid in Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()]
    return sorted(pid for pid in mine if b"run_host" in Path(f"/proc/{pid}/cmdline").read_bytes())


class RunningJob:
    """`meshmend run --local` with three hosts, of which it needs two."""

    def __init__(self, folder: Path) -> None:
        (folder / "train.py").write_text(WORKER)
        self.folder = folder
        command = [sys.executable, "-m", "meshmend", "run", "--local", "2x6", "--host", "2x2", "--hosts", "2:3"]
        with (folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "--cold", "--shared", "shared", "train.py"],
                cwd=folder,
                env=environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def events(self, host: int, *kinds: str) -> list[Line]:
        found = read_timeline(self.folder / "shared" / "timeline" / f"host-{host}.jsonl")
        return [event for event in found if event["event"] in kinds]

    def close(self) -> None:
        kill_tree(self.process.pid)
        self.process.wait()


@pytest.mark.slow
def test_two_losses_are_in_the_timelines_of_those_who_live(tmp_path: Path) -> None:
    job = RunningJob(tmp_path)
    try:
        train_through_two_losses(job)
    finally:
        job.close()


def train_through_two_losses(job: RunningJob) -> None:
    until(lambda: len(job.events(0, "step")) > 50)
    pids = hosts_of(job.process)
    kill_tree(pids[2])
    until(lambda: job.events(0, "recovered") and job.events(1, "recovered"))
    (lost,), (recovered,) = job.events(0, "host lost"), job.events(0, "recovered")
    assert (lost["lost"], lost["chips"]) == ([2], [[0, 4], [0, 5], [1, 4], [1, 5]])
    assert lost["step"] > 45
    assert {"job", "round", "host"} <= lost.keys()
    assert (recovered["hosts"], recovered["lost"]) == ([0, 1], [2])
    # The seconds are those between its own steps: its worker may do one more before it is stopped.
    steps = job.events(0, "step")
    first = next(i for i, step in enumerate(steps) if step["round"] == 2)
    assert recovered["seconds"] == steps[first]["at"] - steps[first - 1]["at"]
    assert [event["id"] for event in job.events(1, "host lost", "recovered")] == [lost["id"], recovered["id"]]
    kill_tree(pids[1])
    until(lambda: job.events(0, "below minimum"))
    (short,) = job.events(0, "below minimum")
    assert (short["hosts"], short["least"]) == ([0], 2)
    output = job.folder / "output"
    until(lambda: "after round 2 host 0 waits: the job needs 2 hosts" in output.read_text())
    for event in job.events(0, "round", "step", "host lost", "recovered", "below minimum"):
        assert {"job", "round", "host"} <= event.keys()
        assert event["event"] == "round" or "step" in event
    noted = job.events(0, "host lost", "recovered", "below minimum")
    assert [event["event"] for event in noted] == ["host lost", "recovered", "host lost", "below minimum"]
    assert len({event["id"] for event in noted}) == 4
    watch = [sys.executable, "-m", "meshmend", "watch", "shared", "--json"]
    done = subprocess.run(watch, cwd=job.folder, env=environment(), check=True, capture_output=True)
    facts: dict[str, Any] = json.loads(done.stdout)
    assert (facts["state"], facts["hosts"], facts["chips"]) == ("waiting", [0], 4)
