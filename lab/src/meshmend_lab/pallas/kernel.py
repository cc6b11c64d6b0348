"""One kernel per chip that follows its instructions: remote DMAs between neighbours, no steps that all wait for.

The payload stays in HBM and is changed in place. A transfer is one DMA into the receiver's inbox, or straight into its
place; what is in the inbox is added through VMEM, a block at a time, while the next block is on its way there.
`instructions` says why nothing is overwritten too early and why nobody waits for ever.

On TPU the kernel is compiled; on other devices it runs in Pallas's interpret mode for TPUs: slow, and for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from meshmend_lab.pallas.instructions import TABLE_WORDS, KernelShape, Kind

COLLECTIVE_ID = 35
"""The barrier semaphore that kernels of this engine share. They run one after the other, and a chip that is done has
had something from every other: none of those is still waiting at the barrier of the kernel before."""
BLOCK_ROWS = 1024
"""Rows of 128 elements that are added at a time, at most."""

Chunks = Annotated[jax.Array, "[K, ...]"]
Ref = Any
"""A reference to memory inside a kernel, or a DMA between two: JAX has no public types for them."""
Index = jax.Array | int


def run_kernel(
    payload: Chunks,
    shape: KernelShape,
    words: Annotated[jax.Array, "int32[W]"],
    ports: Annotated[jax.Array, "int32[V]"],
    *,
    axis: str,
    interpret: bool,
) -> Chunks:
    """Run one chip's instructions over its chunks, in place, inside `jax.shard_map`."""
    if not shape.n_instructions:
        return payload
    tiles = _as_tiles(payload)
    inbox = jax.ShapeDtypeStruct((*shape.inbox_chunks, *tiles.shape[1:]), payload.dtype)
    hbm, smem = pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.SMEM)
    slots = shape.inbox_chunks[:2]
    held, _ = pl.pallas_call(
        _Kernel(shape, axis).run,
        out_shape=(jax.ShapeDtypeStruct(tiles.shape, tiles.dtype), inbox),
        in_specs=[smem, hbm, hbm],
        out_specs=(hbm, hbm),
        input_output_aliases={2: 0},
        scratch_shapes=[
            pltpu.SMEM((TABLE_WORDS,), jnp.int32),
            pltpu.SemaphoreType.DMA(slots),
            pltpu.SemaphoreType.DMA(slots),
            pltpu.SemaphoreType.REGULAR(slots),
            pltpu.SemaphoreType.DMA,
        ],
        compiler_params=pltpu.CompilerParams(collective_id=COLLECTIVE_ID, has_side_effects=True),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="meshmend_schedule",
    )(ports, words, tiles)
    chunks: Chunks = held.reshape(payload.shape)
    return chunks


def _as_tiles(chunks: Chunks) -> Annotated[jax.Array, "[K, ...]"]:
    """Return chunks as matrices: on TPU they are, elsewhere they are flat."""
    width = chunks.shape[-1]
    return chunks if chunks.ndim == 3 else chunks.reshape(len(chunks), -1, 128 if width % 128 == 0 else width)


def _when(condition: Index, do: Callable[..., None], *arguments: object) -> None:
    pl.when(condition)(lambda: do(*arguments))


