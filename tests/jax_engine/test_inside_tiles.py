"""The table of docs/tiles.md, row by row: what works inside a tile, and what JAX refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jax_engine.inside_tiles import CASES

ROOT = Path(__file__).parents[2]


def table() -> dict[str, str]:
    page = (ROOT / "docs" / "tiles.md").read_text(encoding="utf-8")
    _, _, rows = page.partition("| inside a tile |")
    cells = [line.replace("`", "").split("|") for line in rows.split("\n\n")[0].splitlines()[2:]]
    return {name.strip(): outcome.strip() for _, name, outcome, _ in cells}


def test_the_table_has_a_row_for_each_case() -> None:
    assert list(table()) == CASES
    assert set(table().values()) <= {"works", "JAX refuses"}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_row_says_what_happens(name: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    script = str(Path(__file__).with_name("inside_tiles.py"))
    done = subprocess.run([sys.executable, script, name], env=environment, capture_output=True, text=True)
    expected = table()[name]
    if expected == "works":
        assert done.returncode == 0, done.stderr[-2000:]
        (off,) = re.findall(r"off by (\S+);", done.stdout)
        assert float(off) < 1e-5
        assert "across tiles: the plan alone" in done.stdout
    else:
        assert done.returncode == 1, done.stderr[-2000:]
        assert "Error" in done.stderr
