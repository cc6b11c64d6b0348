"""`meshmend bench` and `meshmend doctor --measure`, run as people run them."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshmend import Mesh, plan, predict
from meshmend.bench.report import as_text, compare
from meshmend.cli import app
from meshmend.cost import find_hardware
from meshmend.errors import MeasurementError
from meshmend.planning.auto import CHOICES


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


def test_every_planner_is_timed_beside_psum_and_the_job(measured: tuple[Path, Any]) -> None:
    path, _ = measured
    mesh = Mesh("2x3", failed=["0,0"])
    words = ("--shape", "2x3", "--fail", "0,0", "--payload", "4kB", "--payload", "1002B", "--hardware", str(path))
    facts = figures("bench", *words, "--repeat", "2")
    hardware = find_hardware(str(path))
    able = [kind.name for kind in CHOICES if kind().unsupported_reason(mesh) is None]
    assert 2 <= len(able) < len(CHOICES)
    assert (facts["mesh"], facts["chips"], facts["processes"]) == (str(mesh), 5, 1)
    assert facts["hardware"]["message_s"] == hardware.message_s
    for size, choice in zip((4000, 1000), facts["choices"], strict=True):
        by_case = {one["case"]: one for one in facts["results"] if one["payload_bytes"] == size}
        assert list(by_case) == ["psum", *able, "job"]
        assert by_case["psum"]["predicted_s"] is None
        for name in able:
            tuned = plan(mesh, name, payload_bytes=size, hardware=hardware)
            found = by_case[name]
            assert (found["planner"], found["steps"], found["chunks"]) == (name, tuned.n_steps, tuned.total_chunks)
            assert found["predicted_s"] == pytest.approx(predict(tuned, size, hardware).seconds)
            assert found["error"] == pytest.approx(found["predicted_s"] / found["seconds"] - 1)
            assert 0 < found["seconds"] <= found["median_s"]
        ours = min(one["seconds"] for case, one in by_case.items() if case != "psum")
        # A job plans for 4**k bytes, and all its processes for the same.
        rounded = plan(mesh, payload_bytes={4000: 4096, 1000: 1024}[size], hardware=hardware)
        assert (by_case["job"]["planner"], by_case["job"]["steps"]) == (rounded.planner, rounded.n_steps)
        assert choice["payload_bytes"] == size
        assert choice["fastest_s"] == ours
        assert choice["job_to_fastest"] == pytest.approx(by_case["job"]["seconds"] / ours)
        assert choice["job_to_fastest"] >= 1
        assert choice["job_to_psum"] == pytest.approx(by_case["job"]["seconds"] / by_case["psum"]["seconds"])
    errors = [abs(one["error"]) for one in facts["results"] if one["case"] not in ("psum", "job")]
    assert facts["median_error"] == pytest.approx(statistics.median(errors))


def test_a_wrong_sum_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    import meshmend.jax as mmj
    from meshmend.bench import timing
    from meshmend.jax.session import initialize_alone

    session = initialize_alone(mmj.discover(jax.devices()[:4], shape="2x2"))
    program = mmj.install(plan(session.fabric.mesh, "latency", payload_bytes=400, hardware="cpu-xla"), session.fabric)
    took = timing._time(session, {"latency": program}, 100, 2)
    assert {case: len(seconds) for case, seconds in took.items()} == {"psum": 2, "latency": 2}
    right = mmj.all_reduce
    monkeypatch.setattr(mmj, "all_reduce", lambda x, program: right(x, program).at[0, -1].add(1))
    with pytest.raises(MeasurementError, match="latency gave a wrong sum on 2x2"):
        timing._time(session, {"latency": program}, 100, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shape", "2x2", "--hardware", "none.json"], "none.json cannot be read"),
        (["--shape", "2x2", "--planner", "frob"], "There is no planner 'frob'"),
        (["--shape", "2x2", "--payload", "3B"], "at least 4 bytes"),
    ],
)
def test_refused(words: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", *words])
    assert done.exit_code == 1
    assert message in " ".join(done.stderr.split())


def test_text_for_a_log() -> None:
    results = [
        {"case": case, "payload_bytes": 4000, "seconds": seconds, "median_s": seconds, "planner": planner, "steps": 5}
        | {"chunks": 4, "predicted_s": predicted, "error": predicted and predicted / seconds - 1}
        for case, planner, seconds, predicted in (
            ("psum", None, 0.004, None),
            ("weave", "weave", 0.001, 0.0015),
            ("latency", "latency", 0.002, 0.0018),
            ("job", "latency", 0.002, 0.0018),
        )
    ]
    facts = {"mesh": "2x3", "processes": 6, "device_kind": "cpu", **compare(results)}
    assert facts["choices"][0]["job_to_fastest"] == 2
    assert facts["median_error"] == pytest.approx(0.3)
    lines = as_text(facts).splitlines()
    assert lines[0] == "all-reduce on 2x3 of cpu, 6 processes, best run"
    assert lines[4].split() == ["4", "KB", "latency", "5", "2", "ms", "1.8", "ms", "-10%", "2.00", "0.50"]
    assert lines[-2] == "a job of 4 KB: takes latency, 2.00 × the fastest plan (weave), 0.50 × psum"


@pytest.mark.slow
def test_processes_measure_together(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="meshmend run's store is torch's")
    words = ("--local", "2x4", "--host", "2x2", "--shared", str(tmp_path / "shared"))
    module = ("-m", "meshmend.bench.timing", "--payload", "4kB", "--repeat", "2", "--json")
    done = meshmend("run", *words, *module)
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if '"choices"' in line)
    facts = json.loads(line[line.index("{") :])
    assert (facts["mesh"], facts["chips"], facts["processes"]) == ("2x4", 8, 2)
    assert facts["results"][0]["case"] == "psum"
    assert facts["choices"][0]["job_to_fastest"] >= 1
    assert list((tmp_path / "shared" / "hardware").glob("*.json"))
