"""Small jobs of one process whose keepers can be started, stopped and started again."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshmend as mm
import meshmend.jax as mmj
from meshmend.jax import restart
from meshmend.jax.restart.elements import StateLayout, vectors_from_leaves
from meshmend.jax.restart.launch import Launch
from meshmend.jax.restart.notices import Notices
from meshmend.jax.restart.session import Session
from meshmend.jax.restart.timeline import Timeline

WEIGHTS = {"in": np.arange(12, dtype=np.float32).reshape(3, 4), "out": 100 + np.arange(8, dtype=np.float32)}


@cache
def machine(shape: str, sharded: bool) -> tuple[mmj.Fabric, mm.Schedule, Any]:
    n_devices = int(np.prod([int(n) for n in shape.split("x")]))
    fabric = mmj.discover(jax.devices()[:n_devices], shape=shape)
    schedule = mm.plan(fabric.mesh, "hamiltonian")
    return fabric, schedule, (mmj.install_halves if sharded else mmj.install)(schedule, fabric)


def begin(weights: Any, optimizer: Any, shape: str, sharded: bool) -> tuple[Any, Any]:
    """What a new job starts with: (params, state)."""
    fabric, _, program = machine(shape, sharded)
    params = restart.place(weights, fabric)
    return params, jax.jit(mmj.train_step(_loss, optimizer, fabric).init)(params, program)


@cache
def fresh(shape: str, sharded: bool) -> tuple[Any, Any]:
    return begin(WEIGHTS, optax.adam(0.1), shape, sharded)


class Started:
    """A job that has just been started: nothing is restored yet."""

    def __init__(
        self,
        weights: Any = None,
        optimizer: Any = None,
        *,
        sharded: bool = False,
        job: str = "job",
        shape: str = "2x2",
        **options: Any,
    ) -> None:
        self.fabric, self.schedule, self.program = machine(shape, sharded)
        if weights is None and optimizer is None:
            self.params, self.state = fresh(shape, sharded)
        else:
            self.params, self.state = begin(weights or WEIGHTS, optimizer or optax.adam(0.1), shape, sharded)
        launch = Launch("127.0.0.1:1", 1, 0, job=job)
        self.session = Session(self.fabric, launch, None, (0,), Notices(0, 1), Timeline(None))
        self.keeper = restart.Keeper(self.session, self.schedule, self.program, **options)

    def restore(self) -> restart.Resumed:
        return self.keeper.restore(self.params, self.state, extra=["start"])

    def values(self, step: int) -> tuple[Any, Any]:
        """A state that belongs to a step and to no other: whole numbers, so that all of them are exact."""
        leaves, tree = jax.tree.flatten((self.params, self.state))
        new = [
            jax.device_put(
                (np.arange(leaf.size).reshape(leaf.shape) + 1000 * step + i).astype(leaf.dtype), leaf.sharding
            )
            for i, leaf in enumerate(leaves)
        ]
        params, state = jax.tree.unflatten(tree, new)
        return params, state

    def keep(self, *steps: int) -> None:
        for step in steps:
            self.keeper.keep(step, *self.values(step), extra=["after", step])

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.session.timeline.events if event["event"] == name]


def _loss(params: Any, batch: Any) -> Any:
    return sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(params)) * jnp.mean(batch)


def assert_is_step(job: Started, found: restart.Resumed, step: int) -> None:
    """What was found is what `keep` was given at that step, bit by bit."""
    assert found.step == step
    assert found.extra == ["after", step]
    assert elements(job, (found.params, found.state)) == elements(job, job.values(step))


def elements(job: Started, tree: Any) -> dict[str, bytes]:
    """All elements of a state, without the padding of shards: that is no part of it."""
    layout = StateLayout.of(job.params, job.state, job.program, job.schedule, job.fabric)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    vectors = vectors_from_leaves(layout.outline, layout.is_sharded, leaves)
    return {name: vector.tobytes() for name, vector in vectors.items()}


def arrays_on_disk(disk: Path, step: int) -> list[Path]:
    """The files that hold a checkpoint's values, largest first."""
    found = [path for path in (disk / str(step)).rglob("*") if path.is_file() and path.parent.name == "d"]
    return sorted(found, key=lambda path: -path.stat().st_size)
