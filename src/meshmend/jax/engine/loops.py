"""Running a program: its loops over the payload, a matrix of chunks, and the updates between the way up and the way
down.

A step slices out the runs to send, permutes all lanes, and adds or replaces what arrives, in place. One `lax.scan` per
loop of the program, so the compiled code is the same size for any mesh. An update is an inner loop of as many rounds as
this chip has updates in this step, mostly none: a chip without one touches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshmend.jax.engine.program import ChunkLayout, Program, Tables
from meshmend.schedule import Op
from meshmend.schedule.lanes import KEEP, Lane

Chunks = Annotated[jax.Array, "[K, ...]"]
"""A device's payload as chunks. A chunk is flat, except on TPU, where it fills whole tiles: see `Group.chunk_shape`."""
Update = Callable[[tuple[Chunks, ...], Any, jax.Array], tuple[tuple[Chunks, ...], Any]]
"""From the sums of one chunk (a matrix of one chunk per payload), what is carried along and the chunk's number to what
goes down in their place, and what is carried on."""


def run(chunks: Chunks, program: Program, *, unroll: bool = False) -> Chunks:
    """Run the program's loops over the matrix of chunks; `unroll` writes their steps out one by one."""
    layout = program.layout
    for tables, lanes in zip(program.tables, layout.shape.lanes, strict=True):

        def step(held: Chunks, row: Any, _: None, lanes: tuple[Lane, ...] = lanes) -> Chunks:
            return move(held, row, lanes, layout)

        chunks = scan_steps(chunks, tables, None, layout, step, unroll=unroll)
    return chunks


def run_with_update(
    payload: tuple[Chunks, ...], carried: Any, program: Program, update: Update, down: tuple[Any, ...]
) -> tuple[tuple[Chunks, ...], Any]:
    """Run all matrices of chunks through the program together, with a fused update of each chunk at its owner.

    What goes down has the dtypes `down`. Where sums and updated chunks share a loop they share its permutes too, and
    all travel in the dtypes of the sums; the loops after the last update carry `down`.
    """
    layout, all_due = program.layout, program.due or ()
    total = layout.shape.total_chunks
    if not program.tables:  # a single chip owns everything, and has it complete
        return _apply_updates(payload, carried, jnp.arange(total), total, update)
    last = max(i for i, due in enumerate(all_due) if due.shape[-1])
    for i, (tables, due, lanes) in enumerate(zip(program.tables, all_due, layout.shape.lanes, strict=True)):

        def step(held: Any, row: Any, due: jax.Array, lanes: tuple[Lane, ...] = lanes) -> Any:
            payload, carried = held
            payload = tuple(move(chunks, row, lanes, layout) for chunks in payload)
            return _apply_updates(payload, carried, due, total, update)

        payload, carried = scan_steps((payload, carried), tables, due, layout, step)
        if i == last:
            payload = tuple(chunks.astype(dtype) for chunks, dtype in zip(payload, down, strict=True))
    return payload, carried


def _apply_updates(
    payload: tuple[Chunks, ...], carried: Any, due: Annotated[jax.Array, "int32[S]"], total: int, update: Update
) -> tuple[tuple[Chunks, ...], Any]:
    """Update the chunks that are due. Those of repeats that are over come first, those not begun yet (or none) last."""
    if not due.shape[-1]:
        return payload, carried

    def one(i: jax.Array, held: Any) -> Any:
        payload, carried = held
        chunk = lax.dynamic_index_in_dim(due, i, keepdims=False)
        sums = tuple(lax.dynamic_slice_in_dim(chunks, chunk, 1) for chunks in payload)
        values, carried = update(sums, carried, chunk)
        payload = tuple(
            lax.dynamic_update_slice_in_dim(chunks, new.astype(chunks.dtype), chunk, axis=0)
            for chunks, new in zip(payload, values, strict=True)
        )
        return payload, carried

    first, last = jnp.sum(due >= total), due.shape[-1] - jnp.sum(due < 0)
    held: tuple[tuple[Chunks, ...], Any] = lax.fori_loop(first, last, one, (payload, carried))
    return held


