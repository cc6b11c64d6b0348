"""Processes of a mesh: what they return, how they fail, that none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from meshmend.errors import LaunchError
from meshmend.launch import Chips


def add(chip: tuple[int, ...], base: int) -> int:
    return base + sum(chip)


def fail(chip: tuple[int, ...]) -> None:
    raise ValueError(f"no luck at {chip}")


def sleep(chip: tuple[int, ...]) -> None:
    time.sleep(600)


def test_results_come_back_by_chip() -> None:
    with Chips() as chips:
        for chip in ((1, 1), (0, 1), (0, 0)):
            chips.start(chip, add, 5)
        assert chips.results(20) == {(0, 0): 5, (0, 1): 6, (1, 1): 7}


def test_a_failure_is_reported_with_its_traceback() -> None:
    with Chips() as chips:
        chips.start((0, 1), fail)
        with pytest.raises(LaunchError, match=r"Chip \(0,1\) failed: ValueError: no luck at \(0, 1\)") as caught:
            chips.results(20)
        assert "\n" not in str(caught.value)
        assert "in fail\n" in caught.value.__notes__[0]


def test_a_chip_that_does_not_answer_is_named() -> None:
    with Chips() as chips:
        chips.start((0, 0), sleep)
        with pytest.raises(LaunchError, match=r"No result within 0.2 s from \(0,0\)"):
            chips.results(0.2)


def test_a_killed_chip_can_be_started_again() -> None:
    with Chips() as chips:
        chips.start((0, 0), sleep)
        with pytest.raises(LaunchError, match=r"Chip \(0,0\) is already running"):
            chips.start((0, 0), sleep)
        assert chips.alive == [(0, 0)]
        chips.kill([(0, 0)])
        assert chips.alive == []
        chips.start((0, 0), add, 1)
        assert chips.results(20) == {(0, 0): 1}


def test_a_chip_that_is_killed_by_others_is_detected() -> None:
    def die(chip: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with Chips() as chips:
        chips.start((0, 0), die)
        with pytest.raises(LaunchError, match=r"Chip \(0,0\) failed: its process ended with code -9 and no result"):
            chips.results(20)


def test_chips_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    script = tmp_path / "start.py"
    script.write_text(
        "import os, sys, time\n"
        "from meshmend.launch import Chips\n"
        "def main(chip):\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(600)\n"
        "chips = Chips()\n"
        "chips.start((0, 0), main)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{child}").exists()
