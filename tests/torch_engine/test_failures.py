"""Training goes on when chips are killed: the campaign, and the example."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")
pytest.importorskip("torchft", reason="torchft is not installed: pip install 'meshmend[torch]'")

EXAMPLE = Path(__file__).parents[2] / "examples/torch/train_through_failure.py"


def campaign(kills: int, seed: int) -> Any:
    """Run the campaign in a process of its own: it forks, which a process with threads must not."""
    command = [sys.executable, "-m", "meshmend", "bench", "failures", "4x4", "--kills", str(kills), "--seed", str(seed)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return json.loads(done.stdout)


def test_two_kills() -> None:
    facts = campaign(kills=2, seed=1)
    assert facts["kills"] == 2
    assert facts["committed_steps"] > 2
    assert facts["commits"] > 12 * facts["committed_steps"] - 32
    assert set(facts["stages_s"]) == {"detect", "quorum", "replan", "redo"}
    assert facts["recovery_s"]["worst"] < 60


@pytest.mark.slow
def test_fifty_kills_at_random_moments() -> None:
    facts = campaign(kills=50, seed=0)
    assert facts["kills"] == 50
    assert all(facts["moments"][moment] > 0 for moment in ("before", "inside", "after"))
    assert facts["committed_steps"] > 50
    assert facts["recovery_s"]["median"] <= 5


def test_the_example_trains_through_the_loss_of_a_board(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--steps", "30", "--no-view", "--figure", str(tmp_path / "loss.svg")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert result["steps"] == 30
    assert result["weights_agree"] is True
    assert 12 in result["chips"][10:20]
    assert min(result["chips"]) == 12
    assert result["chips"][-1] == 16
    assert result["last_loss"] < result["first_loss"]
    assert (tmp_path / "loss.svg").stat().st_size > 1000
