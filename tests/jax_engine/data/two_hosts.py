"""One of two processes with eight devices each, on a 4×4 mesh with a hole; run by test_feed.

Prints what this process has read and the parameters that it ends with.
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshmend as mm
import meshmend.jax as mmj

N = 50
STEPS = 3
FAILED = ["2x2@0,2"]


class Source:
    """Integer-valued records; says which of them were read."""

    def __init__(self) -> None:
        self.data = np.random.default_rng(0).integers(-9, 10, size=(N, 4)).astype(np.float32)
        self.read: list[int] = []

    def __len__(self) -> int:
        return N

    def __getitem__(self, record: int) -> Any:
        self.read.append(int(record))
        return self.data[record]


def train(fabric: mmj.Fabric) -> dict[str, Any]:
    source = Source()
    feed = mmj.Feed(source, mmj.KeepGlobal(20), threads=2, prefetch=0)
    schedule = mm.plan(fabric.mesh, "row-pairs")
    init, step = mmj.train_step(lambda w, x: x @ w, optax.sgd(0.125), fabric, per_example=True)
    pair = mmj.install(schedule, fabric, update="two-phase")
    params = jax.device_put(jnp.zeros(4), fabric.sharding())
    state, step = jax.jit(init)(params, pair), jax.jit(step)
    used = []
    for batch in islice(feed.batches(fabric), STEPS):
        params, state, _ = step(params, state, batch.data, pair, weights=batch.weights)
        used.append(batch.indices.tolist())
    return {"read": source.read, "used": used, "params": np.asarray(params).tobytes().hex()}


if __name__ == "__main__":
    jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
    # Each host is a 4×2 tile, so that the ranks of its chips are not contiguous.
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    tiles = [(row, 2 * host + column) for host in (0, 1) for row in range(4) for column in (0, 1)]
    told = train(mmj.discover(devices, coords=tiles, shape="4x4", failed=FAILED))
    sys.stdout.write(json.dumps(told) + "\n")
