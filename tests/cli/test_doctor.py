"""`meshmend doctor`: on this machine, and on machines where something is missing, broken, or hangs."""

from __future__ import annotations

import importlib
import json
import os
import time
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshmend.cli import app
from meshmend.doctor import packages, probes
from meshmend.extras import install_hint

# The package's function of the same name stands before the module.
examination = importlib.import_module("meshmend.doctor.examine")
NUMPY, JAX, TORCH = (
    next(trial for trial in examination.TRIALS if trial.name == name) for name in ("NumPy", "JAX", "PyTorch")
)
QUICK_S = 60.0


def doctor(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def put_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *known]))


def stub(folder: Path, name: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a package of that name before any other, here and in the processes that are started."""
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))
    put_first(folder, monkeypatch)


def stub_jax(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("jax", "jaxlib", "optax"):
        stub(folder, name, code, monkeypatch)


@pytest.fixture
def only_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but NumPy and JAX is tried."""
    monkeypatch.setattr(examination, "TRIALS", (NUMPY, JAX))


def test_this_machine() -> None:
    code, output = doctor("--json")
    facts = json.loads(output)
    by_name = {(finding["section"], finding["name"]): finding for finding in facts["findings"]}
    assert by_name["engines", "NumPy"]["status"] == "works"
    assert by_name["packages", "numpy"]["detail"] == metadata.version("numpy")
    assert {"JAX", "TPU compiler", "PyTorch", "torchft"} <= {name for _, name in by_name}
    for finding in facts["findings"]:
        assert bool(finding["advice"]) == (finding["status"] != "works"), finding
    assert facts["healthy"] == (code == 0)


def test_every_trial_has_a_probe_and_every_need_a_package() -> None:
    assert {trial.probe for trial in examination.TRIALS} <= set(probes.PROBES)
    assert {need for trial in examination.TRIALS for need in trial.needs} <= {p.module for p in packages.PACKAGES}


@pytest.mark.usefixtures("only_jax")
def test_a_jax_that_raises_is_red_and_takes_nothing_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_jax(tmp_path, "raise RuntimeError('the wheel is [broken]')", monkeypatch)
    code, shown = doctor()
    assert code == 1
    assert "RuntimeError: the wheel is [broken]" in shown
    assert "pip install --force-reinstall 'meshmend[jax]'" in shown
    assert "✓ NumPy" in shown
    assert "python -m meshmend.doctor.probes try_jax" in shown


@pytest.mark.usefixtures("only_jax")
def test_a_jax_that_hangs_is_red_and_is_ended_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    code = (
        "import subprocess, time, pathlib\n"
        "child = subprocess.Popen(['sleep', '300'])\n"
        f"with pathlib.Path({str(pids)!r}).open('a') as f: f.write(f'{{child.pid}}\\n')\n"
        "time.sleep(300)\n"
    )
    stub_jax(tmp_path, code, monkeypatch)
    started = time.perf_counter()
    findings = [f for f in examination.examine(timeout_s=6) if f.name in ("JAX", "JAX sees")]
    assert time.perf_counter() - started < QUICK_S
    assert [(f.status, f.detail) for f in findings] == [("broken", "no answer within 6 s")] * 2
    time.sleep(0.2)
    for pid in pids.read_text().split():
        stat = Path(f"/proc/{pid}/stat")
        assert not stat.exists() or stat.read_text().split()[2] == "Z"


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        ("import os; os.abort()", "ended with exit code -6 and no output"),
        ("import os; os._exit(3)", "ended with exit code 3 and no output"),
        ("import os, sys; sys.stderr.write('Illegal instruction\\n'); os._exit(4)", "Illegal instruction"),
    ],
)
def test_a_torch_that_crashes(code: str, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(tmp_path, "torch", code, monkeypatch)
    found = examination._try(TORCH, {}, QUICK_S)
    assert (found.status, found.detail) == ("broken", detail)
    assert "pip install --force-reinstall 'meshmend[torch]'" in found.advice


def test_a_wrong_sum_is_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NumPy engine that adds wrongly: a site hook replaces it in the probe's process."""
    hook = "import meshmend.numpy as mmn\nright = mmn.run\nmmn.run = lambda *given: right(*given) + 1\n"
    (tmp_path / "sitecustomize.py").write_text(hook)
    put_first(tmp_path, monkeypatch)
    found = examination._try(NUMPY, {}, QUICK_S)
    assert found.status == "broken"
    assert "the result is wrong" in found.detail


def test_what_is_missing_is_yellow_and_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {"jax", "torch", "matplotlib"}

    def is_installed(module: str) -> bool:
        return module not in gone and module in ("numpy", "scipy")

    monkeypatch.setattr(packages, "is_installed", is_installed)
    monkeypatch.setattr(examination, "is_installed", is_installed)
    code, output = doctor("--json")
    found = {(f["section"], f["name"]): f for f in json.loads(output)["findings"]}
    assert code == 0
    assert found["engines", "PyTorch"]["advice"] == install_hint("torch")
    assert found["engines", "drawing"]["advice"] == install_hint("draw")
    assert found["engines", "TPU compiler"]["detail"] == "not tried, without jax, jaxlib, optax, libtpu"
    assert found["engines", "TPU compiler"]["advice"] == install_hint("tpu")
    assert found["devices", "JAX sees"]["status"] == "absent"
    assert {f["status"] for f in found.values()} == {"works", "absent"}


def test_numpy_is_not_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda module: module != "numpy")
    numpy = next(f for f in packages.look_at_packages() if f.name == "numpy")
    assert (numpy.status, numpy.advice) == ("broken", install_hint())


