"""Norms over shards are those of optax on one device: of complex weights too, and where a gradient is NaN."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshmend.jax as mmj
from jax_engine.training_cases import check_close, chips_of, tiles_of, train, train_alone
from meshmend.jax.train.optimizers import squares_of
from rows import others_slow

STEPS = 2
INSIDE = {"z": P(None, "tensor"), "fused": P(), "w": P("fsdp", "tensor"), "b": P()}
"""Split by one axis of a tile, with two copies; by none; by both."""
WAYS = [(where, kind) for where in ("chips", "tiles") for kind in ("replicated", "sharded", "fused", "fsdp")]


def fabric_of(where: str) -> mmj.Fabric:
    """Three chips, or three tiles of four."""
    if where == "chips":
        return chips_of("2x2", "0,0")
    return tiles_of("4x4", "0,1", fsdp=2, tensor=2)


def make_params() -> Any:
    """Complex layers of which z² adds up to something quite different from |z|², and real ones."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(3, 4)) + 1j * rng.normal(size=(3, 4))
    params = {"z": z, "fused": np.array([3 + 4j, 1j, -2j]), "w": rng.normal(size=(4, 2)), "b": rng.normal(size=2)}
    return {name: x.astype(np.complex64 if x.dtype == complex else np.float32) for name, x in params.items()}


def batches() -> Any:
    rng = np.random.default_rng(1)
    return [rng.normal(size=(15, 3)).astype(np.float32) for _ in range(STEPS)]


def loss(params: Any, batch: Any) -> Any:
    hidden = (batch * params["fused"]) @ params["z"]
    return jnp.mean((jnp.real(hidden * jnp.exp(1j * jnp.imag(hidden))) @ params["w"] + params["b"]) ** 2)


def trained(where: str, kind: str, optimizer: Any, loss: Any = loss, params: Any = None, inside: Any = INSIDE) -> Any:
    params, split = make_params() if params is None else params, inside if where == "tiles" else None
    return train(loss, params, optimizer, fabric_of(where), kind, batches(), shardings=split).params


def long_ones(params: Any) -> Any:
    """Choose "w" by its shape: a chip's shard of it would not be chosen."""
    return jax.tree.map(lambda leaf: leaf.shape[0] >= 4, params)


CLIP = 0.5
OPTIMIZERS = {
    "clip": (
        optax.chain(mmj.clip_by_global_norm(CLIP), optax.sgd(1.0)),
        optax.chain(optax.clip_by_global_norm(CLIP), optax.sgd(1.0)),
    ),
    "lars": (
        mmj.lars(0.01, 1e-2, long_ones, trust_coefficient=10.0, trust_ratio_mask=long_ones),
        optax.lars(0.01, 1e-2, long_ones, trust_coefficient=10.0, trust_ratio_mask=long_ones),
    ),
    "lamb": (mmj.lamb(0.1, weight_decay=0.1, mask=long_ones), optax.lamb(0.1, weight_decay=0.1, mask=long_ones)),
    "a mask": (
        optax.chain(mmj.add_decayed_weights(0.1, long_ones), optax.sgd(5e-3)),
        optax.chain(optax.add_decayed_weights(0.1, long_ones), optax.sgd(5e-3)),
    ),
}
QUICK = [("tiles", "sharded", "lamb")]


@pytest.mark.parametrize(
    ("where", "kind", "optimizer"),
    others_slow(
        (
            (*way, name)
            for way in WAYS
            for name in OPTIMIZERS
            if way[1] != "fused" or name in ("clip", "a mask")  # there are no norms of layers: see test_fused_update
        ),
        quick=QUICK,
    ),
)
def test_norms_of_complex_weights_are_optax_s(where: str, kind: str, optimizer: str) -> None:
    ours, theirs = OPTIMIZERS[optimizer]
    start = make_params()
    wanted = train_alone(loss, start, theirs, batches()).params
    assert all(np.abs(wanted[name] - start[name]).max() > 1e-3 for name in start), "every layer is trained"
    check_close(trained(where, kind, ours), wanted, rtol=2e-5, atol=2e-6)


def part_nan(params: Any, batch: Any) -> Any:
    """The gradient of one weight of "w" is NaN, and all others are 3."""
    poison = jnp.zeros((4, 2)).at[2, 1].set(jnp.nan)
    return 3 * jnp.sum(params["b"]) + jnp.sum(params["w"] * (3 + poison)) + 0 * jnp.sum(batch)


@pytest.mark.parametrize(("where", "kind"), others_slow(WAYS, quick=[("chips", "fused")]))
def test_one_nan_makes_all_clipped_updates_nan_as_optax_s(where: str, kind: str) -> None:
    params = {"w": np.ones((4, 2), np.float32), "b": np.ones(2, np.float32)}
    ours, theirs = OPTIMIZERS["clip"]
    wanted = train_alone(part_nan, params, theirs, batches()).params
    assert all(np.isnan(leaf).all() for leaf in wanted.values()), "the oracle"
    got = trained(where, kind, ours, part_nan, params, {"w": P("fsdp"), "b": P()})
    assert all(np.isnan(np.asarray(leaf)).all() for leaf in got.values())


@pytest.mark.parametrize("guard", ["zero_nans", "apply_if_finite"])
def test_optax_s_guards_against_nan_see_it_after_clipping(guard: str) -> None:
    def guarded(clip: Any) -> Any:
        if guard == "zero_nans":
            return optax.chain(clip, optax.zero_nans(), optax.sgd(0.5))
        return optax.apply_if_finite(optax.chain(clip, optax.sgd(0.5)), 10)

    params = {"w": np.ones((4, 2), np.float32), "b": np.ones(2, np.float32)}
    got = trained("chips", "replicated", guarded(mmj.clip_by_global_norm(CLIP)), part_nan, params)
    theirs = guarded(optax.clip_by_global_norm(CLIP))
    wanted = train_alone(part_nan, params, theirs, batches()).params
    for name in params:
        np.testing.assert_array_equal(got[name], wanted[name])
        np.testing.assert_array_equal(got[name], 1)


CLIPPING: list[Any] = [mmj.clip_by_global_norm, optax.clip_by_global_norm]


@pytest.mark.parametrize("norm", [0.5, 2.0, 4.0, np.inf, np.nan])
def test_clipping_whole_layers_gives_optax_s_bits(norm: float) -> None:
    """Norms below, at and above the limit of 2, in narrow and complex dtypes too."""
    updates = {"a": jnp.asarray([0.6 * norm, 0.0]), "b": jnp.asarray([0.8j * norm], jnp.complex64)}
    updates["c"] = jnp.zeros(3, jnp.bfloat16)
    got, wanted = (clip(2.0).update(updates, clip(2.0).init(updates), updates)[0] for clip in CLIPPING)
    for name in updates:
        assert got[name].dtype == wanted[name].dtype
        ours, theirs = (np.asarray(x[name]).astype(np.complex64) for x in (got, wanted))
        np.testing.assert_array_equal(ours, theirs)


def test_squares_are_real_and_wide_enough_to_be_added_up() -> None:
    ones = squares_of(jnp.ones(1024, jnp.bfloat16))
    total = jax.ops.segment_sum(ones, jnp.zeros(1024, jnp.int32), 1)
    assert (total.dtype, float(total[0])) == (jnp.float32, 1024)
    found = squares_of(jnp.asarray([3 + 4j, -2j], jnp.complex64))
    assert (found.dtype, found.tolist()) == (jnp.float32, [25, 4])
