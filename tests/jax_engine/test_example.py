"""The example runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, *words], env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


@pytest.mark.slow
@pytest.mark.parametrize("planner", ["hamiltonian", "row-pairs"])
def test_the_example_runs_and_agrees_with_psum(planner: str, tmp_path: Path) -> None:
    picture = tmp_path / "loss.png"
    words = ["--steps", "2", "--planner", planner, "--plot", str(picture)]
    out = run(str(ROOT / "examples/jax/train_with_hole.py"), *words).stdout
    assert float(re.findall(r"over 2 steps: (\S+)", out)[0]) < 1e-5
    assert picture.read_bytes().startswith(b"\x89PNG")
