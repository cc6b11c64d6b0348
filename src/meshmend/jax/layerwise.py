"""Optimizers that look at whole layers, for weights that lie in shards: LARS, LAMB, clipping by the global norm.

A shard is a flat piece of all layers, so the norm of a layer is a sum over chips: every chip adds up the squares of
its own elements, layer by layer, and these few numbers (two per layer) are all-reduced. The transformations here take
what they need from an extra argument `layers`, which `train_step` passes when the update is sharded. Without it they
work on whole layers, as optax's own do.

In an update that is sharded over tiles a chip has a part of its own shards of layers. `InsideTile` says how those lie
in a tile: the squares are added up inside the tile first, a layer's copies counted once, and then over tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import DTypeLike
from numpy.typing import NDArray

from meshmend.jax.collectives import Group, all_reduce, groups_of
from meshmend.jax.fabric import Fabric
from meshmend.jax.program import Program
from meshmend.jax.shardings import copies_in_tile

Mask = Any
"""A pytree of bools like the parameters, or a function from the parameters to one; None is all True."""


class Layers(Protocol):
    """What a layer-wise transformation may ask: each result is a pytree that multiplies with the updates."""

    def norms(self, *trees: Any) -> list[Any]:
        """Return, for each tree, the norm of the layer that each element belongs to."""

    def global_norm(self, tree: Any, *, limit: Any = None) -> Any:
        """Return the norm over all layers; with a `limit`, a norm below it may be any number below it."""

    def chosen(self, mask: Mask) -> Any:
        """Return whether each element's layer is chosen by the mask."""


class WholeLayers:
    """The layers as they are: one leaf each."""

    def __init__(self, params: Any) -> None:
        self.params = params

    def norms(self, *trees: Any) -> list[Any]:
        """Return one norm per leaf."""
        return [jax.tree.map(lambda leaf: jnp.linalg.norm(jnp.ravel(leaf)), tree) for tree in trees]

    def global_norm(self, tree: Any, *, limit: Any = None) -> Any:
        """Return the norm over all leaves."""
        del limit
        return optax.tree.norm(tree)

    def chosen(self, mask: Mask) -> Any:
        """Return one bool per leaf."""
        return jax.tree.map(lambda _, yes: yes, self.params, _mask_of(mask, self.params))


@dataclass(frozen=True)
class InsideTile:
    """How layers lie inside a tile, of which a chip has its shards only: what norms and masks of whole layers need."""

    whole: Any
    """The parameters as they are outside of `jax.shard_map`, with the shapes that a mask may look at."""
    axes: tuple[str, ...]
    copies: tuple[int, ...]
    """For each parameter, how many devices of a tile have the same elements of it."""

    def shares(self, group: Group) -> NDArray[np.float32]:
        """Return how much of each layer's squares a device counts, so that a tile counts each element once."""
        return np.array([*(1 / self.copies[i] for i in group.members), 0], np.float32)

    def total(self, tree: Any) -> Any:
        """Add up what the devices of a tile have.

        This comes before the sum over tiles: then chips in the same place of all tiles end with the same bits, whatever
        the order in which a tile's devices are added up, and so do all devices of a tile.
        """
        return lax.psum(tree, self.axes) if self.axes else tree


def inside_tile(whole: Any, specs: Any, fabric: Fabric) -> InsideTile | None:
    """Return how parameters with these specs lie inside a tile; None where a device has all of them."""
    return InsideTile(whole, fabric.inner_axes, copies_in_tile(specs, fabric)) if fabric.inner_axes else None


