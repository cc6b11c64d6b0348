"""Which optimizers may update shards: those that do the same to every element of every layer, and no others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshmend.jax as mmj
from jax_engine.training_cases import BOTH, chips_of, matrices, tiles_of, train
from meshmend.errors import ParameterError
from meshmend.jax.train.optimizer_check import check_elementwise, updates_of
from meshmend.jax.train.optimizers import layer_numbers
from rows import others_slow


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


LAYERS = {
    "a": shape(5, 3),
    "b": shape(3),
    "none": shape(0, 4),
    "scale": shape(),
    "half": shape(7, dtype=jnp.bfloat16),
}
SHARDS = (shape(2, 10), shape(2, 7, dtype=jnp.bfloat16))
NARROW = LAYERS | {"double": shape(4, dtype=jnp.float16)}
"""Layers whose sums, and shards, are all of float32."""
WIDE_SHARDS = (shape(2, 15),)
DECAY = optax.exponential_decay(0.1, 1, 0.5)


ALIKE = {
    "sgd": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(DECAY),
    "adam, bfloat16 moments": optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "adamw": optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.1, 3, 9)),
    "adagrad": optax.adagrad(0.1),
    "rmsprop": optax.rmsprop(0.1),
    "rprop": optax.rprop(0.1),
    "radam": optax.radam(0.1),
    "lion": optax.lion(0.1),
    "clip": optax.chain(optax.clip(1.0), optax.adam(0.1)),
    "ema": optax.chain(optax.ema(0.9), optax.sgd(0.1)),
    "a piecewise schedule": optax.sgd(optax.piecewise_constant_schedule(0.1, {3: 0.5})),
    "injected hyperparameters": optax.inject_hyperparams(optax.adam)(learning_rate=DECAY),
    "several steps in one": optax.MultiSteps(optax.adam(0.1), 2),
    "on a condition": optax.conditionally_mask(optax.sgd(0.1), lambda step: step < 1),
    "non-negative": optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative()),
    "schedule-free": optax.contrib.schedule_free_adamw(0.1),
    "reduce on plateau": optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau()),
    "ours, clipped": optax.chain(mmj.clip_by_global_norm(1.0), mmj.lamb(0.1, weight_decay=0.1, mask=matrices)),
    "ours, lars": mmj.lars(0.1, weight_decay=0.1, weight_decay_mask=matrices),
    "ours, injected": optax.inject_hyperparams(mmj.lamb)(learning_rate=DECAY),
}

QUICK = ["several steps in one", "reduce on plateau", "ours, clipped", "ours, injected"]


@pytest.mark.parametrize("name", others_slow(ALIKE, quick=QUICK))
def test_optimizers_that_treat_each_weight_by_itself_are_accepted(name: str) -> None:
    check_elementwise(ALIKE[name], SHARDS, LAYERS, own=LAYERS)
    for own in (LAYERS, LAYERS | {"half": shape(7, dtype=jnp.float16)}):
        check_elementwise(ALIKE[name], (shape(2, 13),), in_float32(LAYERS), own=own)
    if name.startswith("ours"):
        return  # their norms are summed over chips: test_training holds them to optax

    # The oracle: the same numbers as layers, and as one flat vector per dtype, through optax itself.
    def flat(tree: Any) -> Any:
        wide = np.concatenate([np.ravel(tree[name]) for name in ("a", "b", "none", "scale")])
        return jnp.asarray(wide), jnp.ravel(tree["half"])

    rng = np.random.default_rng(0)
    params = {key: jnp.asarray(rng.normal(size=layer.shape), layer.dtype) for key, layer in LAYERS.items()}
    flat_params = flat(params)
    state, flat_state = ALIKE[name].init(params), ALIKE[name].init(flat_params)
    for _ in range(3):
        gradients = {key: jnp.asarray(rng.normal(size=layer.shape), layer.dtype) for key, layer in LAYERS.items()}
        updates, state = updates_of(ALIKE[name], gradients, state, params, value=jnp.ones(()))
        found, flat_state = updates_of(ALIKE[name], flat(gradients), flat_state, flat_params, value=jnp.ones(()))
        # Vectorized code may round the last bit of a square root or a power otherwise.
        for got, wanted, rounding in zip(found, flat(updates), (2e-7, 2.0**-8), strict=True):
            np.testing.assert_allclose(np.float32(got), np.float32(wanted), rtol=4 * rounding, atol=0)
        params, flat_params = optax.apply_updates(params, updates), optax.apply_updates(flat_params, found)


def biases_frozen(updates: Any, params: Any) -> Any:
    del params
    return jax.tree.map(lambda leaf: leaf if leaf.ndim > 1 else 0 * leaf, updates)


def one_name_faster(updates: Any, params: Any) -> Any:
    del params
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * (2.0 if jax.tree_util.keystr(path) == "['b']" else 1.0), updates
    )


MASK = {name: name == "a" for name in LAYERS}
LABELS = {name: "slow" if name == "b" else "fast" for name in LAYERS}
BY_LABEL = {"fast": optax.sgd(0.1), "slow": optax.set_to_zero()}
BY_LAYER = {
    "ndim": optax.chain(optax.sgd(0.1), optax.stateless(biases_frozen)),
    "name": optax.chain(optax.stateless(one_name_faster), optax.sgd(0.1)),
    "mask, function": optax.adamw(0.1, mask=matrices),
    "mask, tree": optax.adamw(0.1, mask=MASK),
    "masked, tree": optax.masked(optax.sgd(0.1), MASK),
    "labels, tree": optax.partition(BY_LABEL, LABELS),
    "labels, function": optax.partition(
        BY_LABEL, lambda tree: jax.tree.map(lambda leaf: "fast" if leaf.ndim > 1 else "slow", tree)
    ),
    "masked inside": optax.inject_hyperparams(
        lambda learning_rate: optax.chain(optax.masked(optax.set_to_zero(), MASK), optax.sgd(learning_rate))
    )(learning_rate=0.1),
    "lars": optax.lars(0.1),
    "muon": optax.contrib.muon(0.1),
}


@pytest.mark.parametrize("name", BY_LAYER)
def test_optimizers_that_tell_layers_apart_are_refused(name: str) -> None:
    with pytest.raises(
        ParameterError, match=r"treats some layers differently.*mmj\.lamb; or install with update='replicated'"
    ):
        check_elementwise(BY_LAYER[name], SHARDS, LAYERS, own=LAYERS)


def in_float32(layers: Any) -> Any:
    return jax.tree.map(lambda layer: shape(*layer.shape), layers)


def narrow_frozen(updates: Any, params: Any) -> Any:
    return jax.tree.map(lambda u, p: jnp.zeros_like(u) if p.dtype == jnp.bfloat16 else u, updates, params)


def narrow_slower(updates: Any, params: Any) -> Any:
    del params
    return jax.tree.map(lambda u: u * (0.5 if u.dtype == jnp.float16 else 1.0), updates)


def by_eps(updates: Any, params: Any) -> Any:
    del params
    return jax.tree.map(lambda u: u / (jnp.abs(u) + jnp.finfo(u.dtype).eps), updates)


def moments_of_wide_layers(params: Any) -> Any:
    return jax.tree.map(lambda p: jnp.zeros_like(p) if p.dtype == jnp.float32 else None, params)


BY_DTYPE = {
    "frozen": optax.chain(optax.sgd(0.1), optax.stateless(narrow_frozen)),
    "slower": optax.chain(optax.stateless(narrow_slower), optax.adam(0.1)),
    "its eps": optax.chain(optax.stateless(by_eps), optax.sgd(0.1)),
    "its state": optax.GradientTransformation(moments_of_wide_layers, lambda updates, state, params: (updates, state)),
}


@pytest.mark.parametrize("name", BY_DTYPE)
def test_optimizers_that_tell_dtypes_apart_are_refused(name: str) -> None:
    """Shards have the dtype of sums, so that all layers look the same to them."""
    check_elementwise(BY_DTYPE[name], WIDE_SHARDS, in_float32(NARROW), own=in_float32(NARROW))
    with pytest.raises(
        ParameterError, match=r"treats some layers differently \(.* or dtype\).*install with update='replicated'"
    ):
        check_elementwise(BY_DTYPE[name], WIDE_SHARDS, in_float32(NARROW), own=NARROW)


@pytest.mark.parametrize("kind", ["sharded", "fused", "fsdp", "sharded on tiles"])
def test_a_frozen_bfloat16_layer_is_frozen_or_refused(kind: str) -> None:
    """In every kind of sharded program; in a replicated one it is what optax does on one device."""
    params: Any = {"frozen": jnp.ones(4, jnp.bfloat16), "free": jnp.ones(4)}
    optimizer = BY_DTYPE["frozen"]
    assert trained(optimizer, "replicated", params)["frozen"].tolist() == [1, 1, 1, 1]
    fabric, split = chips_of("2x2"), None
    if kind == "sharded on tiles":
        kind, fabric, split = "sharded", tiles_of("2x4", side="1x2", model=2), jax.sharding.PartitionSpec()
    with pytest.raises(ParameterError, match=r"treats some layers differently .* or dtype"):
        train(squares, params, optimizer, fabric, kind, [], shardings=split)


def test_layers_that_are_all_alike_may_still_differ_from_shards() -> None:
    """With biases only, all layers get the same, and it is not what a shard (a matrix) would get."""
    biases = {"b": LAYERS["b"], "c": shape(9)}
    with pytest.raises(ParameterError, match="treats some layers differently"):
        check_elementwise(BY_LAYER["ndim"], SHARDS[:1], biases, own=biases)


MIXING = {
    "lamb": optax.lamb(0.1),
    "adafactor": optax.adafactor(0.1),
    "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
    "clipping of a billion": optax.chain(optax.clip_by_global_norm(1e9), optax.sgd(0.1)),
    "clipping after a thousand steps": optax.chain(
        optax.conditionally_transform(optax.clip_by_global_norm(1.0), lambda step: step > 1000), optax.sgd(0.1)
    ),
    "adaptive clipping": optax.adaptive_grad_clip(0.1),
    "centralize": optax.chain(optax.centralize(), optax.sgd(0.1)),
    "novograd": optax.novograd(0.1),
    "polyak": optax.polyak_sgd(),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
    "noise from a typed key": optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1)),
    "noise, the same for all": optax.stateless(
        lambda updates, _: jax.tree.map(lambda leaf: leaf + jax.random.normal(jax.random.key(0), leaf.shape), updates)
    ),
    "places": optax.stateless(
        lambda updates, _: jax.tree.map(lambda x: x * jnp.broadcast_to(jnp.float32(1), x.shape).cumsum(-1), updates)
    ),
}


@pytest.mark.parametrize("name", MIXING)
def test_optimizers_that_combine_weights_or_draw_random_numbers_are_refused(name: str) -> None:
    with pytest.raises(
        ParameterError, match=r"cannot update shards of the weights: its \w+ .*or install with update='replicated'"
    ):
        check_elementwise(MIXING[name], SHARDS, LAYERS, own=LAYERS)


def test_what_only_large_layers_show_is_seen() -> None:
    """Adafactor keeps a row and a column of moments from 128 by 128 weights on; others may ask for any size."""
    large = {"w": shape(512, 512), "b": shape(512)}
    factored = optax.adafactor(0.1, multiply_by_parameter_scale=False, clipping_threshold=None)
    with pytest.raises(ParameterError, match="its reduce_sum combines values of several weights"):
        check_elementwise(factored, (shape(256, 1026),), large, own=large)

    def slower(updates: Any, _: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf * (0.1 if leaf.shape == (512, 512) else 1.0), updates)

    with pytest.raises(ParameterError, match="treats some layers differently"):
        check_elementwise(optax.stateless(slower), (shape(256, 1026),), large, own=large)


def test_an_optimizer_that_fails_on_whole_layers_too_fails_with_its_own_error() -> None:
    def broken(params: Any) -> Any:
        raise RuntimeError("broken by its author")

    with pytest.raises(RuntimeError, match="broken by its author"):
        check_elementwise(optax.GradientTransformation(broken, optax.sgd(0.1).update), SHARDS, LAYERS, own=LAYERS)


def squares(params: Any, batch: Any) -> Any:
    return jnp.mean(batch) * sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in jax.tree.leaves(params))


def trained(optimizer: Any, kind: str, params: Any, n_steps: int = 1) -> Any:
    """On four chips."""
    return train(squares, params, optimizer, chips_of("2x2"), kind, [np.ones(4, np.float32)] * n_steps).params


def test_optimizers_that_ask_for_the_loss_get_its_mean() -> None:
    """Polyak's step with f* = 0 is loss / |gradient|² = w² / (2w)² = ¼: from 2 by ¼ × 4 to 1."""
    assert float(trained(optax.polyak_sgd(max_learning_rate=9.0), "replicated", jnp.float32(2))) == pytest.approx(1.0)
    plateau = optax.chain(optax.sgd(0.125), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=1.0))
    whole, shards = (trained(plateau, kind, jnp.arange(5.0), n_steps=4) for kind in BOTH)
    np.testing.assert_array_equal(whole, shards)
    assert whole[1] > 0.75**4, "four steps at the full rate: the rate has fallen, so the loss has arrived"


