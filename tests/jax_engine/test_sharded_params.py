"""Training with sharded parameters is training: the losses of one device, on any number of survivors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshmend.jax as mmj
from jax_engine.training_cases import Trained, check_close, chips_of, matrices, program_of, run, tiles_of, train_alone
from meshmend.errors import ParameterError
from meshmend.jax.engine.tiles import TiledFabric

WORDS, WIDTH, LAYERS = 11, 8, 3
STEPS = 20
EXAMPLES = 60
"""Of 12 and of 5 chips, and of 3 tiles."""


def programs(shape: str = "2x3", *failed: str) -> tuple[mmj.Fabric, mmj.Program]:
    """Chunks that do not divide by the number of chips; or, on many, rings around the hole."""
    fabric = chips_of(shape, *(failed or ["0,0"]))
    return fabric, program_of(fabric, "fsdp", "hamiltonian" if fabric.n_chips > 8 else "weave")


def make_ends(key: Any) -> Any:
    """Small enough for losses of order one, so that 1e-6 is a few roundings of them."""
    return {"embed": jax.random.normal(key, (WORDS, WIDTH)) / 4, "norm": jnp.ones(WIDTH)}


def make_layer(key: Any) -> Any:
    up, down = jax.random.split(key)
    return {
        "up": jax.random.normal(up, (WIDTH, 2 * WIDTH)) / 4,
        "down": jax.random.normal(down, (2 * WIDTH, WIDTH)) / 4,
        "bias": jnp.zeros(2 * WIDTH),
    }


def layer(w: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ w["up"] + w["bias"]) @ w["down"]


def predict(ends: Any, x: Any) -> Any:
    return jax.nn.log_softmax((x * ends["norm"]) @ ends["embed"].T)


def cost(log_chances: Any, words: Any) -> Any:
    return -jnp.mean(jnp.take_along_axis(log_chances, words[:, None], axis=-1))


def whole_loss(params: Any, batch: Any) -> Any:
    """The usual way: all parameters whole, layers under scan and remat."""
    x = params["ends"]["embed"][batch["from"]]
    x, _ = lax.scan(jax.checkpoint(lambda x, w: (layer(w, x), None)), x, params["layers"])
    return cost(predict(params["ends"], x), batch["to"])


def sharded_loss(params: Any, batch: Any, pair: mmj.Program) -> Any:
    ends = mmj.fsdp.gather_params(params["ends"], pair)
    x = mmj.fsdp.scan_layers(layer, params["layers"], ends["embed"][batch["from"]], pair)
    return cost(predict(ends, x), batch["to"])


def whole_params() -> Any:
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    return {"ends": make_ends(keys[0]), "layers": jax.vmap(make_layer)(keys[1:])}


def sharded_params(fabric: mmj.Fabric, pair: mmj.Program) -> Any:
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    inside: dict[str, Any] = INSIDE if isinstance(fabric, TiledFabric) else {"ends": None, "layers": None}
    return {
        "ends": mmj.fsdp.init_sharded(make_ends, keys[0], fabric, pair, shardings=inside["ends"]),
        "layers": mmj.fsdp.init_sharded(make_layer, keys[1:], fabric, pair, stacked=True, shardings=inside["layers"]),
    }


def abstract_params(fabric: mmj.Fabric, pair: mmj.Program) -> Any:
    return jax.eval_shape(lambda pair: sharded_params(fabric, pair), pair)


@cache
def batches() -> Any:
    words = np.random.default_rng(1).integers(WORDS, size=(STEPS, EXAMPLES))
    return [{"from": row, "to": (3 * row + 1) % WORDS} for row in words]


def tiles() -> tuple[TiledFabric, mmj.Program]:
    """Three tiles of two chips."""
    fabric = tiles_of("2x4", "0,1", side="1x2", model=2)
    return fabric, program_of(fabric, "fsdp")


INSIDE = {
    "ends": {"embed": P(None, "model"), "norm": P()},
    "layers": {"up": P(None, "model"), "down": P("model"), "bias": P("model")},
}


def train(where: Callable[[], tuple[mmj.Fabric, mmj.Program]], optimizer: Any, steps: int = STEPS) -> Trained:
    fabric, pair = where()
    params = sharded_params(fabric, pair)
    training = mmj.fsdp.sharded_train_step(sharded_loss, optimizer, fabric)
    return run(training, params, batches()[:steps], pair)


@pytest.mark.slow
def test_on_tiles_the_losses_are_those_of_replicated_parameters_too() -> None:
    fabric, pair = tiles()
    optimizer = optax.chain(optax.scale_by_adam(), mmj.add_decayed_weights(0.1, matrices), optax.scale(-1e-2))
    wanted = per_layer(optax.adamw(1e-2, weight_decay=0.1, mask=matrices), STEPS)
    assert wanted.losses[-1] < 0.9 * wanted.losses[0]
    losses, params, state, _ = train(tiles, optimizer)
    np.testing.assert_allclose(losses, wanted.losses, rtol=0, atol=1e-6)
    found = mmj.fsdp.unshard_params(params, fabric, pair)
    check_close(found["ends"], wanted.params["ends"], rtol=1e-7, atol=1e-5)
    assert found["layers"]["up"].sharding.spec == P(None, None, "model")
    (moments,) = state[0].mu["layers"].shards
    assert len({str(shard.index) for shard in moments.addressable_shards}) == 6, "each chip has its own"


@pytest.mark.slow
def test_twenty_steps_have_the_losses_of_replicated_parameters() -> None:
    fabric, pair = programs("4x4", "2x2@0,0")
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    wanted = train_alone(whole_loss, whole_params(), optimizer, batches())
    assert wanted.losses[-1] < 0.9 * wanted.losses[0], "a run that learns nothing shows nothing"
    losses, params, state, _ = train(lambda: (fabric, pair), optimizer)
    np.testing.assert_allclose(losses, wanted.losses, rtol=0, atol=1e-6)
    check_close(mmj.fsdp.unshard_params(params, fabric, pair), wanted.params, rtol=1e-7, atol=1e-5)
    (moments,) = state[0].mu["layers"].shards
    largest = max(len(owned) for owned in pair.layout.shape.owned)
    assert len(moments.addressable_shards) == 12
    assert moments.addressable_shards[0].data.shape[:2] == (LAYERS, largest), "a chip has its own chunks only"
    assert moments.addressable_shards[0].data.size <= 2 * LAYERS * (5 * WIDTH + 2) * WIDTH / 12


@pytest.mark.parametrize("mean", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_loss_may_ask_for_the_sum_of_gradients(mean: bool) -> None:
    """Integers, whose sums over 5 chips and means over 3 microbatches are exact."""
    fabric, pair = programs()
    rows = np.random.default_rng(0).integers(-9, 9, (30, 3)).astype(np.float32) * 30

    def loss(params: Any, batch: Any, pair: mmj.Program) -> Any:
        return jnp.mean(batch @ mmj.fsdp.gather_params(params, pair, mean=mean)["w"])

    training = mmj.fsdp.sharded_train_step(loss, optax.sgd(1.0), fabric, microbatches=3)
    params = mmj.fsdp.shard_params({"w": jnp.zeros(3)}, fabric, pair)
    (value,), params, *_ = run(training, params, [rows], pair)
    gradients = rows.reshape(5, -1, 3).mean(1)
    assert value == 0
    expected = -gradients.mean(0) if mean else -gradients.sum(0)
    np.testing.assert_array_equal(mmj.fsdp.unshard_params(params, fabric, pair)["w"], expected)


def per_layer(optimizer: optax.GradientTransformation, steps: int) -> Trained:
    """Train whole parameters with the layers of the stack apart, so that each has norms of its own."""
    params = whole_params()
    split = {f"{n}": jax.tree.map(lambda leaf, n=n: leaf[n], params["layers"]) for n in range(LAYERS)}

    def loss(split: Any, batch: Any) -> Any:
        layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(split[f"{n}"] for n in range(LAYERS)))
        return whole_loss({"ends": split["ends"], "layers": layers}, batch)

    split["ends"] = params["ends"]
    return train_alone(loss, split, optimizer, batches()[:steps])


@pytest.mark.slow
@pytest.mark.parametrize("where", [programs, tiles])
def test_norms_are_summed_over_chips_and_each_layer_has_its_own(where: Callable[[], Any]) -> None:
    clip = 0.05
    ours = optax.chain(mmj.clip_by_global_norm(clip), mmj.lamb(0.05, weight_decay=0.1, mask=matrices))
    theirs = optax.chain(optax.clip_by_global_norm(clip), optax.lamb(0.05, weight_decay=0.1, mask=matrices))
    wanted = per_layer(theirs, 4).losses
    assert wanted[-1] < 0.95 * wanted[0]
    np.testing.assert_allclose(train(where, ours, 4).losses, wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (optax.clip_by_global_norm(1.0), "combines values of several weights"),
        (optax.lamb(0.1), "combines values of several weights"),
        (optax.adamw(0.1, mask=matrices), "treats some layers differently"),
        (optax.adafactor(0.1), "combines values of several weights|treats some layers|not sharded as the parameters"),
    ],
    ids=["optax's clipping", "optax's LAMB", "a mask", "Adafactor"],
)
def test_optimizers_that_need_whole_layers_are_refused(optimizer: optax.GradientTransformation, why: str) -> None:
    fabric, pair = programs()
    init, _ = mmj.fsdp.sharded_train_step(sharded_loss, optimizer, fabric)
    with pytest.raises(ParameterError, match=why):
        jax.eval_shape(init, abstract_params(fabric, pair), pair)


def test_parameters_move_to_other_survivors_bit_for_bit() -> None:
    fabric, pair = programs()
    params = sharded_params(fabric, pair)["layers"]
    whole = jax.tree.map(np.asarray, mmj.fsdp.unshard_params(params, fabric, pair))
    healthy = chips_of("2x3")
    all_pair = program_of(healthy, "fsdp")
    moved = mmj.fsdp.shard_params(whole, healthy, all_pair, stacked=True)
    again = mmj.fsdp.unshard_params(moved, healthy, all_pair)
    jax.tree.map(np.testing.assert_array_equal, again, whole)
    back = mmj.fsdp.shard_params(jax.tree.map(np.asarray, again), fabric, pair, stacked=True)
    assert back.outline == params.outline
    jax.tree.map(np.testing.assert_array_equal, back.shards, params.shards)


def test_a_true_mean_over_examples_however_they_are_spread() -> None:
    """Twelve examples on five chips, of which some have one that does not count: NumPy's weighted mean."""
    fabric, pair = programs()

    def loss(params: Any, batch: Any, pair: mmj.Program) -> Any:
        return batch["x"] * jnp.sum(mmj.fsdp.gather_params(params, pair)["w"])

    tree = {"w": np.arange(7, dtype=np.float32)}
    weights = np.array([1, 1, 0, 2, 1, 1, 1, 0, 0, 1], np.float32)  # the fourth chip has no other
    x = np.arange(10, dtype=np.float32) + 1
    mean = np.sum(x * weights) / np.sum(weights)
    for microbatches in (1, 2):
        training = mmj.fsdp.sharded_train_step(
            loss, optax.sgd(0.5), fabric, per_example=True, microbatches=microbatches
        )
        params: Any = mmj.fsdp.shard_params(tree, fabric, pair)
        (value,), params, *_ = run(training, params, [{"x": x}], pair, weights=weights)
        assert value == pytest.approx(mean * tree["w"].sum(), rel=1e-6)
        found = mmj.fsdp.unshard_params(params, fabric, pair)["w"]
        np.testing.assert_allclose(found, tree["w"] - 0.5 * mean, rtol=1e-6)
    _, plain = mmj.fsdp.sharded_train_step(lambda *_: 0.0, optax.sgd(0.5), fabric)
    with pytest.raises(ParameterError, match=r"make it with sharded_train_step\(…, per_example=True\)"):
        plain(params, (), {"x": x}, pair, weights=weights)


