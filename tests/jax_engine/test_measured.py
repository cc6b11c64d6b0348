"""`meshmend doctor --measure`, run as people run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshmend import Mesh, plan, predict
from meshmend.cli import app
from meshmend.cost import find_hardware


def meshmend(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    hidden = ("XLA_FLAGS", "MESHMEND_SHAPE", "MESHMEND_FAILED", "JAX_PLATFORMS")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    command = [sys.executable, "-m", "meshmend", *words]
    given = {**kept, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=given)


def figures(*words: str, **environment: str) -> Any:
    done = meshmend(*words, "--json", **environment)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("measured") / "mine.json"
    return path, figures("doctor", "--measure", str(path), "--shape", "2x3")


@pytest.mark.slow
def test_what_doctor_measures_is_taken_wherever_a_preset_is(measured: tuple[Path, Any]) -> None:
    path, facts = measured
    hardware = find_hardware(str(path))
    assert facts["file"] == str(path)
    assert facts["mesh"] == "2x3"
    assert facts["hardware"]["link_bytes_per_s"] == hardware.link_bytes_per_s
    assert hardware.runs_lanes
    assert hardware.is_switched
    written = json.loads(path.read_text())["measured"]
    assert (written["chips"], written["processes"], written["platform"]) == (6, 1, "cpu")
    assert {"jax", "jaxlib"} <= set(written["versions"])
    assert all(loop["seconds"] > 0 for loop in written["loops"])
    planned = figures("plan", "2x3", "--payload", "4kB", "--hardware", str(path))
    here = plan(Mesh("2x3"), payload_bytes=4000, hardware=hardware)
    assert planned["planner"] == here.planner
    assert planned["seconds"] == pytest.approx(predict(here, 4000, hardware).seconds)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--measure", "mine.txt"], r"the name ends in '.txt', expected .json"),
        (["--measure", "mine.json", "--shape", "2x"], "2x"),
        (["--shape", "2x2"], "give --measure FILE.json as well"),
    ],
)
def test_doctor_says_what_is_wrong_before_it_measures(words: list[str], message: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", *[word.replace("mine", f"{tmp_path}/mine") for word in words]])
    assert done.exit_code == 1
    assert message in " ".join(done.stderr.split())
    assert not (tmp_path / "mine.json").exists()


def test_devices_without_coordinates_need_a_shape(tmp_path: Path) -> None:
    done = meshmend("doctor", "--measure", str(tmp_path / "mine.json"), JAX_PLATFORMS="cpu")
    assert done.returncode == 1
    assert "--shape 4x4" in done.stderr
    assert not (tmp_path / "mine.json").exists()
