"""`meshmend lab machine` and `meshmend lab programs`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

import commandline
from commandline import run_json
from descriptions import OWN
from runtime_losses import KEPT, sample_of

run = partial(commandline.run, width=200)


@pytest.fixture
def galaxy(tmp_path: Path) -> Path:
    """A folder with descriptors of a Galaxy: whole, and without chips."""
    sample = sample_of("galaxy")
    for name, lost in {"whole": [], "one": [9], "board": [28, 29, 30, 31], "two": [0, 9]}.items():
        (tmp_path / f"{name}.yaml").write_text(sample.without(chips=lost).text, encoding="utf-8")
    return tmp_path


def test_compare_tells_what_the_runtime_would_use(galaxy: Path) -> None:
    """Against what was measured for the same chips, and times that grow with the payload."""
    for name, lost in {"one": [9], "board": [28, 29, 30, 31]}.items():
        words = ["lab", "machine", galaxy / f"{name}.yaml", "--intended", galaxy / "whole.yaml"]
        found = run_json(*words, "--payload", "10MB")["compare"]
        (loss,) = [one for one in KEPT["galaxy"]["losses"] if one["chips"] == lost]
        rows = {row["who"]: row for row in found["meshes"]}
        assert rows["ttnn, by itself"]["chips"] == len(loss["opened"]["devices"])
        assert rows["ttnn, by itself"]["mesh"] == "x".join(map(str, loss["opened"]["shape"]))
        assert rows["meshmend"]["chips"] == 32 - len(lost)
        assert found["runtime"] == f"measured, ttnn {KEPT['galaxy']['ttnn']}"
        least = 2 * 10e6 * (1 - 1 / 32) / 4 / 50e9  # every chip sends and receives over at most four links of 50 GB/s
        assert all(least / 2 < row["predicted_seconds"] < 1e-2 for row in rows.values())
        out = run(*words)
        assert f"ttnn, by itself{' ' * 8}" in out
        assert "all-reduce of 100 MB" in out
        assert "predicted, with meshmend's fastest plan on every mesh" in out


def test_compare_says_what_is_not_known(galaxy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHMEND_TTNN", raising=False)
    words = ["lab", "machine", galaxy / "two.yaml", "--intended", galaxy / "whole.yaml"]
    found = run_json(*words)["compare"]
    assert [row["who"] for row in found["meshes"]] == ["meshmend"]
    assert "not known: measured were single chips and 2x2 boards" in found["runtime"]
    assert "MESHMEND_TTNN=/path/to/python" in run(*words)
    mine = tmp_path / "mine.yaml"
    mine.write_text(OWN, encoding="utf-8")
    assert "Give a cluster descriptor" in run("lab", "machine", mine, code=1)


def test_programs_are_written_for_the_devices_of_a_machine(galaxy: Path) -> None:
    file, plan = galaxy / "programs.json", galaxy / "plan.npz"
    described = ["--machine", galaxy / "one.yaml", "--intended", galaxy / "whole.yaml"]
    run("plan", *described, "--planner", "weave:chunks=4", "--save", plan)
    facts = run_json("lab", "programs", plan, *described, "-o", file)
    programs = json.loads(file.read_text(encoding="utf-8"))
    assert {chip["device"] for chip in programs["chips"]} == set(range(32)) - {9}
    assert (programs["chunks"], facts["devices"]) == (4, 31)
    assert "expected .json" in run("lab", "programs", plan, *described, "-o", galaxy / "programs.txt", code=1)
    run("plan", *described, "--planner", "latency", "--save", plan)
    far = run("lab", "programs", plan, *described, "-o", file, code=1)
    assert "not neighbours. Plan with --neighbours-only" in far