def test_what_does_not_fit_is_refused() -> None:
    fabric, pair = programs()
    params = abstract_params(fabric, pair)
    init, step = mmj.fsdp.sharded_train_step(sharded_loss, optax.sgd(0.1), fabric)
    state = jax.eval_shape(init, params, pair)
    with pytest.raises(ParameterError, match=r"params\['more'\] is a .*, expected ShardedParams"):
        jax.eval_shape(init, {**params, "more": jnp.ones(3)}, pair)
    with pytest.raises(ParameterError, match="a stack of 3 layers, expected one tree: use scan_layers"):
        mmj.fsdp.gather_params(params["layers"], pair)
    with pytest.raises(ParameterError, match="Expected ShardedParams, as shard_params makes, got a dict"):
        mmj.fsdp.gather_params(whole_params()["ends"], pair)
    with pytest.raises(ParameterError, match="has 13 examples, which do not split evenly"):
        jax.eval_shape(step, params, state, {"from": np.zeros(13), "to": np.zeros(13)}, pair)
    with pytest.raises(ParameterError, match="shardings say how a model is split inside tiles"):
        mmj.fsdp.shard_params(whole_params()["ends"], fabric, pair, shardings=P())


@pytest.mark.slow
@pytest.mark.parametrize("where", [programs, tiles], ids=["chips", "tiles"])
def test_parameters_without_elements_train_with_the_others(where: Callable[[], Any]) -> None:
    """Beside others, in a stack, and as a tree of their own; the oracle is optax on one device."""
    fabric, pair = where()
    shapes: Any = {
        "flat": {"w": (7,), "none": (0, 4)},
        "stack": {"w": (LAYERS, 5), "none": (LAYERS, 0)},
        "nothing": (0,),
    }
    rng = np.random.default_rng(2)
    whole = jax.tree.map(
        lambda shape: np.asarray(rng.normal(size=shape), np.float32), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )
    split: Any = {"shardings": P()} if isinstance(fabric, TiledFabric) else {}
    params: Any = {
        name: mmj.fsdp.shard_params(tree, fabric, pair, stacked=name == "stack", **split)
        for name, tree in whole.items()
    }

    def layer(w: Any, x: Any) -> Any:
        return x * jnp.sum(w["w"]) + jnp.sum(w["none"])

    def loss(params: Any, batch: Any, pair: mmj.Program) -> Any:
        flat, nothing = (mmj.fsdp.gather_params(params[name], pair) for name in ("flat", "nothing"))
        x = batch * jnp.sum(flat["w"]) + jnp.sum(flat["none"]) + jnp.sum(nothing)
        return jnp.mean(mmj.fsdp.scan_layers(layer, params["stack"], x, pair))

    def plain(params: Any, batch: Any) -> Any:
        x, _ = lax.scan(lambda x, w: (layer(w, x), None), batch * jnp.sum(params["flat"]["w"]), params["stack"])
        return jnp.mean(x)

    optimizer, given = optax.adam(0.1), [np.arange(EXAMPLES, dtype=np.float32)] * 2
    losses, params, *_ = run(mmj.fsdp.sharded_train_step(loss, optimizer, fabric), params, given, pair)
    wanted = train_alone(plain, whole, optimizer, given)
    assert losses == pytest.approx(wanted.losses, rel=1e-5)
    found = mmj.fsdp.unshard_params(params, fabric, pair)
    assert jax.tree.map(jnp.shape, found) == shapes
    check_close(found, wanted.params, rtol=1e-7, atol=1e-5)
