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
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike, DTypeLike

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
from meshmend.jax.engine.program import Program
from meshmend.jax.train.optimizer_check import Before, update_weights
from meshmend.jax.train.optimizers import InsideTile, LayerPart, ShardedLayers, layers_of_chunks, sharded_layers


class Streamed(NamedTuple):
    """What updates carry along: the sharded part of the optimizer's state, and what clipping may need afterwards."""

    state: Shards
    sums: Shards
    squares: tuple[Annotated[jax.Array, "[]"], ...]


@dataclass(frozen=True)
class FusedUpdate:
    """A step's update of the weights that this chip owns, on the chunks' way or, where all are clipped, once more."""

    optimizer: optax.GradientTransformation
    before: Before
    mean: Callable[[jax.Array], jax.Array]
    """Makes the mean gradients of the sums of what all devices give."""
    program: Program
    accumulate_dtype: DTypeLike | None
    tile: InsideTile | None

    def of(self, gradients: Tree) -> tuple[Tree, Tree]:
        """Return new parameters and state from what this device gives."""
        leaves = jax.tree.leaves(gradients)
        payload = tuple(sum_in_chip(group.pack(leaves), self.program.layout) for group in self.groups)
        trial = self._layers_of(jnp.zeros((), jnp.int32))
        numbers = self._new_numbers(trial)
        chunks, held = self._first_pass(payload, trial)
        arrays = held.state
        if trial.limits:
            exceeded = self._exceeds(held.squares, trial.limits)
            # A loop of no round or one, not a cond: it works in place.
            chunks, arrays = lax.fori_loop(
                0, exceeded.astype(jnp.int32), lambda _, now: self._second_pass(now[0], held.sums), (chunks, arrays)
            )
        return self._params_of(chunks), self.state.join(numbers, arrays)

    @cached_property
    def groups(self) -> list[Group]:
        """What travels together."""
        return groups_of(self._like, self.program.layout, self.accumulate_dtype)

    @cached_property
    def state(self) -> _SplitState:
        """The optimizer's state before the update."""
        return _SplitState(self.before.state, self.groups, len(self.program.owned[0]))

    @property
    def _like(self) -> list[Any]:
        return jax.tree.leaves(self.before.params)

    @property
    def _down(self) -> tuple[Any, ...]:
        """The dtypes that new weights travel in."""
        return tuple(gather_dtype(group, self._like) for group in self.groups)

    def _apply(self, weights: Tree, arrays: Any, sums: Tree, layers: Any) -> tuple[Tree, Tree]:
        """Update some of the weights, with the arrays of the state and the sums of gradients that belong to them."""
        before = replace(self.before, own=weights, state=self.state.join(self.state.numbers, arrays))
        return update_weights(self.optimizer, before, jax.tree.map(self.mean, sums), layers=layers)

    def _layers_of(self, chunk: jax.Array) -> ShardedLayers:
        numbers = [layers_of_chunks(chunk[None], one, self._like) for one in self.groups]
        part = LayerPart(len(self._like), self.groups, numbers, self.tile)
        return ShardedLayers([part], self.program, self.before.whole, is_streamed=True)

    def _new_numbers(self, layers: Any) -> list[jax.Array]:
        """Return the state's new numbers, such as the count of steps, which a chip that owns nothing needs too.

        They come from one update of zeros: no weight has influence on them. `layers` notes what is clipped by.
        """
        own = _zeros(self.before.own)
        return self.state.parts(self._apply(own, _zeros(self.state.arrays), own, layers)[1])[0]

    def _first_pass(self, payload: tuple[Chunks, ...], trial: ShardedLayers) -> tuple[tuple[Chunks, ...], Streamed]:
        """Run the program, and update each chunk when its sum is complete, as if nothing had to be clipped."""
        rows, owned, clips = self.before.own, self.program.owned[0], bool(trial.limits)

        def update(sums: tuple[Chunks, ...], held: Streamed, chunk: jax.Array) -> tuple[tuple[Chunks, ...], Streamed]:
            row = jnp.sum(owned < chunk)
            layers = self._layers_of(chunk)
            weights, after = self._apply(
                tuple(lax.dynamic_slice_in_dim(x, row, 1) for x in rows),
                tuple(lax.dynamic_slice_in_dim(x, row, 1) for x in held.state),
                sums,
                layers,
            )
            _, arrays = self.state.parts(after)
            held = Streamed(
                _put_row(held.state, arrays, row),
                _put_row(held.sums, sums, row) if clips else (),
                tuple(total + more for total, more in zip(held.squares, layers.squares, strict=True)),
            )
            return weights, held

        kept = tuple(jnp.zeros_like(x) for x in rows) if clips else ()
        start = Streamed(self.state.arrays, kept, tuple(jnp.zeros((), square.dtype) for square in trial.squares))
        return run_with_update(payload, start, self.program, update, self._down)

    def _exceeds(self, squares: tuple[jax.Array, ...], limits: Sequence[ArrayLike]) -> jax.Array:
        """Whether any norm over all chips is not below its limit. NaN is below none: clipping makes NaN of all then."""
        totals = all_reduce(squares if self.tile is None else self.tile.total(squares), self.program.for_scalars)
        below = [jnp.sqrt(total) < limit for total, limit in zip(totals, limits, strict=True)]
        return ~jnp.all(jnp.stack(below))

    def _second_pass(self, payload: tuple[Chunks, ...], sums: Shards) -> tuple[tuple[Chunks, ...], Shards]:
        """Update all own chunks once more from what was kept, now that norms are known, and send the weights down."""
        owned = self.program.owned[0]
        layers = sharded_layers(self.before, self.program, self.accumulate_dtype, self.tile)
        new, after = self._apply(self.before.own, self.state.arrays, sums, layers)
        _, arrays = self.state.parts(after)

        def put(_: Any, nothing: Any, chunk: jax.Array) -> Any:
            row = jnp.sum(owned < chunk)
            return tuple(lax.dynamic_slice_in_dim(x, row, 1) for x in new), nothing

        chunks, _ = run_with_update(payload, (), self.program, put, self._down)
        return chunks, arrays

    def _params_of(self, payload: Sequence[Chunks]) -> Tree:
        """Return what has come down as parameters."""
        like = self._like
        results = list(like)
        for chunks, group in zip(payload, self.groups, strict=True):
            for i, values in group.unpack(join_in_chip(chunks, self.program.layout), like):
                results[i] = values.astype(like[i].dtype)
        return jax.tree.unflatten(jax.tree.structure(self.before.params), results)


