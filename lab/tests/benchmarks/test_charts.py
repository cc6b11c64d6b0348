"""The plots of docs/measured.md and docs/planners.md are what their script draws from the data that are kept."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import meshmend as mm

FIGURES = Path(__file__).parents[3] / "docs" / "figures"
MEASURED = (FIGURES.parent / "measured.md").read_text(encoding="utf-8")
PLANNERS = (FIGURES.parent / "planners.md").read_text(encoding="utf-8")
REAL_LINKS = MEASURED.partition("\n## Real links")[2].partition("\n## ")[0]
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
    assert f"up to {worst:.1f} times the least possible" in PLANNERS


@pytest.mark.slow
def test_the_predicted_data_are_what_is_predicted_now() -> None:
    assert CHARTS["gaps"]() == GAPS
    assert CHARTS["payloads"]() == CHARTS["read"]("payloads.csv")