class _Kernel:
    """The kernel's code, apart from its references."""

    def __init__(self, shape: KernelShape, axis: str) -> None:
        self.shape, self.axis = shape, axis

    def run(self, ports: Ref, words: Ref, _: Ref, held: Ref, inbox: Ref, table: Ref, *semaphores: Ref) -> None:
        """Follow the instructions. The payload that is given is `held` itself."""
        self.ports, self.held, self.inbox = ports, held, inbox
        self.sent, self.arrived, self.credit, self.local = semaphores
        self._wait_for_partners()

        def fetch(first: jax.Array) -> None:
            self._copy(words.at[pl.ds(pl.multiple_of(first, TABLE_WORDS), TABLE_WORDS)], table)

        def step(i: jax.Array, carry: None) -> None:
            at = i % (TABLE_WORDS // 2)
            _when(at == 0, fetch, 2 * i)
            self._follow(table[2 * at], table[2 * at + 1])
            return carry

        lax.fori_loop(0, self.shape.n_instructions, step, None)

    def _wait_for_partners(self) -> None:
        """Wait until every partner runs this kernel: nobody may write to a chip that does not yet."""
        barrier, n_ports = pltpu.get_barrier_semaphore(), self.shape.n_ports
        partners = [self.ports[end * n_ports + port] for end in (0, 2) for port in range(n_ports)]
        for chip in partners:
            _when(chip >= 0, self._signal, barrier, chip)
        for chip in partners:
            _when(chip >= 0, pl.semaphore_wait, barrier, 1)

    def _signal(self, semaphore: Ref, chip: Index) -> None:
        pl.semaphore_signal(semaphore, 1, device_id={self.axis: chip})

    def _partner(self, end: int, port: Index) -> tuple[Index, Index]:
        """Return the chip at the other end of a port, and its own port there."""
        n_ports = self.shape.n_ports
        return self.ports[end * n_ports + port], self.ports[(end + 1) * n_ports + port]

    def _follow(self, chunk: Index, word: Index) -> None:
        kind = word & 7
        if self.shape.sizes:
            flags = word >> 3
            slot, size, before, port = (flags >> 3) & 63, (flags >> 9) & 15, (flags >> 13) & 31, flags >> 18
            _when(kind == Kind.SEND, self._send, chunk, flags, port, slot, size, before)
            _when(kind == Kind.RECEIVE, self._receive, chunk, flags, port, slot, size)
            _when(kind == Kind.SENT, self._each_size, size, self._wait_sent, port, slot)

    def _each_size(self, size: Index, do: Callable[..., None], *arguments: object) -> None:
        """Do something with the length of run that this size is; nothing where it is none. DMAs have fixed lengths."""
        for i, run in enumerate(self.shape.sizes):
            _when(size == i, do, run, *arguments)

    def _send(self, chunk: Index, flags: Index, port: Index, slot: Index, size: Index, before: Index) -> None:
        _when(flags & 1 == 1, pl.semaphore_wait, self.credit.at[port, slot], 1)
        self._each_size(before - 1, self._wait_sent, port, slot)
        for direct in (0, 1):
            _when((flags >> 1) & 1 == direct, self._each_size, size, self._start, chunk, port, slot, direct)

    def _start(self, run: int, chunk: Index, port: Index, slot: Index, direct: int) -> None:
        chip, theirs = self._partner(0, port)
        source = self.held.at[pl.ds(chunk, run)]
        to = source if direct else self.inbox.at[theirs, slot, pl.ds(0, run)]
        self._remote(source, to, self.sent.at[port, slot], self.arrived.at[theirs, slot], chip).start()

    def _remote(self, source: Ref, to: Ref, sent: Ref, arrived: Ref, chip: Index) -> Ref:
        there: dict[str | tuple[str, ...], Index] = {self.axis: chip}
        return pltpu.make_async_remote_copy(source, to, sent, arrived, device_id=there)

    def _like(self, run: int, port: Index, slot: Index) -> Ref:
        """Return what a slot's semaphores are waited for with: a copy of the same length."""
        some = self.held.at[pl.ds(0, run)]
        return self._remote(some, some, self.sent.at[port, slot], self.arrived.at[port, slot], 0)

    def _wait_sent(self, run: int, port: Index, slot: Index) -> None:
        self._like(run, port, slot).wait_send()

    def _receive(self, chunk: Index, flags: Index, port: Index, slot: Index, size: Index) -> None:
        self._each_size(size, lambda run: self._like(run, port, slot).wait_recv())
        is_inside, adds = (flags >> 1) & 1 == 0, (flags >> 2) & 1 == 1
        _when(is_inside & adds, self._each_size, size, self._add, chunk, port, slot)
        _when(is_inside & ~adds, self._each_size, size, self._replace, chunk, port, slot)
        chip, theirs = self._partner(2, port)
        _when(flags & 1 == 1, self._signal, self.credit.at[theirs, slot], chip)

    def _add(self, run: int, chunk: Index, port: Index, slot: Index) -> None:
        mine = self.held.at[pl.ds(chunk, run)]
        _by_blocks(_add_block, [mine, self.inbox.at[port, slot, pl.ds(0, run)]], [mine])

    def _replace(self, run: int, chunk: Index, port: Index, slot: Index) -> None:
        self._copy(self.inbox.at[port, slot, pl.ds(0, run)], self.held.at[pl.ds(chunk, run)])

    def _copy(self, source: Ref, to: Ref) -> None:
        copy = pltpu.make_async_copy(source, to, self.local)
        copy.start()
        copy.wait()


def _add_block(mine: Ref, theirs: Ref, total: Ref) -> None:
    # As XLA adds: in the payload's dtype, rounded once. Not all chips add bfloat16 by themselves.
    one, two = mine[...], theirs[...]
    if one.dtype == jnp.bfloat16:
        one, two = one.astype(jnp.float32), two.astype(jnp.float32)
    total[...] = (one + two).astype(total.dtype)


def _by_blocks(body: Callable[..., None], inputs: Sequence[Ref], outputs: Sequence[Ref]) -> None:
    """Run something over runs of chunks in HBM, block by block through VMEM: one is computed, the next one fetched."""
    n, rows, width = inputs[0].shape
    block = _block_rows(rows)
    per_chunk = rows // block
    total = n * per_chunk

    def part(ref: Ref, t: Index) -> Ref:
        if per_chunk == 1:
            return ref.at[t]
        return ref.at[t // per_chunk, pl.ds(pl.multiple_of(t % per_chunk * block, block), block)]

    def scoped(*buffers: Ref) -> None:
        *near, fetched, stored = buffers
        ours, theirs = near[: len(inputs)], near[len(inputs) :]

        def fetches(t: Index) -> list[Ref]:
            pairs = enumerate(zip(inputs, ours, strict=True))
            return [pltpu.make_async_copy(part(x, t), own.at[t % 2], fetched.at[i, t % 2]) for i, (x, own) in pairs]

        def stores(t: Index) -> list[Ref]:
            pairs = enumerate(zip(outputs, theirs, strict=True))
            return [pltpu.make_async_copy(own.at[t % 2], part(x, t), stored.at[i, t % 2]) for i, (x, own) in pairs]

        def start(copies: Callable[[Index], list[Ref]], t: Index) -> None:
            for copy in copies(t):
                copy.start()

        def wait(copies: Callable[[Index], list[Ref]], t: Index) -> None:
            for copy in copies(t):
                copy.wait()

        def step(t: Index, carry: None) -> None:
            _when(t + 1 < total, start, fetches, t + 1)
            wait(fetches, t)
            _when(t >= 2, wait, stores, t - 2)
            body(*(own.at[t % 2] for own in near))
            start(stores, t)
            return carry

        start(fetches, 0)
        lax.fori_loop(0, total, step, None)
        for t in range(max(0, total - 2), total):
            wait(stores, t)

    buffers = [pltpu.VMEM((2, block, width), x.dtype) for x in (*inputs, *outputs)]
    pl.run_scoped(scoped, *buffers, *(pltpu.SemaphoreType.DMA((len(x), 2)) for x in (inputs, outputs)))


def _block_rows(rows: int) -> int:
    """Return the rows of a block: all of a chunk's, or whole tiles that divide it."""
    if rows <= BLOCK_ROWS:
        return rows
    return next(block for block in range(BLOCK_ROWS, 0, -1) if rows % block == 0 and (rows % 8 or block % 8 == 0))
