"""Replays of jobs that are made up second by second: what is read of them, and what the simulator makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recorded_job import read_record
from replay import replay

Event = dict[str, Any]
FIRST = {"start": 4.0, "plan": 2.0, "compile": 3.0, "restore": 0.5, "first step": 1.0}
STEP_S = {16: 1.0, 12: 1.25, 8: 2.0, 4: 3.5}


class WrittenJob:
    """Writes what the hosts of a job would have, from the seconds that each thing took."""

    def __init__(self, machine: str = "4x4 in hosts of 2x2", step_s: dict[int, float] = STEP_S) -> None:
        self.machine = machine
        self.step_s = step_s
        self.now = 1_000_000.0
        self.step = self.round = 0
        self.events: dict[int, list[Event]] = {}

    def say(self, speakers: list[int], event: str, **facts: Any) -> None:
        for host in speakers:
            self.events.setdefault(host, []).append({"at": self.now, "event": event, "host": host, **facts})

    def fail(self, survivors: list[int], detect_s: float, rendezvous_s: float) -> None:
        self.now += detect_s
        self.say(survivors, "gave up", why="lost a peer")
        self.now += rendezvous_s

    def train(self, hosts: list[int], stages: dict[str, float], steps: int, lose: int = 0, save_every: int = 0) -> None:
        self.round += 1
        for event in ("process", "fabric", "plan", "compile", "restore"):
            seconds = stages["start"] / 2 if event in ("process", "fabric") else stages[event]
            facts: Event = {"fabric": {"chips": 4 * len(hosts), "hosts": hosts, "machine": self.machine}}.get(event, {})
            if event == "restore":
                facts = {"step": self.step, "source": "memory"}
            self.say(hosts, event, seconds=seconds, round=self.round, **facts)
            self.now += seconds
        resumed = self.step
        for number in range(resumed + 1, resumed + steps + 1):
            self.now += stages["first step"] if number == resumed + 1 else self.step_s[4 * len(hosts)]
            if save_every and number % save_every == 0 and number > resumed + 1:
                self.say(hosts, "checkpoint", seconds=0.5, step=number)
                self.now += 0.5
            self.say(hosts, "step", step=number, loss=0.5, round=self.round, waited_s=0.0)
        self.step = resumed + steps - lose

    def save(self, folder: Path) -> Path:
        (folder / "timeline").mkdir(parents=True)
        for host, events in self.events.items():
            lines = "".join(json.dumps(event) + "\n" for event in events)
            (folder / "timeline" / f"host-{host}.jsonl").write_text(lines)
        return folder


def by_hand(folder: Path) -> Path:
    """Lose host 3 for good, then host 2, which comes back, then host 1: four stops, each of another length."""
    job = WrittenJob()
    job.train([0, 1, 2, 3], FIRST, 101)  # 10.5 s to the first step, then 100 s
    job.fail([0, 1, 2], 2.0, 1.0)  # at 110.5
    job.train(
        [0, 1, 2], {"start": 2.0, "plan": 1.0, "compile": 1.0, "restore": 1.0, "first step": 2.0}, 81
    )  # 10, 100 s
    job.fail([0, 1], 4.0, 1.0)  # at 220.5
    job.train([0, 1], {"start": 2.0, "plan": 1.0, "compile": 2.0, "restore": 1.0, "first step": 3.0}, 51)  # 14, 100 s
    job.fail([0, 1], 0.0, 1.0)  # at 334.5, as host 2 comes back
    job.train([0, 1, 2], {"start": 3.0, "plan": 1.0, "compile": 1.0, "restore": 1.0, "first step": 2.0}, 81)  # 9, 100 s
    job.fail([0, 2], 2.0, 1.0)  # at 443.5
    job.train([0, 2], {"start": 2.0, "plan": 1.0, "compile": 1.0, "restore": 1.0, "first step": 2.0}, 31)  # 10, 60 s
    return job.save(folder)


def test_what_is_predicted_by_hand(tmp_path: Path) -> None:
    """A typical failure takes 2 s to detect and 8 s to restart, of which one to plan; taking a host back took 9 s."""
    found = replay(read_record(by_hand(tmp_path)))
    failures = sorted(found.job.failures, key=lambda one: one.at_s)
    assert [(one.host, one.away_s) for one in failures] == [(3, None), (2, pytest.approx(114.0)), (1, None)]
    assert dict(found.job.step_s) == pytest.approx({16: 1.0, 12: 1.25, 8: 2.0})
    assert found.job.measured.goodput == pytest.approx(460 / 513.5)
    # Training: to 110.5; from 120.5 to 220.5; from 230.5 to 334.5; from 343.5 to 443.5; from 453.5 to the end.
    spans = {16: [100.0], 12: [100.0, 100.0], 8: [104.0, 60.0]}
    trained = sum(map(sum, spans.values()))
    assert found.predicted.spent_s["training"] == pytest.approx(trained)
    assert found.predicted.goodput == pytest.approx(trained / 513.5)
    assert found.goodput_error == pytest.approx(trained / 460 - 1)
    steps = 100 / 1.0 + 200 / 1.25 + 164 / 2.0
    assert found.predicted.steps == pytest.approx(steps + 5)  # and the first of each start
    assert found.predicted.spent_s["detect"] == pytest.approx(3 * 2.0)
    assert found.predicted.spent_s["compile"] == pytest.approx(3.0 + 4 * 1.0)
    assert sum(found.predicted.spent_s.values()) == pytest.approx(513.5)
    work = {one.name: one.work for one in found.policies}
    assert work["fault-tolerant"] == pytest.approx((100 + 200 * 12 / 16 + 164 * 8 / 16) / 513.5)
    # Waiting for host 3, which never came back, nothing but the first 100 s is done.
    assert work["quick repair"] == pytest.approx(100 / 513.5)
    # A spare takes a minute and 7 s of restart: from 179.5 to 220.5 and from 289.5 to 443.5. Host 2 is back in the pool
    # by then, so that the third failure finds it there: from 512.5 to the end.
    assert work["hot spares"] == pytest.approx((100 + 41 + 154 + 1) / 513.5)


def test_checkpoints(tmp_path: Path) -> None:
    """Every 20 steps, for half a second: five in 101 steps, and four of 91 more."""
    job = WrittenJob(step_s=dict.fromkeys(STEP_S, 1.0))
    stages = dict.fromkeys(FIRST, 1.0)
    job.train([0, 1, 2, 3], stages, 101, save_every=20)
    job.fail([0, 1, 2], 1.0, 1.0)
    job.train([0, 1, 2], stages, 91, save_every=20)
    found = replay(read_record(job.save(tmp_path)))
    assert (found.job.checkpoint_steps, found.job.checkpoint_s) == (20, 0.5)
    assert found.job.measured.spent_s["checkpoint"] == pytest.approx(9 * 0.5)
    assert found.predicted.spent_s["checkpoint"] == pytest.approx(9 * 0.5)
    assert found.goodput_error == pytest.approx(0, abs=1e-6)


def run(*words: str) -> str:
    script = Path(__file__).parents[2] / "benchmarks" / "replay.py"
    return subprocess.run([sys.executable, script, *words], capture_output=True, text=True, check=True).stdout


def test_the_script(tmp_path: Path) -> None:
    by_hand(tmp_path / "job")
    facts = json.loads(run(str(tmp_path / "job"), "--json", "--spares", "0"))
    assert facts["goodput_error"] == pytest.approx(464 / 460 - 1)
    assert facts["inputs"]["failures"][0]["host"] in (1, 2, 3)
    assert facts["inputs"]["steps_between_checkpoints"] is None
    spares = next(one for one in facts["policies"] if one["policy"] == "hot spares")
    assert spares["work"] == pytest.approx(100 / 513.5)
    shown = run(str(tmp_path / "job"))
    assert "goodput      89.58 %    90.36 %      +0.9 %" in shown
    assert "4x4 in hosts of 2x2, 514 s, 3 failures of a host" in shown
    assert "elastic slices" in shown
