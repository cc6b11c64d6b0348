from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import commandline

run, run_json = partial(commandline.run, "draw"), partial(commandline.run_json, "draw")
HOLED = ["8x8", "--fail", "2x2@2,2", "--planner", "row-pairs"]


@pytest.mark.parametrize("what", ["rings", "phases", "load", "routes", "trees"])
def test_every_picture_of_a_plan(what: str, tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    facts = run_json(*HOLED, "--what", what, "-o", str(path))
    assert facts["what"] == what
    assert facts["planner"] == "row-pairs"
    assert facts["failed"] == ["2x2@2,2"]
    assert facts["file"] == str(path)
    assert facts["bytes"] == path.stat().st_size


def test_people_see_what_was_drawn_and_where(tmp_path: Path) -> None:
    shown = run(*HOLED, "-o", str(tmp_path / "rings.svg"))
    for words in ("shows", "rings", "file", "size"):
        assert words in shown


def test_parameters_reach_the_planner_and_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    run(*HOLED, "--orientation", "columns", "--what", "trees", "--chunk", "3", "--chunk", "7", "-o", str(path))
    text = path.read_text(encoding="utf-8")
    assert "chunk 3: " in text
    assert "chunk 7: " in text
    assert "column rings: reduce-scatter" in text


def test_steps_of_a_saved_plan(tmp_path: Path) -> None:
    plan = tmp_path / "plan.npz"
    words = ["plan", "4x4", "--planner", "two-color", "--wrap", "all", "--save", str(plan)]
    commandline.run(*words)
    facts = run_json(str(plan), "--steps", "2-5", "-o", str(tmp_path / "steps.html"))
    assert facts["what"] == "steps"
    assert facts["wrap"] == [True, True]


def test_routes_without_a_plan(tmp_path: Path) -> None:
    facts = run_json("6x6", "--fail", "2x2@2,2", "--route", "2,0-4,5", "--route", "0,3-5,3", "-o", f"{tmp_path}/a.svg")
    assert facts["what"] == "routes"
    assert facts["planner"] is None
    assert "(2,0) to (4,5): " in (tmp_path / "a.svg").read_text(encoding="utf-8")