class ShardedLayers:
    """The layers of a tree of parameters that is cut into shards; for use inside `jax.shard_map`."""

    def __init__(
        self, params: Any, program: Program, accumulate_dtype: DTypeLike | None, tile: InsideTile | None = None
    ) -> None:
        self.params = params
        self.program = program
        self.tile = tile
        self.leaves = jax.tree.leaves(params)
        self.groups = groups_of(self.leaves, program.layout, accumulate_dtype)
        self.layer_of = [self._layer_of(group) for group in self.groups]

    def norms(self, *trees: Any) -> list[Any]:
        """Return the norms as arrays like the shards."""
        squares = self._sums_of_squares(*trees)
        return [
            tuple(jnp.sqrt(per_layer)[layer] for per_layer, layer in zip(tree, self.layer_of, strict=True))
            for tree in squares
        ]

    def global_norm(self, tree: Any, *, limit: Any = None) -> Any:
        """Return the norm over all layers."""
        del limit
        (squares,) = self._sums_of_squares(tree)
        return jnp.sqrt(sum(jnp.sum(per_layer) for per_layer in squares))

    def chosen(self, mask: Mask) -> Any:
        """Return bools as arrays like the shards."""
        return chosen_elements(mask, self.params, self.groups, self.layer_of, self.tile)

    def _sums_of_squares(self, *trees: Any) -> Any:
        """Return, for each tree and group, each layer's sum of squares over all chips, and a zero for the padding."""
        local = [
            [
                jax.ops.segment_sum(squares_of(shard).ravel(), layer.ravel(), len(group.members) + 1).at[-1].set(0)
                for shard, layer, group in zip(tree, self.layer_of, self.groups, strict=True)
            ]
            for tree in trees
        ]
        if self.tile is not None:
            shares = [self.tile.shares(group) for group in self.groups]
            local = self.tile.total(
                [[x * s.astype(x.dtype) for x, s in zip(tree, shares, strict=True)] for tree in local]
            )
        return all_reduce(local, self.program.for_scalars)

    def _layer_of(self, group: Group) -> jax.Array:
        """Return the number within the group of each element's layer; padding has the number after the last."""
        owned = self.program.owned[0]
        layer = layers_of_chunks(owned, group, self.leaves)
        # A chip that owns less than others has rows past the last chunk: they must not count as anybody's.
        mine = (owned < group.layout.shape.total_chunks)[:, None]
        return jnp.where(mine, layer, len(group.members))


def squares_of(values: jax.Array) -> jax.Array:
    """Return |x|² of each element, which is real for complex numbers too, in float32 where they are narrower.

    Sums of squares are made of this and nothing else: in bfloat16 a sum of ones would stop at 256.
    """
    values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    return jnp.real(values * jnp.conj(values))


def chosen_elements(
    mask: Mask, params: Any, groups: Sequence[Group], layer_of: Sequence[jax.Array], tile: InsideTile | None = None
) -> Any:
    """Return, for each group, whether the mask chooses the layers with these numbers."""
    params = params if tile is None else tile.whole
    chosen = jax.tree.leaves(jax.tree.map(lambda _, yes: yes, params, _mask_of(mask, params)))
    by_layer = [jnp.array([*(bool(chosen[i]) for i in group.members), False]) for group in groups]
    return tuple(yes[layer] for yes, layer in zip(by_layer, layer_of, strict=True))


def layers_of_chunks(chunks: jax.Array, group: Group, leaves: Sequence[Any]) -> jax.Array:
    """Return the number within the group of the layer that each element of this core's chunks belongs to.

    What is padding at the end of the payload has the number after the last.
    """
    layout = group.layout
    if layout.core_axis is not None:
        chunks = chunks + lax.axis_index(layout.core_axis) * layout.shape.total_chunks
    ends = np.cumsum([math.prod(leaves[i].shape) for i in group.members], dtype=np.int64)
    return layer_numbers(chunks, jnp.arange(group.chunk), ends, group.chunk)


def layer_numbers(chunks: jax.Array, offsets: jax.Array, ends: NDArray[np.int64], chunk: int) -> jax.Array:
    """Return, for each of the chunks and each offset in it, how many layers end at or before that element.

    Elements are not counted from the first one: of more than 2³¹ the numbers would not fit JAX's integers. Each end
    is a chunk and an offset in it, and is compared as such.
    """
    end_chunk, end_offset = (jnp.asarray(part, jnp.int32) for part in np.divmod(ends, chunk))
    here, before = end_chunk == chunks[:, None], end_chunk < chunks[:, None]
    within = jnp.where(here, end_offset, jnp.where(before, 0, chunk))
    return jax.vmap(lambda row: jnp.searchsorted(row, offsets, side="right"))(within)


