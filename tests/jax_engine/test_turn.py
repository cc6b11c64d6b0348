"""A sharded update within one all-reduce, against the same in two phases and against NumPy."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.typing import NDArray

import meshmend as mm
import meshmend.jax as mmj
from meshmend.jax.state.layout import StateLayout, vectors_from_leaves

TURN = "all-reduce-with-turn"
EIGHT = ("3x3", "1,1")
SIXTY = ("8x8", "2x2@2,2")
N_STEPS = 4
LIMIT = 2000.0
"""Between the norms of the second step's gradients and of the others'."""

Params = dict[str, jax.Array]


@cache
def fabric_of(shape: str, failed: str) -> mmj.Fabric:
    mesh = mm.Mesh(shape, failed=[failed])
    return mmj.discover(jax.devices()[: mesh.size], shape=mesh.shape, failed=mesh.holes)


@cache
def plan_of(shape: str, failed: str, planner: str, **more: Any) -> mm.Schedule:
    return mm.plan(fabric_of(shape, failed).mesh, planner, collective=TURN, **more)


def make_params(dtype: Any = jnp.float32) -> Params:
    rng = np.random.default_rng(0)
    whole = {"w": rng.integers(-8, 9, (9, 11)), "b": rng.integers(-8, 9, (7,)), "scale": np.array(1)}
    return {name: jnp.asarray(values, dtype) for name, values in whole.items()} | {"none": jnp.zeros((0, 3), dtype)}


def batches(n_devices: int) -> list[NDArray[np.float32]]:
    """Whole numbers whose means over the examples are whole; the second step's are a hundred times the others'."""
    rng = np.random.default_rng(1)
    rows = 2 * n_devices
    found = [rng.integers(-4, 5, (rows, 3)).astype(np.float32) * rows for _ in range(N_STEPS)]
    found[1] *= 100
    return found


def coefficients(params: Any) -> Any:
    return np.arange(params["w"].size).reshape(params["w"].shape) % 5


def loss(params: Params, batch: Any) -> Any:
    """Linear in each weight, with coefficients from the batch: the gradients are whole, and known to NumPy too."""
    x, y, z = batch.mean(axis=0)
    return x * jnp.sum(params["w"] * coefficients(params)) + y * jnp.sum(params["b"]) + z * params["scale"]


def gradients(params: Any, batch: NDArray[np.float32]) -> dict[str, NDArray[np.float64]]:
    x, y, z = batch.astype(np.float64).mean(axis=0)
    return {"w": x * coefficients(params), "b": np.full(7, y), "scale": np.array(z), "none": np.zeros((0, 3))}


def train(fabric: mmj.Fabric, optimizer: Any, program: Any, params: Any, **more: Any) -> tuple[Any, Any, list[Any]]:
    training = mmj.train_step(loss, optimizer, fabric, **more)
    state = jax.jit(training.init)(params, program)
    step = jax.jit(training.step)
    losses = []
    for batch in batches(int(fabric.jax_mesh.size)):
        params, state, value = step(params, state, batch, program)
        losses.append(value)
    return params, state, losses


def vectors(fabric: mmj.Fabric, optimizer: Any, program: Any, params: Params, state: Any) -> Any:
    """Return parameters and state as a checkpoint has them: without padding, and independent of the mesh."""
    layout = StateLayout.of(mmj.train_step(loss, optimizer, fabric), program, params)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves((params, state))]
    return vectors_from_leaves(layout.outline, layout.is_sharded, leaves)


def check_same(got: Any, wanted: Any, tolerance: float) -> None:
    assert str(jax.tree.structure(got)) == str(jax.tree.structure(wanted))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=jax.tree_util.keystr(path))


def check_against_two_phases(where: tuple[str, str], optimizer: Any, tolerance: float, **plan: Any) -> None:
    fabric, schedule = fabric_of(*where), plan_of(*where, **plan)
    found = []
    for program in (mmj.install_pair(schedule, fabric), mmj.install_turn(schedule, fabric)):
        params, state, losses = train(fabric, optimizer, program, make_params())
        assert all(
            np.ptp([np.asarray(x.data) for x in leaf.addressable_shards], axis=0).max(initial=0) == 0
            for leaf in jax.tree.leaves(params)
        ), "chips differ"
        found.append((vectors(fabric, optimizer, program, params, state), losses))
    check_same(found[1], found[0], tolerance)


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


OPTIMIZERS = {
    "momentum": (optax.sgd(0.5, momentum=0.5), 0.0),
    "adamw, a mask": (
        optax.chain(optax.scale_by_adam(), mmj.add_decayed_weights(0.1, matrices), optax.scale_by_learning_rate(1e-2)),
        1e-6,
    ),
    "clipped adamw": (optax.chain(mmj.clip_by_global_norm(LIMIT), optax.adamw(1e-2)), 1e-6),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_turn_gives_what_two_phases_give(name: str) -> None:
    check_against_two_phases(EIGHT, *OPTIMIZERS[name], planner="weave", chunks=19)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_turn_gives_what_two_phases_give_on_60_chips(name: str) -> None:
    check_against_two_phases(SIXTY, *OPTIMIZERS[name], planner="weave", chunks=120)


def test_clipping_at_the_turn_is_clipping_first() -> None:
    """SGD with a clipped second step, in NumPy: the factor is a power of two, so that all is exact."""
    fabric = fabric_of(*EIGHT)
    params = make_params()
    steps = [gradients(params, batch) for batch in batches(8)]
    norms = [np.sqrt(sum(np.sum(g**2) for g in step.values())) for step in steps]
    limit = norms[1] / 64
    assert [bool(norm > limit) for norm in norms] == [False, True, False, False], "one step is clipped, others are not"
    optimizer = optax.chain(mmj.clip_by_global_norm(float(limit)), optax.sgd(0.5))
    got, *_ = train(fabric, optimizer, mmj.install_turn(plan_of(*EIGHT, "weave", chunks=19), fabric), params)
    for name, value in params.items():
        change = sum(step[name] * min(1.0, limit / norm) for step, norm in zip(steps, norms, strict=True))
        np.testing.assert_allclose(got[name], np.asarray(value) - 0.5 * change, rtol=1e-6, atol=1e-6)
