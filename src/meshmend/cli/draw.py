"""`meshmend draw`: a plan or routes, as a picture or a page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from meshmend.cli.common import mesh_facts, print_result
from meshmend.cli.options import (
    AutoOptions,
    CollectiveOption,
    HoleOptions,
    JsonOption,
    MachineOptions,
    OptionalPlanArgument,
    TuningOptions,
    complete_planner,
    completing,
    given_options,
    is_file,
    load_plan,
)
from meshmend.cli.outputs import check_output
from meshmend.cli.terminal import plain, working
from meshmend.cost.units import format_bytes
from meshmend.drawing import WHAT, draw, draw_routes
from meshmend.drawing.draw import PAGE, STILL, What, check_ending, check_size
from meshmend.errors import DrawingError
from meshmend.extras import require
from meshmend.planning import PLANNERS, Auto, plan
from meshmend.schedule import Collective
from meshmend.topology import Mesh, parse_chip


def command(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="F", help="Output file: .svg .png .pdf, or .html for steps.")
    ],
    machine: MachineOptions,
    holes: HoleOptions,
    tuning: TuningOptions,
    auto: AutoOptions,
    plan_of: OptionalPlanArgument = None,
    planner: Annotated[
        str | None,
        typer.Option(
            "--planner",
            metavar="NAME",
            help=f"One of: {', '.join(PLANNERS)}.",
            show_default=Auto.name,
            autocompletion=complete_planner,
        ),
    ] = None,
    collective: CollectiveOption = Collective.ALL_REDUCE,
    what: Annotated[
        str | None,
        typer.Option(
            "--what",
            metavar="WHAT",
            help=f"One of: {', '.join(WHAT)}.",
            show_default="what fits best",
            autocompletion=completing(*WHAT),
        ),
    ] = None,
    chunk: Annotated[
        list[int] | None,
        typer.Option("--chunk", metavar="K", help="trees: a chunk to draw; steps: a chunk to follow. Repeatable."),
    ] = None,
    steps: Annotated[str | None, typer.Option("--steps", metavar="A-B", help="steps: show only steps A to B.")] = None,
    route: Annotated[
        list[str] | None,
        typer.Option(
            "--route", metavar="r,c-r,c", help="Draw the route between two chips instead of a plan. Repeatable."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Draw a plan: its rings, trees, routes or link load, or every step of it.

    Example: meshmend draw 8x8 --fail 2x2@2,2 --planner row-pairs -o rings.svg
    """
    check_output("--output", output)
    if check_ending(output, (*STILL, PAGE)) != PAGE:
        require("matplotlib", needed_for="Drawing pictures", extra="draw")
    file = plan_of if plan_of is not None and is_file(plan_of) else None
    given = given_options(machine, holes, tuning, auto) + ([] if planner is None else ["--planner"])
    given += [] if collective == Collective.ALL_REDUCE else ["--collective"]
    if route is not None:
        if any(other is not None for other in (planner, what, chunk, steps)):
            raise DrawingError("--route already determines the plan: leave out the other options of the plan.")
        mesh = _mesh(machine, plan_of, holes) if file is None else load_plan(file, *given, proven=False).mesh
        drawing = draw_routes(mesh, [_read_route(text) for text in route], output)
        facts: dict[str, Any] = {**mesh_facts(mesh), "planner": None}
    else:
        if file is not None:
            schedule = load_plan(file, *given, proven=False)
        else:
            mesh = _mesh(machine, plan_of, holes)
            check_size(mesh)
            hardware = machine.hardware(auto.hardware)
            chosen = tuning.planner(planner or Auto.name, auto.payload, hardware, collective=collective)
            with working(f"planning and proving {mesh}", json):
                schedule = plan(mesh, chosen)
        facts = {**mesh_facts(schedule.mesh), "planner": schedule.planner}
        drawing = draw(schedule, output, cast("What | None", what), chunks=chunk, steps=_read_steps(steps))
    written = {"what": drawing.what, "file": str(drawing.path), "bytes": drawing.n_bytes}
    shown = {"shows": drawing.what, "file": plain(drawing.path), "size": format_bytes(drawing.n_bytes)}
    print_result(json, facts | written, "Drawing", shown)


def _mesh(machine: MachineOptions, shape: str | None, holes: HoleOptions) -> Mesh:
    if shape is None and machine.machine is None:
        raise DrawingError("Say which mesh to draw, as in: meshmend draw 8x8 --planner row-pairs -o rings.svg.")
    return machine.mesh(shape, holes)


def _read_route(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    ends = text.split("-")
    if len(ends) != 2:
        raise DrawingError(f"{text!r} is not a route. Write its two chips, as in 0,0-3,5.")
    return parse_chip(ends[0]), parse_chip(ends[1])


def _read_steps(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,9})-(\d{1,9})", text, re.ASCII)
    if match is None:
        raise DrawingError(f"--steps {text}: expected the first and the last step, as in 0-40.")
    return int(match[1]), int(match[2])
