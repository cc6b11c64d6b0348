"""The plans that every JAX test runs: each planner, full and holed meshes, one and several run lengths in a step."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
from jax.sharding import PartitionSpec

import meshmend as mm
import meshmend.jax as mmj
from meshmend.planning import PLANNERS
from standins import one_way_ring, tree_schedule

BY_CHIP = PartitionSpec("chip")

PLANS: dict[str, tuple[str, mm.Mesh]] = {
    "hamiltonian 4x4": ("hamiltonian", mm.Mesh("4x4")),
    "two-color 4x4": ("two-color", mm.Mesh("4x4")),
    "two-color torus": ("two-color", mm.Mesh("4x8", wrap=True)),
    "two-color, two run lengths": ("two-color", mm.Mesh("4x6")),
    "row-pairs 4x4": ("row-pairs", mm.Mesh("4x4")),
    "row-pairs 4x4 - 2x2": ("row-pairs", mm.Mesh("4x4", failed=["2x2@0,2"])),
    "trees 4x4": ("trees", mm.Mesh("4x4")),
    "hamiltonian 4x8 - 2x2": ("hamiltonian", mm.Mesh("4x8", failed=["2x2@2,2"])),
    "row-pairs 4x8 - 2x2": ("row-pairs", mm.Mesh("4x8", failed=["2x2@0,4"])),
    "trees 4x8 - 2x2": ("trees", mm.Mesh("4x8", failed=["2x2@1,3"])),
    "hamiltonian 8x8 - 2x2": ("hamiltonian", mm.Mesh("8x8", failed=["2x2@2,2"])),
    "row-pairs 8x8 - 2x2": ("row-pairs", mm.Mesh("8x8", failed=["2x2@2,2"])),
    "row-pairs 8x8 - 2x2, 3 segments": ("row-pairs 3", mm.Mesh("8x8", failed=["2x2@2,2"])),
    "trees 8x8 - odd holes": ("trees", mm.Mesh("8x8", failed=["1x3@0,2", "5,5", "3x1@5,0"])),
    "trees 3-D": ("trees", mm.Mesh("3x4x2", failed=["1x2x1@1,1,0"])),
    "one-way ring": ("one-way", mm.Mesh("2x4")),
}
if "weave" in PLANNERS:
    PLANS |= {
        "weave 4x4": ("weave", mm.Mesh("4x4")),
        "weave 8x8 - odd holes": ("weave", mm.Mesh("8x8", failed=["1x3@0,2", "5,5", "3x1@5,0"])),
        "weave 3-D, a cable lost": ("weave", mm.Mesh("3x4x2", failed=["0,0,0"], failed_cables=["1,1,0-1,1,1"])),
    }


@cache
def schedule_of(name: str) -> mm.Schedule:
    planner, mesh = PLANS[name]
    match planner.split():
        case ["trees"]:
            return tree_schedule(mesh, chunks=2 * mesh.n_chips + 3)
        case ["weave"]:
            return mm.plan(mesh, "weave", chunks=2 * mesh.n_chips + 3)
        case ["one-way"]:
            return one_way_ring(mesh)
        case [planner, segments]:
            return mm.plan(mesh, planner, segments=int(segments))
        case _:
            return mm.plan(mesh, planner)


@cache
def fabric_of(name: str) -> mmj.Fabric:
    mesh = PLANS[name][1]
    return mmj.discover(jax.devices()[: mesh.size], shape=mesh.shape, failed=mesh.holes, wrap=mesh.wrap)


def on_chips(fabric: mmj.Fabric, function: Any, *arguments: Any) -> Any:
    """Run a function on every chip: array arguments have one row per chip, and so do the results."""

    def local(*rows: Any) -> Any:
        unwrapped = [row if _is_program(row) else jax.tree.map(lambda x: x[0], row) for row in rows]
        return jax.tree.map(lambda x: x[None], function(*unwrapped))

    mapped = jax.shard_map(
        local, mesh=fabric.jax_mesh, in_specs=(BY_CHIP,) * len(arguments), out_specs=BY_CHIP, check_vma=False
    )
    return jax.jit(mapped)(*arguments)


def _is_program(value: Any) -> bool:
    return isinstance(value, mmj.Program)
