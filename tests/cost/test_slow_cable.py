"""One slow cable, on a mesh and behind a switch: the benchmark's bounds by hand, and its table."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

import slow_cable
from meshmend import Mesh, bound


@pytest.mark.parametrize("n", [4, 8, 16])
def test_in_the_middle_it_is_one_cable_less_a_part_and_at_a_corner_the_corner(n: int) -> None:
    """By hand: each element crosses P − 1 of 2n(n − 1) cables up, and a corner chip sends all over its two."""
    for place, (cable, n_cables) in slow_cable.cables(n).items():
        for rate in (Fraction(1, 2), Fraction(1, 4)):
            mesh = Mesh((n, n), cable_rates={cable: rate})
            everywhere = (n * n - 1) / (2 * n * (n - 1) - (1 - rate))
            corner = 1 / (1 + rate) if place == "corner" else Fraction(1, 2)
            assert bound(mesh).units == pytest.approx(float(max(everywhere, corner)), rel=1e-12)
            first = next(iter(mesh.cable_rates))[0]
            assert int((mesh.neighbours[mesh.rank(first)] >= 0).sum()) == n_cables


def test_behind_a_switch() -> None:
    """From half the rate on, the slow chip costs O(1/p); below, it is what everybody waits for."""
    assert slow_cable.behind_a_switch(64, Fraction(1)) == 1
    for p in (8, 64, 1024):
        half = slow_cable.behind_a_switch(p, Fraction(1, 2))
        assert half == max(Fraction(p) / (p - Fraction(1, 2)), Fraction(p, p - 1)), "O(1/p)"
        assert slow_cable.behind_a_switch(p, Fraction(1, 4)) == Fraction(2 * p, p - 1), "twice as long, about"
        assert 1 < slow_cable.behind_a_switch(p, Fraction(7, 8)) < half


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "related.md").read_text(encoding="utf-8")
    assert "\n".join(slow_cable.rows()) in page
