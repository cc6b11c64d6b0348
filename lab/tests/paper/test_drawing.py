from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from drawing.pictures import (
    assert_legible,
    both_ways,
    failed_coordinates,
    lines_of,
    n_heads,
    named,
    one_way,
    sent_pairs,
)
from meshmend import plan, routing
from meshmend.errors import DrawingError, name_chip
from meshmend_lab.paper.drawing import ROUTES, draw_paper_figure, paper_figure
from meshmend_lab.paper.figures import FIGURES
from rows import others_slow

GALLERY = Path(__file__).parents[3] / "docs" / "figures"


@pytest.mark.parametrize("number", others_slow(FIGURES, quick=[1, 4, 10]))
def test_every_figure_is_legible_and_small_and_shows_its_hole(number: int, tmp_path: Path) -> None:
    picture = paper_figure(number)
    assert_legible(picture)
    hole = {(int(r), int(c)) for r, c in np.argwhere(~FIGURES[number].mesh.live)}
    assert failed_coordinates(picture) == ([hole] * len(named(picture, "chips")) if hole else [])
    assert draw_paper_figure(number, tmp_path / "a.svg").n_bytes < 200_000


def test_a_figure_is_drawn_alike_twice_and_as_a_bitmap(tmp_path: Path) -> None:
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    for path in (first, second):
        draw_paper_figure(9, path)
    assert first.read_bytes() == second.read_bytes()
    assert draw_paper_figure(9, tmp_path / "a.png").n_bytes > 10_000


def test_figures_1_and_2_show_the_routes_of_the_network() -> None:
    for number in (1, 2):
        mesh, picture = FIGURES[number].mesh, paper_figure(number)
        for src, dst in ROUTES:
            hops = len(routing.trace(mesh, mesh.rank(src), mesh.rank(dst)).link)
            name = f"{name_chip(src)} to {name_chip(dst)}"
            assert n_heads(picture, name) == 1
            assert f"{name}: {hops} hops" in [t.get_text() for legend in picture.legends for t in legend.get_texts()]
    # Figure 1 is dimension order: no detour. Figure 2 must have some, or it shows nothing.
    lengths = [
        [len(routing.trace(FIGURES[n].mesh, FIGURES[n].mesh.rank(a), FIGURES[n].mesh.rank(b)).link) for a, b in ROUTES]
        for n in (1, 2)
    ]
    assert lengths[0] == [abs(a[0] - b[0]) + abs(a[1] - b[1]) for a, b in ROUTES]
    assert sum(lengths[1]) > sum(lengths[0])


@pytest.mark.parametrize(("number", "n_chips"), [(3, 64), (8, 60)])
def test_figures_3_and_8_are_one_ring(number: int, n_chips: int) -> None:
    ring = lines_of(paper_figure(number), "ring: reduce-scatter, both ways")
    assert ring is not None
    assert len(ring.get_paths()) == n_chips


def test_figures_4_and_5_have_two_colors_at_a_time() -> None:
    for number, n_panels in ((4, 2), (5, 4)):
        picture = paper_figure(number)
        assert len(picture.axes) == n_panels
        for axes in picture.axes:
            drawn = [c for c in axes.collections if str(c.get_label()).startswith("along")]
            assert len({tuple(np.asarray(c.get_edgecolor())[0]) for c in drawn}) == 2
            # Each color has a ring of four chips in each of four rows or columns.
            assert [len(c.get_paths()) for c in drawn] == [16, 16]


def test_figure_6_has_a_ring_for_every_two_rows_and_figure_7_two_rings_a_column() -> None:
    rows = lines_of(paper_figure(6), "row rings: reduce-scatter, both ways")
    assert rows is not None
    assert len(rows.get_paths()) == 4 * 16
    columns = lines_of(paper_figure(7), "column rings of shards: reduce-scatter, both ways")
    assert columns is not None
    assert len(columns.get_paths()) == 8 * 2 * 4


def test_figure_9_forwards_from_every_yellow_chip_to_its_vertical_neighbour() -> None:
    picture = paper_figure(9)
    # Twelve yellow chips; rings of sixteen chips in three whole pairs; three blocks of four.
    assert n_heads(picture, "yellow forwards to blue") == 12
    assert len(lines_of(picture, "row rings: reduce-scatter, both ways").get_paths()) == 3 * 16  # type: ignore[union-attr]
    assert len(lines_of(picture, "yellow blocks: reduce-scatter, both ways").get_paths()) == 3 * 4  # type: ignore[union-attr]
    assert lines_of(picture, "column rings of shards: reduce-scatter, both ways") is None


def test_figure_10_shows_all_phases_of_the_plan() -> None:
    picture, recipe = paper_figure(10), FIGURES[10]
    schedule = plan(recipe.mesh, recipe.planner)
    assert len(picture.axes) == len(schedule.phases) == 8
    for phase in schedule.phases:
        pairs = sent_pairs(schedule, phase.name)
        plain = lines_of(picture, f"{phase.name}, both ways")
        assert len(plain.get_paths() if plain else []) == both_ways(schedule.mesh, pairs)
        assert n_heads(picture, phase.name) == one_way(schedule.mesh, pairs)


def test_there_is_no_figure_11(tmp_path: Path) -> None:
    with pytest.raises(DrawingError, match="figures 1 to 10; there is no figure 11"):
        draw_paper_figure(11, tmp_path / "a.svg")


def test_the_gallery_has_every_figure_and_nothing_large() -> None:
    page = (GALLERY.parent / "paper.md").read_text(encoding="utf-8")
    for number in FIGURES:
        path = GALLERY / f"figure{number:02}.svg"
        assert path.stat().st_size < 200_000
        assert f"figures/{path.name}" in page
