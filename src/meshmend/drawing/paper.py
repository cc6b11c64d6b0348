"""The ten figures of the paper, each drawn from our own plan or routes: a mesh, a planner and a view.

The one place of this part that knows planners by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from meshmend.drawing.draw import STILL, Drawing, _canvas, check_ending
from meshmend.errors import DrawingError
from meshmend.planning import plan
from meshmend.topology import Mesh

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROUTES = (((0, 0), (4, 1)), ((2, 0), (4, 5)), ((0, 3), (5, 3)), ((3, 5), (1, 0)), ((5, 4), (1, 5)))
"""Pairs of chips for figures 1 and 2; three of their dimension-order ways cross the hole of figure 2."""


@dataclass(frozen=True)
class PaperFigure:
    """How one figure is made. `planner` is empty where routes are drawn."""

    title: str
    mesh: Mesh
    planner: str
    view: Literal["routes", "rings", "payload", "shards", "phases"]


_WHOLE, _HOLED = Mesh("8x8"), Mesh("8x8", failed=["2x2@2,2"])

FIGURES: dict[int, PaperFigure] = {
    1: PaperFigure("Dimension-order routing", Mesh("6x6"), "", "routes"),
    2: PaperFigure("Routes round a failed 2×2 region", Mesh("6x6", failed=["2x2@2,2"]), "", "routes"),
    3: PaperFigure("One Hamiltonian ring over near neighbours", _WHOLE, "hamiltonian", "rings"),
    4: PaperFigure("Two concurrent reductions, along X and along Y", Mesh("4x4"), "two-color", "rings"),
    5: PaperFigure("The phases of the two-color reduction", Mesh("4x4"), "two-color", "phases"),
    6: PaperFigure("Row pairs, first phase: two rows form a ring", _WHOLE, "row-pairs", "payload"),
    7: PaperFigure("Row pairs, second phase: alternate rows form rings", _WHOLE, "row-pairs", "shards"),
    8: PaperFigure("One Hamiltonian ring round a failed 2×2 region", _HOLED, "hamiltonian", "rings"),
    9: PaperFigure("Yellow chips forward to the blue rings", _HOLED, "row-pairs", "payload"),
    10: PaperFigure("The steps of the forwarding scheme", Mesh("6x6", failed=["2x2@2,2"]), "row-pairs", "phases"),
}


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
    schedule = plan(recipe.mesh, recipe.planner)
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