def _mask_of(mask: Mask, params: Any) -> Any:
    if mask is None:
        return jax.tree.map(lambda _: True, params)
    return mask(params) if callable(mask) else mask


def scale_by_trust_ratio(
    trust_coefficient: float = 1.0, eps: float = 0.0, mask: Mask = None
) -> optax.GradientTransformationExtraArgs:
    """Scale each layer's update by the norm of its weights over the norm of its update, as LARS and LAMB do.

    The same as `optax.scale_by_trust_ratio` (and, with a mask, as that within `optax.masked`), for shards too.
    """

    def update(updates: Any, state: Any, params: Any = None, *, layers: Layers | None = None, **_: Any) -> Any:
        layers = _known(layers, params)
        weights, changes = layers.norms(params, updates)

        def scaled(change: Any, weight_norm: Any, change_norm: Any, yes: Any) -> Any:
            zero = (weight_norm == 0.0) | (change_norm == 0.0)
            ratio = trust_coefficient * weight_norm / (change_norm + eps)
            return change * jnp.where(yes & ~zero, ratio, 1.0).astype(change.dtype)

        return jax.tree.map(scaled, updates, weights, changes, layers.chosen(mask)), state

    return optax.GradientTransformationExtraArgs(_no_state, update)


def add_decayed_weights(weight_decay: float, mask: Mask = None) -> optax.GradientTransformationExtraArgs:
    """Add the weights, scaled, to the updates of the layers that the mask chooses, for shards too."""

    def update(updates: Any, state: Any, params: Any = None, *, layers: Layers | None = None, **_: Any) -> Any:
        chosen = _known(layers, params).chosen(mask)

        def decayed(change: Any, weight: Any, yes: Any) -> Any:
            return change + jnp.where(yes, weight_decay * weight, 0.0).astype(change.dtype)

        return jax.tree.map(decayed, updates, params, chosen), state

    return optax.GradientTransformationExtraArgs(_no_state, update)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Scale all updates so that their norm, over all layers, is at most `max_norm`, for shards too.

    The same as `optax.clip_by_global_norm`: where one update is NaN, so is the norm, and all updates become NaN.
    """

    def update(updates: Any, state: Any, params: Any = None, *, layers: Layers | None = None, **_: Any) -> Any:
        norm = _known(layers, updates if params is None else params).global_norm(updates, limit=max_norm)

        def clipped(change: Any) -> Any:
            # As optax does it, for the same bits; and NaN is not below the limit, so that all updates become NaN.
            scaled = (change / norm.astype(change.dtype)) * max_norm
            return jnp.where(norm < max_norm, change, scaled.astype(change.dtype))

        return jax.tree.map(clipped, updates), state

    return optax.GradientTransformationExtraArgs(_no_state, update)


def lamb(
    learning_rate: float | Callable[[Any], Any],
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    mask: Mask = None,
) -> optax.GradientTransformationExtraArgs:
    """LAMB, as `optax.lamb`, for a sharded update too (You et al., 2020)."""
    return optax.chain(
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps),
        add_decayed_weights(weight_decay, mask),
        scale_by_trust_ratio(),
        optax.scale_by_learning_rate(learning_rate),
    )


def lars(
    learning_rate: float | Callable[[Any], Any],
    weight_decay: float = 0.0,
    weight_decay_mask: Mask = None,
    trust_coefficient: float = 0.001,
    eps: float = 0.0,
    trust_ratio_mask: Mask = None,
    momentum: float = 0.9,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """LARS, as `optax.lars`, for a sharded update too (You et al., 2017)."""
    return optax.chain(
        add_decayed_weights(weight_decay, weight_decay_mask),
        scale_by_trust_ratio(trust_coefficient, eps, trust_ratio_mask),
        optax.scale_by_learning_rate(learning_rate),
        optax.trace(decay=momentum, nesterov=nesterov),
    )


def _known(layers: Layers | None, params: Any) -> Layers:
    if params is None:
        raise ValueError("This transformation needs the parameters: call update(updates, state, params).")
    return WholeLayers(params) if layers is None else layers


def _no_state(params: Any) -> optax.EmptyState:
    del params
    return optax.EmptyState()