def test_a_version_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda _: ["jax>=0.10; extra == 'jax'", "rich>=13"])
    monkeypatch.setattr(metadata, "version", lambda _: "0.9.13")
    monkeypatch.setattr(packages, "is_installed", lambda _: True)
    found = {f.name: f for f in packages.look_at_packages()}
    assert found["jax"].status == "broken"
    assert found["jax"].detail == "0.9.13, but meshmend needs 0.10 or later"
    assert found["jax"].advice == "pip install -U 'jax>=0.10'"
    assert found["torch"].status == "works"


def test_submodules_are_found_without_importing_their_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(tmp_path, "broken_parent", "raise RuntimeError", monkeypatch)
    (tmp_path / "broken_parent" / "child.py").touch()
    assert packages.is_installed("broken_parent.child")
    assert not packages.is_installed("broken_parent.other")
    assert not packages.is_installed("no_such_parent.child")


@pytest.mark.parametrize(
    ("sight", "status", "words"),
    [
        ({"wrong": None, "mesh": None}, "absent", "MESHMEND_SHAPE"),
        ({"wrong": "1 device does not fit", "mesh": None}, "broken", "unset"),
        ({"wrong": None, "mesh": "Mesh(16x32)", "holes": ["4x2@6,8"]}, "works", "4x2@6,8"),
        ({"wrong": None, "mesh": "Mesh(16x32)", "holes": []}, "works", "none"),
    ],
)
def test_holes(sight: dict[str, Any], status: str, words: str) -> None:
    (found,) = examination._holes(sight)
    assert found.status == status
    assert words in f"{found.detail} {found.advice}"


@pytest.mark.skipif(find_spec("jax") is None or find_spec("optax") is None, reason="JAX is not installed")
def test_holes_that_jax_sees() -> None:
    flags = "--xla_force_host_platform_device_count=16"
    settings = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "MESHMEND_SHAPE": "4x4", "MESHMEND_FAILED": "2x2@0,2"}
    found, sight = examination.run_probe("devices", "JAX sees", "see_jax", settings, QUICK_S, "")
    assert found.status == "works", found
    assert (sight["devices"], sight["holes"]) == (16, ["2x2@0,2"])
    _, sight = examination.run_probe("devices", "", "see_jax", settings | {"MESHMEND_SHAPE": "9x9"}, QUICK_S, "")
    assert "16 devices do not fit" in sight["wrong"]


def test_a_tpu_that_is_not_there_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))
    monkeypatch.setattr(examination, "is_installed", lambda _: True)
    assert examination.jax_environment() == {"JAX_PLATFORMS": "cpu"}
    monkeypatch.setattr(Path, "glob", lambda *_: iter([Path("/dev/accel0")]))
    assert examination.jax_environment() == {}
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    assert examination.jax_environment() == {}
