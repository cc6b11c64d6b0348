"""Exporting an all-reduce: StableHLO that any JAX runs, for devices that need not be here.

The program takes the payload, one row per device, and the plan's tables, split in the same way; it is the engine's own
`all_reduce`. It is exported over an abstract mesh, for TPU and CPU in one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshmend.errors import ParameterError, ScheduleFileError
from meshmend.extras import own_version
from meshmend.jax.engine.collectives import all_reduce
from meshmend.jax.engine.program import ChunkLayout, Program, Tables
from meshmend.schedule import Collective, Schedule
from meshmend.schedule.lanes import Lowered
from meshmend.schedule.verify import ensure_proven
from meshmend_lab.export.artefact import AXIS, PLATFORMS, Artefact, DeviceTables, Payload, write_artefact
from meshmend_lab.extras import require

__all__ = ["check_program", "export_artefact"]

Summing = Callable[[jax.Array, list[jax.Array]], jax.Array]
"""From the payload, one row per device, and the tables to the sums in the same shape."""


def summing(lowered: Lowered, mesh: Mesh | AbstractMesh) -> Summing:
    """Return the all-reduce of a lowered plan as a function over a mesh whose axis "chip" has a device per row."""
    # Laid out as TPUs want it on every platform, so that one program serves all.
    layout = ChunkLayout(lowered.shape, AXIS, core_axis=None, n_cores=1, platform="tpu")

    def own(payload: jax.Array, tables: list[jax.Array]) -> jax.Array:
        left = iter(tables)
        loops = tuple(Tables(next(left), next(left), next(left) if loop.reads_ops else None) for loop in lowered.loops)
        # Who owns which chunk matters to halves of an all-reduce only.
        program = Program(loops, jnp.zeros((1, 1), jnp.int32), layout)
        total: jax.Array = all_reduce(payload, program)
        return total

    rows = PartitionSpec(AXIS)

    def total(payload: jax.Array, tables: list[jax.Array]) -> jax.Array:
        mapped = jax.shard_map(own, mesh=mesh, in_specs=(rows, rows), out_specs=rows, check_vma=False)
        found: jax.Array = mapped(payload, tables)
        return found

    return total


def exported(tables: DeviceTables, payload: Payload) -> bytes:
    """Export the all-reduce of a payload; `jax.export.deserialize` reads it.

    Its `call` takes the payload, then the tables in their order. The same plan, payload and versions make the same
    bytes: the places in source files that operations come from, which JAX would add, are left out.
    """
    require("flatbuffers", needed_for="Exporting", extra="export")
    n_devices = len(tables.chips)
    mesh = AbstractMesh((n_devices,), (AXIS,))
    split = NamedSharding(mesh, PartitionSpec(AXIS))
    total = summing(tables.lowered, mesh)
    given = [jax.ShapeDtypeStruct((n_devices, payload.elements), payload.dtype, sharding=split)]
    given += [jax.ShapeDtypeStruct(table.shape, table.dtype, sharding=split) for table in tables.arrays.values()]
    jitted = jax.jit(lambda payload, *tables: total(payload, list(tables)))
    with _without_places():
        return bytes(jax.export.export(jitted, platforms=PLATFORMS)(*given).serialize())


@contextmanager
def _without_places() -> Iterator[None]:
    option = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, option)
    jax.config.update(option, 0)
    try:
        yield
    finally:
        jax.config.update(option, before)


def export_artefact(
    schedule: Schedule,
    folder: str | Path,
    *,
    payload_bytes: float,
    dtype: str = "float32",
    stand_by: bool = False,
) -> str:
    """Write an all-reduce as a folder that JAX alone runs; return the digest of its manifest.

    Each device has `payload_bytes` to sum. With `stand_by` the program is for all chips of the mesh. Those that were
    left out join and do nothing, for runtimes that want every device of a slice in it. A plan that is not proven yet is
    proven, or refused.

    >>> import tempfile, meshmend as mm
    >>> from meshmend_lab.export.artefact import read_artefact
    >>> schedule = mm.plan(mm.Mesh("4x4", failed=["2x2@0,0"]), "hamiltonian")
    >>> folder = tempfile.mkdtemp()
    >>> digest = export_artefact(schedule, folder, payload_bytes=1e6)
    >>> check_program(read_artefact(folder))
    True
    """
    if schedule.collective is not Collective.ALL_REDUCE:
        raise ParameterError(f"Expected an all-reduce, got a schedule of a {schedule.collective}.")
    payload = Payload.of(payload_bytes, dtype)
    if schedule.total_chunks > payload.elements:
        raise ParameterError(
            f"The plan cuts the payload into {schedule.total_chunks:,} chunks, but {payload_bytes:,.0f} bytes are "
            f"{payload.elements:,} elements of {dtype}. Plan for this payload, or with fewer chunks."
        )
    ensure_proven(schedule)
    tables = DeviceTables.of(schedule, stand_by=stand_by)
    program = exported(tables, payload)
    return write_artefact(Path(folder), schedule, tables, payload, program, versions_here())


def versions_here() -> dict[str, str]:
    """Return the versions that decide what is written."""
    return {"meshmend": own_version(), "jax": jax.__version__, "jaxlib": metadata.version("jaxlib")}


def check_program(artefact: Artefact) -> bool:
    """Hold an artefact's program to an export of its plan; return False where they differ and other versions wrote it.

    Raises `ScheduleFileError` if these versions did. The program itself is neither parsed nor run. JAX writes the same
    function in other words from version to version, so that programs of others say nothing.
    """
    if artefact.program == exported(artefact.tables, artefact.payload):
        return True
    if artefact.versions == versions_here():
        raise ScheduleFileError("The program is not the all-reduce of the plan. Export the plan again.")
    return False
