"""How a job's state lies on the devices of one fabric, leaf by leaf, and which elements of the user's arrays that is.

`flat` says which elements of flat vectors each device has, and `user_tree` what the user's own arrays are; a
`StateLayout` has the leaves themselves and their shardings, and leads from each of these to the others.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from meshmend.errors import RestartError
from meshmend.jax.engine.collectives import Tree
from meshmend.jax.engine.fabric import Fabric
from meshmend.jax.engine.program import Program
from meshmend.jax.engine.tiles import TiledFabric
from meshmend.jax.state.layout.flat import Outline
from meshmend.jax.state.layout.rectangles import Box, overlap, position, rectangles, size_of
from meshmend.jax.state.layout.tree_signature import Identity
from meshmend.jax.state.layout.user_tree import Split, UserArray, box_of, users_tree
from meshmend.jax.train.arguments import check_program
from meshmend.jax.train.shardings import match_specs
from meshmend.jax.train.step import TrainStep

Reader = Callable[[str, int, int], Annotated[NDArray[Any], "[N]"]]
"""From a vector's name, first element and end to the elements between."""


class Piece(NamedTuple):
    """A run of a vector that is a rectangle of one of the user's arrays."""

    first: int
    """Its first element in the vector."""
    user: int
    """Number of the array among the leaves of the user's tree."""
    box: Box


class Values(NamedTuple):
    """What a process has of one of the user's arrays: a rectangle of it."""

    user: int
    box: Box
    values: NDArray[Any]


