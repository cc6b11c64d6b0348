"""A sharded update within one all-reduce: gradients go up as sums, their owner updates its weights, those come down.

A chunk's owner has its share of the optimizer's state, and updates the chunk as soon as its sum is complete, while
other chunks are still on their way up. That suits optimizers that treat each weight by itself.

Clipping by the global norm needs all sums before the first update. The chunks are updated as if nothing had to be
clipped, and the owners add up the squares as they go and keep the sums, the old weights and the old state: a P-th of
each. One number is then summed over the chips, and only if the norm is over the limit do the owners update once more
from what they kept, and the weights come down again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike

from meshmend.errors import ParameterError
from meshmend.jax.engine.collectives import (
    Group,
    Shards,
    Tree,
    all_reduce,
    gather_dtype,
    groups_of,
    join_in_chip,
    sum_in_chip,
)
from meshmend.jax.engine.loops import Chunks, run_with_update
from meshmend.jax.engine.program import ChunkLayout, Program
from meshmend.jax.train.optimizer_check import update_weights
from meshmend.jax.train.optimizers import InsideTile, LayerPart, ShardedLayers, layers_of_chunks

Rows = tuple[Annotated[jax.Array, "[R, ...]"], ...]
"""A chip's own chunks, one per row, each in the shape that it travels in."""


class Streamed(NamedTuple):
    """What updates carry along: the sharded part of the optimizer's state, and what clipping may need afterwards."""

    state: Rows
    sums: Rows
    squares: tuple[Annotated[jax.Array, "[]"], ...]


