"""The measurement, run as people run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshmend.cli import app
from namespaces import needs_lab, needs_netem

pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")

BACKENDS = Path(__file__).parents[2] / "benchmarks/torch_backend.py"
STEPS = BACKENDS.with_name("torch_steps.py")


def bench(*words: str) -> Any:
    command = [sys.executable, "-m", "meshmend", "lab", "bench", "allreduce", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_loopback() -> None:
    facts = bench("--loopback", "2x2", "--payload", "1MB", "--payload", "100KB", "--repeat", "1")
    assert {result["payload_bytes"] for result in facts["results"]} == {1_000_000, 100_000}
    assert {"gloo", "hamiltonian", "two-color"} <= {result["case"] for result in facts["results"]}
    for result in facts["results"]:
        assert result["seconds"] > 0
        assert result["units"] is None
        assert (result["to_gloo"] == 1) == (result["case"] == "gloo")
    for size in (1_000_000, 100_000):
        planned = {r["case"]: r["to_best"] for r in facts["results"] if r["payload_bytes"] == size}
        assert "auto" in planned
        assert min(ratio for case, ratio in planned.items() if case not in ("gloo", "process group")) == 1


@pytest.mark.slow
def test_backends_are_timed_side_by_side() -> None:
    command = [sys.executable, str(BACKENDS), "--loopback", "1x2", "--payload", "50KB", "--repeat", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    results = json.loads(done.stdout)["results"]
    cases = ["all-reduce", "reduce-scatter", "all-gather", "FSDP2 step", "DDP step"]
    assert [result["case"] for result in results] == cases
    for result in results:
        assert result["ratio"] == pytest.approx(result["meshmend_s"] / result["gloo_s"])
        assert (result["mesh"], result["chips"], result["units"]) == ("1x2", 2, None)


@pytest.mark.slow
def test_scripts_under_torchrun_are_timed_side_by_side() -> None:
    command = [sys.executable, str(STEPS), "--shape", "1x2", "--steps", "5", "--repeat", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    facts = json.loads(done.stdout)
    gloo, ours = facts["medians"]["gloo"], facts["medians"]["meshmend"]
    assert gloo["weights"] == pytest.approx(ours["weights"], abs=1e-4)
    for name, ratio in facts["ratios"].items():
        assert gloo[name] > 0
        assert ratio == pytest.approx(ours[name] / gloo[name])


@needs_lab
def test_a_lab_whole_and_holed() -> None:
    words = ["--lab", "2x4", "--fail", "2x2@0,0", "--rate", "80mbit", "--payload", "1MB", "--repeat", "1"]
    facts = bench(*words, "--planner", "hamiltonian")
    cases = [(result["mesh"], result["case"]) for result in facts["results"]]
    assert cases == [(mesh, case) for mesh in ("2x4", "2x4 minus 2x2@0,0") for case in ("gloo", "hamiltonian")]
    for result in facts["results"]:
        assert result["units"] == pytest.approx(result["seconds"] / 0.1)
        # A token bucket lets its first burst through at once, so a short payload may come a little under the bound.
        assert result["to_bound"] > 0.9


@needs_netem
@needs_lab
def test_a_lab_with_a_delay() -> None:
    words = ["--lab", "1x3", "--rate", "80mbit", "--delay", "20ms", "--payload", "12KB", "--planner", "weave"]
    facts = bench(*words, "--repeat", "1")
    assert (facts["rate"], facts["delay"]) == ("80mbit", "20ms")
    for result in facts["results"]:
        assert result["seconds"] >= 0.04  # from one end to the other


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Say where: --lab 4x4"),
        (["--lab", "4x4", "--loopback", "4x4"], "Say where: --lab 4x4"),
        (["--loopback", "2x2", "--payload", "much"], "'much' is not a payload"),
    ],
)
def test_invalid_arguments_are_reported(words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["lab", "bench", "allreduce", *words])
    assert result.exit_code == 1
    assert message in result.output
