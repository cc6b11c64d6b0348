"""The table of docs/adopt.md, row by row: what works inside a tile, what JAX refuses, and what makes XLA abort."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jax_engine.inside_tiles import CASES

ROOT = Path(__file__).parents[2]
WAYS = ("vmap", "manual")


def table() -> dict[tuple[str, str], str]:
    page = (ROOT / "docs" / "adopt.md").read_text(encoding="utf-8")
    _, _, rows = page.partition("| inside a tile |")
    found: dict[tuple[str, str], str] = {}
    for line in rows.split("\n\n")[0].splitlines()[2:]:
        _, name, *outcomes, _ = (cell.strip().replace("`", "") for cell in line.split("|"))
        found |= {(name, way): outcome for way, outcome in zip(WAYS, outcomes, strict=True)}
    return found


def test_the_table_has_a_row_for_each_case() -> None:
    assert list(table()) == [(name, way) for name in CASES for way in WAYS]
    assert set(table().values()) <= {"works", "JAX refuses", "XLA aborts"}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_a_row_says_what_happens(name: str, way: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    script = str(Path(__file__).with_name("inside_tiles.py"))
    done = subprocess.run([sys.executable, script, name, way], env=environment, capture_output=True, text=True)
    expected = table()[name, way]
    if expected == "works":
        assert done.returncode == 0, done.stderr[-2000:]
        (off,) = re.findall(r"off by (\S+);", done.stdout)
        assert float(off) < 1e-5
        assert "across tiles: the plan alone" in done.stdout
    elif expected == "JAX refuses":
        assert done.returncode == 1, done.stderr[-2000:]
        assert "Error" in done.stderr
    else:
        assert done.returncode < 0, done.stdout
        assert "Check failed" in done.stderr
