from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import meshmend as mm
import meshmend.jax as mmj
from jax_engine import cases
from meshmend.errors import ParameterError

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


def train(
    fabric: mmj.Fabric, optimizer: optax.GradientTransformation, program: Any, steps: int = STEPS, **more: Any
) -> Any:
    """Return the losses, the final parameters and the final state of a run with meshmend."""
    init, step = mmj.train_step(loss, optimizer, fabric, **more)
    params = make_params()
    state = jax.jit(init)(params, program)
    jitted = jax.jit(step, donate_argnums=(0, 1))
    losses = []
    for batch in batches(fabric.jax_mesh.devices.size)[:steps]:
        params, state, value = jitted(params, state, batch, program)
        losses.append(float(value))
    return losses, params, state


def train_with_psum(fabric: mmj.Fabric, optimizer: optax.GradientTransformation) -> Any:
    """Do the same with `lax.pmean`, written the usual way and nothing of meshmend's."""

    def local(params: Params, state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        value, gradients = lax.pmean((value, gradients), fabric.axes)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    none, every = PartitionSpec(), PartitionSpec(fabric.axes)
    step = jax.jit(
        jax.shard_map(
            local, mesh=fabric.jax_mesh, in_specs=(none, none, every), out_specs=none, check_vma=False
        )
    )  # fmt: skip
    params = make_params()
    state = optimizer.init(params)
    losses = []
    for batch in batches(fabric.jax_mesh.devices.size):
        params, state, value = step(params, state, batch)
        losses.append(float(value))
    return losses, params, state


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
def test_training_on_a_hole_gives_the_losses_of_psum(name: str, optimizer: optax.GradientTransformation) -> None:
    schedule, fabric = cases.schedule_of(name), cases.fabric_of(name)
    wanted = train_with_psum(fabric, optimizer)
    assert wanted[0][-1] < 0.9 * wanted[0][0], "a run that learns nothing shows nothing"
    check_same(train(fabric, optimizer, mmj.install(schedule, fabric)), wanted)
    check_same(train(fabric, optimizer, mmj.install(schedule, fabric, update="two-phase")), wanted)


def matrices_only(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def test_microbatches_give_the_same_gradients() -> None:
    schedule, fabric = cases.schedule_of("trees 4x4"), cases.fabric_of("trees 4x4")
    program = mmj.install(schedule, fabric)
    whole, cut = (train(fabric, optax.sgd(0.1), program, microbatches=n) for n in (1, 4))
    check_same(cut, whole)
    with pytest.raises(ParameterError, match=r"do not split evenly over the 16 devices .* and 3 microbatches each"):
        train(fabric, optax.sgd(0.1), program, microbatches=3)
    with pytest.raises(ParameterError, match="microbatches is 0"):
        mmj.train_step(loss, optax.sgd(0.1), fabric, microbatches=0)


@pytest.mark.parametrize("update", ["replicated", "two-phase"])
def test_the_mean_over_microbatches_has_the_dtype_of_the_gradient(update: Any) -> None:
    """Each chip rounds its mean of 3 microbatches to bfloat16; 5 of these are added up in float32."""
    fabric = mmj.discover(jax.devices()[:6], shape="2x3", failed=["0,0"])
    program = mmj.install(mm.plan(fabric.mesh, "weave", chunks=7, owners="even"), fabric, update=update)
    rows = np.random.default_rng(0).integers(-99, 99, (15, 4))
    init, step = mmj.train_step(lambda w, x: jnp.mean(x @ w), optax.sgd(1.0), fabric, microbatches=3)
    w = jnp.zeros(4, jnp.bfloat16)
    found = jax.jit(step)(w, jax.jit(init)(w, program), jnp.asarray(rows, jnp.bfloat16), program)[0]
    own = (rows.reshape(5, 3, 4).sum(1).astype(np.float32) / np.float32(3)).astype(jnp.bfloat16)
    expected = -(own.astype(np.float32).sum(0) / np.float32(5))
    np.testing.assert_array_equal(np.asarray(found), expected.astype(jnp.bfloat16))


def test_the_state_is_split_over_the_owners() -> None:
    name = "row-pairs 4x4 - 2x2"
    schedule, fabric = cases.schedule_of(name), cases.fabric_of(name)
    _, params, state = train(fabric, optax.adam(1e-2), mmj.install(schedule, fabric, update="two-phase"), steps=2)
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
    assert len({np.asarray(shard.data).tobytes() for shard in params["w1"].addressable_shards}) == 1


def test_bfloat16_weights_keep_their_dtype_and_losses_and_aux_are_means() -> None:
    schedule, fabric = cases.schedule_of("hamiltonian 4x4"), cases.fabric_of("hamiltonian 4x4")
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), make_params())

    def with_aux(params: Params, batch: Any) -> Any:
        value = loss(params, batch).astype(jnp.float32)
        return value, {"largest": jnp.max(batch[0]), "examples": batch[0].shape[0]}

    init, step = mmj.train_step(with_aux, optax.adam(1e-2), fabric, has_aux=True)
    batch = batches(16)[0]
    by_program = []
    for program in (mmj.install(schedule, fabric), mmj.install(schedule, fabric, update="two-phase")):
        state = jax.jit(init)(params, program)
        new, _, value, aux = jax.jit(step)(params, state, batch, program)
        assert {leaf.dtype for leaf in new.values()} == {jnp.dtype(jnp.bfloat16)}
        assert aux["examples"] == 4
        np.testing.assert_allclose(aux["largest"], batch[0].reshape(16, -1).max(axis=1).mean(), rtol=1e-5)
        by_program.append(float(value))
    each = [float(loss(params, (x, y))) for x, y in zip(*(np.split(part, 16) for part in batch), strict=True)]
    assert by_program == pytest.approx([np.mean(each)] * 2, rel=1e-6)


