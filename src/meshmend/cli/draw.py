"""`meshmend draw`: a plan or routes, as a picture or a page; without a file, routes in words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.text import Text

from meshmend.cli.common import check_output, mesh_facts, print_result
from meshmend.cli.options import (
    AutoOptions,
    CollectiveOption,
    HoleOptions,
    JsonOption,
    MachineOptions,
    OptionalPlanArgument,
    PlannerOption,
    given_options,
    is_file,
    load_plan,
    option,
    tuned_planner,
)
from meshmend.cli.terminal import approved, plain, working
from meshmend.cost.units import format_bytes
from meshmend.drawing import WHAT, Drawing, draw, draw_routes
from meshmend.drawing.draw import PAGE, STILL, What, check_ending, check_size
from meshmend.errors import Coordinate, DrawingError, name_chip
from meshmend.extras import require
from meshmend.planning import Auto, plan
from meshmend.routing import all_pairs
from meshmend.schedule import Collective
from meshmend.topology import Mesh, parse_chip

Pair = tuple[Coordinate, Coordinate]


def command(
    plan_of: OptionalPlanArgument = None,
    *,
    machine: MachineOptions,
    holes: HoleOptions,
    planner: PlannerOption = Auto.name,
    collective: CollectiveOption = Collective.ALL_REDUCE,
    auto: AutoOptions,
    what: Annotated[
        str | None, option("--what", "WHAT", f"One of: {', '.join(WHAT)}.", show_default="what fits best")
    ] = None,
    chunk: Annotated[
        list[int] | None, option("--chunk", "K", "trees: a chunk to draw; steps: a chunk to follow. Repeatable.")
    ] = None,
    steps: Annotated[str | None, option("--steps", "A-B", "steps: only steps A to B.")] = None,
    route: Annotated[
        list[str] | None,
        option("--route", "r,c-r,c", "The route between two chips: drawn, or told without -o. Repeatable."),
    ] = None,
    output: Annotated[
        Path | None, option("--output", "F", "Output file: .svg .png .pdf, or .html for steps.", "-o")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Draw a plan: its rings, trees or link load, or every step of it.

    With --route and no file it tells how packets go round the holes, with the proof that they cannot deadlock.

    Example: meshmend draw 8x8 --fail 2x2@2,2 --planner row-pairs -o rings.svg
    Example: meshmend draw 8x8 --fail 2x2@2,2 --route 2,1-2,4
    """
    if output is not None:
        check_output("--output", output)
        if check_ending(output, (*STILL, PAGE)) != PAGE:
            require("matplotlib", needed_for="Drawing pictures", extra="draw")
    file = plan_of if plan_of is not None and is_file(plan_of) else None
    given = given_options(machine, holes, auto, planner=planner, collective=collective)
    if route is not None:
        if planner != Auto.name or any(other is not None for other in (what, chunk, steps)):
            raise DrawingError("--route already determines the plan: leave out the other options of the plan.")
        mesh = _mesh(machine, plan_of, holes) if file is None else load_plan(file, *given, proven=False).mesh
        pairs = [_read_route(text) for text in route]
        if output is None:
            _tell_routes(mesh, pairs, json)
        else:
            _tell_drawing({**mesh_facts(mesh), "planner": None}, draw_routes(mesh, pairs, output), json)
        return
    if output is None:
        raise typer.BadParameter("Missing option '-o': name the picture's file, or ask for routes with --route.")
    if file is not None:
        schedule = load_plan(file, *given, proven=False)
    else:
        mesh = _mesh(machine, plan_of, holes)
        check_size(mesh)
        hardware = machine.hardware(auto.hardware)
        chosen = tuned_planner(planner, auto.payload, hardware, collective=collective)
        with working(f"planning and proving {mesh}", json):
            schedule = plan(mesh, chosen)
    drawing = draw(schedule, output, cast("What | None", what), chunks=chunk, steps=_read_steps(steps))
    _tell_drawing({**mesh_facts(schedule.mesh), "planner": schedule.planner}, drawing, json)


def _tell_drawing(facts: dict[str, Any], drawing: Drawing, json: bool) -> None:
    """Say what was drawn, and where."""
    written = {"what": drawing.what, "file": str(drawing.path), "bytes": drawing.n_bytes}
    shown = {"shows": drawing.what, "file": plain(drawing.path), "size": format_bytes(drawing.n_bytes)}
    print_result(json, facts | written, "Drawing", shown)


def _mesh(machine: MachineOptions, shape: str | None, holes: HoleOptions) -> Mesh:
    if shape is None and machine.machine is None:
        raise DrawingError("Say which mesh to draw, as in: meshmend draw 8x8 --planner row-pairs -o rings.svg.")
    return machine.mesh(shape, holes)


def _read_route(text: str) -> Pair:
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


def _tell_routes(mesh: Mesh, pairs: list[Pair], json: bool) -> None:
    """Say which chips routes go over, and that packets on the routes between all chips cannot deadlock."""
    routes, proof = all_pairs(mesh)
    facts: list[dict[str, Any]] = []
    shown: dict[str, str | Text] = {}
    for src, dst in pairs:
        path = routes.path(src, dst)
        used = routes.follow(mesh.rank(src), mesh.rank(dst)).channel.tolist()
        facts.append({"from": src, "to": dst, "hops": len(used), "path": path, "channels": used})
        way = " → ".join(name_chip(chip) for chip in path)
        over = f", channels {', '.join(map(str, used))}" if used else ""
        shown[f"{name_chip(src)} to {name_chip(dst)}"] = f"{way}: {len(used)} hops{over}"
    proven = {
        "virtual_channels": routes.n_channels,
        "deadlock_free": proof.deadlock_free,
        "dependencies": proof.n_dependencies,
    }
    shown |= {"virtual channels": str(routes.n_channels), "proof": approved(proof)}
    print_result(json, {**mesh_facts(mesh), **proven, "routes": facts}, f"routes on {mesh}", shown)