def streamed_update(
    optimizer: optax.GradientTransformation,
    params: Tree,
    own_params: Shards,
    state: Tree,
    gradients: Tree,
    mean: Callable[[Shards], Shards],
    scale: Any,
    value: Any,
    program: Program,
    accumulate_dtype: DTypeLike | None,
    whole: Tree,
    tile: InsideTile | None,
) -> tuple[Tree, Tree]:
    """Return new parameters and state.

    `mean` makes the mean gradients of the sums of what all devices give. `whole` are the parameters as masks see them.
    """
    layout, owned = program.layout, program.owned[0]
    leaves, like = jax.tree.leaves(gradients), jax.tree.leaves(params)
    groups = groups_of(leaves, layout, accumulate_dtype)
    split = _SplitState(state, groups, len(owned))
    rows = _as_rows(own_params, groups)
    before = _as_rows(split.arrays, split.groups)

    def update(weights: Tree, arrays: Tree, sums: Tree, layers: Any) -> tuple[Tree, Tree]:
        return update_weights(
            optimizer, weights, split.join(split.numbers, arrays), mean(sums), scale, value=value, layers=layers
        )

    def layers_of(chunk: jax.Array) -> ShardedLayers:
        numbers = [layers_of_chunks(chunk[None], one, like).reshape(-1, one.chunk_shape[-1]) for one in groups]
        return ShardedLayers([LayerPart(len(like), groups, numbers, tile)], program, whole, is_streamed=True)

    # One update of nothing: it has the new numbers (such as the count of steps), which no weight has influence on.
    first = layers_of(jnp.zeros((), jnp.int32))
    numbers, _ = split.parts(update(_zeros(rows), _zeros(before), _zeros(rows), first)[1])
    limits = first.limits

    def apply(sums: tuple[Chunks, ...], held: Streamed, chunk: jax.Array) -> tuple[tuple[Chunks, ...], Streamed]:
        row = jnp.sum(owned < chunk)
        layers = layers_of(chunk)
        weights, after = update(
            tuple(_flat(lax.dynamic_slice_in_dim(x, row, 1)) for x in rows),
            tuple(_flat(lax.dynamic_slice_in_dim(x, row, 1)) for x in held.state),
            tuple(map(_flat, sums)),
            layers,
        )
        _, arrays = split.parts(after)
        held = Streamed(
            _put_row(held.state, arrays, row),
            _put_row(held.sums, sums, row) if limits else (),
            tuple(total + more for total, more in zip(held.squares, layers.squares, strict=True)),
        )
        return tuple(new.reshape(old.shape) for new, old in zip(weights, sums, strict=True)), held

    payload = tuple(sum_in_chip(group.pack(leaves), layout) for group in groups)
    down = tuple(gather_dtype(group, like) for group in groups)
    kept = tuple(jnp.zeros_like(x) for x in rows) if limits else ()
    start = Streamed(before, kept, tuple(jnp.zeros((), square.dtype) for square in first.squares))
    payload, held = run_with_update(payload, start, program, apply, down)

    if limits:
        totals = all_reduce(held.squares if tile is None else tile.total(held.squares), program.for_scalars)
        below = [jnp.sqrt(total) < limit for total, limit in zip(totals, limits, strict=True)]
        # NaN is not below any limit: clipping makes NaN of everything then.
        exceeded = ~jnp.all(jnp.stack(below))

        def again(_: Any, now: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
            payload, _ = now
            layers = ShardedLayers([LayerPart.of_shards(params, program, accumulate_dtype, tile)], program, whole)
            weights, after = update(own_params, split.arrays, tuple(map(_shards, held.sums)), layers)
            _, arrays = split.parts(after)
            new = _as_rows(weights, groups)

            def put(_: Any, nothing: Any, chunk: jax.Array) -> Any:
                row = jnp.sum(owned < chunk)
                return tuple(lax.dynamic_slice_in_dim(x, row, 1) for x in new), nothing

            return run_with_update(payload, (), program, put, down)[0], _as_rows(arrays, split.groups)

        # A loop of no round or one, not a cond: it works in place.
        payload, arrays = lax.fori_loop(0, exceeded.astype(jnp.int32), again, (payload, held.state))
    else:
        arrays = held.state
    return _unpacked(payload, groups, params, layout), split.join(numbers, map(_shards, arrays))


def _unpacked(payload: Sequence[Chunks], groups: Sequence[Group], params: Tree, layout: ChunkLayout) -> Tree:
    """Return what has come down as parameters."""
    like = jax.tree.leaves(params)
    results = list(like)
    for chunks, group in zip(payload, groups, strict=True):
        for i, values in group.unpack(join_in_chip(chunks, layout), like):
            results[i] = values.astype(like[i].dtype)
    return jax.tree.unflatten(jax.tree.structure(params), results)


class _SplitState:
    """An optimizer's state as its numbers, which all chips have, and its arrays, which are shards like the weights."""

    def __init__(self, state: Tree, groups: Sequence[Group], n_rows: int) -> None:
        leaves, self.structure = jax.tree.flatten(state)
        self.is_array = [leaf.ndim > 0 for leaf in leaves]
        by_shape: dict[tuple[int, ...], Group] = {(n_rows, group.chunk): group for group in groups}
        for leaf in leaves:
            if leaf.ndim and leaf.shape not in by_shape:
                raise ParameterError(
                    f"The optimizer's state has an array of shape {leaf.shape}, which is no shard of the weights "
                    f"(expected one of {sorted(by_shape)}). Use an optimizer whose state has the shapes of the weights "
                    "that it is given, or install with update='two-phase'."
                )
        self.numbers, self.arrays = self._sorted(leaves)
        self.groups = [by_shape[leaf.shape] for leaf in self.arrays]

    def parts(self, state: Tree) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return a state's numbers and its arrays."""
        return self._sorted(jax.tree.leaves(state))

    def join(self, numbers: Any, arrays: Tree) -> Tree:
        """Return a state of these."""
        ours = {False: iter(numbers), True: iter(arrays)}
        return jax.tree.unflatten(self.structure, [next(ours[which]) for which in self.is_array])

    def _sorted(self, leaves: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        pairs = list(zip(leaves, self.is_array, strict=True))
        return [leaf for leaf, is_array in pairs if not is_array], [leaf for leaf, is_array in pairs if is_array]


def _as_rows(shards: Sequence[jax.Array], groups: Sequence[Group]) -> Rows:
    return tuple(shard.reshape(-1, *group.chunk_shape) for shard, group in zip(shards, groups, strict=True))


def _shards(rows: jax.Array) -> jax.Array:
    return rows.reshape(len(rows), -1)


def _flat(row: jax.Array) -> jax.Array:
    """Return a chunk as a matrix, as shards are: an optimizer may look at `ndim`."""
    return row.reshape(-1, row.shape[-1])


def _zeros(rows: Rows) -> Rows:
    return tuple(_flat(jnp.zeros((1, *x.shape[1:]), x.dtype)) for x in rows)


def _put_row(rows: Rows, values: Sequence[jax.Array], row: jax.Array) -> Rows:
    return tuple(
        lax.dynamic_update_slice_in_dim(x, new.reshape(1, *x.shape[1:]).astype(x.dtype), row, axis=0)
        for x, new in zip(rows, values, strict=True)
    )
