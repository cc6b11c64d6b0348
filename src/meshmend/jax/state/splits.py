"""How each leaf of a training state is split over the devices: not at all, inside tiles, or by owner.

There are two kinds of train steps. With `train_step` parameters are whole on every chip (or tile), and the optimizer's
arrays are split by owner if the update is sharded. With `sharded_train_step` everything that is like the parameters is
split by owner, as its `ShardedParams` say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshmend.errors import RestartError
from meshmend.jax.collectives import groups_of
from meshmend.jax.fsdp.params import ShardedParams, is_sharded, spec_of
from meshmend.jax.program import Program
from meshmend.jax.state.outline import ShardedArray
from meshmend.jax.training import TrainStep


@dataclass(frozen=True)
class Split:
    """How one leaf lies on the devices."""

    spec: PartitionSpec
    array: ShardedArray | None = None
    """What it holds, if it is split by owner."""


def splits_of(training: TrainStep, program: Program, params: Any, state: Any) -> list[Split]:
    """Return how each leaf of (params, state) is split; raise `RestartError` for what cannot be kept."""
    if training.is_fsdp:
        return _of_sharded_params(training, program, (params, state))
    return _of_update(training, program, params, state)


def _of_update(training: TrainStep, program: Program, params: Any, state: Any) -> list[Split]:
    fabric = training.fabric
    leaves = jax.tree_util.tree_leaves_with_path((params, state))
    specs = [PartitionSpec()] * len(leaves)
    if training.specs is not None:
        inside = training.specs(params, program)
        specs = jax.tree.leaves(inside, is_leaf=lambda spec: isinstance(spec, PartitionSpec))
    found = [Split(spec) for spec in specs]
    if not program.is_sharded:
        return found
    n_params = len(jax.tree.leaves(params))
    shards = [
        jax.ShapeDtypeStruct(NamedSharding(fabric.jax_mesh, spec).shard_shape(tuple(leaf.shape)), leaf.dtype)
        for (_, leaf), spec in zip(leaves[:n_params], specs, strict=False)
    ]
    layout = program.layout
    groups = groups_of(shards, layout, training.accumulate_dtype)
    n_rows = int(fabric.jax_mesh.size) * len(layout.shape.owned[0])
    expected = [(n_rows, group.chunk) for group in groups]
    for i, (path, leaf) in enumerate(leaves[n_params:], n_params):
        if leaf.ndim == 0:
            continue
        which = getattr(path[-1], "idx", None)
        if which is None or which >= len(groups) or leaf.shape != expected[which]:
            raise RestartError(
                f"{jax.tree_util.keystr(path)} has shape {leaf.shape}, which is no shard of these "
                f"parameters (expected one of {expected}). Use an optimizer whose state has the shapes of "
                "the weights that it is given, or install(schedule, fabric), which does not shard it."
            )
        array = ShardedArray(np.dtype(leaf.dtype).name, groups[which].size, groups[which].chunk)
        found[i] = Split(PartitionSpec(fabric.axes), array)
    return found


def _of_sharded_params(training: TrainStep, program: Program, tree: Any) -> list[Split]:
    fabric, found = training.fabric, list[Split]()
    layout = program.layout
    n_rows = int(fabric.jax_mesh.size) * len(layout.shape.owned[0])
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_sharded):
        if not is_sharded(leaf):
            found.append(Split(PartitionSpec()))
            continue
        outline, stack = leaf.outline, () if leaf.n_layers is None else (leaf.n_layers,)
        groups = groups_of(jax.tree.leaves(outline.own_like), layout, outline.accumulate_dtype)
        _check_shards(path, leaf, [(*stack, n_rows, group.chunk) for group in groups])
        for shard, group in zip(leaf.shards, groups, strict=True):
            array = ShardedArray(np.dtype(shard.dtype).name, group.size, group.chunk, leaf.n_layers or 1)
            found.append(Split(spec_of(outline, fabric), array))
    return found


def _check_shards(path: Any, params: ShardedParams, expected: Sequence[tuple[int, ...]]) -> None:
    shapes = [tuple(shard.shape) for shard in params.shards]
    if shapes != list(expected):
        raise RestartError(
            f"{jax.tree_util.keystr(path)} has shards of shapes {shapes}, expected {list(expected)}: they were cut "
            "for other chips, or by another program."
        )
