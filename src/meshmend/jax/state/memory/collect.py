"""Put a state together from copies in memory: each host reads what it has, and gets from others what it lacks.

What any host needs and lacks is sent to all of them, slice by slice. In a round, every process puts the same bytes of
each slice that it sends into a row, and one all-gather on a device of each process brings all rows to all of them. Bits
are moved, never computed with.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from meshmend.jax.engine.fabric import Fabric
from meshmend.jax.state.layout.flat import Outline, dtype_named
from meshmend.jax.state.layout.state_layout import StateLayout
from meshmend.jax.state.waiting import wait_for

BLOCK_BYTES = 16 << 20
"""Bytes that a round brings, which bounds the device memory that this needs."""
ALIGNMENT = 64
"""Bytes at whose multiples an array begins that a CPU device takes as it is."""
SMALLEST_ROW = 1 << 10
"""Words of a process's row, at least."""

T = TypeVar("T")
Bytes = Annotated[NDArray[np.uint8], "uint8[N]"]
Slice = tuple[int, int]
"""A part, and the number of a slice of it."""
ReadPart = Callable[[int, int, int], bytes]
"""From a part, a first byte and an end to these bytes of it."""


def overlaps(runs: Sequence[tuple[int, int, T]], start: int, stop: int) -> Iterator[tuple[int, int, int, T]]:
    """Return what is between two bytes of runs that are in order: first byte, end, first byte of the run, and the run.

    >>> list(overlaps([(0, 4, "a"), (6, 2, "b"), (8, 3, "c")], 3, 7))
    [(3, 4, 0, 'a'), (6, 7, 6, 'b')]
    """
    for i in range(max(0, bisect_right(runs, start, key=lambda run: run[0]) - 1), len(runs)):
        first, length, run = runs[i]
        if first >= stop:
            return
        low, high = max(start, first), min(stop, first + length)
        if low < high:
            yield low, high, first, run


