"""What recomputing gradients costs, on CPU devices: steps with a check every so many, beside steps without.

    python lab/benchmarks/jax_recompute.py                     # 12 of 16 chips, a check every 20 steps
    python lab/benchmarks/jax_recompute.py --every 200 --json

Rounds of `--every` steps, with reading their batches, are run in turn, without and with the check before the last of
them; the median of the ratios of neighbours counts. What is compared is CPU time: all devices share this machine's
cores, so that it is the work of all chips together, and a machine that is busy with other things does not count. A
check computes the gradients of one batch and reads half of one, so that 1/every of the time for those is what it should
cost; they are timed by themselves, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any


def loss(params: Any, batch: Any) -> Any:
    """Return one value per example, of a stack of dense layers."""
    import jax
    import jax.numpy as jnp

    x = batch
    for weights in params:
        x = jax.nn.gelu(x @ weights)
    return jnp.mean((x - batch) ** 2, axis=1)


def measure(shape: str, hole: str, width: int, layers: int, rows: int, every: int, rounds: int) -> dict[str, Any]:
    """Time steps with and without checks, in turn."""
    import jax
    import numpy as np
    import optax

    import meshmend as mm
    import meshmend.jax as mmj
    from meshmend.jax.checks.recompute import Part, Recompute
    from meshmend.jax.compile import compile_train_step
    from meshmend.jax.job.model import Model
    from meshmend.jax.state import put

    fabric = mmj.discover(shape=shape, failed=[hole] if hole else [])
    rng = np.random.default_rng(0)
    params: Any = [rng.normal(size=(width, width)).astype(np.float32) / width**0.5 for _ in range(layers)]
    model = Model(loss, optax.sgd(1e-3), params)
    # An epoch that grain shuffles quickly; a step uses few of its samples.
    data = rng.normal(size=(30_000, width)).astype(np.float32)
    feed = mmj.Feed(data, mmj.KeepPerChip(rows), threads=0, prefetch=0)
    batch = next(feed.batches(fabric))
    program = mmj.install(mm.plan(fabric.mesh, "auto"), fabric)
    compiled = compile_train_step(model.training(fabric), program, params, batch)
    recompute = Recompute(model.gradients, fabric, lambda fact: [fact], every=every)
    held = put(params, fabric, None)
    state = compiled.init(held)
    recompute.compile(held, None, batch)
    if recompute.check(every, held, None, batch):
        raise SystemExit("a clean check found something")

    batches = feed.batches(fabric)

    def run(checked: bool) -> float:
        nonlocal held, state
        started = time.process_time()
        for step in range(1, every + 1):
            batch = next(batches)
            if checked and step % every == 0 and recompute.check(step, held, None, batch):
                raise SystemExit("a clean check found something")
            held, state, _ = compiled.step(held, state, batch)
        jax.block_until_ready(held)
        return time.process_time() - started

    def gradients(params: Any, data: Any, weights: Any) -> Any:
        part = Part(data, weights, np.zeros((rows, 2), np.uint32))  # type: ignore[arg-type]
        return jax.tree.map(lambda x: x.sum()[None], model.gradients(params, None, part).gradients)

    spec, everywhere = jax.sharding.PartitionSpec(fabric.axes), jax.sharding.PartitionSpec()
    alone = jax.jit(
        jax.shard_map(
            gradients, mesh=fabric.jax_mesh, in_specs=(everywhere, spec, spec), out_specs=spec, check_vma=False
        )
    )
    jax.block_until_ready(alone(held, batch.data, batch.weights))
    run(checked=True)
    plain, both, only, reading = [], [], [], []
    for _ in range(rounds):
        plain.append(run(checked=False))
        both.append(run(checked=True))
        started = time.process_time()
        jax.block_until_ready([alone(held, batch.data, batch.weights) for _ in range(5)])
        only.append((time.process_time() - started) / 5)
        started = time.process_time()
        jax.block_until_ready(next(batches).data)
        reading.append(time.process_time() - started)
    ratio = statistics.median(checked / without for checked, without in zip(both, plain, strict=True))
    step_s, gradients_s, reading_s = (
        statistics.median(plain) / every,
        statistics.median(only),
        statistics.median(reading),
    )
    return {
        "mesh": str(fabric.mesh),
        "chips": fabric.mesh.n_chips,
        "parameters": layers * width**2,
        "examples_per_chip": rows,
        "every": every,
        "step_ms": 1e3 * step_s,
        "gradients_ms": 1e3 * gradients_s,
        "reading_ms": 1e3 * reading_s,
        "check_ms": 1e3 * (ratio - 1) * statistics.median(plain),
        "overhead": ratio - 1,
        "expected_overhead": (gradients_s + reading_s / 2) / step_s / every,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4x4")
    parser.add_argument("--hole", default="2x2@0,0")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=64, help="examples per chip")
    parser.add_argument("--every", type=int, default=20, help="steps from check to check")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    n_rows, n_columns = map(int, options.shape.split("x"))
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={n_rows * n_columns}"
    facts = measure(
        options.shape, options.hole, options.width, options.layers, options.rows, options.every, options.rounds
    )
    if options.json:
        print(json.dumps(facts, indent=2))
        return
    print(
        f"\n{facts['mesh']}: {facts['chips']} CPU devices, {facts['parameters']:,} parameters, "
        f"{facts['examples_per_chip']} examples per chip, a check every {facts['every']} steps"
    )
    print(
        f"CPU time of a step {facts['step_ms']:.1f} ms, of it gradients {facts['gradients_ms']:.1f} ms and reading "
        f"{facts['reading_ms']:.1f} ms; of a check {facts['check_ms']:.1f} ms"
    )
    print(f"overhead {facts['overhead']:.2%}, expected {facts['expected_overhead']:.2%}")


if __name__ == "__main__":
    main()
