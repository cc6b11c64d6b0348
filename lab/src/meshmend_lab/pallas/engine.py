"""The kernel as an engine: a proven plan's instructions on a fabric's chips, and the all-reduce that follows them.

Beside the kernel all is meshmend's own: who has which chips, the proof, how leaves are packed into chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from meshmend.cost import Hardware, find_hardware
from meshmend.errors import ParameterError
from meshmend.jax.engine.collectives import groups_of, join_in_chip, sum_dtype, sum_in_chip
from meshmend.jax.engine.fabric import Fabric
from meshmend.jax.engine.loops import Chunks
from meshmend.jax.engine.program import ChunkLayout, abstract_program, put_rows
from meshmend.schedule import Schedule
from meshmend_lab.pallas.instructions import Instructions, KernelShape, instructions_of
from meshmend_lab.pallas.kernel import run_kernel

__all__ = ["KernelProgram", "all_reduce", "as_the_kernel_drives", "install", "program_of"]

DTYPES = ("float32", "bfloat16", "int32")
"""What the kernel adds."""
ASSUMED = (
    ("step_latency_s", "none: chips wait for their data and credits, not for the end of a step"),
    (
        "message_s",
        "assumed, 0.2 µs: about 100 cycles of the scalar core to start a remote DMA and as many to take one, which the "
        "same core does in turn. No TPU has run the kernel, and nobody has timed it",
    ),
    ("links_at_once", "assumed, all: a DMA per link is under way at once; nobody has timed it"),
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class KernelProgram:
    """A plan's instructions on their chips: a pytree, to be an argument of `jax.shard_map` that is split by `spec`."""

    words: Annotated[jax.Array, "int32[N, W]"]
    ports: Annotated[jax.Array, "int32[N, V]"]
    shape: KernelShape = field(metadata={"static": True})
    layout: ChunkLayout = field(metadata={"static": True})

    @property
    def spec(self) -> PartitionSpec:
        """How `jax.shard_map` splits it: `in_specs=(…, program.spec)`."""
        return PartitionSpec(self.layout.axis)

    def run(self, chunks: Chunks) -> Chunks:
        """Follow this chip's own row over its chunks."""
        if str(chunks.dtype) not in DTYPES:
            raise ParameterError(
                f"The kernel adds {', '.join(DTYPES)}, got {chunks.dtype}. Convert the values, give "
                "accumulate_dtype=jnp.float32 if they are narrower, or use mmj.all_reduce."
            )
        is_tpu, axis = self.layout.platform == "tpu", self.layout.axis
        return run_kernel(chunks, self.shape, self.words[0], self.ports[0], axis=axis, interpret=not is_tpu)


def as_the_kernel_drives(hardware: str | Hardware) -> Hardware:
    """Return a TPU as the kernel is assumed to drive it: plan for it with `mode="asynchronous"`.

    >>> as_the_kernel_drives("tpu-v6e").message_s
    2e-07
    """
    fabric = find_hardware(hardware)
    assumed = {name for name, _ in ASSUMED}
    kept = tuple(source for source in fabric.sources if source[0] not in assumed)
    name = f"{fabric.name}, one kernel per chip"
    return replace(fabric, name=name, step_latency_s=0.0, message_s=2e-7, links_at_once=None, sources=(*kept, *ASSUMED))


def install(schedule: Schedule, fabric: Fabric, *, made: Instructions | None = None) -> KernelProgram:
    """Put an all-reduce's instructions on the fabric's chips; `made` are other ones than `instructions_of` makes."""
    sharding = fabric.sharding(fabric.axis)
    program: KernelProgram = jax.tree.map(lambda table: put_rows(table, sharding), program_of(schedule, fabric, made))
    return program


def program_of(schedule: Schedule, fabric: Fabric, made: Instructions | None = None) -> KernelProgram:
    """Return what `install` puts on chips, as arrays of NumPy; a plan that is not proven or does not fit is refused."""
    checked = abstract_program(schedule, fabric)
    if not checked.collective.is_all_reduce:
        raise ParameterError(f"The kernel runs all-reduces, got a schedule for {checked.collective}. Plan one.")
    made = instructions_of(schedule) if made is None else made
    words: Any = made.flat_words
    ports: Any = made.flat_ports
    return KernelProgram(words, ports, made.shape, checked.layout)


def all_reduce(tree: Any, program: KernelProgram, *, accumulate_dtype: DTypeLike | None = None) -> Any:
    """Sum a pytree over all live chips, with the bits of `mmj.all_reduce` and as it is called.

    >>> import jax, meshmend as mm, meshmend.jax as mmj
    >>> fabric = mmj.discover(jax.devices()[:4], shape="2x2", failed=["0,0"])
    >>> program = install(mm.plan(fabric.mesh, "weave", chunks=3), fabric)
    >>> total = jax.shard_map(all_reduce, mesh=fabric.jax_mesh, in_specs=(program.spec,) * 2, out_specs=program.spec,
    ...                       check_vma=False)
    >>> jax.jit(total)(jax.numpy.arange(3.0), program).tolist()
    [3.0, 3.0, 3.0]
    """
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))
    results: list[jax.Array] = [leaf.astype(sum_dtype(leaf.dtype)) for leaf in leaves]
    for group in groups_of(leaves, program.layout, accumulate_dtype):
        chunks = program.run(sum_in_chip(group.pack(leaves), program.layout))
        for i, total in group.unpack(join_in_chip(chunks, program.layout), leaves):
            results[i] = total.astype(results[i].dtype)
    return jax.tree.unflatten(structure, results)
