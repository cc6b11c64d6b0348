"""The code in docs/jax.md and docs/feed.md runs as it stands, and so does the example."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, *words], env=environment, cwd=cwd, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done


@pytest.mark.parametrize(
    ("page", "n_blocks", "output"),
    [
        ("docs/jax.md", 2, "(60, 3, 5)\n"),
        ("docs/feed.md", 1, "Account(steps=8, epochs=2, left_over=0)\n"),
    ],
)
def test_the_how_to_runs(page: str, n_blocks: int, output: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == n_blocks
    assert run("-c", "\n".join(blocks), cwd=tmp_path).stdout == output


@pytest.mark.parametrize("planner", ["hamiltonian"])
def test_the_example_runs_and_agrees_with_psum(planner: str, tmp_path: Path) -> None:
    picture = tmp_path / "loss.png"
    words = ["--steps", "4", "--planner", planner, "--plot", str(picture)]
    out = run(str(ROOT / "examples/jax/train_with_hole.py"), *words).stdout
    assert float(re.findall(r"over 4 steps: (\S+)", out)[0]) < 1e-5
    assert picture.read_bytes().startswith(b"\x89PNG")
