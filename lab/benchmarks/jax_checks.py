"""What the checks of a training job cost, and whether they ever raise a false alarm, on virtual chips.

    python lab/benchmarks/jax_checks.py                        # the time of a step, and of digests of its parameters
    python lab/benchmarks/jax_checks.py --tokens 1024 --json
    python lab/benchmarks/jax_checks.py clean --steps 100000   # so many steps: nothing may be found

A step and the digests of its parameters are timed in turn, several rounds, and medians are compared. All
chips share this machine's cores, so that processor time is what all of them work together; other programs on the
machine disturb it less than the time on the clock.

Digests cost as much per parameter whatever the batch, and computing costs as much per parameter and token: their share
falls with the tokens per chip.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

DIGESTS_LIMIT = 0.01
"""Share of a step that digests may cost."""


def make_layers(width: int, depth: int) -> list[Any]:
    """Return the weights of a stack of dense layers."""
    import jax

    keys = jax.random.split(jax.random.key(0), depth)
    return [jax.random.normal(key, (width, width)) / width**0.5 for key in keys]


def loss(params: Any, batch: Any) -> Any:
    """Apply the layers: per token two operations per weight forwards, and twice that backwards."""
    import jax.numpy as jnp

    hidden = batch
    for layer in params:
        hidden = jnp.tanh(hidden @ layer)
    return jnp.mean((hidden - batch) ** 2)


def measure(shape: str, hole: str, planner: str, width: int, depth: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Time both in turn; return medians, in seconds of processor time of all chips together."""
    import jax
    import jax.numpy as jnp
    import optax

    import meshmend as mm
    import meshmend.jax as mmj
    from meshmend.jax.checks.digests import replica_digests

    fabric = mmj.discover(shape=shape, failed=[hole] if hole else [])
    program = mmj.install(mm.plan(fabric.mesh, planner), fabric)
    params = jax.device_put(make_layers(width, depth), fabric.sharding())
    rows = jax.random.normal(jax.random.key(1), (fabric.n_chips * tokens, width), jnp.float32)
    batch = jax.device_put(rows, fabric.sharding("chip"))
    optimizer = optax.sgd(1e-3)
    training = mmj.train_step(loss, optimizer, fabric)
    state = jax.jit(training.init)(params, program)
    step = jax.jit(training.step).lower(params, state, batch, program).compile()
    digest = jax.jit(replica_digests, static_argnums=2).lower(params, program, fabric).compile()
    what: dict[str, Callable[[], Any]] = {
        "step": lambda: step(params, state, batch, program)[2],
        "digests": lambda: digest(params, program),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in what}
    for number in range(rounds + 1):
        for name, run in what.items():
            begun = time.perf_counter(), time.process_time()
            jax.block_until_ready(run())
            if number:  # the first round warms up
                times[name].append((time.perf_counter() - begun[0], time.process_time() - begun[1]))
    busy = {name: median(cpu for _, cpu in found) for name, found in times.items()}
    n_params = width * width * depth
    return {
        "mesh": str(fabric.mesh),
        "chips": fabric.n_chips,
        "program": repr(program),
        "parameters": n_params,
        "tokens_per_chip": tokens,
        "rounds": rounds,
        "processor_s": busy,
        "wall_s": {name: median(wall for wall, _ in found) for name, found in times.items()},
        "digests_share": busy["digests"] / busy["step"],
        "digests_ns_per_parameter": busy["digests"] / (fabric.n_chips * n_params) * 1e9,
    }


def print_measured(facts: dict[str, Any], every: int) -> None:
    print(
        f"\n{facts['mesh']}: {facts['chips']} CPU devices, {facts['parameters'] / 1e6:.2f} M parameters, "
        f"{facts['tokens_per_chip']} tokens per chip; {facts['program']}"
    )
    print(f"{'':20}{'processor s':>12}{'wall s':>9}{'share of a step':>24}")
    for name, busy in facts["processor_s"].items():
        share = busy / facts["processor_s"]["step"]
        print(f"{name:20}{busy:12.3f}{facts['wall_s'][name]:9.3f}{share:24.2%}")
    print(f"\nDigests every {every} steps: {facts['digests_share'] / every:.3%} of a step. Limit {DIGESTS_LIMIT:.0%}.")


