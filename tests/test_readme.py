"""What the README says in numbers is still so. That its commands run is for test_pages.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import meshmend as mm
from meshmend.cost import Hardware

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
MESH = mm.Mesh("16x32", failed=["4x2@6,8"])
LONG = Hardware("one byte a second", link_bytes_per_s=1.0)


def units(planner: str, **parameters: Any) -> float:
    """Time of a long payload in M/b."""
    return mm.predict(mm.plan(MESH, planner, **parameters), 1.0, LONG).seconds


def test_the_bound_is_what_it_says() -> None:
    assert set(re.findall(r"0\.5\d\d(?= (?:M/b|for))", README)) == {f"{mm.bound(MESH).units:.3f}"}


@pytest.mark.parametrize(
    ("row", "planner", "parameters"),
    [
        ("**meshmend**", "weave", {"chunks": 4096}),
        ("[the paper]", "row-pairs", {"orientation": "rows", "segments": 16}),
    ],
)
def test_the_table_of_alternatives_has_our_figures(row: str, planner: str, parameters: dict[str, Any]) -> None:
    (line,) = (line for line in README.splitlines() if line.startswith(f"| {row}"))
    assert f"{units(planner, **parameters):.2f}" in line
