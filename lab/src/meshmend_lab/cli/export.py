"""`meshmend lab export`: write a plan's all-reduce as a folder that runs without meshmend."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshmend.cli.common import check_folder, mesh_facts, print_result, without_devices
from meshmend.cli.options import (
    HardwareOption,
    HoleOptions,
    JsonOption,
    MachineOptions,
    OptionalPayloadOption,
    OptionalPlanArgument,
    PlannerOption,
    given_options,
    is_file,
    load_plan,
    tuned_planner,
)
from meshmend.cli.terminal import working
from meshmend.cost import DEFAULT_HARDWARE
from meshmend.cost.units import format_bytes, parse_bytes
from meshmend.machines.machine import through_xla
from meshmend.planning import Auto, plan
from meshmend.planning.proven import DEFAULT_PAYLOAD_BYTES
from meshmend_lab.export.artefact import check_replaceable, read_artefact
from meshmend_lab.extras import require


def command(
    plan_of: OptionalPlanArgument = None,
    *,
    machine: MachineOptions,
    folder: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="A new folder, or one to replace.")],
    planner: PlannerOption = Auto.name,
    holes: HoleOptions,
    payload: OptionalPayloadOption = None,
    hardware: HardwareOption = None,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="NAME", help="Dtype of the sum: float32, bfloat16 or int32.")
    ] = "float32",
    stand_by: Annotated[
        bool,
        typer.Option("--stand-by", help="Chips left out are healthy: their devices join the program and do nothing."),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Write the all-reduce of a plan for others: StableHLO for TPU and CPU, each chip's tables, the plan and its proof.

    JAX alone runs it, on as many devices as there are chips: docs/export.md shows how. `meshmend lab verify
    FOLDER` checks it.

    Example: meshmend lab export 8x8 --fail 2x2@2,2 --payload 100MB --hardware tpu-v6e -o plan-artefact/
    Example: meshmend lab export plan.npz --payload 1GB --dtype bfloat16 -o plan-artefact/
    """
    require("jax", "optax", "flatbuffers", needed_for="meshmend lab export", extra="export")
    without_devices()
    from meshmend_lab.export.exporting import export_artefact

    check_folder("--output", folder.parent, make=False)
    check_replaceable(folder)
    payload_bytes = DEFAULT_PAYLOAD_BYTES if payload is None else parse_bytes(payload)
    if plan_of is not None and is_file(plan_of):
        schedule = load_plan(plan_of, *given_options(holes, machine, planner=planner))
    else:
        mesh = machine.mesh(plan_of, holes)
        # XLA is what will drive the links.
        driven = through_xla(machine.hardware(hardware) or DEFAULT_HARDWARE)
        with working(f"planning and proving {mesh}", json):
            schedule = plan(mesh, tuned_planner(planner, payload_bytes, driven))
    with working("exporting", json):
        digest = export_artefact(schedule, folder, payload_bytes=payload_bytes, dtype=dtype, stand_by=stand_by)
        written = read_artefact(folder)
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    facts = {
        **mesh_facts(schedule.mesh),
        "planner": schedule.planner,
        "steps": schedule.n_steps,
        "folder": str(folder),
        "manifest_sha256": digest,
        "devices": len(written.tables.chips),
        "stand_by": stand_by,
        "elements": written.payload.elements,
        "dtype": dtype,
        "bytes": sizes,
    }
    standing = len(written.tables.chips) - schedule.mesh.n_chips
    print_result(
        json,
        facts,
        f"{schedule.planner} {schedule.collective} on {schedule.mesh}",
        {
            "written to": str(folder),
            "devices": f"{len(written.tables.chips):,}" + (f", of which {standing:,} stand by" if stand_by else ""),
            "payload": f"{format_bytes(written.payload.n_bytes)} per device, {written.payload.elements:,} of {dtype}",
            "files": f"{len(sizes)}, {format_bytes(sum(sizes.values()))}",
            "manifest": f"SHA-256 {digest}",
            "proof": str(written.proof),
        },
    )
