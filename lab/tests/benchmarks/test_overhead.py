"""What `lab/benchmarks/overhead.py` measures stays within what docs/metrics.md says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

SCRIPT = Path(__file__).parents[2] / "benchmarks/overhead.py"


@pytest.mark.slow
def test_timeline_and_metrics_take_less_than_half_a_percent_of_a_step() -> None:
    """As examples/operate has it scraped. CPU time is inflated on a busy machine; scraped each second it is close."""
    command = [sys.executable, str(SCRIPT), "--groups", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    facts = json.loads(done.stdout)
    assert facts["paired"]["groups"] == 2
    assert 0 < facts["lines"] < facts["scraped_every_ten_seconds"] < facts["scraped_each_second"]
    assert facts["scraped_every_ten_seconds"] < 0.005
