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
from typing import Annotated, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike, DTypeLike
from numpy.typing import NDArray

from meshmend.errors import ParameterError
from meshmend.jax.engine.collectives import Group, Leaf, Shards, Tree, all_reduce, groups_of, rows_in_use
from meshmend.jax.engine.fabric import Fabric
from meshmend.jax.engine.program import Program
from meshmend.jax.train.optimizer_check import NEEDS_NORMS, Before
from meshmend.jax.train.shardings import copies_in_tile

Mask = Any
"""A pytree of bools like the parameters, or a function from the parameters to one; None is all True."""


class Layers(Protocol):
    """What a layer-wise transformation may ask: each result is a pytree that multiplies with the updates."""

    def norms(self, *trees: Tree) -> list[Tree]:
        """Return, for each tree, the norm of the layer that each element belongs to."""

    def global_norm(self, tree: Tree, *, limit: ArrayLike | None = None) -> jax.Array:
        """Return the norm over all layers; with a `limit`, a norm below it may be any number below it."""

    def chosen(self, mask: Mask) -> Tree:
        """Return whether each element's layer is chosen by the mask."""


class WholeLayers:
    """The layers as they are: one leaf each."""

    def __init__(self, params: Tree) -> None:
        self.params = params

    def norms(self, *trees: Tree) -> list[Tree]:
        """Return one norm per leaf."""
        return [jax.tree.map(lambda leaf: jnp.linalg.norm(jnp.ravel(leaf)), tree) for tree in trees]

    def global_norm(self, tree: Tree, *, limit: ArrayLike | None = None) -> jax.Array:
        """Return the norm over all leaves."""
        del limit
        norm: jax.Array = optax.tree.norm(tree)
        return norm

    def chosen(self, mask: Mask) -> Tree:
        """Return one bool per leaf."""
        return jax.tree.map(lambda _, yes: yes, self.params, _mask_of(mask, self.params))


@dataclass(frozen=True)
class InsideTile:
    """How layers lie inside a tile, of which a chip has its shards only: what norms of whole layers need."""

    axes: tuple[str, ...]
    copies: tuple[int, ...]
    """For each parameter, how many devices of a tile have the same elements of it."""

    def shares(self, group: Group) -> NDArray[np.float32]:
        """Return how much of each layer's squares a device counts, so that a tile counts each element once."""
        return np.array([*(1 / self.copies[i] for i in group.members), 0], np.float32)

    def total(self, tree: Tree) -> Tree:
        """Add up what the devices of a tile have.

        This comes before the sum over tiles: then chips in the same slot of all tiles end with the same bits, whatever
        the order in which a tile's devices are added up, and so do all devices of a tile.
        """
        return lax.psum(tree, self.axes) if self.axes else tree


def inside_tile(specs: Tree, fabric: Fabric) -> InsideTile | None:
    """Return how parameters with these specs lie inside a tile; None where a device has all of them."""
    return InsideTile(fabric.inner_axes, copies_in_tile(specs, fabric)) if fabric.inner_axes else None


@dataclass(frozen=True)
class LayerPart:
    """A tree of layers that is cut into shards together: which layer each element of this device's shards is of."""

    n_layers: int
    groups: Sequence[Group]
    """Of layers, by their numbers in the tree; those without elements are in none."""
    numbers: Sequence[jax.Array]
    """For each group, the number in it of each element's layer; padding has the number after the last."""
    tile: InsideTile | None = None
    is_stack: bool = False
    """Whether the shards are of a stack of such trees, each with norms of its own."""

    @classmethod
    def of_shards(
        cls,
        params: Tree,
        program: Program,
        accumulate_dtype: DTypeLike | None,
        tile: InsideTile | None = None,
        *,
        is_stack: bool = False,
    ) -> LayerPart:
        """Return the layers of `params`, as this device has them before they are cut by the program."""
        leaves, owned = jax.tree.leaves(params), program.owned[0]
        groups = groups_of(leaves, program.layout, accumulate_dtype)
        numbers = []
        for group in groups:
            own = layers_of_chunks(owned, group, leaves)
            # Rows past the last chunk must not count as anybody's.
            numbers.append(jnp.where(rows_in_use(program, own.ndim), own, len(group.members)))
        return cls(len(leaves), groups, numbers, tile, is_stack)

    def sums_of_squares(self, shards: Shards) -> list[jax.Array]:
        """Return, for each group, this device's share of each layer's sum of squares, and a zero for the padding."""
        found = []
        for shard, numbers, group in zip(shards, self.numbers, self.groups, strict=True):

            def sums(squares: jax.Array, numbers: jax.Array = numbers, n_layers: int = len(group.members)) -> jax.Array:
                return jax.ops.segment_sum(squares.ravel(), numbers.ravel(), n_layers + 1).at[-1].set(0)

            squares = squares_of(shard)
            own = jax.vmap(sums)(squares) if self.is_stack else sums(squares)
            found.append(own if self.tile is None else own * self.tile.shares(group).astype(own.dtype))
        return found

    def sum_of_squares(self, shards: Shards) -> jax.Array:
        """Return this device's share of the sum of all squares, whatever layers they are of."""
        total = jnp.zeros((), jnp.float32)
        for shard, numbers, group in zip(shards, self.numbers, self.groups, strict=True):
            squares = squares_of(shard)
            if self.tile is not None:
                squares = squares * jnp.asarray(self.tile.shares(group))[numbers]
            total = total + jnp.sum(squares, where=numbers < len(group.members))
        return total


