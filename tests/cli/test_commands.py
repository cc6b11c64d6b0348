from __future__ import annotations

import time
from pathlib import Path

import pytest

from commandline import run, run_json
from meshmend import load

FACTS = {
    "mesh",
    "chips",
    "failed",
    "planner",
    "chunks",
    "steps",
    "transfers",
    "verified",
    "plan_seconds",
    "verify_seconds",
    "busiest_link_load",
}


def test_the_papers_machine() -> None:
    facts = run_json("plan", "32x32", "--fail", "4x2@6,8", "--planner", "row-pairs")
    assert facts.keys() >= FACTS
    assert (facts["mesh"], facts["chips"], facts["failed"]) == ("32x32", 1016, ["4x2@6,8"])
    assert facts["verified"] is True


def test_people_see_the_plan_and_its_proof() -> None:
    shown = run("plan", "8x8", "--fail", "2x2@2,2", "--planner", "row-pairs")
    for words in ("row-pairs all-reduce on 8x8 minus 2x2@2,2", "60 live of 64", "yellow forwards to blue", "✓ proven"):
        assert words in shown


def test_a_saved_plan_is_verified_again(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.npz")
    planned = run_json("plan", "4x8", "--wrap", "all", "--planner", "two-color", "--save", path)
    verified = run_json("verify", path)
    for fact in FACTS - {"plan_seconds", "verify_seconds"}:
        assert verified[fact] == planned[fact]
    assert planned["wrap"] == [True, True]
    assert load(path).mesh.wrap == (True, True)
    assert "✓ proven" in run("verify", path)


def test_cables_and_parameters_reach_the_planner(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.npz")
    words = ["--fail-cable", "3,2-4,2", "--planner", "row-pairs:orientation=columns,segments=2"]
    facts = run_json("plan", "8x8", *words, "--save", path)
    assert facts["failed_cables"] == ["3,2-4,2"]
    assert {phase["name"] for phase in facts["phases"]} >= {"column rings: reduce-scatter", "yellow forwards to blue"}
    assert facts["chunks"] == 2 * run_json("plan", "8x8", *words[:-1], "row-pairs:orientation=columns")["chunks"]


@pytest.mark.parametrize("words", [(), ("quarantine",)], ids=lambda words: " ".join(words))
def test_without_a_command_the_help_is_printed_once(words: tuple[str, ...]) -> None:
    assert run(*words, code=2).count("Usage") == 1
    assert run(*words, "--help").count("Usage") == 1


def test_help_and_version_are_quick() -> None:
    started = time.process_time()
    assert "Usage" in run("--help")
    assert "meshmend 0." in run("--version")
    assert time.process_time() - started < 2
