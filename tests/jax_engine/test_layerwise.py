"""Norms over shards are those of optax on one device: of complex weights too, and where a gradient is NaN."""

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
from meshmend.jax.engine.program import Update
from meshmend.jax.train.optimizers import squares_of

EXAMPLES = 15
"""Of three chips, and of three tiles."""
STEPS = 2
INSIDE = {"z": P(None, "model"), "fused": P(), "w": P("model"), "b": P()}
WAYS = [(where, kind) for where in ("chips", "tiles") for kind in ("program", "pair", "fused", "fsdp")]


@cache
def fabric_of(where: str) -> mmj.Fabric:
    if where == "chips":
        return mmj.discover(jax.devices()[:4], shape="2x2", failed=["0,0"])
    return mmj.tile(mmj.discover(jax.devices()[:8], shape="2x4", failed=["0,1"]), "1x2", model=2)


@cache
def program_of(where: str, kind: str) -> Any:
    fabric = fabric_of(where)
    collective = "all-reduce-with-update" if kind == "fused" else "all-reduce"
    plan = mm.plan(fabric.mesh, "weave", chunks=3, owners="even", collective=collective)
    updates: dict[str, Update] = {"program": "replicated", "fused": "fused"}
    return mmj.install(plan, fabric, update=updates.get(kind, "two-phase"))


def make_params() -> Any:
    """Complex layers of which z² adds up to something quite different from |z|², and real ones."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(3, 4)) + 1j * rng.normal(size=(3, 4))
    params = {"z": z, "fused": np.array([3 + 4j, 1j, -2j]), "w": rng.normal(size=(4, 2)), "b": rng.normal(size=2)}
    return {name: x.astype(np.complex64 if x.dtype == complex else np.float32) for name, x in params.items()}


def batches() -> Any:
    rng = np.random.default_rng(1)
    return [rng.normal(size=(EXAMPLES, 3)).astype(np.float32) for _ in range(STEPS)]


def loss(params: Any, batch: Any) -> Any:
    hidden = (batch * params["fused"]) @ params["z"]
    return jnp.mean((jnp.real(hidden * jnp.exp(1j * jnp.imag(hidden))) @ params["w"] + params["b"]) ** 2)


def on_one_device(optimizer: Any, loss: Any = loss, params: Any = None) -> Any:
    """Plain optax."""
    params = make_params() if params is None else params
    state = optimizer.init(params)
    for batch in batches():
        updates, state = optimizer.update(jax.jit(jax.grad(loss))(params, batch), state, params)
        params = optax.apply_updates(params, updates)
    return params


def trained(where: str, kind: str, optimizer: Any, loss: Any = loss, params: Any = None, inside: Any = INSIDE) -> Any:
    fabric, program = fabric_of(where), program_of(where, kind)
    params = make_params() if params is None else params
    split = {"shardings": inside} if where == "tiles" else {}
    step: Any
    if kind == "fsdp":
        params = mmj.fsdp.shard_params(params, fabric, program, **split)
        init, step = mmj.fsdp.sharded_train_step(
            lambda params, batch, pair: loss(mmj.fsdp.gather_params(params, pair), batch), optimizer, fabric
        )
    else:
        init, step = mmj.train_step(loss, optimizer, fabric, **split)
    state, step = jax.jit(init)(params, program), jax.jit(step)
    for batch in batches():
        params, state, _ = step(params, state, batch, program)
    return mmj.fsdp.unshard_params(params, fabric, program) if kind == "fsdp" else params


CLIP = 0.5
OPTIMIZERS = {
    "clip": (
        optax.chain(mmj.clip_by_global_norm(CLIP), optax.sgd(1.0)),
        optax.chain(optax.clip_by_global_norm(CLIP), optax.sgd(1.0)),
    ),
    "lars": (mmj.lars(1.0, 1e-2, trust_coefficient=0.1), optax.lars(1.0, 1e-2, trust_coefficient=0.1)),
    "lamb": (mmj.lamb(0.1, weight_decay=0.1), optax.lamb(0.1, weight_decay=0.1)),
}
QUICK = [("chips", "pair", "lamb"), ("chips", "fused", "clip"), ("chips", "fsdp", "lars")]


def slow_unless(quick: bool, *case: str) -> Any:
    return pytest.param(*case, marks=[] if quick else pytest.mark.slow)


@pytest.mark.parametrize(
    ("where", "kind", "optimizer"),
    [
        slow_unless((*way, name) in QUICK, *way, name)
        for way in WAYS
        for name in OPTIMIZERS
        if way[1] != "fused"
        or name == "clip"  # with a fused update there are no norms of layers: see test_fused_update
    ],
)
def test_norms_of_complex_weights_are_optax_s(where: str, kind: str, optimizer: str) -> None:
    ours, theirs = OPTIMIZERS[optimizer]
    wanted, start = on_one_device(theirs), make_params()
    assert all(np.abs(wanted[name] - start[name]).max() > 1e-3 for name in start), "every layer is trained"
    got = trained(where, kind, ours)
    for name in start:
        np.testing.assert_allclose(got[name], wanted[name], rtol=2e-5, atol=2e-6, err_msg=name)


def part_nan(params: Any, batch: Any) -> Any:
    """The gradient of one weight of "w" is NaN, and all others are 3."""
    poison = jnp.zeros((4, 2)).at[2, 1].set(jnp.nan)
    return 3 * jnp.sum(params["b"]) + jnp.sum(params["w"] * (3 + poison)) + 0 * jnp.sum(batch)


@pytest.mark.parametrize(("where", "kind"), [slow_unless(way == ("chips", "fused"), *way) for way in WAYS])
def test_one_nan_makes_all_clipped_updates_nan_as_optax_s(where: str, kind: str) -> None:
    params = {"w": np.ones((4, 2), np.float32), "b": np.ones(2, np.float32)}
    ours, theirs = OPTIMIZERS["clip"]
    wanted = on_one_device(theirs, part_nan, params)
    assert all(np.isnan(leaf).all() for leaf in wanted.values()), "the oracle"
    got = trained(where, kind, ours, part_nan, params, {"w": P("model"), "b": P()})
    assert all(np.isnan(np.asarray(leaf)).all() for leaf in got.values())


@pytest.mark.parametrize("guard", ["zero_nans", "apply_if_finite"])
def test_optax_s_guards_against_nan_see_it_after_clipping(guard: str) -> None:
    def guarded(clip: Any) -> Any:
        if guard == "zero_nans":
            return optax.chain(clip, optax.zero_nans(), optax.sgd(0.5))
        return optax.apply_if_finite(optax.chain(clip, optax.sgd(0.5)), 10)

    params = {"w": np.ones((4, 2), np.float32), "b": np.ones(2, np.float32)}
    got = trained("chips", "program", guarded(mmj.clip_by_global_norm(CLIP)), part_nan, params)
    wanted = on_one_device(guarded(optax.clip_by_global_norm(CLIP)), part_nan, params)
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
