"""The README is the first thing a reader runs, so it is run here: every Python block and every command."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from meshmend import Mesh, bound

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.S)
COMMANDS = [line[2:] for block in re.findall(r"```console\n(.*?)```", README, re.S) for line in block.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("readme")


def run(words: list[str], folder: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(words, cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_there_is_something_to_run() -> None:
    assert PYTHON
    assert len(COMMANDS) >= 4


@pytest.mark.parametrize("code", PYTHON)
def test_python_blocks(code: str, folder: Path) -> None:
    shown = run([sys.executable, "-c", code], folder)
    assert "all-reduce on 16x32 minus 4x2@6,8: 504 chips" in shown
    assert "× the bound" in shown


def test_commands_in_order(folder: Path) -> None:
    for command in COMMANDS:
        shown = run(shlex.split(command), folder)
        if command.split()[1] in ("plan", "verify"):
            assert "✓ proven" in shown
    for made in ("plan.npz", "rings.svg", "steps.html"):
        assert (folder / made).stat().st_size > 1000
    assert len(list((folder / "plans").iterdir())) == 9


def test_every_figure_and_page_that_it_points_to_is_there() -> None:
    for target in re.findall(r"\]\(((?!https?:)[^)]+)\)", README):
        assert (Path(__file__).parent.parent / target).exists(), target


def test_the_bound_is_what_it_says() -> None:
    assert f"{bound(Mesh('16x32', failed=['4x2@6,8'])).units:.3f} for\n16×32 minus 4×2" in README
