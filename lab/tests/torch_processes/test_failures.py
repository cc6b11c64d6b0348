"""The campaign that kills chips and boards of a torchft job at random moments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")
pytest.importorskip("torchft", reason="torchft is not installed: pip install 'meshmend[torch]'")

CAMPAIGN = Path(__file__).parents[2] / "benchmarks/torch_failures.py"


def campaign(kills: int, seed: int) -> Any:
    """Run the campaign in a process of its own: it forks, which a process with threads must not."""
    command = [sys.executable, str(CAMPAIGN), "4x4", "--kills", str(kills), "--seed", str(seed), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_fifty_kills_at_random_moments() -> None:
    facts = campaign(kills=50, seed=0)
    assert facts["kills"] == 50
    assert all(facts["moments"][moment] > 0 for moment in ("before", "inside", "after"))
    assert facts["committed_steps"] > 50
    assert facts["recovery_s"]["median"] <= 2
    assert facts["recovery_s"]["worst"] <= 3
    # No survivor sits out a timeout: the lighthouse misses a heartbeat after 1 s, members each other after 0.5 s.
    assert facts["stages_s"]["detect"]["worst"] <= 1
    assert facts["stages_s"]["quorum"]["worst"] <= 2
