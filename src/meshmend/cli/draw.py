"""`meshmend draw`: a plan or routes, as a picture or a page; and what there is to say of routes, without a picture."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.text import Text

from meshmend.cli.common import mesh_facts, print_result
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
from meshmend.cli.outputs import check_output
from meshmend.cli.terminal import approved, plain, working
from meshmend.cost.units import format_bytes
from meshmend.drawing import WHAT, Drawing, draw, draw_routes
from meshmend.drawing.draw import PAGE, STILL, What, check_ending, check_size
from meshmend.errors import Coordinate, DrawingError, ParameterError, name_chip
from meshmend.extras import require
from meshmend.planning import Auto, plan
from meshmend.routing import SCHEMES, Routes, choose, report
from meshmend.routing import route as routes_of
from meshmend.schedule import Collective
from meshmend.topology import Mesh, parse_chip

ALL = "all"
"""For --route: every pair of chips."""
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
        str | None,
        option(
            "--what",
            "WHAT",
            f"One of: {', '.join(WHAT)}.",
            show_default="what fits best",
        ),
    ] = None,
    chunk: Annotated[
        list[int] | None, option("--chunk", "K", "trees: a chunk to draw; steps: a chunk to follow. Repeatable.")
    ] = None,
    steps: Annotated[str | None, option("--steps", "A-B", "steps: only steps A to B.")] = None,
    route: Annotated[
        list[str] | None,
        option(
            "--route",
            "r,c-r,c|all",
            "The route between two chips, or statistics of all: drawn, or told without -o. Repeatable.",
        ),
    ] = None,
    scheme: Annotated[
        str | None,
        option(
            "--scheme",
            "NAME",
            f"One of: {', '.join(SCHEMES)}.",
            show_default="the best",
        ),
    ] = None,
    channels: Annotated[
        int | None, option("--channels", "N", "Virtual channels of the network, which limit the choice.", min=1)
    ] = None,
    output: Annotated[
        Path | None, option("--output", "F", "Output file: .svg .png .pdf, or .html for steps.", "-o")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Draw a plan: its rings, trees, routes or link load, or every step of it.

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
        _routes(mesh, route, scheme, channels, output, json)
        return
    if output is None:
        raise typer.BadParameter("Missing option '-o': name the picture's file, or ask for routes with --route.")
    if scheme is not None or channels is not None:
        raise ParameterError("--scheme and --channels are of routes: give --route, too.")
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


def _routes(
    mesh: Mesh, texts: list[str], scheme: str | None, channels: int | None, output: Path | None, json: bool
) -> None:
    """Draw routes, or tell of them."""
    pairs = None if texts == [ALL] else [_read_route(text) for text in texts]
    if output is None:
        _tell_routes(mesh, pairs, scheme, channels, json)
        return
    if pairs is None or scheme is not None or channels is not None:
        raise DrawingError("A picture shows single routes, as plans take them: leave out -o, or name two chips.")
    _tell_drawing({**mesh_facts(mesh), "planner": None}, draw_routes(mesh, pairs, output), json)


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
        raise DrawingError(f"{text!r} is not a route. Write its two chips, as in 0,0-3,5, or {ALL} alone.")
    return parse_chip(ends[0]), parse_chip(ends[1])


def _read_steps(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,9})-(\d{1,9})", text, re.ASCII)
    if match is None:
        raise DrawingError(f"--steps {text}: expected the first and the last step, as in 0-40.")
    return int(match[1]), int(match[2])


def _tell_routes(mesh: Mesh, pairs: list[Pair] | None, scheme: str | None, channels: int | None, json: bool) -> None:
    """Say which chips routes go over, or how long all of them are, and that they cannot deadlock."""
    if scheme is not None and channels is not None:
        raise ParameterError("--channels limits the choice of a scheme; with --scheme there is nothing to choose.")
    routes, proof = choose(mesh, max_channels=channels) if scheme is None else routes_of(mesh, scheme)
    found, shown = _all(routes) if pairs is None else _some(routes, pairs)
    facts = {
        **mesh_facts(mesh),
        "scheme": routes.scheme,
        "virtual_channels": routes.n_channels,
        "deadlock_free": proof.deadlock_free,
        "dependencies": proof.n_dependencies,
    }
    shown["virtual channels"] = str(routes.n_channels)
    print_result(json, facts | found, f"{routes.scheme} routes on {mesh}", shown | {"proof": approved(proof)})


Rows = dict[str, str | Text]


def _some(routes: Routes, pairs: list[Pair]) -> tuple[dict[str, Any], Rows]:
    """Return routes chip by chip, for programs and for people."""
    facts: list[dict[str, Any]] = []
    shown: Rows = {}
    for src, dst in pairs:
        path = routes.path(src, dst)
        used = routes.follow(routes.mesh.rank(src), routes.mesh.rank(dst)).channel.tolist()
        facts.append({"from": src, "to": dst, "hops": len(used), "path": path, "channels": used})
        way = " → ".join(name_chip(chip) for chip in path)
        over = f", channels {', '.join(map(str, used))}" if used else ""
        shown[f"{name_chip(src)} to {name_chip(dst)}"] = f"{way}: {len(used)} hops{over}"
    return {"routes": facts}, shown


def _all(routes: Routes) -> tuple[dict[str, Any], Rows]:
    """Return a report over all pairs, for programs and for people."""
    found = report(routes)
    pairs = Text(f"{found.pairs:,}")
    if found.pairs_without_route:
        pairs = pairs.append(", ").append(f"{found.pairs_without_route:,} without a route", style="red")
    busiest = "none"
    if found.busiest_link is not None:
        link = "→".join(name_chip(end) for end in found.busiest_link)
        busiest = f"{link} carries {found.busiest_link_flows:,} flows when every chip sends to every other"
    return asdict(found), {
        "pairs": pairs,
        "mean route": f"{found.mean_hops:.3f} hops, {found.mean_detour:.4f} times the shortest live path",
        "longest route": f"{found.longest_hops} hops",
        "longest detour": f"{found.longest_detour_hops} hops over the shortest live path",
        "busiest link": busiest,
    }
