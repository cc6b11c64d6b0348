"""The pictures of the first page are what their scripts draw from the data that are kept."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import meshmend as mm

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
FOUND: dict[str, Any] = json.loads((FIGURES / "survive.json").read_text(encoding="utf-8"))
PARTS = {"svg", "style", "rect", "line", "circle", "path", "text", "g"}
SCRIPTS: dict[str, dict[str, Any]] = {
    name: runpy.run_path(str(FIGURES / name)) for name in ("survive.py", "hero.py", "badges.py")
}
DRAWN: dict[str, dict[Path, str]] = {name: script["pictures"]() for name, script in SCRIPTS.items()}


@pytest.mark.parametrize("script", DRAWN)
def test_pictures_are_drawn_by_their_script(script: str) -> None:
    pictures = DRAWN[script]
    old = [path.name for path, text in pictures.items() if path.read_text(encoding="utf-8") != text]
    assert not old, f"run: python docs/figures/{script}"
    assert all(len(text.encode()) < 150_000 for text in pictures.values())


def test_what_survives_is_told_as_recorded_plays_anywhere_and_stands_still_when_asked() -> None:
    """Shown by <img>, a picture may not load anything nor run a script."""
    holed = mm.Mesh(FOUND["mesh"], failed=[FOUND["failed"]])
    for text in DRAWN["survive.py"].values():
        root = ElementTree.fromstring(text)  # noqa: S314  # our own
        assert {element.tag.rpartition("}")[2] for element in root.iter()} <= PARTS
        assert not re.search(r"url\(|href|@import", text)
        style = "".join(root.itertext()).partition("@media (prefers-reduced-motion: no-preference)")
        assert "animation:" in style[2]
        assert "animation:" not in style[0]
        assert root.get("aria-label")
        said = " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", text))
        assert f"{holed.size} chips train" in said
        assert f"{holed.n_chips} chips keep training" in said
        resumed = FOUND["resumed"]
        assert f"resumed at step {resumed['step']} from memory, {resumed['after_s']:.0f} s later" in said
        assert FOUND["command"].removeprefix("meshmend ") in said


def test_the_record_is_of_the_readmes_command_and_of_a_job_that_went_on() -> None:
    readme = (FIGURES.parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"\n{FOUND['command']}\n" in readme
    holed = mm.Mesh(FOUND["mesh"], failed=[FOUND["failed"]])
    steps, killed = FOUND["steps"], FOUND["killed"]
    assert [one["step"] for one in steps] == sorted({one["step"] for one in steps})
    assert all(one["chips"] == (holed.size if one["step"] <= killed["step"] else holed.n_chips) for one in steps)
    assert all(one["at_s"] > killed["at_s"] for one in steps if one["chips"] == holed.n_chips)
    assert steps[-1]["loss"] < next(one["loss"] for one in reversed(steps) if one["step"] <= killed["step"])
    for name, mesh in (("before", mm.Mesh(FOUND["mesh"])), ("after", holed)):
        cables = {tuple(sorted(mesh.rank_of[tuple(end)] for end in ends)) for ends in FOUND["trees"][name]}
        assert len(cables) == mesh.n_chips - 1
        assert cables <= {tuple(sorted(pair)) for pair in mesh.cables.tolist()}


def test_the_times_are_those_of_the_page() -> None:
    page, found = (FIGURES.parent / "plans.md").read_text(encoding="utf-8"), SCRIPTS["hero.py"]["read"]()
    rings = min(found["one ring"], found["the paper's rings"])
    assert f"predicted to take {found['meshmend']} M/b;\nrings take {rings} and more" in page


@pytest.mark.slow
def test_the_times_are_what_is_predicted_now() -> None:
    assert SCRIPTS["hero.py"]["times"]() == SCRIPTS["hero.py"]["read"]()


def width_of(path: Path) -> float:
    """Return a picture's width in its own units, in which words are 13 high."""
    return float(ElementTree.parse(path).getroot().get("viewBox", "").split()[2])  # noqa: S314  # our own


def test_the_readmes_pictures_can_be_read_on_a_phone_and_in_the_dark() -> None:
    readme = (FIGURES.parents[1] / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r'(srcset="|src="|\]\()docs/figures/([\w-]+)\.svg', readme)
    assert len(shown) >= 4
    for how, name in shown:
        path = FIGURES / f"{name}.svg"
        assert "prefers-color-scheme: dark" in path.read_text(encoding="utf-8"), path.name
        if how == 'srcset="':
            assert width_of(path) <= 400, path.name
        elif width_of(path) > 200:
            narrow = f'<source media="(max-width: 600px)" srcset="docs/figures/{name}-narrow.svg"'
            assert narrow in readme, path.name


def test_the_pages_picture_of_trees_can_be_read_on_a_phone_and_in_the_dark() -> None:
    path = FIGURES / "weave_trees.svg"
    assert width_of(path) <= 400
    assert "prefers-color-scheme: dark" in path.read_text(encoding="utf-8")
