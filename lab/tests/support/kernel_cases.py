"""Schedules for the tests of the kernel, instructions that were broken on purpose, and runs in interpret mode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from numpy.typing import NDArray

import meshmend as mm
import meshmend.jax as mmj
from kernel_model import decode
from meshmend.planning import PLANNERS
from meshmend_lab.pallas.engine import KernelProgram, all_reduce, install
from meshmend_lab.pallas.instructions import Instructions, Kind

MODES: tuple[Literal["on_wait", "eager"], ...] = ("on_wait", "eager")
HOLES = [f"2x2@{row},{column}" for row in range(3) for column in range(3)]
CREDIT, DIRECT, ADD = 1 << 3, 1 << 4, 1 << 5
"""Bits of an instruction's second word."""


def plan_small(mesh: mm.Mesh, planner: str) -> mm.Schedule | None:
    """A short plan, or None where the planner does not serve the mesh."""
    parameters: dict[str, Any] = {"chunks": 2 * mesh.n_chips} if planner == "weave" else {}
    if PLANNERS[planner](**parameters).unsupported_reason(mesh) is not None:
        return None
    return mm.plan(mesh, planner, **parameters)


def fabric_for(mesh: mm.Mesh) -> mmj.Fabric:
    return mmj.discover(jax.devices()[: mesh.size], shape=mesh.shape, failed=mesh.holes, wrap=mesh.wrap)


def with_word(made: Instructions, chip: int, position: int, word: int) -> Instructions:
    words = made.words.copy()
    words[chip, position, 1] = word
    return replace(made, words=words)


def without_credit(made: Instructions, number: int = 0) -> Instructions:
    """The same where one send does not wait for its credit, and the receive that would give it does not."""

    def places(chip: int, kind: Kind, port: int | None = None, slot: int | None = None) -> list[int]:
        """Where a chip has instructions of a kind with a credit, of one slot if it is given."""
        ones = [decode((a, b)) for a, b in made.words[chip].tolist()]
        found = [i for i, one in enumerate(ones) if one.kind is kind and one.credit]
        return [i for i in found if port is None or (ones[i].port, ones[i].slot) == (port, slot)]

    waits = [(chip, at) for chip in range(len(made.words)) for at in places(chip, Kind.SEND)]
    chip, at = waits[number]
    one = decode((int(made.words[chip, at, 0]), int(made.words[chip, at, 1])))
    dst, into = (int(end) for end in made.ports[chip, :2, one.port])
    turn = places(chip, Kind.SEND, one.port, one.slot).index(at)
    gives = places(dst, Kind.RECEIVE, into, one.slot)[turn]
    broken = with_word(made, chip, at, int(made.words[chip, at, 1]) & ~CREDIT)
    return with_word(broken, dst, gives, int(made.words[dst, gives, 1]) & ~CREDIT)


def interpret(mode: Literal["on_wait", "eager"]) -> Any:
    """Run kernels as a TPU would, with the race detector on; what nobody has written is NaN."""
    params = pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode, uninitialized_memory="nan")
    return pltpu.force_tpu_interpret_mode(params)


def on_kernels(function: Any, fabric: mmj.Fabric, rows: Any, program: KernelProgram, mode: Any) -> Any:
    """Run a function of a chip's row and the program on every chip."""

    def local(rows: Any, program: KernelProgram) -> Any:
        found = function(jax.tree.map(lambda x: x[0], rows), program)
        return jax.tree.map(lambda x: x[None], found)

    split = program.spec
    mapped = jax.shard_map(local, mesh=fabric.jax_mesh, in_specs=(split, split), out_specs=split, check_vma=False)
    with interpret(mode):
        return jax.tree.map(np.asarray, jax.jit(mapped)(rows, program))


def all_reduce_on_chips(schedule: mm.Schedule, tree: Any, mode: Any = "eager", **options: Any) -> Any:
    """All-reduce a tree with one row per chip."""
    fabric = fabric_for(schedule.mesh)
    return on_kernels(
        lambda rows, program: all_reduce(rows, program, **options), fabric, tree, install(schedule, fabric), mode
    )


def run_made(schedule: mm.Schedule, made: Instructions, payload: NDArray[np.generic], mode: Any) -> NDArray[np.generic]:
    """Run instructions over chunks, one row per chip."""
    fabric = fabric_for(schedule.mesh)
    program = install(schedule, fabric, made=made)
    return np.asarray(on_kernels(lambda chunks, program: program.run(chunks), fabric, payload, program, mode))


def integers(mesh: mm.Mesh, *shape: int) -> NDArray[np.float32]:
    """Whole numbers, one row per chip: their sums are exact in any order."""
    return np.random.default_rng(0).integers(-9, 9, size=(mesh.n_chips, *shape)).astype(np.float32)
