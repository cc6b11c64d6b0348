from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshmend as mm
import meshmend.jax as mmj
from jax_engine import cases
from jax_engine.training_cases import BOTH, INSTALLED, Trained, chips_of, matrices, train, train_alone

HOLED = "row-pairs 8x8 - 2x2"
"""60 chips, of which twelve yellow ones own no chunk."""
STEPS = 6
TOLERANCE = 1e-5
"""Relative, in float32. A mean over 60 chips may differ by 60 roundings of 6e-8 between two orders of addition; the
losses are of order one, the network is smooth, and six steps let that grow a few times: 1e-5 leaves a factor three."""

Params = dict[str, jax.Array]


def make_params() -> Params:
    rng = np.random.default_rng(0)
    return {
        "w1": jnp.asarray(rng.normal(size=(5, 17)) / 2, jnp.float32),
        "b1": jnp.zeros(17),
        "w2": jnp.asarray(rng.normal(size=(17, 3)) / 4, jnp.float32),
        "scale": jnp.ones(()),
    }


def loss(params: Params, batch: Any) -> Any:
    x, y = batch
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((params["scale"] * (hidden @ params["w2"]) - y) ** 2)


def batches(n_devices: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(1)
    rows = 4 * n_devices
    xs = [rng.normal(size=(rows, 5)).astype(np.float32) for _ in range(STEPS)]
    return [(x, np.stack([np.sin(x[:, 0]), x[:, 1] * x[:, 2], x[:, 3]], axis=1)) for x in xs]


def train_on(name: str, optimizer: optax.GradientTransformation, kind: str, steps: int = STEPS, **more: Any) -> Any:
    """Train with the plan of a case."""
    fabric = cases.fabric_of(name)
    program = mmj.install(cases.schedule_of(name), fabric, update=INSTALLED[kind])
    given = batches(fabric.jax_mesh.devices.size)[:steps]
    return train(loss, make_params(), optimizer, fabric, kind, given, program=program, **more)


def one_device(optimizer: optax.GradientTransformation, n_devices: int) -> Trained:
    return train_alone(loss, make_params(), optimizer, batches(n_devices))


def check_same(got: Any, wanted: Any) -> None:
    np.testing.assert_allclose(got[0], wanted[0], rtol=TOLERANCE)
    for name, leaf in wanted[1].items():
        np.testing.assert_allclose(got[1][name], leaf, rtol=50 * TOLERANCE, atol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("row-pairs 4x4 - 2x2", optax.sgd(0.1, momentum=0.9)),
        pytest.param("trees 4x4", optax.adamw(1e-2, weight_decay=0.1), marks=pytest.mark.slow),
        pytest.param(HOLED, optax.adamw(1e-2, weight_decay=0.1), marks=pytest.mark.slow),
    ],
    ids=["momentum, 12 chips", "adamw, trees", "adamw, 60 chips"],
)
def test_training_gives_the_losses_of_one_device(name: str, optimizer: optax.GradientTransformation) -> None:
    wanted = one_device(optimizer, cases.fabric_of(name).jax_mesh.devices.size)
    assert wanted[0][-1] < 0.9 * wanted[0][0], "a run that learns nothing shows nothing"
    for kind in BOTH:
        check_same(train_on(name, optimizer, kind), wanted)


@pytest.mark.parametrize("kind", BOTH)
def test_the_mean_over_microbatches_is_rounded_once(kind: str) -> None:
    """15 gradients of bfloat16, of 3 microbatches on 5 chips, are added up in float32 and divided at the end."""
    rows = np.random.default_rng(0).integers(-99, 99, (15, 4))
    found = train(
        lambda w, x: jnp.mean(x @ w),
        jnp.zeros(4, jnp.bfloat16),
        optax.sgd(1.0),
        chips_of("2x3", "0,0"),
        kind,
        [jnp.asarray(rows, jnp.bfloat16)],
        microbatches=3,
    ).params
    expected = -rows.sum(0).astype(np.float32) / np.float32(15)
    np.testing.assert_array_equal(np.asarray(found), expected.astype(jnp.bfloat16))


def test_the_state_is_split_over_the_owners() -> None:
    name = "row-pairs 4x4 - 2x2"
    schedule = cases.schedule_of(name)
    _, params, state, _ = train_on(name, optax.adam(1e-2), "sharded", steps=2)
    n_params = sum(leaf.size for leaf in params.values())
    (mu,) = state[0].mu
    on_a_chip = mu.addressable_shards[0].data
    chunk = -(-n_params // schedule.total_chunks)
    most = np.bincount(schedule.owners).max()
    assert on_a_chip.shape == (most, chunk)
    assert len(mu.addressable_shards) == 12
    idle = [rank for rank in range(12) if rank not in schedule.owners]
    assert idle, "some chips own nothing"
    for rank in idle:
        assert not np.asarray(mu)[rank * most : (rank + 1) * most].any()


@pytest.mark.parametrize("kind", BOTH)
def test_gradients_of_bfloat16_weights_are_summed_in_float32(kind: str) -> None:
    """One chip brings 256, eight bring 1, seven nothing: 264 / 16 = 16.5 is exact. In bfloat16, 256 + 1 is 256."""
    batch = np.array([256.0] + [1.0] * 8 + [0.0] * 7, np.float32)
    w = jnp.zeros((), jnp.bfloat16)
    new = train(lambda w, x: jnp.sum(w * x.astype(w.dtype)), w, optax.sgd(1.0), chips_of("4x4"), kind, [batch]).params
    assert (new.dtype, float(new)) == (jnp.bfloat16, -16.5)


@pytest.mark.slow
def test_two_cores_a_chip_train_too() -> None:
    mesh = mm.Mesh("2x4", failed=["2x2@0,0"])
    devices = np.array(jax.devices()[:8]).reshape(4, 2)
    fabric = mmj.Fabric(mesh, jax.sharding.Mesh(devices, ("chip", "core")), None)
    wanted = one_device(optax.lamb(1e-2), 8)
    for kind in BOTH:
        check_same(train(loss, make_params(), mmj.lamb(1e-2), fabric, kind, batches(8)), wanted)


def test_masks_by_layer_are_welcome_where_layers_are_whole() -> None:
    masked = optax.adamw(0.1, mask=matrices)
    _, _, state, _ = train_on("hamiltonian 4x4", masked, "replicated", steps=1)
    assert jax.tree.map(jnp.shape, state[0].mu) == jax.tree.map(jnp.shape, make_params())