@pytest.mark.parametrize("sharded", [False, True], ids=["program", "pair"])
def test_gradients_of_bfloat16_weights_are_summed_in_float32(sharded: bool) -> None:
    """One chip brings 256, eight bring 1, seven nothing: 264 / 16 = 16.5 is exact. In bfloat16, 256 + 1 is 256."""
    schedule, fabric = cases.schedule_of("hamiltonian 4x4"), cases.fabric_of("hamiltonian 4x4")
    program = mmj.install(schedule, fabric, update="two-phase" if sharded else "replicated")
    init, step = mmj.train_step(lambda w, batch: jnp.sum(w * batch.astype(w.dtype)), optax.sgd(1.0), fabric)
    w = jnp.zeros((), jnp.bfloat16)
    batch = np.array([256.0] + [1.0] * 8 + [0.0] * 7, np.float32)
    new, _, _ = jax.jit(step)(w, jax.jit(init)(w, program), batch, program)
    assert (new.dtype, float(new)) == (jnp.bfloat16, -16.5)


def test_two_cores_a_chip_train_too() -> None:
    mesh = mm.Mesh("2x4", failed=["2x2@0,0"])
    devices = np.array(jax.devices()[:8]).reshape(4, 2)
    fabric = mmj.Fabric(mesh, jax.sharding.Mesh(devices, ("chip", "core")), None)
    schedule = mm.plan(mesh, "hamiltonian")
    wanted = train_with_psum(fabric, optax.lamb(1e-2))
    check_same(train(fabric, mmj.lamb(1e-2), mmj.install(schedule, fabric)), wanted)
    check_same(train(fabric, mmj.lamb(1e-2), mmj.install(schedule, fabric, update="two-phase")), wanted)


def test_masks_by_layer_are_refused() -> None:
    masked = optax.adamw(0.1, mask=matrices_only)
    schedule, fabric = cases.schedule_of("hamiltonian 4x4"), cases.fabric_of("hamiltonian 4x4")
    init, _ = mmj.train_step(loss, masked, fabric)
    with pytest.raises(ParameterError, match="treats some layers differently"):
        jax.jit(init)(make_params(), mmj.install(schedule, fabric, update="two-phase"))
    state = jax.jit(init)(make_params(), mmj.install(schedule, fabric))
    assert jax.tree.map(jnp.shape, state[0].mu) == jax.tree.map(jnp.shape, make_params()), "whole layers are welcome"
