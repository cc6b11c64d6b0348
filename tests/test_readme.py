"""The README is the first thing a reader runs, so it is run here: every Python block and every command."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert "Schedule(row-pairs all-reduce on 16x32 minus 4x2@6,8: 504 chips" in run(
        [sys.executable, "-c", code], folder
    )


def test_commands_in_order(folder: Path) -> None:
    steps = []
    for command in COMMANDS:
        shown = run(shlex.split(command), folder)
        assert "✓ proven" in shown
        steps += re.findall(r"^steps +(\d+)", shown, re.M)[:1]
    was, becomes = re.findall(r"(\d+) steps become (\d+)", README)[0]
    assert steps[-2:] == [was, becomes]
