"""The user's own tree of a training state: its arrays by name, in their whole shapes, however devices hold them.

With `train_step` parameters are whole on every chip (or tile), and the optimizer's arrays are split by owner if the
update is sharded: the optimizer was given one matrix of chunks per dtype of sums in the place of all parameters, and
has as many where it would have trees like theirs. With `sharded_train_step` everything that is like the parameters is
`ShardedParams`. In the user's tree there are whole arrays in both cases, as one device without meshmend would have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshmend.errors import RestartError
from meshmend.jax.engine.collectives import Group, Tree, groups_of, travel_dtype
from meshmend.jax.engine.program import Program
from meshmend.jax.state.layout.flat import ShardedArray
from meshmend.jax.state.layout.rectangles import Box
from meshmend.jax.train.fsdp.params import ShardedParams, is_sharded, spec_of
from meshmend.jax.train.shardings import is_spec
from meshmend.jax.train.step import TrainStep


@dataclass(frozen=True)
class UserArray:
    """One array of the user's tree: a leaf of it."""

    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    """How it is split inside tiles, where there are any."""


@dataclass(frozen=True)
class Split:
    """How one leaf of (params, state) lies on the devices, and which of the user's arrays it holds."""

    spec: PartitionSpec
    users: tuple[UserArray, ...]
    """The one that it is; or if it is split by owner, those whose elements it has, one after the other."""
    array: ShardedArray | None = None
    """What it holds, if it is split by owner."""


@dataclass(frozen=True)
class _Cut:
    """A tree of arrays that is split by owner: in one matrix of chunks per dtype of sums."""

    like: Tree
    """Arrays of the tree (of one layer), as shapes and own dtypes."""
    specs: Sequence[PartitionSpec]
    groups: Sequence[Group]
    spec: PartitionSpec
    """How the matrices are split over the devices."""
    n_layers: int | None = None
    accumulate_dtype: Any = None

    def split(self, matrices: Sequence[Any]) -> tuple[Any, list[Split]]:
        """Return the tree that these matrices hold, and how; what is no array stands for all that would be in it."""
        leaves, structure = jax.tree.flatten(self.like)
        stack = () if self.n_layers is None else (self.n_layers,)
        found: list[Any] = [None] * len(leaves)
        for i, (leaf, spec) in enumerate(zip(leaves, self.specs, strict=True)):
            spec = PartitionSpec(*(None for _ in stack), *spec)
            found[i] = UserArray((*stack, *leaf.shape), travel_dtype(leaf.dtype, self.accumulate_dtype), spec)
        splits = []
        for matrix, group in zip(matrices, self.groups, strict=True):
            for i in group.members:
                is_array = hasattr(matrix, "dtype")
                found[i] = UserArray(found[i].shape, np.dtype(matrix.dtype), found[i].spec) if is_array else matrix
            if hasattr(matrix, "dtype"):
                array = ShardedArray(np.dtype(matrix.dtype).name, group.size, group.chunk, self.n_layers or 1)
                splits.append(Split(self.spec, tuple(found[i] for i in group.members), array))
        return jax.tree.unflatten(structure, found), splits


def users_tree(training: TrainStep, program: Program, params: Tree, state: Tree) -> tuple[dict[str, Any], list[Split]]:
    """Return the user's tree, and how each leaf of (params, state) is split; refuse what cannot be kept."""
    tree, splits = (_of_sharded_params if training.is_fsdp else _of_update)(training, program, params, state)
    own, its_state = tree
    if not training.has_model_state:
        return {"params": own, "opt_state": its_state}, splits
    return {"params": own, "opt_state": its_state[0], "model_state": its_state[1]}, splits


