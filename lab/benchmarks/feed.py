"""What the next batch of arrays costs: meshmend's feed, and NumPy slicing with `device_put`.

    python lab/benchmarks/feed.py [SAMPLES ...]

Both run in this process, by turns, on 4 virtual chips: rows in a random order of an array, and of a dict of two arrays,
until they are on the devices. meshmend's batches have weights, too. "waits" is how long the host waits for its next
batch after it has slept for a step of 50 ms, the median and the longest of all steps: to place it on the devices. A
batch is late if it is asked for when a device begins a step of 50 ms, as a job does, and is there after that.

The order takes longest to compute for one sample more than a power of 4, and least for a power of 4: both by default.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np

import meshmend.jax as mmj
from meshmend.jax.data.example_keys import make_feed

BATCHES = (1024, 8192)
ROUNDS, SECONDS = 7, 0.3
"""How often each has its turn, and for how long."""
STEPS, STEP_S = 100, 0.05


def slices(data: Any, batch: int, sharding: Any) -> Iterator[Any]:
    """What a user without meshmend writes."""
    n_samples = len(jax.tree.leaves(data)[0])
    while True:
        order = np.random.default_rng(0).permutation(n_samples)
        for first in range(0, n_samples - batch + 1, batch):
            rows = order[first : first + batch]
            yield jax.tree.map(lambda array, rows=rows: jax.device_put(array[rows], sharding), data)


def per_batch(batches: Iterator[Any]) -> float:
    """Return the seconds per batch, of as many as there is time for."""
    begun, n_batches = time.perf_counter(), 0
    while (taken := time.perf_counter() - begun) < SECONDS or not n_batches:
        jax.block_until_ready(next(batches))
        n_batches += 1
    return taken / n_batches


def waits(batches: Iterator[Any]) -> list[float]:
    """Return how long each batch takes after a step in which the host sleeps."""
    found = []
    for _ in range(STEPS):
        time.sleep(STEP_S)
        begun = time.perf_counter()
        next(batches)
        found.append(time.perf_counter() - begun)
    return found


def n_late(batches: Iterator[Any], step: Callable[[], Any]) -> int:
    """Return before how many batches a device is done with the step that began when they were asked for."""
    found = 0
    for _ in range(STEPS):
        result = step()
        jax.block_until_ready(next(batches))
        found += result.is_ready()
        result.block_until_ready()
    return found


def in_ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:4.2f} ms (≤ {max(seconds) * 1e3:4.1f})"


def compiled_step() -> Callable[[], Any]:
    """Return a computation on the first device that takes as long as a step."""
    x = jnp.eye(256)
    run = jax.jit(lambda x, n: jax.lax.fori_loop(0, n, lambda _, y: y @ x, x))
    run(x, 1).block_until_ready()
    n_turns, taken = 100, 0.0
    while taken < STEP_S:
        n_turns = int(n_turns * max(1.1, min(10, 1.1 * STEP_S / (taken or STEP_S))))
        begun = time.perf_counter()
        run(x, n_turns).block_until_ready()
        taken = time.perf_counter() - begun
    return lambda: run(x, n_turns)


def measure(name: str, data: Any, batch: int, step: Callable[[], Any]) -> None:
    """Print a line."""
    fabric = mmj.discover(shape="2x2")
    feed = make_feed(data, mmj.KeepGlobal(batch), seed=0, n_chips=4)
    batches = feed.batches(fabric)
    ours = ((one.data, one.weights) for one in batches)
    theirs = slices(data, batch, fabric.sharding(fabric.batch_axes))
    per_batch(ours), per_batch(theirs)
    times = [(per_batch(ours), per_batch(theirs)) for _ in range(ROUNDS)]
    mine, plain = (statistics.median(column) for column in zip(*times, strict=True))
    print(
        f"{feed.epoch_size:7,} samples  {name:5}  batch {batch:5,}  {mine * 1e3:5.2f} ms  NumPy {plain * 1e3:5.2f} ms  "
        f"ratio {mine / plain:4.2f}  waits {in_ms(waits(batches))}  NumPy {in_ms(waits(theirs))}  "
        f"late {n_late(ours, step)} of {STEPS}"
    )


if __name__ == "__main__":
    step = compiled_step()
    for n_samples in [int(word) for word in sys.argv[1:]] or [4**9, 4**9 + 1]:
        x = np.random.default_rng(0).standard_normal((n_samples, 9)).astype(np.float32)
        y = np.arange(n_samples, dtype=np.int32)
        for size in BATCHES:
            measure("array", x, size, step)
            measure("dict", {"x": x, "y": y}, size, step)
