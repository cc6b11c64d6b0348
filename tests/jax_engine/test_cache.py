"""Compiled steps: a new hole compiles once, and the same hole again, in a new process, not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

CODE = """
import json, sys
import jax, jax.numpy as jnp, numpy as np, optax
import meshmend as mm, meshmend.jax as mmj

counts = {"compiled": 0, "from cache": 0}
def listen(event, **_):
    if event == "/jax/compilation_cache/cache_misses": counts["compiled"] += 1
    if event == "/jax/compilation_cache/cache_hits": counts["from cache"] += 1
jax.monitoring.register_event_listener(listen)
loss = lambda w, batch: jnp.mean((batch @ w) ** 2)
found = []
for hole in sys.argv[1:]:
    fabric = mmj.discover(shape="4x4", failed=[hole])
    program = mmj.install(mm.plan(fabric.mesh, "hamiltonian"), fabric)
    init, step = mmj.train_step(loss, optax.sgd(0.1), fabric)
    w = jax.device_put(np.ones((4, 2), np.float32), fabric.sharding())
    state = jax.jit(init)(w, program)
    batch = jax.device_put(np.ones((24, 4), np.float32), fabric.sharding("chip"))
    before = dict(counts)
    jitted = jax.jit(step)
    for _ in range(3):
        w, state, _ = jitted(w, state, batch, program)
    found.append({name: counts[name] - before[name] for name in counts})
print(json.dumps(found))
"""


def run(folder: Path, *holes: str) -> list[dict[str, int]]:
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=16",
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", CODE, *holes], env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, int]] = json.loads(done.stdout)
    return found


def test_a_new_hole_compiles_once_and_comes_from_the_cache_next_time(tmp_path: Path) -> None:
    once, fresh = {"compiled": 1, "from cache": 0}, {"compiled": 0, "from cache": 1}
    assert run(tmp_path, "2x2@0,0", "2x2@2,2") == [once, once]
    assert run(tmp_path, "2x2@2,2", "2x2@0,0") == [fresh, fresh]
