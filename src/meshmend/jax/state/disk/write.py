"""A state on its way to disk: the user's whole arrays, in chunks, each written by the host that owns its first element.

A host copies what its devices own, and nothing else of the state. Its chunks are rectangles of the user's arrays
(`rectangles`), while devices own runs of vectors, so that some chunks have elements of several hosts. Those go as files
through the folder that the checkpoint is made in, from the hosts that have them to the one that writes the chunk. No
device takes part, and no host sees more than its share. Everything but the copy runs beside training.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple, Protocol

import jax
import numpy as np
from numpy.typing import NDArray

from meshmend.errors import RestartError, TransientError
from meshmend.jax.engine.collectives import Tree
from meshmend.jax.state.layout.rectangles import Box, ChunkGrid, chunk_shape, inside, overlap, shape_of
from meshmend.jax.state.layout.state_layout import StateLayout, Values
from meshmend.jax.state.waiting import wait_for
from meshmend.launch.signing import checksum, file_key

SLICED_FROM_BYTES = 1 << 16
"""Bytes from which only a device's share of a replicated array is copied to the host, and not all of it."""
UNDER_WAY = "meshmend-unfinished"
"""Folder of what hosts send each other, beside the arrays; it is gone before the checkpoint is there."""

Checksums = list[list[str]]
"""Of each chunk of each of the user's arrays; where the job has a key, nobody can make them without it."""

Place = tuple[str, int, int, int]
"""Where a run of a vector is in an array: its name, its first element, that element's in the array, and its length."""


class VectorRun(NamedTuple):
    """Elements of a vector, one after the other, in this host's memory."""

    name: str
    start: int
    elements: Annotated[NDArray[Any], "[N]"]


def copy_to_host(layout: StateLayout, params: Tree, state: Tree, *, slices: bool | None = None) -> list[VectorRun]:
    """Return what this process's devices own of a state, in its memory; arrays may be donated when this returns.

    Of large replicated arrays, a device copies only the rows that its share is in (`slices`). On CPU nothing is copied:
    NumPy looks at the device's memory, which JAX then does not use again, whoever is donated the array.
    """
    slices = layout.devices[0].platform != "cpu" if slices is None else slices
    leaves = jax.tree.leaves((params, state))
    wait_for(leaves)
    found: list[tuple[jax.Array, list[Place]]] = []
    which = 0
    for i, leaf in enumerate(leaves):
        for shard in leaf.addressable_shards:
            number = layout.numbers[shard.device]
            if layout.is_sharded[i]:
                rows, chunk = layout.outline.rows(which, number), layout.outline.sharded[which].chunk
                places = [(f"sharded {which}", start, row * chunk, length) for row, start, length in rows]
                found.append((shard.data, places))
            else:
                found += _share(layout, i, shard.data, number, slices)
        which += layout.is_sharded[i]
    for data, _ in found:
        data.copy_to_host_async()
    return [
        VectorRun(name, start, np.asarray(data).reshape(-1)[at : at + length])
        for data, places in found
        for name, start, at, length in places
    ]


