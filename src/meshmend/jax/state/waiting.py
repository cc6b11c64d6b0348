"""Wait for results without waiting for lost peers.

When a peer dies, a collective fails at once on the devices that communicate with it, and on no others: those wait for
devices that will never answer. Waiting for one device after the other may block on one of those. So poll all of this
process's devices, and raise the first error that any of them has.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from meshmend.errors import RestartError
from meshmend.jax.engine.collectives import Tree

POLL_S = 0.001
"""Seconds between looks."""


def fetch(tree: Tree) -> Tree:
    """Return arrays as NumPy arrays, once all of this process's devices have them.

    They are replicated, or split inside tiles of which this process has a whole one: nothing is asked of other hosts.
    Raises as soon as any device has failed, which `float(loss)` and `jax.block_until_ready` may not: they can block
    until heartbeats end the process.
    """
    wait_for(tree)
    return jax.tree.map(_whole, tree)


def _whole(leaf: jax.Array) -> NDArray[Any]:
    shards = {str(shard.index): shard for shard in leaf.addressable_shards}
    if leaf.is_fully_replicated:
        return np.asarray(next(iter(shards.values())).data)
    n_here = sum(shard.data.size for shard in shards.values())
    if n_here < leaf.size:
        raise RestartError(
            f"This process has {n_here} of the {leaf.size} elements of an array of shape {leaf.shape}: it is split "
            "over devices of several hosts. Gather it on all of them first, in a jitted function with replicated "
            "out_shardings."
        )
    whole = np.empty(leaf.shape, leaf.dtype)
    for shard in shards.values():
        whole[shard.index] = np.asarray(shard.data)
    return whole


def wait_for(tree: Tree) -> None:
    """Return when this process's parts of all arrays are ready; raise as soon as any of them has failed."""
    waiting = [shard.data for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]
    while True:
        still = []
        for part in waiting:
            if part.is_ready():
                part.block_until_ready()
            else:
                still.append(part)
        if not still:
            return
        waiting = still
        time.sleep(POLL_S)
