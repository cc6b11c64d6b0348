"""`meshmend lab figure`: a figure of the paper, from our plans."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshmend.cli.common import check_output, mesh_facts, print_result
from meshmend.cli.options import JsonOption
from meshmend.cli.terminal import plain
from meshmend.cost.units import format_bytes
from meshmend_lab.paper.drawing import draw_paper_figure
from meshmend_lab.paper.figures import FIGURES


def command(
    number: Annotated[int, typer.Argument(metavar="N", help="Number of the figure, 1 to 10.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="F", help="Output file: .svg .png .pdf.")],
    json: JsonOption = False,
) -> None:
    """Draw a figure of the paper from our plans and routes.

    Example: meshmend lab figure 9 -o figure09.svg
    """
    check_output("--output", output)
    drawing = draw_paper_figure(number, output)
    facts = {**mesh_facts(FIGURES[number].mesh), "planner": FIGURES[number].planner or None}
    written = {"what": drawing.what, "file": str(drawing.path), "bytes": drawing.n_bytes}
    shown = {"shows": drawing.what, "file": plain(drawing.path), "size": format_bytes(drawing.n_bytes)}
    print_result(json, facts | written, "Drawing", shown)
