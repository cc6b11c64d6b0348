"""The plans that every JAX test runs: each planner, full and holed meshes, one and several run lengths in a step."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

import meshmend as mm
import meshmend.jax as mmj
from meshmend.planning import PLANNERS
from meshmend.schedule import Op
from meshmend.schedule.lanes import KEEP, Lowered
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
    return fabric_for(PLANS[name][1])


def on_chips(fabric: mmj.Fabric, function: Any, *arguments: Any) -> Any:
    """Run a function on every chip: array arguments have one row per chip, and so do the results."""

    def local(*rows: Any) -> Any:
        unwrapped = [row if _is_program(row) else jax.tree.map(lambda x: x[0], row) for row in rows]
        return jax.tree.map(lambda x: x[None], function(*unwrapped))

    return jax.jit(mapped(fabric, local, in_specs=(BY_CHIP,) * len(arguments)))(*arguments)


def mapped(
    fabric: mmj.Fabric,
    function: Any = mmj.all_reduce,
    *,
    in_specs: Any = (BY_CHIP, BY_CHIP),
    out_specs: Any = BY_CHIP,
    check_vma: bool = False,
) -> Any:
    """Return a function over all devices of one of each, by default of one chip's rows and a program."""
    return jax.shard_map(function, mesh=fabric.jax_mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


def fabric_for(mesh: mm.Mesh) -> mmj.Fabric:
    return mmj.discover(jax.devices()[: mesh.size], shape=mesh.shape, failed=mesh.holes, wrap=mesh.wrap)


def two_cores() -> mmj.Fabric:
    """Four chips of two cores."""
    devices = np.array(jax.devices()[:8]).reshape(4, 2)
    return mmj.Fabric(mm.Mesh("2x2"), jax.sharding.Mesh(devices, ("chip", "core")), None)


def replay(lowered: Lowered, payload: np.ndarray) -> np.ndarray:
    """Run the tables on arrays, one chip, step and lane at a time: what the JAX engine must do.

    The rows of a repeated schedule run again and again, in each period so many chunks further on; before the first
    chunk and after the last one they have nothing to do.
    """
    held, total, repeat = payload.copy(), lowered.shape.total_chunks, lowered.shape.repeat
    steps = [(loop, t, 0) for loop in lowered.loops for t in range(loop.n_steps)]
    if repeat is not None:
        (loop,) = lowered.loops
        steps = [(loop, now % repeat.period, now // repeat.period * repeat.n_chunks) for now in range(repeat.n_steps)]
    for loop, t, further in steps:
        before = held.copy()
        for number, lane in enumerate(loop.lanes):
            sender = {dst: src for src, dst in lane.pairs}
            for chip in range(lowered.shape.n_chips):
                op, at = loop.ops[chip, t, number], loop.receive[chip, t, number] + further
                assert op in lane.ops
                if op == KEEP or not 0 <= at < total:
                    continue
                sent = loop.send[sender[chip], t, number] + further
                run = before[sender[chip], sent : sent + lane.run]
                if op == Op.REDUCE:
                    run = run + before[chip, at : at + lane.run]
                held[chip, at : at + lane.run] = run
    return held


def _is_program(value: Any) -> bool:
    return isinstance(value, mmj.Program)