class Needed:
    """What this process's devices need of a state: one array for each run of a vector, filled as bytes arrive.

    It is a reader, as `StateLayout.to_devices` takes it. What was read for the last time is not kept.
    """

    def __init__(self, layout: StateLayout) -> None:
        self._found: dict[tuple[str, int, int], NDArray[Any]] = {}
        self._runs: dict[str, list[tuple[int, int, Bytes]]] = {}
        """By vector: first byte, length and bytes of each array, in order."""
        for name, start, stop in sorted(set(layout.needs())):
            dtype = dtype_named(layout.outline.vectors[name][0])
            array = self._found[name, start, stop] = aligned_empty(stop - start, dtype)
            self._runs.setdefault(name, []).append((start * dtype.itemsize, array.nbytes, array.view(np.uint8)))

    def of(self, name: str, start: int, stop: int) -> Iterator[tuple[int, int, Bytes]]:
        """Return what is needed between two bytes of a vector: first byte, end, and the bytes to put there."""
        for low, high, first, into in overlaps(self._runs.get(name, []), start, stop):
            yield low, high, into[low - first : high - first]

    def __call__(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Return elements of a vector, once."""
        run = (name, start, stop)
        return self._found.pop(run) if start < stop else self._found[run]


def aligned_empty(size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array whose memory a CPU device can use as it is: JAX copies what does not begin at 64 bytes."""
    whole = np.empty(size * dtype.itemsize + ALIGNMENT, np.uint8)
    first = -whole.ctypes.data % ALIGNMENT
    return whole[first : first + size * dtype.itemsize].view(dtype)


class NeededParts:
    """What this process needs of all parts, which are as an outline describes them."""

    def __init__(self, outline: Outline, layout: StateLayout) -> None:
        self.outline, self.layout, self.needed = outline, layout, Needed(layout)
        self._runs: dict[int, list[tuple[int, int, tuple[str, int]]]] = {}
        """By part: first byte and length of each run of it, and the vector and byte of that which it begins at."""

    def _of(self, part: int, start: int, stop: int) -> Iterator[tuple[str, int, int, int]]:
        """Return what vectors have between two bytes of a part: name, first byte there, first byte here, and end."""
        if part not in self._runs:
            runs = self.outline.byte_runs(part)
            self._runs[part] = [(at, length, (name, first)) for name, first, at, length in runs]
        for low, high, at, (name, first) in overlaps(self._runs[part], start, stop):
            yield name, first + low - at, low, high

    def needs(self, part: int, start: int, stop: int) -> bool:
        """Whether this process needs anything between two bytes of a part."""
        found = self._of(part, start, stop)
        return any(True for name, first, low, high in found for _ in self.needed.of(name, first, first + high - low))

    def put(self, part: int, start: int, data: Bytes) -> None:
        """Take what is needed of bytes of a part, from its byte `start` on."""
        for name, first, low, high in self._of(part, start, start + len(data)):
            for begin, end, into in self.needed.of(name, first, first + high - low):
                at = low - start + begin - first
                into[:] = data[at : at + end - begin]

    def wanted(self, has: Container[int]) -> str:
        """Return which slices this process needs of parts that it does not have itself, as hex digits.

        That is one bit each, as the processes of a large job tell each other.
        """
        first = self.outline.first_slices
        bits = np.zeros(first[-1], bool)
        for part in range(self.outline.n_parts):
            if part not in has:
                bits[first[part] : first[part + 1]] = [self.needs(part, *ends) for ends in self.outline.slices(part)]
        return np.packbits(bits).tobytes().hex()


def gather(
    parts: NeededParts, sent_by: Mapping[Slice, int], read: ReadPart, compiled: jax.stages.Compiled | None = None
) -> None:
    """Bring slices from the processes that send them to all, which take what they need.

    `sent_by` is the same on all processes. `compiled` is what `compile_gather` has made for the layout.
    """
    fabric = parts.layout.fabric
    leaders = leaders_of(fabric)
    if len(leaders) == 1 or not sent_by:
        return
    jitted, sharding = make_gather(fabric)
    run, words = compiled or jitted, row_words(parts.layout)
    of_process: list[list[tuple[int, int, int]]] = [[] for _ in leaders]
    position = {int(leader.process_index): i for i, leader in enumerate(leaders)}
    for part, which in sorted(sent_by):
        of_process[position[sent_by[part, which]]].append((part, *parts.outline.slices(part)[which]))
    own = position[jax.process_index()]
    longest = max(stop - start for slices in of_process for _, start, stop in slices)

    def send(round_: GatherRound) -> jax.Array:
        row = np.zeros(words * 4, np.uint8)
        for i, (part, start, stop) in enumerate(of_process[own][round_.first : round_.last]):
            data = read(part, start + round_.at, min(stop, start + round_.at + round_.width))
            row[i * round_.width : i * round_.width + len(data)] = np.frombuffer(data, np.uint8)
        mine = jax.device_put(row.view(np.uint32)[None], leaders[own])
        sent: jax.Array = run(jax.make_array_from_single_device_arrays((len(leaders), words), sharding, [mine]))
        return sent

    def receive(round_: GatherRound, sent: jax.Array) -> None:
        wait_for(sent)
        rows = np.asarray(sent.addressable_shards[0].data).view(np.uint8)
        for row, slices in zip(rows, of_process, strict=True):
            for i, (part, start, stop) in enumerate(slices[round_.first : round_.last]):
                n_bytes = min(round_.width, stop - start - round_.at)
                if n_bytes > 0:
                    parts.put(part, start + round_.at, row[i * round_.width : i * round_.width + n_bytes])

    before: tuple[GatherRound, jax.Array] | None = None
    for round_ in rounds_of(max(map(len, of_process)), longest, words):
        sent = send(round_)  # while the one before is put where it belongs
        if before is not None:
            receive(*before)
        before = round_, sent
    if before is not None:
        receive(*before)


class GatherRound(NamedTuple):
    """What every process sends at a time: of its slices from `first` to `last`, so many bytes from byte `at` on."""

    first: int
    last: int
    at: int
    width: int


def rounds_of(n_slices: int, n_bytes: int, words: int) -> Iterator[GatherRound]:
    """Return the rounds in which up to so many slices of up to so many bytes are sent in rows of so many words."""
    at_once = max(1, min(n_slices, words))
    width = words // at_once * 4
    for first in range(0, n_slices, at_once):
        for at in range(0, n_bytes, width):
            yield GatherRound(first, first + at_once, at, width)


def leaders_of(fabric: Fabric) -> tuple[jax.Device, ...]:
    """Return one device of each process."""
    first: dict[int, jax.Device] = {}
    for device in fabric.jax_mesh.devices.flat:
        first.setdefault(int(device.process_index), device)
    return tuple(first[process] for process in sorted(first))


def row_words(layout: StateLayout) -> int:
    """Return the words of a process's row."""
    vectors = layout.outline.vectors.values()
    n_bytes = sum(dtype_named(dtype).itemsize * size for dtype, size in vectors)
    whole = min(BLOCK_BYTES, 1 << max(12, (n_bytes - 1).bit_length()))
    return max(SMALLEST_ROW, whole // 4 // len(leaders_of(layout.fabric)))


def make_gather(fabric: Fabric) -> tuple[jax.stages.Wrapped, NamedSharding]:
    """Return what brings the rows of all processes to a device of each; and how these rows lie on the devices."""
    mesh = jax.sharding.Mesh(np.array(leaders_of(fabric)), ("host",))

    def gather_rows(row: jax.Array) -> jax.Array:
        rows: jax.Array = lax.all_gather(row, "host", tiled=True)
        return rows

    by_host = PartitionSpec("host")
    mapped = jax.shard_map(gather_rows, mesh=mesh, in_specs=by_host, out_specs=PartitionSpec(), check_vma=False)
    return fabric.jit(mapped), NamedSharding(mesh, by_host)


def compile_gather(layout: StateLayout) -> jax.stages.Compiled | None:
    """Compile what `gather` runs for a layout; None where one process has all devices."""
    if len(leaders_of(layout.fabric)) == 1:
        return None
    run, sharding = make_gather(layout.fabric)
    shape = (sharding.num_devices, row_words(layout))
    return run.lower(jax.ShapeDtypeStruct(shape, np.uint32, sharding=sharding)).compile()
