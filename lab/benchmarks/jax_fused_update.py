"""A train step with a fused update, beside an all-reduce with a replicated update and beside two phases, on CPU
devices.

    python lab/benchmarks/jax_fused_update.py                          # AdamW on 60 of 64 chips
    python lab/benchmarks/jax_fused_update.py --optimizer clipped --json
    python lab/benchmarks/jax_fused_update.py --topology v6e:16x16 --hole 4x2@6,8 --megabytes 100  # compiled for TPUs

All are timed in turn, several rounds, best of each, so that a busy machine slows all of them alike. All devices share
this machine's cores, so that work which every chip does costs as much here as all chips' work together.

For a TPU slice, steps of all kinds are compiled by the real compiler (libtpu), and the memory that they need is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

LIMIT = 1.5
"""Times the step with an all-reduce and a replicated update."""


def optimizer_named(name: str) -> Any:
    """Return one of the optimizers. "clipped" has a limit that is never reached, "clipping" one that always is."""
    import optax

    import meshmend.jax as mmj

    return {
        "adamw": optax.adamw(1e-3),
        "momentum": optax.sgd(1e-3, momentum=0.9),
        "clipped": optax.chain(mmj.clip_by_global_norm(1e9), optax.adamw(1e-3)),
        "clipping": optax.chain(mmj.clip_by_global_norm(1e-9), optax.adamw(1e-3)),
    }[name]


def loss(weights: Any, batch: Any) -> Any:
    """Have a gradient for every weight, at little cost."""
    import jax.numpy as jnp

    return jnp.mean(batch) * jnp.sum(weights**2)


def measure(shape: str, hole: str, chunks: int, megabytes: float, rounds: int, optimizer: str) -> dict[str, Any]:
    """Time a step of each kind on one mesh."""
    import jax
    import jax.numpy as jnp

    import meshmend as mm
    import meshmend.jax as mmj

    fabric = mmj.discover(shape=shape, failed=[hole])
    schedule = mm.plan(fabric.mesh, "weave", chunks=chunks, collective="all-reduce-with-update")
    chosen = optimizer_named(optimizer)
    size = max(1, round(megabytes * 1e6 / 4))

    training = mmj.train_step(loss, chosen, fabric)
    batch = jnp.ones((fabric.mesh.n_chips, 1))
    runs: dict[str, Any] = {}
    for name, update in (
        ("all-reduce, replicated update", "replicated"),
        ("two phases, sharded update", "two-phase"),
        ("fused update", "fused"),
    ):
        program = mmj.install(schedule, fabric, update=update)  # type: ignore[arg-type]
        weights = jax.device_put(jnp.ones(size), fabric.sharding())
        state = jax.jit(training.init)(weights, program)
        on_one = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
        step = jax.jit(training.step, donate_argnums=(0, 1)).lower(weights, state, batch, program).compile()
        weights, state, _ = step(weights, state, batch, program)
        runs[name] = [step, program, weights, state, on_one, float("inf")]
    for _ in range(rounds):
        for run in runs.values():
            step, program, weights, state, _, best = run
            started = time.perf_counter()
            weights, state, _ = jax.block_until_ready(step(weights, state, batch, program))
            run[2], run[3], run[5] = weights, state, min(best, time.perf_counter() - started)
    replicated = runs["all-reduce, replicated update"][5]
    return {
        "mesh": str(fabric.mesh),
        "chips": fabric.mesh.n_chips,
        "chunks": chunks,
        "steps": schedule.n_steps,
        "megabytes": size * 4 / 1e6,
        "optimizer": optimizer,
        "runs": [
            {"name": name, "seconds": best, "times_replicated": best / replicated, "state_bytes": on_one}
            for name, (*_, on_one, best) in runs.items()
        ],
    }


def measure_compiled(topology: str, hole: str, cores: int | None, megabytes: float, optimizer: str) -> dict[str, Any]:
    """Compile both kinds of step for a slice, by one plan, and return bytes per device."""
    import jax
    import jax.numpy as jnp

    import meshmend as mm
    import meshmend.jax as mmj
    from meshmend.jax.compile.for_topology import slice_fabric
    from meshmend.jax.engine.program import abstract_program

    fabric = slice_fabric(topology, failed=[hole], wrap=False, cores=cores)
    schedule = mm.plan(
        fabric.mesh, "weave", chunks=2 * fabric.mesh.n_chips, collective="all-reduce-with-update", verify=False
    )
    # Whole tiles per chunk: then the weights are summed where they lie.
    n_tiles = schedule.total_chunks * int(fabric.jax_mesh.size) // fabric.mesh.n_chips
    size = max(1, round(megabytes * 1e6 / (4 * 1024 * n_tiles))) * 1024 * n_tiles
    training = mmj.train_step(loss, optimizer_named(optimizer), fabric)
    weights = jax.ShapeDtypeStruct((size,), jnp.float32, sharding=fabric.sharding())
    batch = jax.ShapeDtypeStruct((int(fabric.jax_mesh.size), 1), jnp.float32, sharding=fabric.sharding(fabric.axes))
    runs = []
    for name, update in (("all-reduce, replicated update", "replicated"), ("fused update", "fused")):
        program = abstract_program(schedule, fabric, update=update)  # type: ignore[arg-type]
        arrays = fabric.sharding() if update == "replicated" else fabric.sharding(fabric.axes)
        state = jax.tree.map(
            lambda x, arrays=arrays: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=arrays if x.ndim else fabric.sharding()
            ),
            jax.eval_shape(training.init, weights, program),
        )
        lowered = jax.jit(training.step, donate_argnums=(0, 1)).lower(weights, state, batch, program)
        compiled: Any = lowered.compile(compiler_options=dict(fabric.compiler_options))
        memory = compiled.memory_analysis()
        runs.append(
            {
                "name": name,
                "argument_bytes": memory.argument_size_in_bytes,
                "temporary_bytes": memory.temp_size_in_bytes,
                "aliased_bytes": memory.alias_size_in_bytes,
            }
        )
    return {
        "topology": topology,
        "chips": fabric.mesh.n_chips,
        "cores_per_chip": int(fabric.jax_mesh.size) // fabric.mesh.n_chips,
        "chunks": schedule.total_chunks,
        "payload_bytes": 4 * size,
        "optimizer": optimizer,
        "runs": runs,
    }


def print_compiled(facts: dict[str, Any]) -> None:
    print(
        f"\n{facts['topology']}, {facts['chips']} chips of {facts['cores_per_chip']} cores: {facts['optimizer']}, "
        f"{facts['payload_bytes'] / 1e6:.1f} MB of weights in {facts['chunks']} chunks; MB per device"
    )
    print(f"{'':32}{'arguments':>11}{'in place':>10}{'temporaries':>13}")
    for run in facts["runs"]:
        print(
            f"{run['name']:32}{run['argument_bytes'] / 1e6:11.1f}{run['aliased_bytes'] / 1e6:10.1f}"
            f"{run['temporary_bytes'] / 1e6:13.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8x8")
    parser.add_argument("--hole", default="2x2@2,2")
    parser.add_argument("--chunks", type=int, default=240)
    parser.add_argument("--megabytes", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--optimizer", choices=["adamw", "momentum", "clipped", "clipping"], default="adamw")
    parser.add_argument("--topology", help="compile for this TPU slice instead, as in v6e:16x16")
    parser.add_argument("--cores", type=int, help="use so many of a TPU chip's cores; by default all")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.topology:
        os.environ["JAX_PLATFORMS"] = "cpu"
        facts = measure_compiled(options.topology, options.hole, options.cores, options.megabytes, options.optimizer)
        print(json.dumps(facts, indent=2)) if options.json else print_compiled(facts)
        return
    rows, columns = map(int, options.shape.split("x"))
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={rows * columns}"
    facts = measure(options.shape, options.hole, options.chunks, options.megabytes, options.rounds, options.optimizer)
    if options.json:
        print(json.dumps(facts, indent=2))
        return
    print(
        f"\n{facts['mesh']}: {facts['chips']} CPU devices, {facts['megabytes']:.1f} MB of weights in {facts['chunks']} "
        f"chunks, {facts['steps']} steps, {facts['optimizer']}"
    )
    print(f"{'':32}{'ms':>8}{'× replicated':>14}{'optimizer KB per chip':>24}")
    for run in facts["runs"]:
        print(
            f"{run['name']:32}{run['seconds'] * 1e3:8.0f}{run['times_replicated']:14.2f}"
            f"{run['state_bytes'] / 1e3:24.1f}"
        )
    print(f"\nLimit: the fused update {LIMIT} × the all-reduce with a replicated update.")


if __name__ == "__main__":
    main()
