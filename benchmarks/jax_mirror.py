"""What keeping copies in memory costs: the time of a training step with it and without, on 64 virtual chips.

    python benchmarks/jax_mirror.py

All hosts are in one process here, so one process does the copying of all eight.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=64")

import jax
import jax.numpy as jnp
import optax

import meshmend as mm
import meshmend.jax as mmj
from meshmend.jax.state.layout import StateLayout
from meshmend.jax.state.memory import HostMemory
from meshmend.jax.state.mirror import copy_of, make_parts_fn
from meshmend.launch.hosts import Hosts

WIDTH, STEPS = 512, 8


def main() -> None:
    hosts = Hosts.of("8x8", "4x2")
    fabric = mmj.discover(shape="8x8")
    schedule = mm.plan(fabric.mesh, "row-pairs")
    pair = mmj.install(schedule, fabric, update="two-phase")

    def loss(params: Any, batch: Any) -> Any:
        for layer in params:
            batch = jnp.tanh(batch @ layer)
        return jnp.sum(batch**2, axis=1)

    training = mmj.train_step(loss, optax.adam(1e-3), fabric, per_example=True)
    keys = jax.random.split(jax.random.key(0), 4)
    params = jax.device_put([jax.random.normal(key, (WIDTH, WIDTH)) / 20 for key in keys], fabric.sharding())
    state = jax.jit(training.init)(params, pair)
    layout = StateLayout.of(training, pair, params)
    host_of = {chip: host for host in range(len(hosts)) for chip in hosts.chips(host)}
    host_of_chip = [host_of[fabric.mesh.chip(rank)] for rank in range(fabric.mesh.n_chips)]
    batch = jax.device_put(jnp.ones((64 * 4, WIDTH)), fabric.sharding("chip"))
    step = jax.jit(training.step)
    cut = jax.jit(make_parts_fn(layout, host_of_chip))
    folder = Path(tempfile.mkdtemp(prefix="meshmend-", dir="/dev/shm"))
    memories = [HostMemory(folder / str(host)) for host in range(len(hosts))]
    times: dict[str, list[float]] = {"step": [], "cut and send": [], "copy and write": []}
    n_bytes = 0
    try:
        for number in range(STEPS + 4):
            begun = time.perf_counter()
            jax.block_until_ready(step(params, state, batch, pair))
            stepped = time.perf_counter()
            parts = jax.block_until_ready(cut(params, state))
            sent = time.perf_counter()
            n_bytes = sum(
                memory.write(copy_of(parts, layout, host_of_chip, host, 1, number, None, "run"))
                for host, memory in enumerate(memories)
            )
            if number >= 4:
                times["step"].append(stepped - begun)
                times["cut and send"].append(sent - stepped)
                times["copy and write"].append(time.perf_counter() - sent)
    finally:
        shutil.rmtree(folder)
    best = {name: min(values) for name, values in times.items()}
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((params, state)))
    print(
        f"state {held / 1e6:.1f} MB (parameters and Adam), kept by all hosts together {n_bytes / 1e6:.1f} MB per step"
    )
    for name, seconds in best.items():
        print(f"{name:16} {seconds * 1e3:8.1f} ms  {seconds / best['step']:6.3f} of a step")


if __name__ == "__main__":
    main()