def _of_update(training: TrainStep, program: Program, params: Tree, state: Tree) -> tuple[Any, list[Split]]:
    fabric, leaves = training.fabric, jax.tree.leaves((params, state))
    specs = [PartitionSpec()] * len(leaves)
    if training.specs is not None:
        specs = jax.tree.leaves(training.specs(params, program), is_leaf=is_spec)
    splits: list[Split] = []

    def user(leaf: Any) -> UserArray:
        array = UserArray(tuple(leaf.shape), np.dtype(leaf.dtype), specs[len(splits)])
        splits.append(Split(array.spec, (array,)))
        return array

    if not program.is_sharded:
        return jax.tree.map(user, (params, state)), splits
    n_params = len(jax.tree.leaves(params))
    shards = [
        jax.ShapeDtypeStruct(NamedSharding(fabric.jax_mesh, spec).shard_shape(tuple(leaf.shape)), leaf.dtype)
        for leaf, spec in zip(leaves[:n_params], specs[:n_params], strict=True)
    ]
    groups = groups_of(shards, program.layout, training.accumulate_dtype)
    n_rows = int(fabric.jax_mesh.size) * len(program.layout.shape.owned[0])
    expected = [group.shard_shape(n_rows) for group in groups]
    by_owner = PartitionSpec(fabric.axes)
    cut = _Cut(params, specs[:n_params], groups, by_owner, accumulate_dtype=training.accumulate_dtype)

    def is_cut(node: Any) -> bool:
        shapes = [tuple(getattr(one, "shape", ())) for one in node] if type(node) in (tuple, list) else []
        return any(shapes) and all(
            shape == wanted or not jax.tree.leaves(one)
            for one, shape, wanted in zip(node, shapes, expected, strict=False)
        ) and len(shapes) == len(expected)  # fmt: skip

    def of_state(path: Any, node: Any) -> Any:
        if is_cut(node):
            tree, found = cut.split(node)
            splits.extend(found)
            return tree
        if node.ndim:
            raise RestartError(
                f"{jax.tree_util.keystr((jax.tree_util.SequenceKey(1), *path))} has shape {node.shape}, which is no "
                f"shard of these parameters (expected one of {expected}). Use an optimizer whose state has the shapes "
                "of the weights that it is given, or install(schedule, fabric), which does not shard it."
            )
        return user(node)

    own = jax.tree.map(user, params)
    return (own, jax.tree_util.tree_map_with_path(of_state, state, is_leaf=is_cut)), splits


def _of_sharded_params(training: TrainStep, program: Program, params: Tree, state: Tree) -> tuple[Any, list[Split]]:
    fabric, splits = training.fabric, list[Split]()
    n_rows = int(fabric.jax_mesh.size) * len(program.layout.shape.owned[0])

    def user(path: Any, leaf: Any) -> Any:
        if not is_sharded(leaf):
            array = UserArray(tuple(leaf.shape), np.dtype(leaf.dtype), PartitionSpec())
            splits.append(Split(PartitionSpec(), (array,)))
            return array
        outline, stack = leaf.outline, () if leaf.n_layers is None else (leaf.n_layers,)
        groups = groups_of(jax.tree.leaves(outline.own_like), program.layout, outline.accumulate_dtype)
        _check_shards(path, leaf, [(*stack, *group.shard_shape(n_rows)) for group in groups])
        specs = jax.tree.leaves(outline.specs_inside, is_leaf=is_spec)
        cut = _Cut(outline.like, specs, groups, spec_of(outline, fabric), leaf.n_layers, outline.accumulate_dtype)
        tree, found = cut.split(leaf.shards)
        splits.extend(found)
        return tree

    return jax.tree_util.tree_map_with_path(user, (params, state), is_leaf=is_sharded), splits


def _check_shards(path: Any, params: ShardedParams, expected: Sequence[tuple[int, ...]]) -> None:
    # What an optimizer leaves out is no array.
    shapes = [tuple(getattr(shard, "shape", own)) for shard, own in zip(params.shards, expected, strict=False)]
    if len(params.shards) != len(expected) or shapes != list(expected):
        raise RestartError(
            f"{jax.tree_util.keystr(path)} has shards of shapes {shapes}, expected {list(expected)}: they were cut "
            "for other chips, or by another program."
        )


def box_of(array: UserArray, jax_mesh: Any, device: Any) -> Box:
    """Return what a device's slot in its tile has of an array, before that is split by owner."""
    index = NamedSharding(jax_mesh, array.spec).devices_indices_map(array.shape)[device]
    return tuple(cut.indices(n)[:2] for cut, n in zip(index, array.shape, strict=True))
