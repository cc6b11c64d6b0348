"""`meshmend compile`: compile a plan's all-reduce for a TPU slice with the real TPU compiler, without a TPU."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

from meshmend.cli.common import mesh_facts, print_result, without_devices
from meshmend.cli.options import FailOption, JsonOption, PlannerOption, option, read_wrap, tuned_planner
from meshmend.cli.terminal import working
from meshmend.cost.units import format_bytes, name_seconds, parse_bytes
from meshmend.errors import ParameterError
from meshmend.extras import require
from meshmend.planning import Auto, plan
from meshmend.topology import name_shape, parse_shape
from meshmend.topology.text import is_shape

if TYPE_CHECKING:
    from meshmend.jax.compile.for_topology import Compiled
    from meshmend.jax.engine.tiles import TiledFabric

WIRED = "slice"
"""For --wrap: the axes that wrap in a slice of that kind and shape."""


def command(
    topology: Annotated[str, option("--topology", "GEN:SHAPE", "A TPU slice, as in v3:32x32 or v4:4x4x8.")],
    fail: FailOption = None,
    wrap: Annotated[
        str, option("--wrap", "AXES", "Axes that wrap: slice (as it is wired), none, all, or numbers as in 0,1.")
    ] = WIRED,
    tile: Annotated[
        str | None, option("--tile", "SHAPE", "Tiles of the slice, as in 2x2; only tiles exchange gradients.")
    ] = None,
    cores: Annotated[int | None, option("--cores", "N", "Cores used per chip; default: all.", min=1, max=2)] = None,
    planner: PlannerOption = Auto.name,
    payload: Annotated[str, option("--payload", "SIZE", "Payload per device, as in 102.4MB.")] = "102.4MB",
    dtype: Annotated[str, option("--dtype", "NAME", "float32 or bfloat16.")] = "float32",
    json: JsonOption = False,
) -> None:
    """Compile the all-reduce for a TPU slice with its real compiler, without a TPU.

    The chip (x, y) of the slice is row x, column y: --fail 4x2@6,8 is x from 6 to 9, y from 8 to 9.

    With --tile the plan is for the mesh of tiles, and the payload is what each device has of it.

    Example: meshmend compile --topology v3:32x32 --fail 4x2@6,8 --planner row-pairs
    Example: meshmend compile --topology v6e:8x8 --fail 2x2@2,2 --tile 2x2
    """
    require("jax", "optax", "libtpu", needed_for="meshmend compile", extra="tpu")
    without_devices()
    from meshmend.jax.compile.for_topology import compile_for, slice_fabric
    from meshmend.jax.engine.tiles import tile as cut_slice

    if dtype not in ("float32", "bfloat16"):
        raise ParameterError(f"--dtype is {dtype!r}, expected float32 or bfloat16.")
    payload_bytes = round(parse_bytes(payload))
    generation, _, chips = topology.partition(":")
    if is_shape(chips):  # libtpu knows one way to write it
        topology = f"{generation}:{name_shape(parse_shape(chips))}"
    fabric = slice_fabric(topology, failed=fail or (), cores=cores)
    if wrap != WIRED:  # the slice says how many axes it has: 4x4x1 has two
        wraps = read_wrap(wrap, fabric.mesh.n_axes)
        fabric = slice_fabric(topology, failed=fail or (), wrap=wraps, cores=cores)
    cut = None if tile is None else cut_slice(fabric, tile)
    fabric = fabric if cut is None else cut
    with working(f"planning and proving {fabric.mesh}", json):
        schedule = plan(fabric.mesh, tuned_planner(planner, payload_bytes, fabric.hardware))
    facts: dict[str, Any] = {"payload_bytes": payload_bytes, "dtype": dtype}
    if cut is not None:
        facts |= {"tile": tile, "devices_per_tile": cut.devices_per_tile, "wasted_chips": cut.tiling.n_wasted}
    with working("compiling the all-reduce", json):
        report = compile_for(topology, schedule, fabric, payload_bytes=payload_bytes, dtype=dtype)
    facts = {
        **mesh_facts(fabric.mesh),
        "planner": schedule.planner,
        "steps": schedule.n_steps,
        **facts,
        **dataclasses.asdict(report),
    }
    sizes = {name: format_bytes(facts[name]) for name in facts if name.endswith("_bytes")}
    print_result(
        json,
        facts,
        f"{schedule.planner} all-reduce on {topology}, {fabric.mesh}",
        {
            **_size_of(report, cut),
            "program": f"{schedule.n_steps:,} steps in {report.loops} loops of up to {report.lanes} lanes",
            "collectives": f"{report.permutes} permutes, {report.in_flight} in flight at once"
            + (
                f", {report.other_collectives} inside the {'chips' if cut is None else 'tiles'}"
                if report.other_collectives
                else ""
            ),
            "HLO": f"{report.hlo_chars_without_pairs:,} characters, and "
            f"{report.hlo_chars - report.hlo_chars_without_pairs:,} of lists of chips",
            "memory per device": f"{sizes['argument_bytes']} arguments, "
            f"{sizes['temporary_bytes']} temporaries, {sizes['aliased_bytes']} in place",
            "work per device": f"{report.flops / 1e9:,.1f} GFLOP, {sizes['accessed_bytes']} read and "
            "written (a loop's body counted once)",
            "compiled in": f"{name_seconds(report.compile_seconds)}, lowered in {name_seconds(report.lower_seconds)}",
        },
    )


def _size_of(report: Compiled, cut: TiledFabric | None) -> dict[str, str]:
    if cut is None:
        cores = f"{report.cores_per_chip} core{'s' * (report.cores_per_chip > 1)}"
        return {"chips": f"{report.chips:,} × {cores} ({report.device_kind})"}
    side, wasted = name_shape(cut.tiling.side), cut.tiling.n_wasted
    of = f"{side} chips, {cut.devices_per_tile} devices ({report.device_kind})"
    return {"tiles": f"{report.chips:,} of {of}; {wasted} live chip{'s' * (wasted != 1)} unused"}
