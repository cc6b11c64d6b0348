"""A job's step against plain JAX, and FSDP's step against every planner's, measured in the same processes.

    meshmend run --local 4x6 --host 2x2 lab/benchmarks/jax_job_step.py  # the README's job against `pmean`
    python lab/benchmarks/jax_job_step.py --fsdp                        # 12 CPU devices: 4x4 minus 2x2

The first trains the README's model by `mmj.Job`, and then by a step that anybody would write with `jax.lax.pmean`.
The second runs a step with sharded parameters with the halves that a job plans, and with those of every planner.
"""

from __future__ import annotations

import argparse
import inspect
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS, FIRST = 40, 10
"""Steps of each, and how many of them are not counted."""


def against_pmean(shared: str) -> None:
    import jax
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import meshmend.jax as mmj

    job = mmj.Job(shared=shared, global_batch=256, compile_ahead=False)
    text = np.frombuffer(inspect.getsource(argparse).encode(), np.uint8)
    dataset = np.lib.stride_tricks.sliding_window_view(text, 9)
    shapes = {"embed": (256, 16), "hidden": (128, 128), "read": (128, 256)}
    rng = np.random.default_rng(0)
    start = {name: (rng.normal(size=shape) / shape[0] ** 0.5).astype(np.float32) for name, shape in shapes.items()}

    def loss(params: Any, batch: Any) -> Any:
        hidden = jax.nn.relu(params["embed"][batch[:, :-1]].reshape(len(batch), -1) @ params["hidden"])
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["read"], batch[:, -1])

    optimizer = optax.adamw(1e-2)
    times = [time.perf_counter() for _ in job.train(loss, optimizer, start, dataset, steps=STEPS)]
    ours = [after - before for before, after in zip(times[FIRST:], times[FIRST + 1 :], strict=False)]

    mesh = Mesh(np.array(jax.devices()), ("x",))
    n = len(jax.devices())
    batch_size = n * -(-256 // n)
    everywhere = NamedSharding(mesh, P())
    params = jax.device_put(start, everywhere)
    state = jax.jit(optimizer.init, out_shardings=everywhere)(params)

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(lambda weights: loss(weights, batch).mean())(params)
        updates, state = optimizer.update(jax.lax.pmean(gradients, "x"), state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(value, "x")

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("x")), out_specs=(P(), P(), P()), check_vma=False)
    run = jax.jit(mapped)
    times = []
    for number in range(STEPS):
        part = dataset[number * batch_size : (number + 1) * batch_size]
        batch = jax.make_array_from_callback(part.shape, NamedSharding(mesh, P("x")), part.__getitem__)
        params, state, value = run(params, state, batch)
        float(value.addressable_data(0))
        times.append(time.perf_counter())
    plain = [after - before for before, after in zip(times[FIRST:], times[FIRST + 1 :], strict=False)]
    if jax.process_index() == 0:
        mine, theirs = statistics.median(ours), statistics.median(plain)
        print(
            f"a step of the job: {mine * 1e3:.0f} ms; by plain JAX with pmean: {theirs * 1e3:.0f} ms; "
            f"ratio {mine / theirs:.2f} (medians of {len(ours)} steps)"
        )


def fsdp() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=16"
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import meshmend as mm
    import meshmend.jax as mmj
    from meshmend.errors import MeshmendError
    from meshmend.jax.train.plan import any_pair
    from meshmend.planning.auto import CHOICES

    fabric = mmj.discover(jax.devices()[:12], shape="4x4", failed=["2x2@0,0"])
    measured = mmj.measure(fabric)

    def make_ends(key: Any) -> Any:
        return {"read": jax.random.normal(key, (8, 64)) / 3, "out": jnp.ones(64) / 64}

    def make_layer(key: Any) -> Any:
        return {"w": jax.random.normal(key, (64, 64)) / 16}

    def loss(params: Any, batch: Any, pair: Any) -> Any:
        ends = mmj.fsdp.gather_params(params["ends"], pair)
        x = jnp.tanh(batch["x"] @ ends["read"])
        x = mmj.fsdp.scan_layers(lambda w, x: x + jnp.tanh(x @ w["w"]), params["layers"], x, pair)
        return (x @ ends["out"] - batch["y"]) ** 2

    def make_params(pair: Any) -> Any:
        keys = jax.random.split(jax.random.key(0), 9)
        layers = mmj.fsdp.init_sharded(make_layer, keys[1:], fabric, pair, stacked=True)
        return {"ends": mmj.fsdp.init_sharded(make_ends, keys[0], fabric, pair), "layers": layers}

    outline = jax.eval_shape(lambda: make_params(any_pair(fabric)))
    whole = mmj.plan(fabric, outline, update="fsdp", hardware=measured)
    pairs: dict[str, Any] = {"job": whole.install(fabric)}
    for planner in (kind.name for kind in CHOICES):
        try:
            made = mmj.plan(fabric, outline, update="fsdp", hardware=measured, planner=planner)
        except MeshmendError:
            continue
        pairs[planner] = made.install(fabric)
    by_hand = [
        mm.plan(fabric.mesh, "gather", chunks=fabric.n_chips, collective=half)
        for half in ("reduce-scatter", "all-gather")
    ]
    pairs["gather, a chunk per chip"] = mmj.install(
        None, fabric, scatter=by_hand[0], gather=by_hand[1], scalars=whole.scalars, update="two-phase"
    )
    x = np.random.default_rng(0).normal(size=(24, 8)).astype(np.float32)
    batch = {"x": x, "y": np.sin(x.sum(1))}
    steps = {}
    for name, pair in pairs.items():
        params = make_params(pair)
        train = mmj.fsdp.sharded_train_step(loss, optax.adam(1e-2), fabric, per_example=True)
        state = fabric.jit(train.init)(params, pair)
        step = fabric.jit(train.step)
        value = float(step(params, state, batch, pair)[2])
        steps[name] = (step, params, state, pair, value)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(9):
        for name, (step, params, state, pair, _) in steps.items():
            started = time.perf_counter()
            jax.block_until_ready(step(params, state, batch, pair))
            times[name].append(time.perf_counter() - started)
    best = min(min(one) for one in times.values())
    print(f"{'halves':26}{'steps':>12}{'best':>10}{'median':>10}{'× fastest':>11}{'loss':>9}")
    for name, (_, _, _, pair, value) in steps.items():
        took = times[name]
        print(
            f"{name:26}{f'{pair.n_steps} + {pair.gather.n_steps}':>12}{min(took) * 1e3:>7.1f} ms"
            f"{statistics.median(took) * 1e3:>7.1f} ms{min(took) / best:>11.2f}{value:>9.4f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fsdp", action="store_true", help="FSDP's step in this process")
    if parser.parse_args().fsdp:
        fsdp()
        return
    folder = os.environ.get("MESHMEND_SHARED") or str(Path(tempfile.gettempdir()) / "meshmend-job-step")
    against_pmean(folder)


if __name__ == "__main__":
    main()
