from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import commandline

run, run_json = partial(commandline.run, "draw"), partial(commandline.run_json, "draw")
HOLED = ["8x8", "--fail", "2x2@2,2", "--planner", "row-pairs"]


@pytest.mark.parametrize("what", ["rings", "load", "trees"])
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
    run(
        *HOLED[:-1], "row-pairs:orientation=columns", "--what", "trees", "--chunk", "3", "--chunk", "7", "-o", str(path)
    )
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


ROUTED = ("8x8", "--fail", "2x2@2,2", "--route")


def test_one_route() -> None:
    facts = run_json(*ROUTED, "2,1-2,4")
    assert (facts["deadlock_free"], facts["virtual_channels"]) == (True, 2)
    (found,) = facts["routes"]
    assert found["hops"] == 5
    assert found["path"] == [[2, 1], [1, 1], [1, 2], [1, 3], [1, 4], [2, 4]]
    assert len(found["channels"]) == 5
    shown = run(*ROUTED, "2,1-2,4", "--route", "0,0-0,0", width=120)
    assert "(2,1) → (1,1) → (1,2)" in shown
    assert "(0,0) to (0,0)" in shown
    assert "routes on 8x8 minus 2x2@2,2" in shown
    assert "✓ free of deadlock" in shown
