"""Gather on every host what the others have: bits that are each on one host, summed as integers over all hosts."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshmend.jax.fabric import Fabric
from meshmend.jax.state.outline import Vectors

BLOCK_BYTES = 16 << 20
"""Bytes sent at a time, which bounds the device memory that this needs."""


def combine(vectors: Vectors, fabric: Fabric) -> Vectors:
    """Return vectors in which every element is as on the one process that has it; elsewhere its bits must be zero."""
    leaders = _leaders(fabric)
    if len(leaders) == 1:
        return vectors
    names = list(vectors)
    stream = np.concatenate([vectors[name].view(np.uint8).reshape(-1) for name in names])
    block = min(BLOCK_BYTES, 1 << max(12, (len(stream) - 1).bit_length()))
    padded = np.zeros(-(-len(stream) // block) * block, np.uint8)
    padded[: len(stream)] = stream
    words = padded.view(np.uint32).reshape(-1, block // 4)
    add, sharding = _adder(leaders)
    here = next(device for device in leaders if device.process_index == jax.process_index())
    for row in words:
        mine = jax.device_put(row[None], here)
        whole = jax.make_array_from_single_device_arrays((len(leaders), len(row)), sharding, [mine])
        row[:] = np.asarray(add(whole).addressable_shards[0].data)[0]
    found, at = {}, 0
    for name in names:
        n_bytes = vectors[name].nbytes
        found[name] = padded[at : at + n_bytes].view(vectors[name].dtype)
        at += n_bytes
    return found


def _leaders(fabric: Fabric) -> tuple[Any, ...]:
    """Return one device of each process."""
    first: dict[int, Any] = {}
    for device in fabric.jax_mesh.devices.flat:
        first.setdefault(int(device.process_index), device)
    return tuple(first[process] for process in sorted(first))


@cache
def _adder(leaders: tuple[Any, ...]) -> tuple[Any, NamedSharding]:
    mesh = jax.sharding.Mesh(np.array(leaders), ("host",))
    by_host = PartitionSpec("host")
    add = jax.shard_map(lambda row: lax.psum(row, "host"), mesh=mesh, in_specs=by_host, out_specs=by_host)
    return jax.jit(add), NamedSharding(mesh, by_host)