def _share(
    layout: StateLayout, leaf: int, data: jax.Array, device: int, slices: bool
) -> Iterator[tuple[jax.Array, list[Place]]]:
    """Return what a device is to write of a leaf that others have, too: the rows that its share of elements is in."""
    tile, slot = divmod(device, layout.outline.devices_per_tile)
    name, first, _ = layout.whole_leaves[leaf][slot]
    dtype = np.dtype(data.dtype).name
    share, before = layout.outline.share(dtype), first - slot * layout.outline.n_replicated(dtype)
    start, stop = max(0, tile * share - before), min(data.size, (tile + 1) * share - before)
    if start >= stop:
        return
    skipped = 0
    if slices and data.nbytes >= SLICED_FROM_BYTES:
        row = data.size // data.shape[0]
        data, skipped = data[start // row : -(-stop // row)], start // row * row
    yield data, [(name, first + start, start - skipped, stop - start)]


class ChunkSink(Protocol):
    """Where chunks are written."""

    def write(self, user: int, box: Box, values: NDArray[Any]) -> None:
        """Begin to write a chunk of one of the user's arrays."""

    def commit(self) -> None:
        """Return when all chunks are written."""


class ChunkWriter:
    """Puts together the chunks that one process writes, from its own runs and from what others send.

    `folder` is one that all processes see, as `etils.epath` has it. Every process makes the same calls; `exchange` is
    as in `Coordination`.
    """

    def __init__(
        self,
        layout: StateLayout,
        folder: Any,
        exchange: Callable[[Any], list[Any]],
        *,
        process: int,
        process_of_device: Sequence[int],
    ) -> None:
        self.layout = layout
        self.folder = folder / UNDER_WAY
        self.exchange = exchange
        self.process = process
        self.process_of_device = process_of_device
        self.grids = grids_of(layout)
        self._checksums: list[tuple[int, int, str]] = []
        """Number of an array, that of a chunk, and the checksum of its values."""
        self._writers: dict[tuple[int, int], int] = {}
        self._open: dict[tuple[int, int], NDArray[Any]] = {}
        """Chunks that are not whole yet."""
        self._missing: Counter[tuple[int, int]] = Counter()
        """Elements that they miss."""
        self._to_send: dict[int, list[Values]] = {}

    def run(self, runs: Sequence[VectorRun], store: ChunkSink) -> Checksums:
        """Write this process's chunks; return the checksums of all chunks on process 0, and of none on the others."""
        self._store = store
        sent_to = self._together(lambda: self._write_own(runs))
        self._together(lambda: self._write_others([i for i, to in enumerate(sent_to) if self.process in to]))
        return self._collect() if self.process == 0 else []

    def _together(self, do: Callable[[], Any]) -> list[Any]:
        """Return what this has returned on each process; raise on all of them if it has failed on any."""
        failure: Exception | None = None
        mine: dict[str, Any] = {}
        try:
            mine["done"] = do()
        except Exception as error:
            failure, mine["error"] = error, f"process {self.process}: {error}"
        told = self.exchange(mine)
        errors = [one["error"] for one in told if "error" in one]
        if errors:
            raise failure or TransientError(errors[0])
        return [one["done"] for one in told]

    def _write_own(self, runs: Sequence[VectorRun]) -> list[int]:
        """Write what this process has whole, and send what it has of other processes' chunks; return to whom."""
        for run in runs:
            for values in self.layout.values(*run):
                self._add(values)
        if self._to_send:
            self.folder.mkdir(parents=True, exist_ok=True)
        for process, pieces in self._to_send.items():
            self._file(self.process, process).write_bytes(_packed(pieces))
        return sorted(self._to_send)

    def _write_others(self, senders: Sequence[int]) -> None:
        """Complete the chunks that others have a part of."""
        for sender in senders:
            for values in _unpacked(self._file(sender, self.process).read_bytes(), self.layout):
                self._add(values)
        if self._open:
            user, chunk = next(iter(self._open))
            raise RestartError(f"Chunk {chunk} of array {user} misses {self._missing[user, chunk]} elements.")
        self._store.commit()
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self._checksums)
        self._checksum_file(self.process).write_text(f"{checksum(file_key(), text.encode())}\n{text}")

    def _collect(self) -> Checksums:
        """Return the checksums of all processes, and remove what they have sent each other."""
        found: list[list[str | None]] = [[None] * grid.n_chunks for grid in self.grids]
        for process in sorted(set(self.process_of_device)):
            expected, _, text = self._checksum_file(process).read_text().partition("\n")
            if checksum(file_key(), text.encode()) != expected:
                raise RestartError(f"The checksums that process {process} has sent through the folder are damaged.")
            for user, chunk, one in json.loads(text):
                found[user][chunk] = one
        checksums = [[one for one in row if one is not None] for row in found]
        if [len(row) for row in checksums] != [grid.n_chunks for grid in self.grids]:
            raise RestartError("Some chunks of the checkpoint have been written by no process.")
        self.folder.rmtree()
        return checksums

    def _add(self, values: Values) -> None:
        grid = self.grids[values.user]
        for number in grid.chunks_of(values.box):
            key, box = (values.user, number), grid.box(number)
            common = overlap(box, values.box)
            assert common is not None  # noqa: S101  # that is what the chunks of a box are
            part = values.values[inside(common, values.box)]
            if key not in self._writers:
                device = self.layout.device_of(values.user, tuple(first for first, _ in box))
                self._writers[key] = self.process_of_device[device]
            if self._writers[key] != self.process:
                self._to_send.setdefault(self._writers[key], []).append(Values(values.user, common, part))
            elif common == box:
                self._write(key, box, part)
            else:
                if key not in self._open:
                    self._open[key] = np.empty(shape_of(box), part.dtype)
                    self._missing[key] = self._open[key].size
                self._open[key][inside(common, box)] = part
                self._missing[key] -= part.size
                if not self._missing[key]:
                    self._write(key, box, self._open.pop(key))

    def _write(self, key: tuple[int, int], box: Box, values: NDArray[Any]) -> None:
        values = np.asarray(values, order="C")
        self._checksums.append((*key, checksum_of(values)))
        self._store.write(key[0], box, values)

    def _file(self, sender: int, receiver: int) -> Any:
        return self.folder / f"{sender}-to-{receiver}"

    def _checksum_file(self, process: int) -> Any:
        return self.folder / f"checksums-{process}"


def grids_of(layout: StateLayout) -> list[ChunkGrid]:
    """Return how the user's arrays are cut into chunks: no larger than what one slot of a tile has of a layer."""
    shapes = [user.shape for user in layout.users]
    for pieces in layout.pieces.values():
        for piece in pieces:
            shapes[piece.user] = shape_of(piece.box)
    return [
        ChunkGrid(user.shape, chunk_shape(shape, np.dtype(user.dtype).itemsize))
        for user, shape in zip(layout.users, shapes, strict=True)
    ]


def checksum_of(values: NDArray[Any]) -> str:
    """Return the checksum of an array's bytes, under the key of a job that has a lasting one."""
    return checksum(file_key(lasting=True), np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def _packed(pieces: Sequence[Values]) -> bytes:
    header = json.dumps([(piece.user, piece.box) for piece in pieces]).encode()
    content = header + b"".join(piece.values.tobytes() for piece in pieces)
    return f"{len(header)} {checksum(file_key(), content)}\n".encode() + content


def _unpacked(packed: bytes, layout: StateLayout) -> Iterator[Values]:
    line, _, rest = packed.partition(b"\n")
    length, expected = line.decode().split()
    if checksum(file_key(), rest) != expected:
        raise RestartError("A file that another host has sent through the checkpoint's folder is damaged.")
    at = int(length)
    for user, box in json.loads(rest[:at]):
        shape, dtype = shape_of(box), np.dtype(layout.users[user].dtype)
        n = math.prod(shape)
        yield Values(user, tuple(map(tuple, box)), np.frombuffer(rest, dtype, n, at).reshape(shape))
        at += n * dtype.itemsize
