"""Gather on every host what the others have: bits that are each on one host, summed as integers over all hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from meshmend.jax.fabric import Fabric
from meshmend.jax.state.outline import Outline, Vectors, dtype_named

BLOCK_BYTES = 16 << 20
"""Bytes sent at a time, which bounds the device memory that this needs."""


def combine(vectors: Vectors, fabric: Fabric, compiled: Any = None) -> Vectors:
    """Return vectors in which every element is as on the one process that has it; elsewhere its bits must be zero.

    They are the given ones, filled in block by block: a host holds the state once. `compiled` is what
    `compile_combine` has made for their outline.
    """
    leaders = leaders_of(fabric)
    if len(leaders) == 1:
        return vectors
    streams = [vector.view(np.uint8).reshape(-1) for vector in vectors.values()]
    n_bytes = sum(map(len, streams))
    block = _block(n_bytes)
    add, sharding = make_adder(fabric)
    add = compiled or add
    here = next(device for device in leaders if device.process_index == jax.process_index())
    for start in range(0, n_bytes, block):
        row = np.zeros(block, np.uint8)
        pieces = list(_pieces(streams, start, start + block))
        for at, piece in pieces:
            row[at : at + len(piece)] = piece
        mine = jax.device_put(row.view(np.uint32)[None], here)
        whole = jax.make_array_from_single_device_arrays((len(leaders), block // 4), sharding, [mine])
        total = np.asarray(add(whole).addressable_shards[0].data)[0].view(np.uint8)
        for at, piece in pieces:
            piece[:] = total[at : at + len(piece)]
    return vectors


def _pieces(streams: Sequence[NDArray[np.uint8]], start: int, end: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Return the parts of arrays that are between two bytes of all of them in a row, each with its place there."""
    first = 0
    for stream in streams:
        low, high = max(start, first), min(end, first + len(stream))
        if low < high:
            yield low - start, stream[low - first : high - first]
        first += len(stream)


def leaders_of(fabric: Fabric) -> tuple[Any, ...]:
    """Return one device of each process."""
    first: dict[int, Any] = {}
    for device in fabric.jax_mesh.devices.flat:
        first.setdefault(int(device.process_index), device)
    return tuple(first[process] for process in sorted(first))


def compile_combine(outline: Outline, fabric: Fabric) -> Any:
    """Compile what `combine` runs for a state's vectors; None where one process has all of them."""
    if len(leaders_of(fabric)) == 1:
        return None
    add, sharding = make_adder(fabric)
    words = _block(sum(dtype_named(dtype).itemsize * size for dtype, size in outline.vectors.values())) // 4
    return add.lower(jax.ShapeDtypeStruct((sharding.num_devices, words), np.uint32, sharding=sharding)).compile()


def _block(n_bytes: int) -> int:
    """Return the bytes to send at a time of so many, a power of two."""
    return min(BLOCK_BYTES, 1 << max(12, (n_bytes - 1).bit_length()))


def make_adder(fabric: Fabric) -> tuple[jax.stages.Wrapped, NamedSharding]:
    """Return what sums rows of words, one per host, on a device of each; and how these rows lie on the devices."""
    mesh = jax.sharding.Mesh(np.array(leaders_of(fabric)), ("host",))
    by_host = PartitionSpec("host")

    def add(row: jax.Array) -> jax.Array:
        total: jax.Array = lax.psum(row, "host")
        return total

    mapped = jax.shard_map(add, mesh=mesh, in_specs=by_host, out_specs=by_host)
    return fabric.jit(mapped), NamedSharding(mesh, by_host)