def run_clean(shape: str, planner: str, steps: int, every: int) -> dict[str, Any]:
    """Train a tiny model, compare the digests of its replicas every so many steps, and count what is found.

    Weights and data have magnitudes from 1e-30 to 1e30, in float32 and bfloat16, so that sums round in all ways,
    underflow and overflow.
    """
    import jax
    import jax.numpy as jnp
    import optax
    from jax import lax

    import meshmend as mm
    import meshmend.jax as mmj
    from meshmend.jax.checks.digests import compare_replicas, replica_digests

    fabric = mmj.discover(shape=shape)
    program = mmj.install(mm.plan(fabric.mesh, planner), fabric)
    n_chips = fabric.n_chips

    def noisy(params: Any, batch: Any) -> Any:
        """Have gradients of all magnitudes: those of the batch, as they are."""
        return sum(jnp.sum(params[name].astype(jnp.float32) * jnp.mean(batch[name], axis=0)) for name in params)

    # Sums travel in the dtypes of the weights.
    training = mmj.train_step(noisy, optax.sgd(1e-4), fabric, accumulate_dtype=None)

    def draw(key: Any) -> Any:
        sizes, signs = jax.random.split(key)
        powers = jax.random.uniform(sizes, (n_chips, 48), minval=-30.0, maxval=30.0)
        # Half of the places have one magnitude on all chips, so that sums cancel and carry.
        powers = powers.at[:, :24].set(powers[:1, :24] + jax.random.uniform(signs, (n_chips, 24)))
        values = jax.random.normal(signs, (n_chips, 48)) * 10.0**powers
        return {"narrow": values[:, ::2], "wide": values[:, 1::2]}

    def train(params: Any, state: Any, first: Any, program: Any) -> Any:
        def one(held: Any, number: Any) -> tuple[Any, None]:
            params, state = held
            batch = draw(jax.random.fold_in(jax.random.key(0), number))
            new, state, _ = training.step(params, state, batch, program)
            # What has overflowed is replaced, or every step after it would be of no use.
            params = jax.tree.map(lambda x, old: jnp.where(jnp.abs(x) < 1e30, x, old), new, params)
            return (params, state), None

        held, _ = lax.scan(one, (params, state), first + jnp.arange(every))
        return *held, replica_digests(held[0], program, fabric)

    weights = {"narrow": jnp.ones(24, jnp.bfloat16), "wide": jnp.ones(24)}
    params = jax.device_put(weights, fabric.sharding())
    state = jax.jit(training.init)(params, program)
    compiled = jax.jit(train)
    alarms: list[str] = []
    begun = time.perf_counter()
    for first in range(0, steps, every):
        params, state, digests = compiled(params, state, jnp.int32(first), program)
        alarms += [str(one) for one in compare_replicas(digests, params, fabric)]
    return {
        "chips": n_chips,
        "steps": -(-steps // every) * every,
        "digests": -(-steps // every),
        "alarms": alarms,
        "seconds": time.perf_counter() - begun,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["cost", "clean"], default="cost")
    parser.add_argument("--shape", help="by default 4x4 (cost) or 2x2 (clean)")
    parser.add_argument("--hole", default="2x2@0,0", help='cost: the failed chips, "" for none')
    parser.add_argument("--planner", default="hamiltonian")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192, help="rows of the batch per chip")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--every", type=int, default=100, help="steps between digests")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    shape = options.shape or {"cost": "4x4", "clean": "2x2"}[options.what]
    rows, columns = map(int, shape.split("x"))
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={rows * columns}"
    if options.what == "clean":
        facts = run_clean(shape, options.planner, options.steps, options.every)
        found = f"{len(facts['alarms'])} false alarms: {facts['alarms'][:5]}" if facts["alarms"] else "no alarm"
        text = (
            f"{facts['steps']:,} steps on {facts['chips']} chips, {facts['digests']:,} comparisons "
            f"of digests: {found}, in {facts['seconds']:.0f} s."
        )
        print(json.dumps(facts, indent=2) if options.json else text)
        raise SystemExit(bool(facts["alarms"]))
    facts = measure(shape, options.hole, options.planner, options.width, options.depth, options.tokens, options.rounds)
    print(json.dumps(facts, indent=2)) if options.json else print_measured(facts, options.every)


if __name__ == "__main__":
    main()
