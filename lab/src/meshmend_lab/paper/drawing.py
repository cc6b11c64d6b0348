"""The ten figures of the paper, each drawn from the plan or the routes that `figures` gives for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from meshmend.drawing.draw import STILL, Drawing, _canvas, check_ending
from meshmend.errors import DrawingError
from meshmend_lab.paper.figures import FIGURES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROUTES = (((0, 0), (4, 1)), ((2, 0), (4, 5)), ((0, 3), (5, 3)), ((3, 5), (1, 0)), ((5, 4), (1, 5)))
"""Pairs of chips for figures 1 and 2; three of their dimension-order ways cross the hole of figure 2."""


def paper_figure(number: int) -> Figure:
    """Return a figure of the paper as a matplotlib figure.

    >>> paper_figure(11)
    Traceback (most recent call last):
    ...
    meshmend.errors.DrawingError: The paper has figures 1 to 10; there is no figure 11.
    """
    if number not in FIGURES:
        raise DrawingError(f"The paper has figures 1 to {len(FIGURES)}; there is no figure {number}.")
    _canvas()
    from meshmend.drawing import views

    recipe = FIGURES[number]
    title = f"Figure {number}. {recipe.title}"
    if recipe.view == "routes":
        src, dst = ([recipe.mesh.rank(chip) for chip in ends] for ends in zip(*ROUTES, strict=True))
        return views.draw_routes(recipe.mesh, src, dst, title=title)
    schedule = recipe.schedule()
    if recipe.view == "phases":
        return views.draw_phases(schedule, title=title)
    return views.draw_rings(schedule, "all" if recipe.view == "rings" else recipe.view, title=title)


def draw_paper_figure(number: int, path: str | Path) -> Drawing:
    """Draw a figure of the paper to `path`, as .svg, .png or .pdf."""
    path = Path(path)
    check_ending(path, STILL)
    picture = paper_figure(number)
    _canvas().write(picture, path)
    return Drawing(path, f"figure {number}", path.stat().st_size)
