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
from meshmend.jax.engine.tiles import TiledFabric
from meshmend.jax.train.shardings import specs_of_state

SPECS = {"up": P(None, "model"), "down": P("model"), "scale": P()}
STEPS = 4
ADAMW = optax.adamw(1e-2)


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
def fabric_of(shape: str, failed: str, **inner: int) -> TiledFabric:
    n_devices = int(np.prod([int(n) for n in shape.split("x")]))
    chips = mmj.discover(jax.devices()[:n_devices], shape=shape, failed=[failed])
    return mmj.tile(chips, "2x2", **inner or {"model": 4})


def program_of(kind: str, fabric: TiledFabric) -> Any:
    chunks = 2 * fabric.mesh.n_chips
    if kind == "program":
        return mmj.install(mm.plan(fabric.mesh, "weave", chunks=chunks), fabric)
    if kind == "pair":
        return mmj.install(mm.plan(fabric.mesh, "weave", chunks=chunks, owners="even"), fabric, update="two-phase")
    return mmj.install(
        mm.plan(fabric.mesh, "weave", chunks=chunks, collective="all-reduce-with-update"), fabric, update="fused"
    )


def batches(n_examples: int) -> Any:
    rng = np.random.default_rng(1)
    return [rng.normal(size=(n_examples, 8)).astype(np.float32) for _ in range(STEPS)]


def one_device(n_examples: int, weights: Any = None, optimizer: Any = ADAMW) -> tuple[list[float], Any]:
    """Plain optax."""
    params, found = params_tree(), []
    state = optimizer.init(params)

    def loss(params: Any, batch: Any) -> Any:
        return jnp.average(values(params, batch)[0], weights=weights)

    for batch in batches(n_examples):
        value, gradients = jax.jit(jax.value_and_grad(loss))(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        found.append(float(value))
    return found, params


def train(
    fabric: TiledFabric,
    kind: str,
    n_examples: int,
    weights: Any = None,
    *,
    optimizer: Any = ADAMW,
    shardings: Any = SPECS,
    **options: Any,
) -> Any:
    program = program_of(kind, fabric)
    loss = mean_loss if weights is None else values
    init, step = mmj.train_step(
        loss, optimizer, fabric, shardings=shardings, has_aux=True, per_example=weights is not None, **options
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
    ["fused", pytest.param("program", marks=pytest.mark.slow), pytest.param("pair", marks=pytest.mark.slow)],
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


def long_ones(params: Any) -> Any:
    """Choose "down" by its shape: a chip's shard of it, (4, 4) or less, would not be chosen."""
    return jax.tree.map(lambda leaf: leaf.shape[0] >= 16, params)


LIMIT = 1.2
NORMS = {
    "lamb": (mmj.lamb(0.05, weight_decay=0.1, mask=long_ones), optax.lamb(0.05, weight_decay=0.1, mask=long_ones)),
    "lars": (
        mmj.lars(0.1, 0.1, long_ones, trust_coefficient=0.3, trust_ratio_mask=long_ones),
        optax.lars(0.1, 0.1, long_ones, trust_coefficient=0.3, trust_ratio_mask=long_ones),
    ),
    "clipping": (
        optax.chain(mmj.clip_by_global_norm(LIMIT), optax.sgd(0.1, momentum=0.9)),
        optax.chain(optax.clip_by_global_norm(LIMIT), optax.sgd(0.1, momentum=0.9)),
    ),
    "a mask": (
        optax.chain(mmj.add_decayed_weights(0.1, long_ones), optax.adam(0.1)),
        optax.chain(optax.add_decayed_weights(0.1, long_ones), optax.adam(0.1)),
    ),
}
"""Ours, which know how layers are split inside a tile and over tiles, and optax's own, for whole layers."""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("lamb", "pair"),
        *(
            pytest.param(name, kind, marks=pytest.mark.slow)
            for name, kind in [
                *[
                    ("lars", "pair"),
                    ("clipping", "pair"),
                    ("clipping", "fused"),
                    ("a mask", "pair"),
                    ("a mask", "fused"),
                ],
                *[("lamb", "program"), ("lars", "program"), ("clipping", "program")],
            ]
        ),
    ],
)
def test_norms_are_of_whole_layers(name: str, kind: str) -> None:
    """Two axes inside a tile: "up" is split by both, "down" by one and has two copies, "scale" has four."""
    fabric = fabric_of("4x4", "0,1", fsdp=2, tensor=2)
    shardings = {"up": P("fsdp", "tensor"), "down": P("tensor"), "scale": P()}
    ours, optaxs = NORMS[name]
    losses, params, _ = train(fabric, kind, 24, optimizer=ours, shardings=shardings)
    want, expected = one_device(24, optimizer=optaxs)
    np.testing.assert_allclose(losses, want, rtol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), params, expected)
    for leaf in jax.tree.leaves(params):
        by_slot: dict[Any, Any] = {}
        for shard in leaf.addressable_shards:
            first = by_slot.setdefault(str(shard.index), np.asarray(shard.data))
            assert np.array_equal(first, shard.data), "all copies end with the same bits"


def test_some_of_these_steps_are_clipped_and_some_are_not() -> None:
    params: Any = params_tree()
    optimizer = NORMS["clipping"][1]
    state, norms = optimizer.init(params), []
    differentiate = jax.jit(jax.grad(mean_loss, has_aux=True))
    for batch in batches(24):
        gradients, _ = differentiate(params, batch)
        norms.append(float(optax.tree.norm(gradients)))
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    assert min(norms) < LIMIT < max(norms), norms


REFUSED = {
    "optax.lamb": (optax.lamb(0.1), "pair", r"combines values of several weights.*mmj\.lamb"),
    "optax.lars": (
        optax.lars(0.1),
        "pair",
        r"treats some layers differently.*mmj\.lars.*install with update='replicated'",
    ),
    "optax.clip_by_global_norm": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
        "fused",
        r"combines values of several weights.*mmj\.clip_by_global_norm.*install with update='replicated'",
    ),
    "adafactor": (optax.adafactor(0.1), "pair", r"or install with update='replicated'"),
    "adaptive clipping": (
        optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
        "pair",
        r"combines values of several weights.*install with update='replicated'",
    ),
    "mmj.lamb with a fused update": (
        mmj.lamb(0.1),
        "fused",
        r"needs norms of layers before .*update='two-phase'",
    ),
    "mmj.lars with a fused update": (
        mmj.lars(0.1),
        "fused",
        r"needs norms of layers before .*update='two-phase'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_update_shards_of_shards_is_refused(name: str) -> None:
    optimizer, kind, message = REFUSED[name]
    fabric = fabric_of("4x4", "0,1")
    init, step = mmj.train_step(mean_loss, optimizer, fabric, shardings=SPECS, has_aux=True)
    with pytest.raises(ParameterError, match=message):
        jax.eval_shape(init, params_tree(), program_of(kind, fabric))
    with pytest.raises(ParameterError, match=message):
        jax.eval_shape(step, params_tree(), None, batches(24)[0], program_of(kind, fabric))


def test_value_and_grad_takes_no_program_for_a_sharded_update() -> None:
    fabric = fabric_of("4x4", "0,1")
    differentiate = mmj.value_and_grad(mean_loss, fabric, SPECS, has_aux=True)
    with pytest.raises(ParameterError, match=r"got update='fused'.*use mmj\.train_step"):
        differentiate(params_tree(), batches(24)[0], program=program_of("fused", fabric))


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
