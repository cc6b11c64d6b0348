"""Three readers, each on the way that the first page shows: every command on it runs, from the pages' own text.

`tests/jax_restart/test_first_hour.py` types the ML engineer's jobs in order, in one folder.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pages import ROOT, Block, commands, furnish, read

INDEX = (ROOT / "docs/index.md").read_text(encoding="utf-8")
PATHS = {
    "train on such a machine": ("start", "jobs", "cluster", "jax", "torch"),
    "run such a machine": ("cluster", "operate", "metrics", "quarantine", "troubleshooting"),
    "study collectives": ("see", "plans", "paper", "related"),
}


def blocks(path: str) -> list[Block]:
    found = [block for name in PATHS[path] for block in read(ROOT / f"docs/{name}.md")]
    return [block for block in found if block.kind in ("bash", "python")]


@pytest.mark.parametrize("path", PATHS)
def test_the_first_page_shows_the_way(path: str) -> None:
    (row,) = re.findall(rf"^\| {path} \| (.*) \|$", INDEX, re.M)
    assert tuple(re.findall(r"\]\((\w+)\.md\)", row)) == PATHS[path]


@pytest.mark.parametrize("path", PATHS)
def test_every_command_on_the_way_is_run_by_a_test_or_says_why_not(path: str) -> None:
    needs = "server that never ends|eight hosts|eight nodes|a TPU|one rank|the line of a script|one process of several"
    found = blocks(path)
    assert len([block for block in found if block.runs or block.by]) >= 3
    for block in found:
        if block.by:
            text = (ROOT / block.by).read_text(encoding="utf-8")
            words = re.findall(r"[\w./-]+\.py\b|read_text|read\(", text)
            assert words, f"{block.name}: {block.by} reads no page and no script"
        elif not block.runs:
            assert re.search(needs, block.reason), f"{block.name} is not run: {block.reason}"


@pytest.mark.parametrize("path", ["run such a machine", pytest.param("study collectives", marks=pytest.mark.slow)])
def test_the_quick_commands_on_the_way_run_in_order_in_one_folder(path: str, tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "work").mkdir()
    furnish(tmp_path / "work")
    environment = os.environ | {
        "PATH": f"{commands(tmp_path / 'tools')}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "lab/src"), *filter(None, sys.path)]),
        "JAX_PLATFORMS": "cpu",
    }
    ran = 0
    for block in blocks(path):
        if block.runs and not block.slow and not block.needs_lab:
            command = [sys.executable, "-c"] if block.kind == "python" else ["bash", "-euo", "pipefail", "-c"]
            done = subprocess.run(
                [*command, block.body], cwd=tmp_path / "work", env=environment, capture_output=True, text=True
            )
            assert done.returncode == 0, f"{block.name}\n{done.stdout}{done.stderr}"
            ran += 1
    assert ran >= 1