def test_optimizers_that_evaluate_the_loss_again_are_refused_by_name() -> None:
    search = optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(3))
    for kind in BOTH:
        with pytest.raises(ParameterError, match=r"a train step does not have: .*'value_fn'"):
            trained(search, kind, jnp.ones(3))


def test_numbers_float8_and_empty_layers_train_whole_and_in_shards() -> None:
    """SGD at rate 1/4 of w²: half of each weight is left; a float8 weight is rounded once, at the end."""
    params = {"number": 1.0, "narrow": jnp.array([2, 4, 6], jnp.float8_e4m3fn), "none": jnp.zeros((0, 3), jnp.bfloat16)}
    for kind in BOTH:
        new = trained(optax.sgd(0.25), kind, params)
        assert float(new["number"]) == 0.5
        assert new["narrow"].dtype == jnp.float8_e4m3fn
        assert new["narrow"].astype(jnp.float32).tolist() == [1, 2, 3]
        assert (new["none"].shape, new["none"].dtype) == ((0, 3), jnp.bfloat16)


def test_a_state_with_a_typed_key_trains_with_a_program() -> None:
    noisy = optax.chain(optax.add_noise(1e-3, 0.5, jax.random.key(0)), optax.sgd(0.25))
    new = trained(noisy, "replicated", jnp.ones(4), n_steps=2)
    np.testing.assert_allclose(new, 0.25, atol=0.1)
    assert len(np.unique(np.asarray(new))) == 4


@pytest.mark.parametrize("chunk", [7, 2**30 + 7, 2**31 - 1])
def test_layers_are_distinguished_beyond_two_billion_elements(chunk: int) -> None:
    """Against Python's integers, at the edges of layers that begin and end anywhere in 5 chunks."""
    ends = np.array([3, chunk - 1, chunk, 2 * chunk + 5, 2 * chunk + 5, 4 * chunk, 5 * chunk - 2], np.int64)
    offsets = np.array([0, 1, 2, 3, 4, 5, 6, chunk - 3, chunk - 2, chunk - 1], np.int64)
    got = layer_numbers(jnp.arange(5), jnp.asarray(offsets, jnp.int32), ends, chunk)
    places = [[int(row) * chunk + int(offset) for offset in offsets] for row in range(5)]
    assert got.tolist() == [[sum(int(end) <= place for end in ends) for place in row] for row in places]
    assert chunk == 7 or places[-1][-1] > 2**31
