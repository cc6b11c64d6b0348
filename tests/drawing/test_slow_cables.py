"""Slow cables look different in every picture, and the legend says what they are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import meshmend as mm
from meshmend.drawing.draw import figure
from meshmend.drawing.geometry import FigureLayout, cables

SLOW = mm.Mesh("4x4", failed=[(3, 3)], cable_rates={"0,1-0,2": "1/2", "4x1@0,0": "3/4"})


def test_cables_are_drawn_once_each_by_their_kind() -> None:
    layout = FigureLayout(SLOW)
    slow = {tuple(map(tuple, line.tolist())) for line in cables(layout, slow=True)}
    assert slow == {((1, 0), (2, 0)), ((0, 0), (0, 1)), ((0, 1), (0, 2)), ((0, 2), (0, 3))}
    assert len(cables(layout)) + len(slow) == SLOW.n_cables


@pytest.mark.parametrize("what", ["rings", "load", "trees"])
def test_pictures_and_legends_show_them(what: str) -> None:
    schedule = mm.plan(SLOW, "weave", chunks=4)
    drawn = figure(schedule, what)  # type: ignore[arg-type]
    for axes in drawn.axes[: 1 if what == "load" else None]:
        lines = {str(line.get_label()): line for line in axes.lines}
        x = np.asarray(lines["slow cables"].get_xdata(), dtype=float)
        assert np.isnan(x).sum() == 4
        assert lines["slow cables"].is_dashed()
        assert not lines["cables"].is_dashed()
        assert lines["slow cables"].get_color() != lines["cables"].get_color()
    words = [text.get_text() for legend in drawn.legends for text in legend.get_texts()]
    assert "slow cable, rates 1/2 to 3/4" in words
    plain = figure(mm.plan(mm.Mesh("4x4"), "weave", chunks=4), what)  # type: ignore[arg-type]
    assert not any("slow" in text.get_text() for legend in plain.legends for text in legend.get_texts())


def test_the_page_has_them_apart(tmp_path: Path) -> None:
    mm.draw(mm.plan(SLOW, "weave", chunks=2), tmp_path / "steps.html")
    page = (tmp_path / "steps.html").read_text(encoding="utf-8")
    found = re.search(r'id="data">(.*?)</script>', page)
    assert found is not None
    facts = json.loads(found[1])
    assert len(facts["film"]["slow"]) == 4
    assert len(facts["film"]["cables"]) == SLOW.n_cables - 4
