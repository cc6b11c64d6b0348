"""`train_step` on tiles trains as one device does; with a sharded update, a chip has a T-th of the state."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshmend as mm
import meshmend.jax as mmj
from meshmend.errors import ParameterError
from meshmend.jax.shardings import specs_of_state

SPECS = {"up": P(None, "model"), "down": P("model"), "scale": P()}
STEPS = 4


def params_tree() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"up": (8, 16), "down": (16, 4), "scale": (4,)}
    return {name: rng.normal(size=shape).astype(np.float32) / 2 for name, shape in shapes.items()}


def values(params: Any, batch: Any) -> Any:
    """The loss, one value per example, and a metric."""
    hidden = jnp.tanh(batch @ params["up"])
    return jnp.mean((hidden @ params["down"] * params["scale"] - 1) ** 2, axis=-1), {"hidden": hidden}


def mean_loss(params: Any, batch: Any) -> Any:
    found, aux = values(params, batch)
    return jnp.mean(found), jax.tree.map(lambda x: jnp.mean(x, axis=0), aux)


@cache
def fabric_of(shape: str, failed: str) -> mmj.TiledFabric:
    n_devices = int(np.prod([int(n) for n in shape.split("x")]))
    return mmj.tile(mmj.discover(jax.devices()[:n_devices], shape=shape, failed=[failed]), "2x2", model=4)


def program_of(kind: str, fabric: mmj.TiledFabric) -> Any:
    chunks = 2 * fabric.mesh.n_chips
    if kind == "program":
        return mmj.install(mm.plan(fabric.mesh, "weave", chunks=chunks), fabric)
    if kind == "pair":
        return mmj.install_pair(mm.plan(fabric.mesh, "weave", chunks=chunks, owners="even"), fabric)
    return mmj.install_turn(mm.plan(fabric.mesh, "weave", chunks=chunks, collective="all-reduce-with-turn"), fabric)


def batches(n_examples: int) -> Any:
    rng = np.random.default_rng(1)
    return [rng.normal(size=(n_examples, 8)).astype(np.float32) for _ in range(STEPS)]


def one_device(n_examples: int, weights: Any = None) -> tuple[list[float], Any]:
    """Plain optax."""
    optimizer, params, found = optax.adamw(1e-2), params_tree(), []
    state = optimizer.init(params)

    def loss(params: Any, batch: Any) -> Any:
        return jnp.average(values(params, batch)[0], weights=weights)

    for batch in batches(n_examples):
        value, gradients = jax.jit(jax.value_and_grad(loss))(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        found.append(float(value))
    return found, params


def train(fabric: mmj.TiledFabric, kind: str, n_examples: int, weights: Any = None, **options: Any) -> Any:
    program = program_of(kind, fabric)
    loss = mean_loss if weights is None else values
    init, step = mmj.train_step(
        loss, optax.adamw(1e-2), fabric, shardings=SPECS, has_aux=True, per_example=weights is not None, **options
    )
    params: Any = params_tree()
    state, found = jax.jit(init)(params, program), []
    more = {} if weights is None else {"weights": weights}
    jitted = jax.jit(step)
    for batch in batches(n_examples):
        params, state, value, aux = jitted(params, state, batch, program, **more)
        found.append(float(value))
    assert aux["hidden"].shape == (16,)
    return found, params, state


@pytest.mark.parametrize(
    "kind",
    ["turn", pytest.param("program", marks=pytest.mark.slow), pytest.param("pair", marks=pytest.mark.slow)],
)
def test_a_step_on_tiles_is_that_of_one_device(kind: str) -> None:
    fabric = fabric_of("4x4", "0,1")
    losses, params, state = train(fabric, kind, 24, microbatches=2)
    want, expected = one_device(24)
    np.testing.assert_allclose(losses, want, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6), params, expected)
    assert {name: leaf.sharding.spec for name, leaf in params.items()} == SPECS
    if kind == "program":
        assert {name: leaf.sharding.spec for name, leaf in state[0].mu.items()} == SPECS
    else:
        (moment,) = state[0].mu
        # A chip's shards are 8·4 + 4·4 + 4 elements, of which its tile owns a third, in chunks of ⌈52 / 6⌉.
        assert moment.addressable_shards[0].data.shape == (2, -(-52 // 6))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["turn", "pair"])
def test_a_sharded_update_on_fifteen_tiles(kind: str) -> None:
    """8×8 chips, 2×2 tiles, one lost: equal to the replicated update, with a fifteenth of its state per chip."""
    fabric = fabric_of("8x8", "2x2@2,2")
    assert fabric.mesh.n_chips == 15
    weights = (np.arange(60) % 3 != 0).astype(np.float32)
    want_losses, want, whole = train(fabric, "program", 60, weights)
    losses, params, state = train(fabric, kind, 60, weights)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6), params, want)
    plain_losses, plain = one_device(60, weights)
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6), params, plain)

    def elements_per_chip(state: Any) -> int:
        return sum(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(state[0].mu))

    assert elements_per_chip(whole) == 52
    assert elements_per_chip(state) == 2 * -(-52 // 30)  # two chunks of 30, each rounded up to whole elements


@pytest.mark.parametrize(
    "optimizer",
    [mmj.lamb(0.1), optax.chain(mmj.clip_by_global_norm(1.0), optax.sgd(0.1))],
    ids=["lamb", "clipping"],
)
def test_norms_are_refused_where_a_chip_has_shards_of_shards(optimizer: Any) -> None:
    fabric = fabric_of("4x4", "0,1")
    init, _ = mmj.train_step(mean_loss, optimizer, fabric, shardings=SPECS, has_aux=True)
    for kind in ("turn", "pair"):
        with pytest.raises(ParameterError, match=r"sharded over tiles a chip has shards of both\. Pass a Program"):
            jax.eval_shape(init, params_tree(), program_of(kind, fabric))


def test_value_and_grad_takes_no_program_for_a_sharded_update() -> None:
    fabric = fabric_of("4x4", "0,1")
    differentiate = mmj.value_and_grad(mean_loss, fabric, SPECS, has_aux=True)
    with pytest.raises(ParameterError, match=r"got a ProgramWithTurn.*use mmj\.train_step"):
        differentiate(params_tree(), batches(24)[0], program=program_of("turn", fabric))


def test_state_is_split_as_the_parameter_that_it_belongs_to() -> None:
    params = {"a": {"w": np.zeros((2, 4))}, "w": np.zeros((4, 2)), "b": np.zeros(3)}
    specs = {"a": {"w": P(None, "model")}, "w": P("model"), "b": P()}
    state = optax.chain(optax.adam(0.1), optax.ema(0.9)).init(params)
    found = specs_of_state(state, params, specs)
    adam = found[0][0]
    assert adam.mu == adam.nu == found[1].ema == specs
    assert adam.count == P()
    # The same name with another shape is not the parameter's: optax.adafactor keeps sums of rows and columns.
    assert specs_of_state({"w": np.zeros(4)}, params, specs) == {"w": P()}
    assert specs_of_state((np.zeros(3), np.zeros(5)), np.zeros(3), P("model")) == (P("model"), P())
