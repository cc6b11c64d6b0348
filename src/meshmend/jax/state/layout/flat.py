"""A job's state independent of any mesh: flat vectors of elements, and which of them each part of a copy holds.

Which chunk of a sharded state lies on which chip depends on the plan, and so on the hole. An `Outline` says where the
elements of every part belong in vectors that are the same for every mesh: the replicated arrays of one dtype
one after the other, and for each sharded array the elements of its weights in order. From those, any other mesh's
parts are cut. Bits are moved, never computed with.

Parts are of two kinds. A *share* is a piece of all replicated arrays, which any chip can cut; there are `n_shares`. The
*shards* of a device are what it alone has. Parts are numbered: first the shares, then the shards of each device.

Where a model is split inside tiles, each slot of a tile has shards of its own, and tiles have them alike. Vectors then
have the shards of one slot after the other, whichever tiles there are and wherever they lie, and each slot has
`n_shares` of its own.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from meshmend.errors import RestartError

SLICES = 8
"""Slices of a part, at least."""
MOST_SLICES = 1024
"""Slices of all shares of a slot together: many hosts send them at a restart, and each has a checksum of its own."""


@dataclass(frozen=True)
class ShardedArray:
    """One sharded array of the state: the elements of its group of weights, in chunks that devices own."""

    dtype: str
    size: int
    """Elements, without padding; of one layer, where there is a stack of them."""
    chunk: int
    n_layers: int = 1
    """Layers of a stack, each cut into chunks by itself."""


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
    replicated: dict[str, tuple[int, ...]]
    """Elements of each replicated array, by dtype; in tiles, of the shard that each slot has of it."""
    sharded: tuple[ShardedArray, ...]
    devices_per_tile: int = 1
    """Devices of a tile, whose shards differ."""
    n_shares: int = 1
    """Shares that the replicated arrays of each slot are cut into."""

    @cached_property
    def dtypes(self) -> list[str]:
        """Dtypes of the state, in the order in which a part has them."""
        return sorted({*self.replicated, *(array.dtype for array in self.sharded)})

    @property
    def n_rows(self) -> int:
        """Chunks that a device has room for."""
        return len(self.owned[0]) if self.owned else 0

    def n_replicated(self, dtype: str) -> int:
        """Elements of all replicated arrays of a dtype."""
        return sum(self.replicated.get(dtype, ()))

    def share(self, dtype: str) -> int:
        """Elements of the replicated arrays that each device writes to disk."""
        return -(-self.n_replicated(dtype) * self.devices_per_tile // self.n_devices)

    @property
    def n_all_shares(self) -> int:
        """Shares of all slots: the parts with smaller numbers."""
        return self.devices_per_tile * self.n_shares

    @property
    def n_parts(self) -> int:
        """Parts of a copy; where nothing is sharded, there are shares alone."""
        return self.n_all_shares + (self.n_devices if self.sharded else 0)

    def share_part(self, slot: int, share: int) -> int:
        """Return the number of a share of a slot of a tile."""
        return slot * self.n_shares + share

    def shards_part(self, device: int) -> int:
        """Return the number of a device's shards."""
        return self.n_all_shares + device

    def shares(self, dtype: str) -> list[int]:
        """Elements of each replicated array that are in a share: a piece of every one of them."""
        return [-(-size // self.n_shares) for size in self.replicated.get(dtype, ())]

    def part_size(self, part: int, dtype: str) -> int:
        """Elements of a part."""
        if part < self.n_all_shares:
            return sum(self.shares(dtype))
        return sum(array.n_layers * self.n_rows * array.chunk for array in self.sharded if array.dtype == dtype)

    @cached_property
    def share_bytes(self) -> int:
        """Bytes of a share: of one dtype after the other."""
        return self._bytes(0)

    @cached_property
    def shards_bytes(self) -> int:
        """Bytes of a device's shards."""
        return self._bytes(self.n_all_shares)

    def _bytes(self, part: int) -> int:
        return sum(self.part_size(part, dtype) * dtype_named(dtype).itemsize for dtype in self.dtypes)

    def part_bytes(self, part: int) -> int:
        """Bytes of a part."""
        return self.share_bytes if part < self.n_all_shares else self.shards_bytes

    @cached_property
    def _slices(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        # Of few large shares there are as many slices as if there were one share per tile.
        n_tiles = self.n_devices // self.devices_per_tile
        n_slices = max(SLICES, min(SLICES * n_tiles, MOST_SLICES) // self.n_shares)
        return _cut(self.share_bytes, n_slices), _cut(self.shards_bytes, SLICES)

    def slices(self, part: int) -> list[tuple[int, int]]:
        """First byte and end of the slices of a part: what is summed, asked for and sent by itself."""
        return self._slices[part >= self.n_all_shares]

    @cached_property
    def first_slices(self) -> list[int]:
        """For each part the number of its first slice, and at the end that of all slices."""
        return [0, *itertools.accumulate(len(self.slices(part)) for part in range(self.n_parts))]

    @property
    def vectors(self) -> dict[str, tuple[str, int]]:
        """Dtype and elements of the vectors, by name: the same for one state on every mesh."""
        n = self.devices_per_tile
        whole = {f"replicated {dtype}": (dtype, n * sum(sizes)) for dtype, sizes in self.replicated.items()}
        return whole | {
            f"sharded {i}": (array.dtype, n * array.n_layers * array.size) for i, array in enumerate(self.sharded)
        }

    def runs(self, part: int, dtype: str) -> Iterator[tuple[str, int, int, int]]:
        """Return where a part belongs: (vector, first element of it, first element of the part, length).

        The last shares overlap where they would not be equal otherwise.
        """
        at = 0
        if part < self.n_all_shares:
            slot, number = divmod(part, self.n_shares)
            start = slot * self.n_replicated(dtype)
            for size, share in zip(self.replicated.get(dtype, ()), self.shares(dtype), strict=True):
                if share:
                    yield f"replicated {dtype}", start + min(number * share, size - share), at, share
                start, at = start + size, at + share
            return
        for i, array in enumerate(self.sharded):
            if array.dtype != dtype:
                continue
            for row, start, length in self.rows(i, part - self.n_all_shares):
                yield f"sharded {i}", start, at + row * array.chunk, length
            at += array.n_layers * self.n_rows * array.chunk

    def rows(self, which: int, device: int) -> Iterator[tuple[int, int, int]]:
        """Return which elements of a sharded array a device's rows hold: (row, first element, length).

        Of a stack, the rows of one layer after the other; and so are the vectors.
        """
        array = self.sharded[which]
        tile, slot = divmod(device, self.devices_per_tile)
        chip, core = divmod(tile, self.n_cores)
        for layer in range(array.n_layers):
            before = (slot * array.n_layers + layer) * array.size
            for row, chunk in enumerate(self.owned[chip], layer * self.n_rows):
                start = (core * self.total_chunks + chunk) * array.chunk
                length = min(array.chunk, array.size - start)
                if chunk < self.total_chunks and length > 0:
                    yield row, before + start, length

    def device_of(self, vector: str, element: int) -> int:
        """Return the device that writes an element of a vector to disk: it has it."""
        kind, which = vector.split()
        if kind == "replicated":
            slot, rest = divmod(element, self.n_replicated(which))
            return rest // self.share(which) * self.devices_per_tile + slot
        array = self.sharded[int(which)]
        row, rest = divmod(element, array.size)
        core, chunk = divmod(rest // array.chunk, self.total_chunks)
        return (self._owners[chunk] * self.n_cores + core) * self.devices_per_tile + row // array.n_layers

    @cached_property
    def _owners(self) -> dict[int, int]:
        return {chunk: chip for chip, row in enumerate(self.owned) for chunk in row}

    def byte_runs(self, part: int) -> Iterator[tuple[str, int, int, int]]:
        """Return `runs` of all dtypes in bytes, in the order of the part: (vector, first byte of it, at, length)."""
        before = 0
        for dtype in self.dtypes:
            size = dtype_named(dtype).itemsize
            for name, start, at, length in self.runs(part, dtype):
                yield name, start * size, before + at * size, length * size
            before += self.part_size(part, dtype) * size

    def as_json(self) -> dict[str, Any]:
        """Return the outline as plain values."""
        names = ("n_devices", "n_cores", "total_chunks", "owned", "replicated", "devices_per_tile", "n_shares")
        sharded = [(array.dtype, array.size, array.chunk, array.n_layers) for array in self.sharded]
        return {name: getattr(self, name) for name in names} | {"sharded": sharded}

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> Outline:
        """Return the outline that `as_json` wrote."""
        return cls(
            n_devices=int(facts["n_devices"]),
            n_cores=int(facts["n_cores"]),
            total_chunks=int(facts["total_chunks"]),
            owned=tuple(tuple(int(chunk) for chunk in row) for row in facts["owned"]),
            replicated={str(dtype): tuple(map(int, sizes)) for dtype, sizes in facts["replicated"].items()},
            sharded=tuple(ShardedArray(str(dtype), *map(int, numbers)) for dtype, *numbers in facts["sharded"]),
            devices_per_tile=int(facts["devices_per_tile"]),
            n_shares=int(facts["n_shares"]),
        )

    def check(self) -> None:
        """Raise `RestartError` unless all parts together are every element."""
        if min(self.n_cores, self.devices_per_tile) < 1 or self.n_devices != self.n_cores * self.devices_per_tile * len(
            self.owned
        ):
            tiles = f"{self.devices_per_tile} × " if self.devices_per_tile != 1 else ""
            raise RestartError(
                f"expected {tiles}{self.n_cores} × {len(self.owned)} devices (cores × chips), got {self.n_devices}"
            )
        if not 1 <= self.n_shares <= self.n_devices:
            raise RestartError(f"expected 1 to {self.n_devices} shares, got {self.n_shares}")
        if len({len(row) for row in self.owned}) != 1:
            raise RestartError("expected chips with room for equally many chunks")
        chunks = sorted(chunk for row in self.owned for chunk in row if chunk != self.total_chunks)
        if len(chunks) != self.total_chunks or chunks != list(range(len(chunks))):
            raise RestartError(f"expected each of {self.total_chunks} chunks with one chip, got {chunks[:20]} …")
        room = self.n_cores * self.total_chunks
        for array in self.sharded:
            if array.n_layers < 1:
                raise RestartError(f"expected at least one layer, got {array.n_layers}")
            if not 0 <= array.size <= room * array.chunk:
                raise RestartError(f"expected at most {room} × {array.chunk} elements, got {array.size}")
        if any(size < 0 for sizes in self.replicated.values() for size in sizes):
            raise RestartError(f"expected no negative sizes, got {self.replicated}")

    @cached_property
    def digest(self) -> str:
        """A name for the content."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:16]


def _cut(n_bytes: int, n_slices: int) -> list[tuple[int, int]]:
    ends = [n_bytes * i // n_slices for i in range(n_slices + 1)]
    return list(itertools.pairwise(ends))