class ShardedLayers:
    """The layers of parameters that are cut into shards; for use inside `jax.shard_map`.

    `whole` are the parameters as masks see them. By default a tree of updates is the shards of one part; where it is
    something else, `split` takes the parts' shards out of it, and `join` makes one of them.

    Where they are streamed, this is one chunk of many that are updated one after the other, and norms are not known
    yet: none counts as over its limit, and limits and squares are noted.
    """

    def __init__(
        self,
        parts: Sequence[LayerPart],
        program: Program,
        whole: Tree,
        *,
        split: Callable[[Any], list[Shards]] = lambda tree: [tree],
        join: Callable[[list[Shards]], Any] = lambda parts: parts[0],
        is_streamed: bool = False,
    ) -> None:
        self.parts = parts
        self.program = program
        self.whole = whole
        self.split = split
        self.join = join
        self.is_streamed = is_streamed
        self.limits: list[ArrayLike] = []
        self.squares: list[jax.Array] = []

    def norms(self, *trees: Tree) -> list[Tree]:
        """Return the norms as trees like the updates."""
        if self.is_streamed:
            raise ParameterError(NEEDS_NORMS)
        return [
            self.join(
                [
                    tuple(jnp.sqrt(x)[..., numbers] for x, numbers in zip(sums, part.numbers, strict=True))
                    for sums, part in zip(tree, self.parts, strict=True)
                ]
            )
            for tree in self._sums_of_squares(*trees)
        ]

    def global_norm(self, tree: Tree, *, limit: ArrayLike | None = None) -> jax.Array:
        """Return the norm over all layers."""
        if not self.is_streamed:
            return jnp.sqrt(sum(jnp.sum(x) for x in jax.tree.leaves(self._sums_of_squares(tree))))
        if limit is None:
            raise ParameterError(NEEDS_NORMS)
        self.limits.append(limit)
        self.squares.append(
            sum(
                (part.sum_of_squares(shards) for part, shards in zip(self.parts, self.split(tree), strict=True)),
                start=jnp.zeros((), jnp.float32),
            )
        )
        return jnp.zeros(())

    def chosen(self, mask: Mask) -> Tree:
        """Return bools as trees like the updates."""
        chosen = jax.tree.leaves(jax.tree.map(lambda _, yes: yes, self.whole, _mask_of(mask, self.whole)))
        found = []
        for part in self.parts:
            own, chosen = chosen[: part.n_layers], chosen[part.n_layers :]
            by_group = (jnp.array([*(bool(own[i]) for i in group.members), False]) for group in part.groups)
            found.append(tuple(yes[numbers] for yes, numbers in zip(by_group, part.numbers, strict=True)))
        return self.join(found)

    def _sums_of_squares(self, *trees: Tree) -> list[list[list[jax.Array]]]:
        """Return, for each tree, part and group, the sums over all chips: one per layer, and a zero for the padding."""
        local = [
            [part.sums_of_squares(shards) for part, shards in zip(self.parts, self.split(tree), strict=True)]
            for tree in trees
        ]
        tile = self.parts[0].tile
        if tile is not None:  # all parts lie in the same
            local = tile.total(local)
        found: list[list[list[jax.Array]]] = all_reduce(local, self.program.for_scalars)
        return found


def sharded_layers(
    before: Before, program: Program, accumulate_dtype: DTypeLike | None, tile: InsideTile | None
) -> ShardedLayers:
    """Return the layers of parameters that are cut into shards as one tree."""
    part = LayerPart.of_shards(before.params, program, accumulate_dtype, tile)
    return ShardedLayers([part], program, before.whole)


def squares_of(values: jax.Array) -> jax.Array:
    """Return |x|² of each element, which is real for complex numbers too, in float32 where they are narrower.

    Sums of squares are made of this and nothing else: in bfloat16 a sum of ones would stop at 256.
    """
    values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    return jnp.real(values * jnp.conj(values))