class _SplitState:
    """An optimizer's state as its numbers, which all chips have, and its arrays, which are shards like the weights."""

    def __init__(self, state: Tree, groups: Sequence[Group], n_rows: int) -> None:
        leaves, self.structure = jax.tree.flatten(state)
        self.is_array = [leaf.ndim > 0 for leaf in leaves]
        shapes = {group.shard_shape(n_rows) for group in groups}
        for leaf in leaves:
            if leaf.ndim and leaf.shape not in shapes:
                raise ParameterError(
                    f"The optimizer's state has an array of shape {leaf.shape}, which is no shard of the weights "
                    f"(expected one of {sorted(shapes)}). Use an optimizer whose state has the shapes of the weights "
                    "that it is given, or install with update='two-phase'."
                )
        self.numbers, self.arrays = self._sorted(leaves)

    def parts(self, state: Tree) -> tuple[list[jax.Array], Shards]:
        """Return a state's numbers and its arrays."""
        return self._sorted(jax.tree.leaves(state))

    def join(self, numbers: Any, arrays: Tree) -> Tree:
        """Return a state of these."""
        ours = {False: iter(numbers), True: iter(arrays)}
        return jax.tree.unflatten(self.structure, [next(ours[which]) for which in self.is_array])

    def _sorted(self, leaves: list[jax.Array]) -> tuple[list[jax.Array], Shards]:
        pairs = list(zip(leaves, self.is_array, strict=True))
        return [leaf for leaf, is_array in pairs if not is_array], tuple(leaf for leaf, is_array in pairs if is_array)


def _zeros(rows: Shards) -> Shards:
    return tuple(jnp.zeros((1, *x.shape[1:]), x.dtype) for x in rows)


def _put_row(rows: Shards, values: Shards, row: jax.Array) -> Shards:
    return tuple(
        lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), row, axis=0)
        for x, new in zip(rows, values, strict=True)
    )