def scan_steps(
    held: Any,
    tables: Tables,
    due: jax.Array | None,
    layout: ChunkLayout,
    step: Callable[[Any, Any, Any], Any],
    *,
    unroll: bool = False,
) -> Any:
    """Run one loop: `step(held, row, due)` for each of its rows."""
    rows = tuple(None if table is None else table[0] for table in (*tables, due))
    repeat = layout.shape.repeat
    if repeat is None:
        return lax.scan(lambda held, row: (step(held, row[:-1], row[-1]), None), held, rows, unroll=unroll)[0]
    total = layout.shape.total_chunks

    def repeated(held: Any, now: jax.Array) -> tuple[Any, None]:
        """Run a period's rows over and over; in every period they stand for as many chunks further on."""
        send, receive, ops, due = jax.tree.map(
            lambda table: lax.dynamic_index_in_dim(table, now % repeat.period, keepdims=False), rows
        )
        further = now // repeat.period * repeat.n_chunks
        at = receive + further
        # Before the first repeat, and after the last one, a row has nothing to do yet, or any more.
        ops = jnp.where((at >= 0) & (at < total), ops, ops.dtype.type(KEEP))
        row = jnp.clip(send + further, 0, total - 1), jnp.clip(at, 0, total - 1), ops
        return step(held, row, None if due is None else due + further), None

    return lax.scan(repeated, held, jnp.arange(repeat.n_steps, dtype=jnp.int32), unroll=unroll)[0]


def move(held: Chunks, row: Any, lanes: tuple[Lane, ...], layout: ChunkLayout) -> Chunks:
    """Run one step: send and receive on all lanes, by the step's row of the tables."""
    send, receive, ops = row
    # The barriers say that all lanes leave together and arrive together, or a TPU's scheduler may take them in turn.
    leaving = lax.optimization_barrier(
        [lax.dynamic_slice_in_dim(held, send[i], lane.run) for i, lane in enumerate(lanes)]
    )
    arrived = lax.optimization_barrier(
        [lax.ppermute(part, layout.axis, lane.pairs) for part, lane in zip(leaving, lanes, strict=True)]
    )
    # On CPU a zero that is available only once every lane has arrived orders all of the step's reads before its first
    # write. Without it, XLA may see a write beside a read of the same buffer, and copy the whole payload to be safe:
    # that made a step thirty times slower. (It drops barriers before it decides on copies, so they do not help here.)
    after = 0 if layout.platform == "tpu" or len(arrived) == 1 else zero_after(arrived, receive[0])
    for i, (new, lane) in enumerate(zip(arrived, lanes, strict=True)):
        at = receive[i] + after
        if lane.ops != (Op.COPY,):
            old = lax.dynamic_slice_in_dim(held, at, lane.run)
            new = choose(lane, {Op.REDUCE: old + new, Op.COPY: new, KEEP: old}, None if ops is None else ops[i])
        held = lax.dynamic_update_slice_in_dim(held, new, at, axis=0)
    return held


def choose(lane: Lane, outcome: dict[int, jax.Array], op: jax.Array | None) -> jax.Array:
    """Return the outcome of what a lane does in this step; `op` is None where a lane always does the same."""
    found = outcome[lane.ops[0]]
    for other in lane.ops[1:]:
        found = jnp.where(op == other, outcome[other], found)
    return found


def zero_after(values: Sequence[jax.Array], index: Any) -> jax.Array:
    """Return a zero, like `index`, that is available only once all values are; `index` is some number from 0 on.

    The zero is the sign bit of that number, so the compiler cannot fold it.
    """
    zero = jnp.asarray(index) >> 31
    after = jnp.zeros_like(zero)
    for part in values:
        after += first_bits(part).astype(zero.dtype) & zero
    return after


def hidden_zero(value: jax.Array) -> jax.Array:
    """Return a zero that is available only once a value is, and that the compiler does not know to be one."""
    bit = first_bits(value).astype(jnp.int32) & 1
    return bit * (bit - 1)


def first_bits(value: jax.Array) -> jax.Array:
    """Return the bits of an array's first element, or of its real part, as a whole number."""
    first = value[(0,) * value.ndim]
    if jnp.iscomplexobj(first):
        first = jnp.real(first)
    if first.dtype == jnp.bool_:
        return first.astype(jnp.uint8)
    return lax.bitcast_convert_type(first, np.dtype(f"uint{8 * first.dtype.itemsize}"))
