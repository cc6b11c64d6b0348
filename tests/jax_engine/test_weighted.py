"""The true mean: gradients, loss and aux over the examples really used, whatever the chips and the spread."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshmend.jax as mmj
from jax_engine.training_cases import BOTH, Trained, check_close, chips_of, program_of, train
from meshmend.errors import ParameterError
from rows import others_slow

HOLES = {16: [], 12: ["2x2@0,2"], 8: ["2x4@0,0"]}
"""Holes of a 4×4 mesh, by the number of chips that they leave."""


def machine(n_chips: int, kind: str) -> tuple[mmj.Fabric, Any]:
    fabric = chips_of("4x4", *HOLES[n_chips])
    return fabric, program_of(fabric, kind, "row-pairs")


def feed_of(data: np.ndarray, policy: Any) -> mmj.Feed:
    return mmj.Feed(data, policy, threads=0)


def integers(n: int) -> np.ndarray:
    return np.random.default_rng(2).integers(-9, 10, size=(n, 6)).astype(np.float32)


def linear(params: Any, batch: Any) -> Any:
    """A loss whose gradients are the examples themselves: integers, which add up exactly in any order."""
    return batch @ params["w"] + params["b"]


def follow(fabric: mmj.Fabric, program: Any, feed: mmj.Feed, optimizer: Any, n_steps: int = 10) -> list[Any]:
    """Train, and return the parameters after every step."""
    init, step = mmj.train_step(linear, optimizer, fabric, per_example=True)
    params = jax.device_put({"w": jnp.zeros(6), "b": jnp.ones(())}, fabric.sharding())
    state = jax.jit(init)(params, program)
    jitted: Any = jax.jit(step)
    trajectory = []
    for batch, _ in zip(feed.batches(fabric), range(n_steps), strict=False):
        params, state, _ = jitted(
            params, state, batch.data, program, weights=batch.weights, scale=batch.learning_rate_factor
        )
        trajectory.append(jax.tree.map(np.asarray, params))
    assert jitted._cache_size() == 1, "the short batch at the end of an epoch must not compile again"
    return trajectory


def by_hand(feed: mmj.Feed, data: np.ndarray, n_steps: int, batch: int, rate: np.float32) -> list[Any]:
    """The same with SGD in plain NumPy: exact sums of integers, one division, one product, one sum."""
    params: dict[str, Any] = {"w": np.zeros(6, np.float32), "b": np.float32(1)}
    trajectory: list[Any] = []
    epoch = sample = 0
    for _ in range(n_steps):
        used = data[feed.records(epoch)[sample : sample + batch]]
        mean = used.astype(np.float64).sum(axis=0).astype(np.float32) / np.float32(len(used))
        params = {"w": params["w"] - rate * mean, "b": params["b"] - rate * np.float32(1)}
        trajectory.append(params)
        epoch, sample = (epoch, sample + batch) if sample + batch < len(data) else (epoch + 1, 0)
    return trajectory


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("kind", BOTH)
def test_integer_gradients_give_the_same_bits_on_any_number_of_chips(name: str, kind: str) -> None:
    check_same_bits(name, kind, tuple(HOLES))


def test_integer_gradients_give_the_same_bits_on_two_numbers_of_chips() -> None:
    check_same_bits("sgd", "sharded", (12, 8))


def check_same_bits(name: str, kind: str, numbers: tuple[int, ...]) -> None:
    data = integers(300)
    feed = feed_of(data, mmj.KeepGlobal(64))
    optimizer = {"sgd": optax.sgd(0.125), "adam": optax.adam(0.1)}[name]
    by_chips = [follow(*machine(n_chips, kind), feed, optimizer) for n_chips in numbers]
    assert not np.array_equal(by_chips[0][-1]["w"], by_chips[0][-2]["w"])
    for trajectory in by_chips[1:]:
        for ours, theirs in zip(trajectory, by_chips[0], strict=True):
            jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    if name == "sgd":
        # The rate is a power of two, so that it does not matter whether product and sum are rounded apart.
        for ours, theirs in zip(by_chips[0], by_hand(feed, data, 10, 64, np.float32(0.125)), strict=True):
            jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def curved(params: Any, batch: Any) -> Any:
    """A loss for float gradients, with aux of several kinds; one value an example."""
    x, y = batch
    out = jnp.tanh(x @ params["w1"]) @ params["w2"]
    error = jnp.sum((out - y) ** 2, axis=1)
    return error, {"wrong": error > 1.0, "mean of x": x, "bf16": error.astype(jnp.bfloat16)}


def curved_inputs(n: int) -> Any:
    rng = np.random.default_rng(4)
    params = {"w1": rng.normal(size=(4, 7)) / 2, "w2": rng.normal(size=(7, 3)) / 3}
    batch = rng.normal(size=(n, 4)), rng.normal(size=(n, 3))
    weights = rng.integers(0, 3, size=n) / 2
    return jax.tree.map(lambda x: x.astype(np.float32), (params, batch, weights))


def curved_gradients(params: Any, batch: Any, weights: np.ndarray) -> Any:
    """The weighted mean of the loss and its gradients in float64, derived by hand."""
    params, (x, y), w = jax.tree.map(lambda leaf: leaf.astype(np.float64), (params, batch, weights))
    hidden = np.tanh(x @ params["w1"])
    residue = hidden @ params["w2"] - y
    error = (residue**2).sum(axis=1)
    up = 2 * residue * (w / w.sum())[:, None]
    w1 = x.T @ ((up @ params["w2"].T) * (1 - hidden**2))
    return error, (w * error).sum() / w.sum(), {"w1": w1, "w2": hidden.T @ up}


def one_step(kind: str, batch: Any, weights: Any, microbatches: int) -> Trained:
    """One step of SGD at rate 1, with aux."""
    options: Any = {"has_aux": True, "per_example": True, "microbatches": microbatches, "weights": weights}
    fabric, program = machine(12, kind)
    start = curved_inputs(60)[0]
    return train(curved, start, optax.sgd(1.0), fabric, kind, [batch], program=program, **options)


@pytest.mark.parametrize(("microbatches", "kind"), [(1, "replicated"), (3, "replicated"), (2, "sharded")])
def test_the_mean_is_that_of_plain_numpy(microbatches: int, kind: str) -> None:
    """Five rows per chip, which neither 2 nor 3 divide, with weights 0, ½ and 1: one step of SGD at rate 1."""
    params, batch, weights = curved_inputs(60)
    (value,), new, _, (aux,) = one_step(kind, batch, weights, microbatches)
    error, wanted, gradients = curved_gradients(params, batch, weights)
    # Sums of 60 values of order one in float32: a few roundings of 6e-8 each.
    np.testing.assert_allclose(value, wanted, rtol=2e-6)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(params[name] - new[name], gradient, atol=2e-6)
    np.testing.assert_allclose(aux["wrong"], np.average(error > 1.0, weights=weights), rtol=2e-6)
    np.testing.assert_allclose(aux["mean of x"], np.average(batch[0], axis=0, weights=weights), atol=2e-6)
    assert aux["wrong"].dtype == jnp.float32
    assert aux["bf16"].dtype == jnp.float32


def test_without_weights_every_example_counts_once_as_in_the_mean_path() -> None:
    params, batch, _ = curved_inputs(60)
    given: Any = params, optax.adam(0.1), chips_of("2x3"), "replicated", [batch]
    mean = train(lambda p, b: jnp.mean(curved(p, b)[0]), *given)
    each = train(lambda p, b: curved(p, b)[0], *given, per_example=True)
    np.testing.assert_allclose(mean.losses, each.losses, rtol=2e-6)
    check_close(mean.params, each.params, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("microbatches", "kind"), others_slow([(2, "replicated"), (1, "sharded")], quick=[(2, "replicated")])
)
def test_nan_in_padding_reaches_nothing(microbatches: int, kind: str) -> None:
    """Whole chips of padding, and padding among real examples: filled with NaN, it changes no bit."""
    _, batch, weights = curved_inputs(60)
    weights[:10] = 0
    assert (weights.reshape(12, 5) == 0).all(axis=1).sum() >= 2
    spoilt = jax.tree.map(lambda x: np.where(weights[:, None] > 0, x, np.nan), batch)
    wanted, got = (one_step(kind, one, weights, microbatches) for one in (batch, spoilt))
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(wanted))
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.parametrize("kind", others_slow(BOTH, quick=["sharded"]))
def test_scale_multiplies_the_update_of_any_optimizer_without_compiling_again(kind: str) -> None:
    """A factor at run time is the learning rate times that factor, in Adam too."""
    fabric, program = machine(12, kind)
    params, batch, _ = curved_inputs(60)
    params = jax.device_put(params, fabric.sharding())

    def mean(params: Any, batch: Any) -> Any:
        return jnp.mean(curved(params, batch)[0])

    init, step = mmj.train_step(mean, optax.adamw(0.1), fabric)
    state = jax.jit(init)(params, program)
    jitted: Any = jax.jit(step)
    for factor in (0.75, 0.5):
        got = jitted(params, state, batch, program, scale=factor)
    wanted = jax.jit(mmj.train_step(mean, optax.adamw(0.1 * factor), fabric).step)(params, state, batch, program)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got[0], wanted[0])
    assert jitted._cache_size() == 1


def test_a_shrunk_batch_trains_with_a_smaller_rate() -> None:
    """KeepPerChip on 12 of 16 chips: one step of SGD is ¾ of the rate times the mean over the 24 samples used."""
    fabric, program = machine(12, "sharded")
    data = integers(100)
    feed = feed_of(data, mmj.KeepPerChip(2))
    (after,) = follow(fabric, program, feed, optax.sgd(1.0), n_steps=1)
    np.testing.assert_allclose(after["w"], -0.75 * data[feed.records(0, 0, 24)].mean(axis=0), rtol=1e-6)


def test_a_loss_of_the_wrong_shape_and_unusable_weights_are_refused() -> None:
    fabric, program = machine(12, "replicated")
    params, batch, weights = curved_inputs(60)
    init, step = mmj.train_step(lambda p, b: jnp.mean(curved(p, b)[0]), optax.sgd(1.0), fabric, per_example=True)
    state = jax.jit(init)(params, program)
    with pytest.raises(ParameterError, match=r"the loss must have one value for each of the 5 examples.*shape \(\)"):
        jax.jit(step)(params, state, batch, program)
    init, step = mmj.train_step(
        lambda p, b: (curved(p, b)[0], jnp.ones(3)), optax.sgd(1.0), fabric, has_aux=True, per_example=True
    )
    with pytest.raises(ParameterError, match=r"a value of aux must have one value.*shape \(3,\)"):
        jax.jit(step)(params, state, batch, program)
    init, step = mmj.train_step(lambda p, b: jnp.mean(curved(p, b)[0]), optax.sgd(1.0), fabric)
    with pytest.raises(ParameterError, match="does not take weights"):
        jax.jit(step)(params, state, batch, program, weights=weights)
