"""A job's state independent of any mesh: flat vectors of elements, and which of them each device holds.

Which chunk of a sharded state lies on which chip depends on the plan, and so on the hole. An `Outline` says where the
elements of every device's part belong in vectors that are the same for every mesh: the replicated arrays of one dtype
one after the other, and for each sharded array the elements of its weights in order. From those, any other mesh's
parts are cut. Bits are moved, never computed with.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from meshmend.errors import RestartError
from meshmend.jax.collectives import groups_of
from meshmend.jax.fabric import Fabric
from meshmend.jax.program import AnyProgram, Program
from meshmend.jax.state.identity import Identity
from meshmend.jax.training import TrainStep
from meshmend.jax.validation import check_program

Vectors = dict[str, Annotated[NDArray[Any], "[S]"]]
"""The whole state, independent of any mesh: flat vectors by name."""


@dataclass(frozen=True)
class ShardedArray:
    """One sharded array of the state: the elements of its group of weights, in chunks that devices own."""

    dtype: str
    size: int
    """Elements, without padding."""
    chunk: int


def dtype_named(name: Any) -> np.dtype[Any]:
    """Return the dtype of that name; raise `RestartError` for any other text.

    `np.dtype` reads little formulas, too, and fails in many ways on text from a damaged file.
    """
    try:
        found = np.dtype(name) if isinstance(name, str) and name.isidentifier() else None
    except TypeError:
        found = None
    if found is None or found.name != name or found.hasobject:
        raise RestartError(f"{name!r} is not the name of a dtype.")
    return found


@dataclass(frozen=True)
class Outline:
    """How a job's state is split over the devices of one mesh. Small, and kept with every copy of the state."""

    n_devices: int
    n_cores: int
    total_chunks: int
    owned: tuple[tuple[int, ...], ...]
    """For each chip the chunks that its rows hold; `total_chunks` marks a row that it does not need."""
    replicated: dict[str, int]
    """Elements of the replicated arrays, by dtype."""
    sharded: tuple[ShardedArray, ...]

    @cached_property
    def dtypes(self) -> list[str]:
        """Dtypes of the state, in the order in which a part has them."""
        return sorted({*self.replicated, *(array.dtype for array in self.sharded)})

    @property
    def n_rows(self) -> int:
        """Chunks that a device has room for."""
        return len(self.owned[0]) if self.owned else 0

    def share(self, dtype: str) -> int:
        """Elements of the replicated arrays that each device is responsible for."""
        return -(-self.replicated.get(dtype, 0) // self.n_devices)

    def part_size(self, dtype: str) -> int:
        """Elements of a device's part."""
        rows = sum(self.n_rows * array.chunk for array in self.sharded if array.dtype == dtype)
        return self.share(dtype) + rows

    @property
    def vectors(self) -> dict[str, tuple[str, int]]:
        """Dtype and elements of the vectors, by name: the same for one state on every mesh."""
        whole = {f"replicated {dtype}": (dtype, size) for dtype, size in self.replicated.items()}
        return whole | {f"sharded {i}": (array.dtype, array.size) for i, array in enumerate(self.sharded)}

    def empty(self) -> Vectors:
        """Return vectors of zeros."""
        return {name: np.zeros(size, dtype_named(dtype)) for name, (dtype, size) in self.vectors.items()}

    def runs(self, device: int, dtype: str) -> Iterator[tuple[str, int, int, int]]:
        """Return where a device's part belongs: (vector, first element of it, first element of the part, length)."""
        share = self.share(dtype)
        length = min(share, self.replicated.get(dtype, 0) - device * share)
        if length > 0:
            yield f"replicated {dtype}", device * share, 0, length
        at = share
        for i, array in enumerate(self.sharded):
            if array.dtype != dtype:
                continue
            for row, start, length in self.rows(i, device):
                yield f"sharded {i}", start, at + row * array.chunk, length
            at += self.n_rows * array.chunk

    def rows(self, which: int, device: int) -> Iterator[tuple[int, int, int]]:
        """Return which elements of a sharded array a device's rows hold: (row, first element, length)."""
        array = self.sharded[which]
        chip, core = divmod(device, self.n_cores)
        for row, chunk in enumerate(self.owned[chip]):
            start = (core * self.total_chunks + chunk) * array.chunk
            length = min(array.chunk, array.size - start)
            if chunk < self.total_chunks and length > 0:
                yield row, start, length

    def collect(self, device: int, dtype: str, part: Annotated[NDArray[Any], "[P]"], into: Vectors) -> None:
        """Put a device's part where it belongs in the vectors."""
        for name, start, at, length in self.runs(device, dtype):
            into[name][start : start + length] = part[at : at + length]

    def as_json(self) -> dict[str, Any]:
        """Return the outline as plain values."""
        facts = {name: getattr(self, name) for name in ("n_devices", "n_cores", "total_chunks", "owned", "replicated")}
        return facts | {"sharded": [(array.dtype, array.size, array.chunk) for array in self.sharded]}

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> Outline:
        """Return the outline that `as_json` wrote."""
        return cls(
            n_devices=int(facts["n_devices"]),
            n_cores=int(facts["n_cores"]),
            total_chunks=int(facts["total_chunks"]),
            owned=tuple(tuple(int(chunk) for chunk in row) for row in facts["owned"]),
            replicated={str(dtype): int(size) for dtype, size in facts["replicated"].items()},
            sharded=tuple(ShardedArray(str(dtype), int(size), int(chunk)) for dtype, size, chunk in facts["sharded"]),
        )

    def check(self) -> None:
        """Raise `RestartError` unless the parts of all devices together are every element, once."""
        if self.n_cores < 1 or self.n_devices != self.n_cores * len(self.owned):
            raise RestartError(
                f"expected {self.n_cores} × {len(self.owned)} devices (cores × chips), got {self.n_devices}"
            )
        if len({len(row) for row in self.owned}) != 1:
            raise RestartError("expected chips with room for equally many chunks")
        chunks = sorted(chunk for row in self.owned for chunk in row if chunk != self.total_chunks)
        if len(chunks) != self.total_chunks or chunks != list(range(len(chunks))):
            raise RestartError(f"expected each of {self.total_chunks} chunks with one chip, got {chunks[:20]} …")
        room = self.n_cores * self.total_chunks
        for array in self.sharded:
            if not 0 <= array.size <= room * array.chunk:
                raise RestartError(f"expected at most {room} × {array.chunk} elements, got {array.size}")
        if any(size < 0 for size in self.replicated.values()):
            raise RestartError(f"expected no negative sizes, got {self.replicated}")

    @cached_property
    def digest(self) -> str:
        """A name for the content."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:16]


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
    outline: Outline = field(repr=False)
    identity: Identity = field(repr=False)

    @classmethod
    def of(cls, training: TrainStep, program: AnyProgram, params: Any) -> StateLayout:
        """Describe the state that `training.init` makes; its optimizer's part is sharded by owner if the update is.

        That is the same for a `ProgramPair` and a `ProgramWithTurn` of one plan.

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
        n_params = len(jax.tree.leaves(params))
        by_owner = None if isinstance(program, Program) else program.sharded_by
        is_sharded = tuple(by_owner is not None and i >= n_params and leaf.ndim > 0 for i, leaf in enumerate(leaves))
        replicated: dict[str, int] = {}
        for leaf, split in zip(leaves, is_sharded, strict=True):
            if not split:
                dtype = np.dtype(leaf.dtype).name
                replicated[dtype] = replicated.get(dtype, 0) + math.prod(leaf.shape)
        n_devices = int(fabric.jax_mesh.devices.size)
        n_cores = n_devices // fabric.mesh.n_chips
        owned: NDArray[Any] = np.zeros((fabric.mesh.n_chips, 0), int)
        sharded: list[ShardedArray] = []
        total_chunks = 0
        if by_owner is not None:
            layout = by_owner.layout
            total_chunks, owned = layout.shape.total_chunks, np.array(layout.shape.owned)
            groups = groups_of(leaves[:n_params], layout, training.accumulate_dtype)
            for leaf, split, path in zip(leaves, is_sharded, paths, strict=True):
                if split:
                    group = getattr(path[-1], "idx", None)
                    expected = [(n_devices * owned.shape[1], g.chunk) for g in groups]
                    if group is None or group >= len(groups) or leaf.shape != expected[group]:
                        raise RestartError(
                            f"{jax.tree_util.keystr(path)} has shape {leaf.shape}, which is no shard of these "
                            f"parameters (expected one of {expected}). Use an optimizer whose state has the shapes of "
                            "the weights that it is given, or install(schedule, fabric), which does not shard it."
                        )
                    sharded.append(ShardedArray(np.dtype(leaf.dtype).name, groups[group].size, groups[group].chunk))
        outline = Outline(
            n_devices, n_cores, total_chunks, tuple(map(tuple, owned.tolist())), replicated, tuple(sharded)
        )
        shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
        sizes = iter(sharded)
        identity = Identity.of(params, state, [next(sizes).size if split else None for split in is_sharded])
        return cls(fabric, structure, shapes, is_sharded, outline, identity)

    def check(self, params: Any, state: Any) -> None:
        """Raise `RestartError` if a state does not have this layout, for example because another train step made it."""
        given = jax.tree_util.tree_leaves_with_path((params, state))
        expected = jax.tree_util.tree_leaves_with_path(jax.tree.unflatten(self.structure, self.leaves))
        why = ""
        for (path, leaf), (own_path, own) in zip(given, expected, strict=False):
            if path != own_path or (leaf.shape, leaf.dtype) != (own.shape, own.dtype):
                why = f"expected {_name(own_path, own)}, got {_name(path, leaf)}"
                break
        if not why and jax.tree.structure((params, state)) != self.structure:
            found = jax.tree.structure((params, state))
            why = f"expected {len(expected)} arrays in {self.structure}, got {len(given)} in {found}"
        if why:
            raise RestartError(
                f"The state is not of the layout that it is to be kept in: {why}. Make both with the same train step, "
                "program and parameters."
            )

    def sharding(self, number: int) -> NamedSharding:
        """How leaf `number` lies on the devices."""
        return self.fabric.sharding(self.fabric.axes) if self.is_sharded[number] else self.fabric.sharding()

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
            dtype = np.dtype(leaf.dtype).name
            start, used[dtype] = used[dtype], used[dtype] + math.prod(leaf.shape)
            values = vectors[f"replicated {dtype}"][start : used[dtype]].reshape(leaf.shape)
            found.append(_put(values, self.sharding(i)))
        params, state = jax.tree.unflatten(self.structure, found)
        return params, state

    def _shards_to_devices(self, which: int, old: jax.Array, vector: Annotated[NDArray[Any], "[S]"]) -> jax.Array:
        parts = []
        for shard in old.addressable_shards:
            rows = np.array(shard.data)
            device = _device_number(shard, self.outline.n_rows)
            for row, start, length in self.outline.rows(which, device):
                rows[row, :length] = vector[start : start + length]
            parts.append(jax.device_put(rows, shard.device))
        return jax.make_array_from_single_device_arrays(old.shape, old.sharding, parts)


def place(tree: Any, fabric: Fabric) -> Any:
    """Put arrays that every process has alike on all devices, without communication.

    (`jax.device_put` would first compare what all processes have, with one collective per array.)
    """
    return jax.tree.map(lambda leaf: _put(np.asarray(leaf), fabric.sharding()), tree)


def _put(values: NDArray[Any], sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def vectors_from_leaves(outline: Outline, is_sharded: Sequence[bool], leaves: Sequence[NDArray[Any]]) -> Vectors:
    """Return the vectors of a whole state that is in this host's memory, leaf by leaf as it lay on its devices."""
    vectors = outline.empty()
    used = dict.fromkeys(outline.replicated, 0)
    which = 0
    for split, leaf in zip(is_sharded, leaves, strict=True):
        if split:
            for device in range(outline.n_devices):
                rows = leaf[device * outline.n_rows : (device + 1) * outline.n_rows]
                for row, start, length in outline.rows(which, device):
                    vectors[f"sharded {which}"][start : start + length] = rows[row, :length]
            which += 1
        else:
            dtype = leaf.dtype.name
            start, used[dtype] = used[dtype], used[dtype] + leaf.size
            vectors[f"replicated {dtype}"][start : used[dtype]] = leaf.ravel()
    return vectors


def _name(path: tuple[Any, ...], leaf: Any) -> str:
    """Describe a leaf of (params, state), as in params['w'] float32[2, 3]."""
    return f"{('params', 'state')[path[0].idx]}{jax.tree_util.keystr(path[1:])} {leaf.dtype}{list(leaf.shape)}"


def _device_number(shard: Any, n_rows: int) -> int:
    """Return the number of the device that a shard of a sharded leaf lies on."""
    return (shard.index[0].start or 0) // max(n_rows, 1)
