"""`meshmend plan`: make a schedule, prove it, say what it is, keep it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from meshmend.cli.common import (
    FailCableOption,
    FailOption,
    JsonOption,
    ShapeArgument,
    WrapOption,
    mesh_facts,
    print_facts,
    print_json,
    read_mesh,
    told_errors,
)
from meshmend.cost import busiest_link_load
from meshmend.files import save
from meshmend.planning import PLANNERS, plan
from meshmend.schedule import Schedule
from meshmend.verify import Proof, verify

PlannerOption = Annotated[str, typer.Option("--planner", metavar="NAME", help=f"One of: {', '.join(PLANNERS)}.")]
OrientationOption = Annotated[
    str | None, typer.Option("--orientation", help="row-pairs: pair rows, columns, or auto (fewer yellow chips).")
]
SegmentsOption = Annotated[
    int | None, typer.Option("--segments", min=1, help="row-pairs: parts of the payload that follow each other.")
]
ChunksOption = Annotated[
    int | None, typer.Option("--chunks", min=1, help="weave: parts of the payload; more for longer payloads.")
]


def command(
    shape: ShapeArgument,
    planner: PlannerOption,
    fail: FailOption = None,
    fail_cable: FailCableOption = None,
    wrap: WrapOption = "none",
    orientation: OrientationOption = None,
    segments: SegmentsOption = None,
    chunks: ChunksOption = None,
    save_to: Annotated[
        Path | None, typer.Option("--save", metavar="F", help="Write the schedule to F: .npz, or .txt to read it.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Plan an allreduce for the chips that survive, and prove it.

    Example: meshmend plan 16x32 --fail 4x2@6,8 --planner row-pairs
    """
    with told_errors(json):
        mesh = read_mesh(shape, fail, fail_cable, wrap)
        parameters = read_parameters(orientation=orientation, segments=segments, chunks=chunks)
        started = time.perf_counter()
        schedule = plan(mesh, planner, verify=False, **parameters)
        plan_seconds = time.perf_counter() - started
        proof = verify(schedule)
        if save_to is not None:
            save(schedule, save_to)
        facts = schedule_facts(schedule, proof) | {"plan_seconds": plan_seconds}
        if json:
            print_json(facts)
        else:
            show_schedule(schedule, proof, {"planned in": f"{plan_seconds:.2f} s"})


def read_parameters(**given: Any) -> dict[str, Any]:
    """Return the planner's parameters that were given on the command line."""
    return {name: value for name, value in given.items() if value is not None}


def schedule_facts(schedule: Schedule, proof: Proof) -> dict[str, Any]:
    """Return what the JSON of `plan` and `verify` says of a proven schedule."""
    return {
        **mesh_facts(schedule.mesh),
        "planner": schedule.planner,
        "collective": str(schedule.collective),
        "chunks": schedule.total_chunks,
        "steps": schedule.n_steps,
        "transfers": schedule.n_transfers,
        "verified": True,
        "verify_method": proof.method,
        "false_pass_probability": proof.false_pass_probability,
        "verify_seconds": proof.seconds,
        "busiest_link_load": busiest_link_load(schedule),
        "phases": [
            {"name": p.name, "first_step": p.first_step, "last_step": p.last_step, "transfers": p.n_transfers}
            for p in schedule.phases
        ],
    }


def show_schedule(schedule: Schedule, proof: Proof, more: dict[str, str]) -> None:
    """Print the same facts for people."""
    phases = [f"steps {p.first_step:>4} – {p.last_step:<4}  {p.name}" for p in schedule.phases]
    print_facts(
        f"{schedule.planner} {schedule.collective} on {schedule.mesh}",
        {
            "chips": f"{schedule.mesh.n_chips:,} live of {schedule.mesh.size:,}",
            "steps": f"{schedule.n_steps:,}",
            "chunks": f"{schedule.total_chunks:,}",
            "transfers": f"{schedule.n_transfers:,}",
            "busiest link": f"{busiest_link_load(schedule):.4f} of the payload",
            "phases": "\n".join(phases),
            **more,
            "proof": f"[green]✓[/] {proof}",
        },
    )
