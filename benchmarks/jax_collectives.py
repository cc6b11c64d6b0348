"""The JAX engine compared with a bare ring of `lax.ppermute` and with `lax.psum`, on virtual CPU devices.

    python benchmarks/jax_collectives.py                     # 2x4 and 4x4 chips, 64 MB
    python benchmarks/jax_collectives.py --shape 4x4 --megabytes 8 --json

All are timed in turn, several rounds, best of each, so that a busy machine slows all of them alike. Idle lanes cost a
copy on CPU; on a TPU the lanes run side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SHAPES = ("2x4", "4x4")
RING_LIMIT = 1.3
TREES_LIMIT = 2.5


def measure(shape: str, megabytes: float, rounds: int) -> dict[str, Any]:
    """Time everything on one mesh, in this process."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.sharding import PartitionSpec

    import meshmend as mm
    import meshmend.jax as mmj
    from meshmend.planning import PLANNERS

    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from standins import one_way_ring, tree_schedule

    fabric = mmj.discover(shape=shape)
    n = fabric.mesh.n_chips
    schedules = {
        "engine: one-way ring": one_way_ring(fabric.mesh),
        "engine: hamiltonian": mm.plan(fabric.mesh, "hamiltonian"),
        "engine: row-pairs": mm.plan(fabric.mesh, "row-pairs"),
        "engine: two-color": mm.plan(fabric.mesh, "two-color"),
    }
    if "weave" in PLANNERS:
        schedules["engine: weave"] = mm.plan(fabric.mesh, "weave")
    else:
        schedules["engine: trees"] = tree_schedule(fabric.mesh, chunks=256)
    step = int(np.lcm.reduce([n, *(schedule.total_chunks for schedule in schedules.values())]))
    size = max(1, round(megabytes * 1e6 / 4 / step)) * step
    payload = jax.jit(
        lambda: (jnp.arange(size) % 7)[None] + jnp.arange(n, dtype=jnp.float32)[:, None],
        out_shardings=fabric.sharding("chip"),
    )()
    expected = np.asarray(payload).sum(axis=0)

    def bare_ring(x: jax.Array) -> Any:
        held, me = x.reshape(n, -1), lax.axis_index("chip")
        onward = [(i, (i + 1) % n) for i in range(n)]

        def reduce_scatter(t: int, held: jax.Array) -> Any:
            arrived = lax.ppermute(lax.dynamic_index_in_dim(held, (me - t) % n, 0, keepdims=False), "chip", onward)
            at = (me - t - 1) % n
            total = lax.dynamic_index_in_dim(held, at, 0, keepdims=False) + arrived
            return lax.dynamic_update_index_in_dim(held, total, at, 0)

        def all_gather(t: int, held: jax.Array) -> Any:
            arrived = lax.ppermute(lax.dynamic_index_in_dim(held, (me - t + 1) % n, 0, keepdims=False), "chip", onward)
            return lax.dynamic_update_index_in_dim(held, arrived, (me - t) % n, 0)

        held = lax.fori_loop(0, n - 1, reduce_scatter, held)
        return lax.fori_loop(0, n - 1, all_gather, held).reshape(x.shape)

    spec = PartitionSpec("chip")

    def mapped(function: Any, n_arguments: int) -> Any:
        return jax.jit(
            jax.shard_map(
                function, mesh=fabric.jax_mesh, in_specs=(spec,) * n_arguments, out_specs=spec, check_vma=False
            )
        )

    calls: dict[str, Any] = {
        "lax.psum": (mapped(lambda x: lax.psum(x, "chip"), 1), ()),
        "bare ring of ppermute": (mapped(bare_ring, 1), ()),
    }
    for name, schedule in schedules.items():
        calls[name] = (mapped(mmj.all_reduce, 2), (mmj.install(schedule, fabric),))
    best = {}
    temporaries = {}
    for name, (call, more) in calls.items():
        result = np.asarray(call(payload, *more))
        if not (result == expected).all():
            raise AssertionError(f"{name} gives a wrong sum")
        best[name] = float("inf")
        temporaries[name] = call.lower(payload, *more).compile().memory_analysis().temp_size_in_bytes
    for _ in range(rounds):
        for name, (call, more) in calls.items():
            started = time.perf_counter()
            call(payload, *more).block_until_ready()
            best[name] = min(best[name], time.perf_counter() - started)
    ring = best["bare ring of ppermute"]
    return {
        "shape": shape,
        "megabytes": size * 4 / 1e6,
        "calls": [
            {
                "name": name,
                "seconds": seconds,
                "times_bare_ring": seconds / ring,
                "times_psum": seconds / best["lax.psum"],
                "temporary_megabytes": temporaries[name] / 1e6,
            }
            for name, seconds in best.items()
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help=f"chips, as in 4x4; by default {' and '.join(SHAPES)}")
    parser.add_argument("--megabytes", type=float, default=64.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(options.shape[0], options.megabytes, options.rounds)))
        return
    found = []
    for shape in options.shape or SHAPES:
        # JAX takes its device count from the environment, once per process.
        rows, columns = map(int, shape.split("x"))
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={rows * columns}",
        }
        command = [sys.executable, __file__, "--here", "--shape", shape]
        command += ["--megabytes", str(options.megabytes), "--rounds", str(options.rounds)]
        out = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
        found.append(json.loads(out))
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for facts in found:
        print(f"\n{facts['shape']} CPU devices, {facts['megabytes']:.1f} MB each")
        print(f"{'':24}{'ms':>8}{'× bare ring':>13}{'× psum':>9}{'temporaries MB':>16}")
        for call in facts["calls"]:
            print(
                f"{call['name']:24}{call['seconds'] * 1e3:8.0f}{call['times_bare_ring']:13.2f}"
                f"{call['times_psum']:9.2f}{call['temporary_megabytes']:16.1f}"
            )
    print(f"\nLimits: a ring schedule {RING_LIMIT} × the bare ring, weave {TREES_LIMIT} ×.")


if __name__ == "__main__":
    main()
