"""`meshmend lab bench jax`, run as people run it."""

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
from meshmend.cli import app
from meshmend.cost import find_hardware
from meshmend.cost.hardware import write_hardware
from meshmend.planning.auto import CHOICES
from meshmend_lab.errors import LabError
from meshmend_lab.timing.report import as_text, compare


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


@pytest.mark.slow
def test_every_planner_is_timed_beside_psum_and_the_job(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    write_hardware(find_hardware("cpu-xla:message_s=2ms"), path, {})
    mesh = Mesh("2x3", failed=["0,0"])
    words = ("--shape", "2x3", "--fail", "0,0", "--payload", "4kB", "--payload", "1002B", "--hardware", str(path))
    facts = figures("lab", "bench", "jax", *words, "--repeat", "2")
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
    from meshmend.jax.session import initialize_alone
    from meshmend_lab.timing import devices

    session = initialize_alone(mmj.discover(jax.devices()[:4], shape="2x2"))
    program = mmj.install(plan(session.fabric.mesh, "latency", payload_bytes=400, hardware="cpu-xla"), session.fabric)
    took = devices._time(session, {"latency": program}, 100, 2)
    assert {case: len(seconds) for case, seconds in took.items()} == {"psum": 2, "latency": 2}
    right = mmj.all_reduce
    monkeypatch.setattr(mmj, "all_reduce", lambda x, program: right(x, program).at[0, -1].add(1))
    with pytest.raises(LabError, match="latency gave a wrong sum on 2x2"):
        devices._time(session, {"latency": program}, 100, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shape", "2x2", "--hardware", "none.json"], "none.json cannot be read"),
        (["--shape", "2x2", "--planner", "frob"], "There is no planner 'frob'"),
        (["--shape", "2x2", "--payload", "3B"], "at least 4 bytes"),
    ],
)
def test_refused(words: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["lab", "bench", "jax", *words])
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
    words = ("--local", "2x4", "--host", "2x2", "--shared", str(tmp_path / "shared"))
    module = ("-m", "meshmend_lab.timing.devices", "--payload", "4kB", "--repeat", "2", "--json")
    done = meshmend("run", *words, *module)
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if '"choices"' in line)
    facts = json.loads(line[line.index("{") :])
    assert (facts["mesh"], facts["chips"], facts["processes"]) == ("2x4", 8, 2)
    assert facts["results"][0]["case"] == "psum"
    assert facts["choices"][0]["job_to_fastest"] >= 1
    assert list((tmp_path / "shared" / "hardware").glob("*.json"))
