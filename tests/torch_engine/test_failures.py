"""Training goes on when chips are killed: the page's job, and the example."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")
pytest.importorskip("torchft", reason="torchft is not installed: pip install 'meshmend[torch]'")

from meshmend.launch.timeline import read_timeline
from meshmend.launch.watching import Watch
from pages import read

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/torch/train_through_failure.py"


def test_the_pages_job_goes_on_with_three_when_one_of_the_four_is_killed(tmp_path: Path) -> None:
    """The block of the page, for fewer epochs."""
    (block,) = (
        block for block in read(ROOT / "docs/torch.md") if block.kind == "python" and "epoch < 200:" in block.body
    )
    job, shorter = tmp_path / "job.py", block.body.replace("epoch < 200:", "epoch < 15:")
    assert shorter != block.body
    job.write_text(shorter, encoding="utf-8")
    command = [sys.executable, str(job)]
    with (
        (tmp_path / "torchft.log").open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True) as running,
    ):
        assert running.stdout is not None
        try:
            said = ""
            while "on 2x2" not in said:
                said += (line := running.stdout.readline())
                assert line, said
            chips = dict(re.findall(r"chip (\(\d, \d\)) is process (\d+)", said))
            os.kill(int(chips.pop("(0, 1)")), signal.SIGKILL)
            said += running.communicate(timeout=120)[0]
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == 0, (tmp_path / "torchft.log").read_text()[-2000:]
    ends = re.findall(r"chip (\(\d, \d\)): (\d+) steps on ([^,]*,\d), weights (\S+ \S+ \S+\]\])", said)
    assert sorted(chip for chip, *_ in ends) == sorted(chips)
    assert len(chips) == 3
    ((steps, mesh, _),) = {tuple(facts) for _, *facts in ends}  # all three have the same weights
    assert mesh == "2x2 minus 1x1@0,1"
    assert int(steps) > 15 * 1000 // 100  # steps of three chips use fewer samples than those of four


@pytest.mark.slow  # sixteen processes; the test above loses one of four, and test_goodput has accounts of quorums
def test_the_example_trains_through_the_loss_of_a_board(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--steps", "30", "--no-view", "--figure", str(tmp_path / "loss.svg")]
    command += ["--shared", str(tmp_path / "shared")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert result["steps"] == 30
    assert result["weights_agree"] is True
    assert 12 in result["chips"][10:20]
    assert min(result["chips"]) == 12
    assert result["chips"][-1] == 16
    assert result["last_loss"] < result["first_loss"]
    # 64 samples per chip and step, and none of the 5,000 a third time before all have been used twice.
    assert result["samples"] == 64 * sum(result["chips"])
    assert result["sample_used"] == [result["samples"] // 5000, -(-result["samples"] // 5000)]
    assert (tmp_path / "loss.svg").stat().st_size > 1000
    where_the_time_went(tmp_path / "shared", result)


def where_the_time_went(shared: Path, result: dict[str, Any]) -> None:
    """Hold the job's account, from its timelines, against what the example has seen itself."""
    watch = Watch(shared)
    watch.read()
    account = watch.account()
    assert account is not None
    assert sorted(watch.histories, key=int) == [str(number) for number in range(16)]
    assert watch.state(account) == "over"
    assert (account.step, account.chips, account.machine) == (30, 16, "4x4 in hosts of 1x1")
    assert account.training_s + sum(account.badput_s.values()) == pytest.approx(account.total_s, rel=1e-6)
    assert 0 < account.goodput < 1
    (loss,) = [one for one in account.recoveries if one.lost]
    assert loss.lost == (2, 3, 6, 7)
    assert (loss.chips, loss.step, loss.resumed) == (12, result["killed_after_step"] + 1, loss.step)
    # The example measures from the kill, the account from the last step before it.
    assert loss.total_s <= result["recovered_s"] + 5 * account.step_s + 1
    # A board that dies between two steps is missed by the quorum alone: nobody gives up, and there is no "detect".
    events = [event for path in (shared / "timeline").iterdir() for event in read_timeline(path)]
    resumed_at = min(event["at"] for event in events if event["event"] == "step" and event["at"] > loss.at)
    gave_up = [event["at"] for event in events if event["event"] == "gave up" and loss.at < event["at"] < resumed_at]
    assert (loss.stages_s["detect"] > 0) == bool(gave_up)
    assert loss.stages_s["detect"] == pytest.approx(min(gave_up, default=loss.at) - loss.at)
    assert loss.stages_s["rendezvous"] > 0
    back = [one for one in account.recoveries if one.at > loss.at]
    assert {host for one in back for host in one.joined} == {2, 3, 6, 7}
    told = {event["id"]: event["event"] for event in events if "id" in event}
    assert Counter(told.values())["host lost"] == 4  # each once, though twelve chips have seen it
    lost = [event for event in read_timeline(shared / "timeline/host-0.jsonl") if event["event"] == "host lost"]
    assert sorted(event["chips"] for event in lost) == [[[0, 2]], [[0, 3]], [[1, 2]], [[1, 3]]]
    (again,) = [event for event in read_timeline(shared / "timeline/host-0.jsonl") if event["event"] == "recovered"]
    assert again["lost"] == [2, 3, 6, 7]
    assert again["seconds"] == pytest.approx(loss.total_s, abs=1.0)
    healed = [event for event in read_timeline(shared / "timeline/host-2.jsonl") if event["event"] == "restore"]
    assert healed[-1]["source"] == "peers"
    assert healed[-1]["step"] > loss.step
