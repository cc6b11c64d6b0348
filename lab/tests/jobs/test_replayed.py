"""A job that ran is replayed by the simulator: its account and the prediction agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jax_restart.command import SCRIPT, environment, meshmend


@pytest.mark.slow
def test_a_job_that_lost_five_hosts_is_replayed_within_five_per_cent(tmp_path: Path) -> None:
    """Half of the steps' time is slept, so that restarts are no more of the job than they are of a real one's hour."""
    script = SCRIPT.replace("steps=30", "steps=360").replace(
        "    if step.number", "    time.sleep(0.1)\n    if step.number"
    )
    (tmp_path / "train.py").write_text("import time\n" + script.replace("global_batch=64", "global_batch=48"))
    words = ["--local", "2x12", "--host", "2x2", "--hosts", "1:6", "--shared", "shared"]
    for host in range(1, 6):
        words += ["--kill", f"{6 - host}@{60 * host}"]
    meshmend("run", *words, "train.py", folder=tmp_path)
    replay = [sys.executable, str(Path(__file__).parents[2] / "benchmarks" / "replay.py"), "shared", "--json"]
    facts = json.loads(subprocess.run(replay, cwd=tmp_path, env=environment(), capture_output=True, check=True).stdout)
    assert [one["host"] for one in facts["inputs"]["failures"]] == [5, 4, 3, 2, 1]
    watched = json.loads("".join(meshmend("watch", "shared", "--once", "--json", folder=tmp_path)))
    assert facts["measured"]["training_s"] == pytest.approx(watched["training_s"])
    assert facts["predicted"]["goodput"] == pytest.approx(watched["goodput"], rel=0.05)
    assert facts["predicted"]["goodput"] == pytest.approx(facts["measured"]["goodput"], rel=0.05)
    assert facts["predicted"]["steps"] == pytest.approx(360, rel=0.1)
