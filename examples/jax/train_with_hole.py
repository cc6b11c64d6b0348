"""Train a small language model on 8×8 chips of which a 2×2 board has failed, and compare with plain `lax.psum`.

    python examples/jax/train_with_hole.py                   # about a minute on two cores
    python examples/jax/train_with_hole.py --plot loss.png

The chips are virtual CPU devices. On a TPU leave out the environment and `shape`: `discover()` reads the devices'
coordinates, and what is missing among them is the hole (not yet tried on a TPU). The model is a one-layer
transformer that learns to write the licence of this project, letter by letter.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=64")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec

import meshmend as mm
import meshmend.jax as mmj

WIDTH, CONTEXT, BATCH_PER_CHIP = 32, 32, 2
TEXT = Path(__file__).parents[2] / "LICENSE"


def make_params(n_letters: int) -> dict[str, jax.Array]:
    """Return a transformer block between an embedding and its readout."""
    shapes = {
        "embed": (n_letters, WIDTH),
        "place": (CONTEXT, WIDTH),
        "qkv": (WIDTH, 3 * WIDTH),
        "mix": (WIDTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
        "read": (WIDTH, n_letters),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    scaled = {name: jax.random.normal(k, s) / s[0] ** 0.5 for k, (name, s) in zip(keys, shapes.items(), strict=True)}
    return scaled | {"embed": scaled["embed"] * 2, "bias": jnp.zeros(n_letters)}


def loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of the next letter."""
    letters, nexts = batch[:, :-1], batch[:, 1:]
    x = params["embed"][letters] + params["place"]
    q, k, v = jnp.split(_normed(x) @ params["qkv"], 3, axis=-1)
    scores = q @ jnp.swapaxes(k, 1, 2) / WIDTH**0.5
    scores = jnp.where(jnp.tri(CONTEXT, dtype=bool), scores, -jnp.inf)
    x = x + jax.nn.softmax(scores) @ v @ params["mix"]
    x = x + jax.nn.gelu(_normed(x) @ params["up"]) @ params["down"]
    logits = _normed(x) @ params["read"] + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, nexts).mean()


def _normed(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def make_batches(n_chips: int, n_steps: int) -> tuple[list[np.ndarray], int]:
    """Cut random pieces of text, a few per chip and step."""
    text = np.frombuffer(TEXT.read_bytes(), dtype=np.uint8)
    letters, text = np.unique(text, return_inverse=True)
    rng = np.random.default_rng(0)
    starts = rng.integers(0, len(text) - CONTEXT - 1, (n_steps, n_chips * BATCH_PER_CHIP, 1))
    return list(text[starts + np.arange(CONTEXT + 1)].astype(np.int32)), len(letters)


def train_with_psum(fabric: mmj.Fabric, optimizer: Any, params: Any, batches: list[np.ndarray]) -> list[float]:
    """Train the usual way."""
    none, by_chip = PartitionSpec(), PartitionSpec("chip")

    @jax.jit
    @partial(jax.shard_map, mesh=fabric.jax_mesh, in_specs=(none, none, by_chip), out_specs=none, check_vma=False)
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, gradients = lax.pmean(jax.value_and_grad(loss)(params, batch), "chip")
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    for batch in batches:
        params, state, value = step(params, state, batch)
        losses.append(float(value))
    return losses


def train_with_meshmend(
    fabric: mmj.Fabric, optimizer: Any, params: Any, batches: list[np.ndarray], program: mmj.Program
) -> list[float]:
    """Train over the plan's all-reduce, or over its pair with the update in between."""
    init, step = mmj.train_step(loss, optimizer, fabric)
    state = jax.jit(init)(params, program)
    # A copy, because the step donates the memory of the weights that it receives.
    params = jax.device_put(jax.tree.map(jnp.copy, params), fabric.sharding())
    step = jax.jit(step, donate_argnums=(0, 1))
    losses = []
    for batch in batches:
        params, state, value = step(params, state, batch, program)
        losses.append(float(value))
    return losses


def plot(losses: dict[str, list[float]], title: str, path: Path) -> None:
    """Draw the loss curves, and how far they are from the first one."""
    import matplotlib.pyplot as plt

    figure, (upper, lower) = plt.subplots(2, sharex=True, figsize=(7, 6), height_ratios=(2, 1), layout="constrained")
    reference = np.array(losses["lax.psum"])
    for number, (name, values) in enumerate(losses.items()):
        upper.plot(values, ("-", "--", ":")[number], color=f"C{number}", label=name, linewidth=2)
        if name != "lax.psum":
            lower.plot((np.array(values) / reference - 1) * 1e7, "ox"[number - 1], color=f"C{number}", markersize=4)
    upper.set(title=title, ylabel="loss (nats per letter)")
    lower.set(xlabel="step", ylabel="relative difference\nfrom psum, 1e-7")
    lower.axhline(0, color="C0", linewidth=1)
    upper.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train three times on the same batches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--planner", default="row-pairs")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()

    fabric = mmj.discover(shape="8x8", failed=["2x2@2,2"])
    schedule = mm.plan(fabric.mesh, options.planner)
    print(schedule)
    batches, n_letters = make_batches(fabric.mesh.n_chips, options.steps)
    params, optimizer = make_params(n_letters), optax.adamw(1e-2)
    runs = {
        "lax.psum": lambda: train_with_psum(fabric, optimizer, params, batches),
        "meshmend": lambda: train_with_meshmend(
            fabric, optimizer, params, batches, mmj.install(schedule, fabric)
        ),
        "meshmend, sharded update": lambda: train_with_meshmend(
            fabric, optimizer, params, batches, mmj.install(schedule, fabric, update="two-phase")
        ),
    }  # fmt: skip
    losses: dict[str, list[float]] = {}
    for name, run in runs.items():
        started = time.perf_counter()
        losses[name] = run()
        print(f"{name:26} loss {losses[name][0]:.4f} → {losses[name][-1]:.4f}  ({time.perf_counter() - started:.0f} s)")
    reference = np.array(losses["lax.psum"])
    worst = max(float(np.abs(np.array(values) / reference - 1).max()) for values in losses.values())
    print(f"largest relative difference from psum over {options.steps} steps: {worst:.1e}")
    print("The seconds compare nothing: on CPU devices psum is one sum in shared memory, and a plan many small copies.")
    if worst > 1e-3:
        raise SystemExit("The curves should agree to float32 rounding.")
    if options.plot:
        plot(losses, f"{fabric.mesh.n_chips} chips: {fabric.mesh}, {schedule.planner}", options.plot)
        print(f"drawn to {options.plot}")


if __name__ == "__main__":
    main()
