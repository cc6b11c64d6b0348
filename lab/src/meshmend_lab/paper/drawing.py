"""The ten figures of the paper, each drawn from the plan or the routes that `figures` gives for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from meshmend.drawing.draw import STILL, Drawing, _canvas, check_ending
from meshmend.errors import DrawingError
from meshmend_lab.paper.figures import FIGURES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from meshmend.schedule import Schedule

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
        return _draw_phases(schedule, title)
    return views.draw_rings(schedule, "all" if recipe.view == "rings" else recipe.view, title=title)


def _draw_phases(schedule: Schedule, title: str) -> Figure:
    """Draw every phase in a panel of its own, in order of time; phases that span the same steps share one."""
    from meshmend.drawing import views
    from meshmend.drawing.canvas import line_key
    from meshmend.drawing.style import COPY_DASH, GREY, Look, phases_in_order

    groups: dict[tuple[int, int], list[int]] = {}
    for phase in phases_in_order(schedule):
        steps = schedule.step[schedule.phase == phase]
        groups.setdefault((int(steps[0]), int(steps[-1])), []).append(phase)
    panels = []
    for number, ((first, last), phases) in enumerate(groups.items(), 1):
        names = "\n".join(schedule.phase_names[phase] for phase in phases)
        panels.append(f"{number}. {names}\n({views.name_steps(first, last)})")
    keys = [
        line_key("adds", Look(GREY), arrow=True),
        line_key("replaces", Look(GREY, COPY_DASH, open_head=True), arrow=True),
        line_key("both ways", Look(GREY), arrow=False),
    ]
    return views.draw_groups(schedule, list(groups.values()), panels, title, keys=[*keys])


def draw_paper_figure(number: int, path: str | Path) -> Drawing:
    """Draw a figure of the paper to `path`, as .svg, .png or .pdf."""
    path = Path(path)
    check_ending(path, STILL)
    picture = paper_figure(number)
    _canvas().write(picture, path)
    return Drawing(path, f"figure {number}", path.stat().st_size)
