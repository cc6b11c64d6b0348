"""How long a checkpoint holds up training: meshmend's, and Orbax's AsyncCheckpointer on the same tree.

    python lab/benchmarks/checkpoint_stall.py [MB ...]

Both run in this process, by turns, on 16 virtual chips. Orbax has the tree as a plain JAX user would: whole arrays on
every device. "holds" is the time until `save` returns, so that training may overwrite its arrays; "written" until the
checkpoint is committed; "restored" until a job has its arrays again.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=16")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import meshmend as mm
import meshmend.jax as mmj
from meshmend.jax.session.coordination import Coordination
from meshmend.jax.state.candidates import UNCHECKED
from meshmend.jax.state.disk.background import Saving
from meshmend.jax.state.disk.disk import Disk
from meshmend.jax.state.disk.write import copy_to_host
from meshmend.jax.state.layout.state_layout import StateLayout, put

TIMES = 5
UPDATES = ("replicated", "fused", "fsdp")


def state_of(update: str, n_bytes: int) -> tuple[StateLayout, Any, Any]:
    """Parameters in eight layers, and two moments of each: three arrays of the same size."""
    fabric = mmj.discover(jax.devices()[:16], shape="4x4", failed=["2x2@0,0"])
    kind: Any = "two-phase" if update == "fsdp" else update
    owners: Any = {"collective": "all-reduce-with-update"} if update == "fused" else {}
    program = mmj.install(mm.plan(fabric.mesh, "weave", **owners), fabric, update=kind)
    rows = n_bytes // (3 * 8 * 4 * 1024)
    rng = np.random.default_rng(0)
    params: Any = {f"layer {i}": rng.normal(size=(rows, 1024)).astype(np.float32) for i in range(8)}
    training: Any
    if update == "fsdp":
        params = mmj.fsdp.shard_params(params, fabric, program)
        training = mmj.fsdp.sharded_train_step(lambda *_: 0.0, optax.adam(0.1), fabric)
    else:
        training = mmj.train_step(lambda *_: jnp.zeros(()), optax.adam(0.1), fabric)
        params = put(params, fabric)
    state = jax.jit(training.init)(params, program)
    # Not the zeros that an optimizer begins with, which Orbax compresses to nothing.
    params, state = jax.block_until_ready(jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree))((params, state)))
    return StateLayout.of(training, program, params), params, state


def measure(update: str, megabytes: int) -> None:
    """Print a line."""
    layout, params, state = state_of(update, megabytes * 10**6)
    rng = np.random.default_rng(1)
    tree = jax.tree.map(lambda user: rng.normal(size=user.shape).astype(user.dtype), layout.tree)
    tree = jax.block_until_ready(jax.device_put(tree, layout.fabric.sharding()))
    folder = Path(tempfile.mkdtemp(prefix="meshmend-"))
    disk, saver = Disk(folder / "ours", keep=1, timeout_s=120), ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
    holds: dict[str, list[float]] = {"ours": [], "orbax": []}
    written: dict[str, list[float]] = {"ours": [], "orbax": []}
    for step in range(1, TIMES + 2):
        for name in holds:
            begun = time.perf_counter()
            if name == "ours":
                facts = {"step": step, "attempt": 1, "extra": None, "verified": UNCHECKED}
                runs = copy_to_host(layout, params, state)
                saving = Saving(step, 0, partial(disk.save, layout, runs, facts, Coordination(0, 1)))
            else:
                saver.save(folder / "orbax" / str(step), args=ocp.args.StandardSave(tree))
            held = time.perf_counter() - begun
            if name == "ours":
                assert saving.wait(600)  # noqa: S101
                assert saving.error is None, saving.error  # noqa: S101
            else:
                saver.wait_until_finished()
                shutil.rmtree(folder / "orbax" / str(step))
            if step > 1:  # the first imports and compiles
                holds[name].append(held)
                written[name].append(time.perf_counter() - begun)
    begun = time.perf_counter()
    jax.block_until_ready(layout.to_devices(disk.load(TIMES + 1, layout)[1], (params, state)))
    restored = time.perf_counter() - begun
    disk.close()
    saver.close()
    shutil.rmtree(folder)
    ours, theirs = (statistics.median(holds[name]) for name in holds)
    print(
        f"{update:10}  {megabytes:4} MB  holds {ours * 1e3:7.1f} ms  Orbax {theirs * 1e3:7.1f} ms  "
        f"ratio {ours / theirs:4.2f}  written {statistics.median(written['ours']):5.2f} s  "
        f"Orbax {statistics.median(written['orbax']):5.2f} s  restored {restored:5.2f} s"
    )


if __name__ == "__main__":
    for size in [int(word) for word in sys.argv[1:]] or [100, 400]:
        for one in UPDATES:
            measure(one, size)
