"""A small regression, the sessions of one process that train it, and plain optax on one device as the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import meshmend.jax as mmj
from meshmend.jax.session import Session, initialize_alone
from meshmend.launch.timeline import timeline_of

N_SAMPLES, BATCH = 100, 32
_rng = np.random.default_rng(3)
DATASET = {
    "x": _rng.normal(size=(N_SAMPLES, 6)).astype(np.float32),
    "y": _rng.normal(size=N_SAMPLES).astype(np.float32),
}
PARAMS: dict[str, Any] = {
    "w": _rng.normal(size=(6, 5)).astype(np.float32) / 2,
    "out": _rng.normal(size=5).astype(np.float32),
}
WHOLE, HOLED, ONE = "2x4", "4x4 minus 2x2@2,2", "1x1"


def alone(machine: str, timeline: Path | None = None) -> Session:
    """A session on a mesh, as in "4x4 minus 2x2@2,2"."""
    shape, _, failed = machine.partition(" minus ")
    n_devices = int(np.prod([int(n) for n in shape.split("x")]))
    fabric = mmj.discover(jax.devices()[:n_devices], shape=shape, failed=failed.split())
    return initialize_alone(fabric, timeline=timeline)


def job(shared: Path, machine: str = WHOLE, batch: Any = BATCH, **options: Any) -> mmj.Job:
    planner = "auto" if machine == ONE else "hamiltonian"
    session = alone(machine, timeline_of(shared, 0))
    return mmj.Job(shared, batch, session=session, **{"disk_every": 0, "planner": planner, **options})


def loss(params: Any, batch: Any) -> Any:
    return (jnp.tanh(batch["x"] @ params["w"]) @ params["out"] - batch["y"]) ** 2


def train(job: mmj.Job, steps: int, **options: Any) -> tuple[list[float], list[np.ndarray], Any]:
    """Losses, samples of each step, and the parameters at the end."""
    losses, samples = [], []
    given = {"loss": loss, "optimizer": optax.adam(0.02), "params": PARAMS, "dataset": DATASET} | options
    for step in job.train(**given, steps=steps):
        losses.append(step.loss)
        samples.append(step.batch.indices)
    return losses, samples, job.params


def plain_training(
    samples: Sequence[np.ndarray], loss: Any = loss, params: Any = PARAMS, optimizer: Any = None
) -> tuple[list[float], Any]:
    """The same batches on one device, with nothing but optax."""
    optimizer = optax.adam(0.02) if optimizer is None else optimizer
    state = optimizer.init(params)
    losses = []

    @jax.jit
    def update(params: Any, state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(lambda p: jnp.mean(loss(p, batch)))(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    for rows in samples:
        params, state, value = update(params, state, {name: array[rows] for name, array in DATASET.items()})
        losses.append(float(value))
    return losses, params


def assert_close(found: Any, expected: Any, rtol: float = 2e-6) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol), found, expected)


def assert_same_bits(found: Any, expected: Any) -> None:
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.asarray(mine).tobytes() == np.asarray(other).tobytes()


LAYERS = {"w": np.random.default_rng(5).normal(size=(3, 5, 5)).astype(np.float32) / 4}


ENDS = PARAMS | {"none": np.zeros((0, 4), np.float32)}
"""With an array that has no elements, as an unused part of a model has."""


def layer(w: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ w["w"])


def sharded_loss(params: Any, batch: Any, pair: mmj.Program) -> Any:
    ends = mmj.fsdp.gather_params(params["ends"], pair)
    x = mmj.fsdp.scan_layers(layer, params["layers"], jnp.tanh(batch["x"] @ ends["w"]), pair)
    return (x @ ends["out"] - batch["y"]) ** 2


def make(fabric: mmj.Fabric, pair: mmj.Program) -> Any:
    return {
        "ends": mmj.fsdp.shard_params(ENDS, fabric, pair),
        "layers": mmj.fsdp.shard_params(LAYERS, fabric, pair, stacked=True),
    }


FSDP: dict[str, Any] = {"loss": sharded_loss, "params": make, "update": "fsdp"}


SHARDINGS = {"w": P(None, "model"), "out": P("model")}


SPLIT: dict[str, Any] = {"w": np.concatenate([PARAMS["w"], PARAMS["w"][:, :3]], axis=1), "out": np.ones(8, np.float32)}
"""Parameters that divide by the chips of a tile."""