def layers_of_chunks(
    chunks: Annotated[jax.Array, "int32[R]"], group: Group, leaves: Sequence[Leaf]
) -> Annotated[jax.Array, "int32[R, ...]"]:
    """Return the number within the group of the layer that each element of this core's chunks belongs to.

    They are in the shape of shards. What is padding at the end of the payload has the number after the last.
    """
    layout = group.layout
    if layout.core_axis is not None:
        chunks = chunks + lax.axis_index(layout.core_axis) * layout.shape.total_chunks
    ends = np.cumsum([math.prod(leaves[i].shape) for i in group.members], dtype=np.int64)
    return layer_numbers(chunks, jnp.arange(group.chunk).reshape(group.chunk_shape), ends, group.chunk)


def layer_numbers(chunks: jax.Array, offsets: jax.Array, ends: NDArray[np.int64], chunk: int) -> jax.Array:
    """Return, for each of the chunks and each offset in it, how many layers end at or before that element.

    Elements are not counted from the first one: of more than 2³¹ the numbers would not fit JAX's integers. Each end
    is a chunk and an offset in it, and is compared as such.
    """
    end_chunk, end_offset = (jnp.asarray(part, jnp.int32) for part in np.divmod(ends, chunk))
    here, before = end_chunk == chunks[:, None], end_chunk < chunks[:, None]
    within = jnp.where(here, end_offset, jnp.where(before, 0, chunk))
    return jax.vmap(lambda row: jnp.searchsorted(row, offsets, side="right"))(within)


def _mask_of(mask: Mask, params: Tree) -> Tree:
    if mask is None:
        return jax.tree.map(lambda _: True, params)
    return mask(params) if callable(mask) else mask


def scale_by_trust_ratio(
    trust_coefficient: float = 1.0, eps: float = 0.0, mask: Mask = None
) -> optax.GradientTransformationExtraArgs:
    """Scale each layer's update by the norm of its weights over the norm of its update, as LARS and LAMB do.

    The same as `optax.scale_by_trust_ratio` (and, with a mask, as that within `optax.masked`), for shards too.
    """

    def update(updates: Tree, state: Tree, params: Tree = None, *, layers: Layers | None = None, **_: Any) -> Tree:
        layers = _known(layers, params)
        weights, changes = layers.norms(params, updates)

        def scaled(change: jax.Array, weight_norm: jax.Array, change_norm: jax.Array, yes: jax.Array) -> jax.Array:
            zero = (weight_norm == 0.0) | (change_norm == 0.0)
            ratio = trust_coefficient * weight_norm / (change_norm + eps)
            return change * jnp.where(yes & ~zero, ratio, 1.0).astype(change.dtype)

        return jax.tree.map(scaled, updates, weights, changes, layers.chosen(mask)), state

    return optax.GradientTransformationExtraArgs(_no_state, update)


def add_decayed_weights(weight_decay: float, mask: Mask = None) -> optax.GradientTransformationExtraArgs:
    """Add the weights, scaled, to the updates of the layers that the mask chooses, for shards too."""

    def update(updates: Tree, state: Tree, params: Tree = None, *, layers: Layers | None = None, **_: Any) -> Tree:
        chosen = _known(layers, params).chosen(mask)

        def decayed(change: jax.Array, weight: jax.Array, yes: jax.Array) -> jax.Array:
            return change + jnp.where(yes, weight_decay * weight, 0.0).astype(change.dtype)

        return jax.tree.map(decayed, updates, params, chosen), state

    return optax.GradientTransformationExtraArgs(_no_state, update)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Scale all updates so that their norm, over all layers, is at most `max_norm`, for shards too.

    The same as `optax.clip_by_global_norm`: where one update is NaN, so is the norm, and all updates become NaN.
    """

    def update(updates: Tree, state: Tree, params: Tree = None, *, layers: Layers | None = None, **_: Any) -> Tree:
        norm = _known(layers, updates if params is None else params).global_norm(updates, limit=max_norm)

        def clipped(change: jax.Array) -> jax.Array:
            # As optax does it, for the same bits; and NaN is not below the limit, so that all updates become NaN.
            scaled = (change / norm.astype(change.dtype)) * max_norm
            return jnp.where(norm < max_norm, change, scaled.astype(change.dtype))

        return jax.tree.map(clipped, updates), state

    return optax.GradientTransformationExtraArgs(_no_state, update)


def lamb(
    learning_rate: optax.ScalarOrSchedule,
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
    learning_rate: optax.ScalarOrSchedule,
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


def _known(layers: Layers | None, params: Tree) -> Layers:
    if params is None:
        raise ValueError("This transformation needs the parameters: call update(updates, state, params).")
    return WholeLayers(params) if layers is None else layers


def _no_state(params: Tree) -> optax.EmptyState:
    del params
    return optax.EmptyState()