@dataclass(frozen=True)
class StateLayout:
    """A training state (parameters and the optimizer's state) on one fabric: its leaves, and their outline.

    It follows from the train step, the program and the parameters, and `Keeper` and the compiled steps agree on it. The
    fabric, the plan's chunks and owners, and the dtype of sums are defined here, once.
    """

    fabric: Fabric
    structure: Any
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    splits: tuple[Split, ...] = field(repr=False)
    """How each leaf lies on the devices."""
    tree: dict[str, Any] = field(repr=False, compare=False)
    """The user's own tree, of `UserArray`: what is saved on disk."""
    outline: Outline = field(repr=False)
    programs: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """Programs compiled for it already: "cut", which makes copies, "gather", which sends them to hosts, and "vote"."""

    @classmethod
    def of(cls, training: TrainStep, program: Program, params: Tree) -> StateLayout:
        """Describe the state that `training.init` makes; its optimizer's part is sharded by owner if the update is.

        That is the same for a fused update and one of two phases of one plan. With `sharded_train_step` everything
        that is `ShardedParams` is sharded by owner.

        `params` may be on any device or on none: only shapes and dtypes count.
        """
        fabric = training.fabric
        check_program(program, fabric)
        state = jax.eval_shape(training.init, params, program)
        leaves, structure = jax.tree.flatten((params, state))
        for path, leaf in jax.tree_util.tree_leaves_with_path((params, state)):
            if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
                raise RestartError(
                    f"{jax.tree_util.keystr(path)} has dtype {leaf.dtype}, which cannot be kept. Use a raw key "
                    "(jax.random.PRNGKey) in its place."
                )
        tree, splits = users_tree(training, program, params, state)
        replicated: dict[str, tuple[int, ...]] = {}
        for leaf, split in zip(leaves, splits, strict=True):
            if split.array is None:
                dtype = np.dtype(leaf.dtype).name
                shape = NamedSharding(fabric.jax_mesh, split.spec).shard_shape(tuple(leaf.shape))
                replicated[dtype] = (*replicated.get(dtype, ()), math.prod(shape))
        n_devices, devices_per_tile = int(fabric.jax_mesh.devices.size), fabric.devices_per_tile
        n_cores = n_devices // (fabric.mesh.n_chips * devices_per_tile)
        owned: NDArray[Any] = np.zeros((fabric.mesh.n_chips, 0), int)
        total_chunks = 0
        if program.is_sharded:
            shape_of_program = program.layout.shape
            total_chunks, owned = shape_of_program.total_chunks, np.array(shape_of_program.owned)
        sharded = tuple(split.array for split in splits if split.array is not None)
        outline = Outline(
            n_devices, n_cores, total_chunks, tuple(map(tuple, owned.tolist())), replicated, sharded, devices_per_tile
        )
        shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
        return cls(fabric, structure, shapes, tuple(splits), tree, outline)

    @cached_property
    def is_sharded(self) -> tuple[bool, ...]:
        """Which leaves are split by owner, over all devices."""
        return tuple(split.array is not None for split in self.splits)

    @property
    def specs(self) -> tuple[PartitionSpec, ...]:
        """How each leaf lies on the devices."""
        return tuple(split.spec for split in self.splits)

    @cached_property
    def users(self) -> list[UserArray]:
        """The leaves of the user's tree."""
        return jax.tree.leaves(self.tree)

    @cached_property
    def identity(self) -> Identity:
        """The identity of the state, however it is split."""
        return Identity.of(self.tree)

    @cached_property
    def copy_identity(self) -> Identity:
        """The identity of copies in memory, which have the elements in the order of the vectors."""
        tiles = ", ".join(f"{axis}={self.fabric.jax_mesh.shape[axis]}" for axis in self.fabric.inner_axes)
        arrays = Identity.of(self.tree, lambda user: f", {tuple(user.spec)} of tiles with {tiles}" if tiles else "")
        how = "split by owner" if any(self.is_sharded) else "replicated"
        order = hashlib.sha256(repr(sorted(self.pieces.items())).encode()).hexdigest()[:16]
        return Identity((*arrays.entries, ("order of elements", f"{how}, {order}")))

    def check(self, params: Tree, state: Tree) -> None:
        """Raise `RestartError` if a state does not have this layout, for example because another train step made it."""
        why = self.difference(params, state)
        if why:
            raise RestartError(
                f"The state is not of the layout that it is to be kept in: {why}. Make both with the same train step, "
                "program and parameters."
            )

    def difference(self, params: Tree, state: Tree) -> str:
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
    def devices(self) -> list[Any]:
        """All devices, numbered as in the outline."""
        return list(self.fabric.jax_mesh.devices.flat)

    @cached_property
    def numbers(self) -> dict[Any, int]:
        """The number of each device."""
        return {device: number for number, device in enumerate(self.devices)}

    @cached_property
    def pieces(self) -> dict[str, list[Piece]]:
        """For each vector the rectangles of the user's arrays that it has one after the other."""
        number = {id(user): i for i, user in enumerate(self.users)}
        found: dict[str, list[Piece]] = {name: [] for name in self.outline.vectors}
        tile = self.devices[: self.outline.devices_per_tile]
        boxes = [[box_of(user, self.fabric.jax_mesh, device) for device in tile] for user in self.users]
        which = 0
        for i, split in enumerate(self.splits):
            users = [number[id(user)] for user in split.users]
            if split.array is None:
                for (name, start, _), box in zip(self.whole_leaves[i], boxes[users[0]], strict=True):
                    found[name].append(Piece(start, users[0], box))
                continue
            name, at = f"sharded {which}", 0
            which += 1
            is_stack = len(split.spec) > 1
            for slot in range(len(tile)):
                for layer in range(split.array.n_layers):
                    for user in users:
                        box = boxes[user][slot]
                        box = ((layer, layer + 1), *box[1:]) if is_stack else box
                        found[name].append(Piece(at, user, box))
                        at += size_of(box)
        return {name: sorted(piece for piece in pieces if size_of(piece.box)) for name, pieces in found.items()}

    @cached_property
    def _homes(self) -> dict[int, dict[Box, tuple[str, int]]]:
        """For each of the user's arrays where its rectangles are: once each, although tiles may have them twice."""
        found: dict[int, dict[Box, tuple[str, int]]] = {}
        for name, pieces in self.pieces.items():
            for piece in pieces:
                found.setdefault(piece.user, {}).setdefault(piece.box, (name, piece.first))
        return found

    def device_of(self, user: int, index: tuple[int, ...]) -> int:
        """Return the device whose part has an element of one of the user's arrays."""
        point = tuple((at, at + 1) for at in index)
        box, (name, first) = next(home for home in self._homes[user].items() if overlap(home[0], point) == point)
        return self.outline.device_of(name, first + position(index, box))

    def rectangles(self, name: str, start: int, stop: int) -> Iterator[tuple[Piece, Box]]:
        """Return what a range of a vector is of the user's arrays, one rectangle after the other, with its piece."""
        pieces = self.pieces[name]
        at = bisect_right(pieces, start, key=lambda piece: piece.first) - 1
        while start < stop:
            piece = pieces[at]
            end = min(stop, piece.first + size_of(piece.box))
            for box in rectangles(piece.box, start - piece.first, end - piece.first):
                yield piece, box
            start, at = end, at + 1

    def values(self, name: str, start: int, elements: Annotated[NDArray[Any], "[N]"]) -> Iterator[Values]:
        """Return elements of a vector as rectangles of the user's arrays; of what there is twice, one."""
        at = 0
        for piece, box in self.rectangles(name, start, start + len(elements)):
            n = size_of(box)
            if self._homes[piece.user][piece.box] == (name, piece.first):
                yield Values(piece.user, box, elements[at : at + n].reshape([b - a for a, b in box]))
            at += n

    def needs(self) -> list[tuple[str, int, int]]:
        """Return what the devices of this process have of the vectors: name, first element and end."""
        slots = set(self.own_devices.values())
        found = [runs[slot] for runs in self.whole_leaves.values() for slot in slots]
        for which in range(len(self.outline.sharded)):
            for device in self._own_numbers:
                rows = self.outline.rows(which, device)
                found += [(f"sharded {which}", start, start + length) for _, start, length in rows]
        return found

    @cached_property
    def whole_leaves(self) -> dict[int, list[tuple[str, int, int]]]:
        """The elements of vectors in each slot of a tile, for each leaf that is not split by owner."""
        found, used = {}, dict.fromkeys(self.outline.replicated, 0)
        for i, leaf in enumerate(self.leaves):
            if not self.is_sharded[i]:
                dtype = np.dtype(leaf.dtype).name
                size, start = math.prod(self.sharding(i).shard_shape(tuple(leaf.shape))), used[dtype]
                used[dtype] += size
                n_all = self.outline.n_replicated(dtype)
                starts = [slot * n_all + start for slot in range(self.outline.devices_per_tile)]
                found[i] = [(f"replicated {dtype}", start, start + size) for start in starts]
        return found

    def to_devices(self, read: Reader, like: Tree, *, donate: bool = False) -> tuple[Tree, Tree]:
        """Return (params, state) on this fabric's devices, with their elements as read from the vectors.

        `like` is a (params, state) that is on the devices already; what is padding keeps its values. With `donate`,
        each of its arrays is gone as soon as there is the new one.
        """
        found: list[jax.Array] = []
        which = 0
        for i, (leaf, old) in enumerate(zip(self.leaves, jax.tree.leaves(like), strict=True)):
            if self.is_sharded[i]:
                found.append(self._shards_to_devices(which, old, read))
                which += 1
            else:
                sharding, runs = self.sharding(i), self.whole_leaves[i]
                shape = sharding.shard_shape(tuple(leaf.shape))
                held = {slot: read(*runs[slot]).reshape(shape) for slot in set(self.own_devices.values())}
                parts = [jax.device_put(held[slot], device) for device, slot in self.own_devices.items()]
                found.append(jax.make_array_from_single_device_arrays(tuple(leaf.shape), sharding, parts))
            if donate:
                old.delete()
        params, state = jax.tree.unflatten(self.structure, found)
        return params, state

    @cached_property
    def _own_numbers(self) -> list[int]:
        me = jax.process_index()
        return [number for number, device in enumerate(self.devices) if device.process_index == me]

    @cached_property
    def own_devices(self) -> dict[Any, int]:
        """Devices of this process, and the slot of its tile that each is."""
        return {self.devices[number]: number % self.outline.devices_per_tile for number in self._own_numbers}

    def _shards_to_devices(self, which: int, old: jax.Array, read: Reader) -> jax.Array:
        parts = []
        for shard in old.addressable_shards:
            values = np.array(shard.data)
            rows = values.reshape(-1, self.outline.sharded[which].chunk)
            for row, start, length in self.outline.rows(which, self.numbers[shard.device]):
                rows[row, :length] = read(f"sharded {which}", start, start + length)
            parts.append(jax.device_put(values, shard.device))
        return jax.make_array_from_single_device_arrays(old.shape, old.sharding, parts)


def put(tree: Tree, fabric: Fabric, shardings: Any = None) -> Tree:
    """Put arrays that every process has alike on all devices, without communication.

    On a fabric of tiles `shardings` says how they are split inside a tile, as in `value_and_grad`. (`jax.device_put`
    would first compare what all processes have, with one collective per array.)
    """

    def on_devices(leaf: Any, spec: PartitionSpec) -> jax.Array:
        values = np.asarray(leaf)
        where = NamedSharding(fabric.jax_mesh, spec)
        return jax.make_array_from_callback(values.shape, where, lambda index: values[index])

    if not isinstance(fabric, TiledFabric):
        return jax.tree.map(lambda leaf: on_devices(leaf, PartitionSpec()), tree)
    return jax.tree.map(on_devices, tree, match_specs((shardings,), (tree,), fabric)[0])


def _name(path: tuple[Any, ...], leaf: Any) -> str:
    """Describe a leaf of (params, state), as in params['w'] float32[2, 3]."""
    return f"{('params', 'state')[path[0].idx]}{jax.tree_util.keystr(path[1:])} {leaf.dtype}{list(leaf.shape)}"
