"""How a job's state lies on the devices of one fabric, leaf by leaf, and how it gets there from flat vectors.

`outline` says which elements of the vectors each device has; a `StateLayout` has the leaves themselves, their shardings
and their identity, and cuts the one into the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from meshmend.errors import RestartError
from meshmend.jax.fabric import Fabric
from meshmend.jax.program import Program
from meshmend.jax.shardings import match_specs
from meshmend.jax.state.identity import Identity
from meshmend.jax.state.outline import Outline, Vectors
from meshmend.jax.state.splits import splits_of
from meshmend.jax.tiles import TiledFabric
from meshmend.jax.training import TrainStep
from meshmend.jax.validation import check_program

Boxes = list[list[list[int]]]
"""For each place of a tile its shard of a leaf, or for each device its shard of a stack of layers that is split by
owner: first element and end along each axis."""


@dataclass(frozen=True)
class StateLayout:
    """A training state (parameters and the optimizer's state) on one fabric: its leaves, and their outline.

    It follows from the train step, the program and the parameters, and is what `Keeper` and the compiled steps agree
    on: the fabric, the plan's chunks and owners, and the dtype of sums are defined here, once.
    """

    fabric: Fabric
    structure: Any
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    is_sharded: tuple[bool, ...]
    """Which leaves are split by owner, over all devices."""
    specs: tuple[PartitionSpec, ...]
    """How each leaf lies on the devices."""
    outline: Outline = field(repr=False)
    identity: Identity = field(repr=False)
    programs: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """What is compiled for it already: "cut", which makes copies, and "add", which combines those of several hosts."""

    @classmethod
    def of(cls, training: TrainStep, program: Program, params: Any) -> StateLayout:
        """Describe the state that `training.init` makes; its optimizer's part is sharded by owner if the update is.

        That is the same for a fused update and one of two phases of one plan. With `sharded_train_step` everything
        that is `ShardedParams` is sharded by owner.

        `params` may be on any device or on none: only shapes and dtypes count.
        """
        fabric = training.fabric
        check_program(program, fabric)
        state = jax.eval_shape(training.init, params, program)
        leaves, structure = jax.tree.flatten((params, state))
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path((params, state))[0]]
        for leaf, path in zip(leaves, paths, strict=True):
            if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
                raise RestartError(
                    f"{jax.tree_util.keystr(path)} has dtype {leaf.dtype}, which cannot be kept. Use a raw key "
                    "(jax.random.PRNGKey) in its place."
                )
        splits = splits_of(training, program, params, state)
        sharded = tuple(split.array for split in splits if split.array is not None)
        replicated: dict[str, int] = {}
        for leaf, split in zip(leaves, splits, strict=True):
            if split.array is None:
                dtype = np.dtype(leaf.dtype).name
                shape = NamedSharding(fabric.jax_mesh, split.spec).shard_shape(tuple(leaf.shape))
                replicated[dtype] = replicated.get(dtype, 0) + math.prod(shape)
        n_devices, n_places = int(fabric.jax_mesh.devices.size), fabric.devices_per_tile
        n_cores = n_devices // (fabric.mesh.n_chips * n_places)
        owned: NDArray[Any] = np.zeros((fabric.mesh.n_chips, 0), int)
        total_chunks = 0
        if program.is_sharded:
            shape_of_program = program.layout.shape
            total_chunks, owned = shape_of_program.total_chunks, np.array(shape_of_program.owned)
        outline = Outline(
            n_devices, n_cores, total_chunks, tuple(map(tuple, owned.tolist())), replicated, sharded, n_places
        )
        shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
        sizes = [None if split.array is None else split.array.n_layers * split.array.size for split in splits]
        tiles = ", ".join(f"{axis}={fabric.jax_mesh.shape[axis]}" for axis in fabric.inner_axes)
        in_tiles = [f"{tuple(split.spec)} of tiles with {tiles}" if tiles else "" for split in splits]
        is_sharded, specs = tuple(size is not None for size in sizes), tuple(split.spec for split in splits)
        identity = Identity.of(params, state, sizes, in_tiles)
        return cls(fabric, structure, shapes, is_sharded, specs, outline, identity)

    def check(self, params: Any, state: Any) -> None:
        """Raise `RestartError` if a state does not have this layout, for example because another train step made it."""
        why = self.difference(params, state)
        if why:
            raise RestartError(
                f"The state is not of the layout that it is to be kept in: {why}. Make both with the same train step, "
                "program and parameters."
            )

    def difference(self, params: Any, state: Any) -> str:
        """Return the first way in which a state does not have this layout; nothing if it has."""
        given = jax.tree_util.tree_leaves_with_path((params, state))
        expected = jax.tree_util.tree_leaves_with_path(jax.tree.unflatten(self.structure, self.leaves))
        for (path, leaf), (own_path, own) in zip(given, expected, strict=False):
            if path != own_path or (leaf.shape, leaf.dtype) != (own.shape, own.dtype):
                return f"expected {_name(own_path, own)}, got {_name(path, leaf)}"
        found = jax.tree.structure((params, state))
        if found != self.structure:
            return f"expected {len(expected)} arrays in {self.structure}, got {len(given)} in {found}"
        return ""

    def sharding(self, number: int) -> NamedSharding:
        """How leaf `number` lies on the devices."""
        return NamedSharding(self.fabric.jax_mesh, self.specs[number])

    @cached_property
    def boxes(self) -> list[Boxes | None]:
        """For each leaf what the places of a tile have of it, or all devices of a stack that is split by owner.

        None where one place has all, or where devices have one part after the other.
        """
        every = self.fabric.jax_mesh.devices.reshape(-1).tolist()
        tile = every[: self.outline.n_places]
        found: list[Boxes | None] = []
        for i, leaf in enumerate(self.leaves):
            is_stack = self.is_sharded[i] and len(leaf.shape) > 2
            if not is_stack and (self.is_sharded[i] or len(tile) == 1):
                found.append(None)
                continue
            index_of = self.sharding(i).devices_indices_map(tuple(leaf.shape))
            found.append(
                [
                    [list(cut.indices(n)[:2]) for cut, n in zip(index_of[device], leaf.shape, strict=True)]
                    for device in (every if is_stack else tile)
                ]
            )
        return found

    def to_devices(self, vectors: Vectors, like: Any) -> tuple[Any, Any]:
        """Return (params, state) on this fabric's devices, with their elements from the vectors.

        `like` is a (params, state) that is on the devices already; what is padding keeps its values.
        """
        found: list[jax.Array] = []
        used = dict.fromkeys(self.outline.replicated, 0)
        which = 0
        for i, (leaf, old) in enumerate(zip(self.leaves, jax.tree.leaves(like), strict=True)):
            if self.is_sharded[i]:
                found.append(self._shards_to_devices(which, old, vectors[f"sharded {which}"]))
                which += 1
                continue
            dtype, sharding = np.dtype(leaf.dtype).name, self.sharding(i)
            shape = sharding.shard_shape(tuple(leaf.shape))
            start, used[dtype] = used[dtype], used[dtype] + math.prod(shape)
            by_place = vectors[f"replicated {dtype}"].reshape(self.outline.n_places, -1)[:, start : used[dtype]]
            parts = [
                jax.device_put(by_place[place].reshape(shape), device) for device, place in self._own_devices.items()
            ]
            found.append(jax.make_array_from_single_device_arrays(tuple(leaf.shape), sharding, parts))
        params, state = jax.tree.unflatten(self.structure, found)
        return params, state

    @cached_property
    def _own_devices(self) -> dict[Any, int]:
        """Devices of this process, and the place of a tile that each is."""
        n_places, me = self.outline.n_places, jax.process_index()
        every = self.fabric.jax_mesh.devices.flat
        return {device: i % n_places for i, device in enumerate(every) if device.process_index == me}

    def _shards_to_devices(self, which: int, old: jax.Array, vector: Annotated[NDArray[Any], "[S]"]) -> jax.Array:
        parts = []
        for shard in old.addressable_shards:
            values = np.array(shard.data)
            rows = values.reshape(-1, values.shape[-1])
            device = _device_number(shard, self.outline.n_rows)
            for row, start, length in self.outline.rows(which, device):
                rows[row, :length] = vector[start : start + length]
            parts.append(jax.device_put(values, shard.device))
        return jax.make_array_from_single_device_arrays(old.shape, old.sharding, parts)


def place(tree: Any, fabric: Fabric, shardings: Any = None) -> Any:
    """Put arrays that every process has alike on all devices, without communication.

    On a fabric of tiles `shardings` says how they are split inside a tile, as in `value_and_grad`. (`jax.device_put`
    would first compare what all processes have, with one collective per array.)
    """

    def put(leaf: Any, spec: PartitionSpec) -> jax.Array:
        values = np.asarray(leaf)
        where = NamedSharding(fabric.jax_mesh, spec)
        return jax.make_array_from_callback(values.shape, where, lambda index: values[index])

    if not isinstance(fabric, TiledFabric):
        return jax.tree.map(lambda leaf: put(leaf, PartitionSpec()), tree)
    return jax.tree.map(put, tree, match_specs((shardings,), (tree,), fabric)[0])


def by_place(leaf: NDArray[Any], boxes: Boxes | None) -> Annotated[NDArray[Any], "[P, S]"]:
    """Return what each place of a tile has of a leaf, one row per place."""
    if boxes is None:
        return leaf.reshape(1, -1)
    return np.stack([leaf[tuple(slice(*ends) for ends in box)].reshape(-1) for box in boxes])


def vectors_from_leaves(
    outline: Outline,
    is_sharded: Sequence[bool],
    leaves: Sequence[NDArray[Any]],
    boxes: Sequence[Boxes | None] | None = None,
) -> Vectors:
    """Return the vectors of a whole state that is in this host's memory, leaf by leaf as it lay on its devices.

    `boxes` is `StateLayout.boxes` of the state, where it was split inside tiles.
    """
    vectors = outline.empty()
    boxes = [None] * len(leaves) if boxes is None else boxes
    used = dict.fromkeys(outline.replicated, 0)
    which = 0
    for split, leaf, box in zip(is_sharded, leaves, boxes, strict=True):
        if split:
            for device in range(outline.n_devices):
                rows = leaf[..., device * outline.n_rows : (device + 1) * outline.n_rows, :]
                rows = rows.reshape(-1, leaf.shape[-1])
                for row, start, length in outline.rows(which, device):
                    vectors[f"sharded {which}"][start : start + length] = rows[row, :length]
            which += 1
        else:
            dtype, rows = leaf.dtype.name, by_place(leaf, box)
            start, used[dtype] = used[dtype], used[dtype] + rows.shape[1]
            vectors[f"replicated {dtype}"].reshape(outline.n_places, -1)[:, start : used[dtype]] = rows
    return vectors


def _name(path: tuple[Any, ...], leaf: Any) -> str:
    """Describe a leaf of (params, state), as in params['w'] float32[2, 3]."""
    return f"{('params', 'state')[path[0].idx]}{jax.tree_util.keystr(path[1:])} {leaf.dtype}{list(leaf.shape)}"


def _device_number(shard: Any, n_rows: int) -> int:
    """Return the number of the device that a shard of a sharded leaf lies on."""
    return (shard.index[-2].start or 0) // max(n_rows, 1)
