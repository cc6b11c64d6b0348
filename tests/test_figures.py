"""The pictures of the first page and of the benchmarks are what their scripts draw from the data that are kept."""

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
MEASURED = (FIGURES.parent / "measured.md").read_text(encoding="utf-8")
REAL_LINKS = MEASURED.partition("\n## Real links")[2].partition("\n## ")[0]
SCRIPT = runpy.run_path(str(FIGURES / "survive.py"))
FOUND: dict[str, Any] = json.loads((FIGURES / "survive.json").read_text(encoding="utf-8"))
PARTS = {"svg", "style", "rect", "line", "circle", "path", "text", "g"}
DRAWN: dict[Path, str] = SCRIPT["pictures"]()


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.name)
def test_it_is_drawn_from_the_record(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == DRAWN[path], "run: python docs/figures/survive.py"
    assert len(DRAWN[path].encode()) < 150_000


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.name)
def test_it_plays_anywhere_and_stands_still_when_asked(path: Path) -> None:
    """Shown by <img>, a picture may not load anything nor run a script."""
    root = ElementTree.fromstring(DRAWN[path])  # noqa: S314  # our own
    assert {element.tag.rpartition("}")[2] for element in root.iter()} <= PARTS
    assert not re.search(r"url\(|href|@import", DRAWN[path])
    style = "".join(root.itertext()).partition("@media (prefers-reduced-motion: no-preference)")
    assert "animation:" in style[2]
    assert "animation:" not in style[0]
    assert "prefers-color-scheme: dark" in style[0]
    assert root.get("aria-label")


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.name)
def test_what_it_says_is_what_was_recorded(path: Path) -> None:
    said = " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", DRAWN[path]))
    holed = mm.Mesh(FOUND["mesh"], failed=[FOUND["failed"]])
    assert f"{holed.size} chips train" in said
    assert f"{holed.n_chips} chips keep training" in said
    assert f"resumed at step {FOUND['resumed']['step']} from memory, {FOUND['resumed']['after_s']:.0f} s later" in said
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


HERO = runpy.run_path(str(FIGURES / "hero.py"))
TREES: dict[Path, str] = HERO["pictures"]()


@pytest.mark.parametrize("path", TREES, ids=lambda path: path.name)
def test_trees_are_drawn_by_their_script(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == TREES[path], "run: python docs/figures/hero.py"


def test_the_times_are_those_of_the_page() -> None:
    page, found = (FIGURES.parent / "plans.md").read_text(encoding="utf-8"), HERO["read"]()
    rings = min(found["one ring"], found["the paper's rings"])
    assert f"predicted to take {found['meshmend']} M/b;\nrings take {rings} and more" in page


@pytest.mark.slow
def test_the_times_are_what_is_predicted_now() -> None:
    assert HERO["times"]() == HERO["read"]()


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


CHARTS = runpy.run_path(str(FIGURES / "benchmarks.py"))
PLOTS: dict[Path, str] = CHARTS["pictures"]()
GAPS: list[dict[str, str]] = CHARTS["read"]("lab_gaps.csv")


@pytest.mark.parametrize("path", PLOTS, ids=lambda path: path.name)
def test_a_plot_is_drawn_from_its_data(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == PLOTS[path], "run: python docs/figures/benchmarks.py"


def mesh_of(row: dict[str, str]) -> str:
    return (row["mesh"] + (f" minus {row['failed']}" if row["failed"] else "")).replace("x", "×")


def test_the_measured_data_are_those_of_the_lab() -> None:
    said = re.findall(r"^\| (\d×\d[^|]*) \| ([\w-]+) \| ([\d.]+) \|", REAL_LINKS, re.M)
    assert said == [(mesh_of(row), row["case"], row["seconds"]) for row in CHARTS["read"]("lab.csv")]


def test_the_parts_of_a_measured_time_add_up_to_it() -> None:
    assert [(row["mesh"], row["failed"], row["case"]) for row in GAPS] == [
        (row["mesh"], row["failed"], row["case"]) for row in CHARTS["read"]("lab.csv")
    ]
    for row in GAPS:
        parts = [float(value) for name, value in row.items() if name.endswith("_s")]
        assert len(parts) == len(CHARTS["PARTS"])
        assert sum(parts) == pytest.approx(float(row["seconds"]), abs=0.003)
        assert min(parts[:-1]) >= 0
        assert sum(parts[:2]) <= float(row["seconds"]), "no run is faster than the plan's busiest link"
        mesh = mm.Mesh(row["mesh"], failed=[row["failed"]] if row["failed"] else [])
        assert float(row["bandwidth_s"]) == pytest.approx(mm.bound(mesh).units * 32e6 / 5e6, abs=0.001)


def test_the_page_shows_the_data() -> None:
    for row in GAPS:
        cells = {name: f"{float(value):.2f}" for name, value in row.items() if name.endswith("_s")}
        assert cells.pop("latency_s") == "0.00"
        shown = list(cells.values())
        if row["case"] == "Gloo":
            shown[1:3] = ["–"] * 2
        start = f"| {mesh_of(row)} | {row['case']} | {row['seconds']} |"
        (line,) = (line for line in REAL_LINKS.splitlines() if line.startswith(start))
        assert line.endswith(f" | {' | '.join(shown)} |")
    worst = max(float(row["over_least"]) for row in CHARTS["read"]("payloads.csv") if row["planner"] == "auto")
    assert f"up to {worst:.1f} times the least possible" in MEASURED


@pytest.mark.slow
def test_the_predicted_data_are_what_is_predicted_now() -> None:
    assert CHARTS["gaps"]() == GAPS
    assert CHARTS["payloads"]() == CHARTS["read"]("payloads.csv")
