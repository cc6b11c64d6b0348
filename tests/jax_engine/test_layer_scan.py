"""`scan_layers` has the values and the gradients of plain JAX, with whole and with sharded parameters, round a hole."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshmend as mm
import meshmend.jax as mmj
from jax_engine.training_cases import chips_of, program_of
from meshmend.errors import ParameterError

WIDTH = 8
ROUNDING = 1e-5
"""Relative to the largest of an array: twelve layers and a mean over twelve chips, in another order, in float32."""


def layers_tree(n_layers: int, dtype: Any = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"up": (WIDTH, 3 * WIDTH), "down": (3 * WIDTH, WIDTH), "norm": (WIDTH,), "scale": ()}
    return {
        name: jnp.asarray(rng.normal(size=(n_layers, *shape)).astype(np.float32) / 4).astype(dtype)
        for name, shape in shapes.items()
    }


def layer(w: Any, x: Any) -> Any:
    h = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * (1 + w["norm"])
    return x + (1 + w["scale"]) * (jnp.tanh(h @ w["up"]) @ w["down"])


@cache
def programs(shape: str = "4x4", *failed: str) -> tuple[mmj.Fabric, mmj.Program]:
    """A ring around the hole, or, on five chips, seven chunks that are gathered and scattered by plans of their own."""
    fabric = chips_of(shape, *failed)
    if fabric.n_chips != 5:
        return fabric, program_of(fabric, "fsdp", "hamiltonian")
    scatter, gather = (
        mm.plan(fabric.mesh, "gather", chunks=7, collective=what) for what in ("reduce-scatter", "all-gather")
    )
    scalars = mm.plan(fabric.mesh, "latency")
    return fabric, mmj.install(None, fabric, scatter=scatter, gather=gather, scalars=scalars, update="two-phase")


def whole_program(fabric: mmj.Fabric) -> mmj.Program:
    """For parameters that are whole on every chip: an all-reduce of fewer chunks than a layer has weights."""
    return program_of(fabric, "replicated", chunks=16)


def batch(n_chips: int, per_chip: int = 2) -> Any:
    return np.random.default_rng(1).normal(size=(n_chips * per_chip, WIDTH)).astype(np.float32)


def mapped(fabric: mmj.Fabric, function: Any, in_specs: Any, out_specs: Any) -> Any:
    return jax.jit(
        jax.shard_map(function, mesh=fabric.jax_mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    )


def check_close(got: Any, wanted: Any, rounding: float = ROUNDING) -> None:
    structures: list[Any] = [jax.tree.structure(got), jax.tree.structure(wanted)]
    assert structures[0] == structures[1]
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert a.shape == b.shape
        assert np.abs(a - b).max() <= rounding * np.abs(b).max(), jax.tree_util.keystr(path)


def plain(layers: Any, x: Any, layer: Any = layer) -> Any:
    """The mean loss over the whole batch, written the usual way, on one device."""
    y, _ = lax.scan(lambda x, w: (layer(w, x), None), x, layers)
    return jnp.mean(jnp.sum(y**2, axis=-1))


def gradients_over_chips(fabric: mmj.Fabric, params: Any, x: Any, program: Any, layer: Any = layer, **more: Any) -> Any:
    """Return the mean loss and the gradients of `scan_layers` on all chips."""

    def local(params: Any, x: Any, program: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean(jnp.sum(mmj.fsdp.scan_layers(layer, params, x, program, **more) ** 2, axis=-1))

        value, gradients = jax.value_and_grad(loss)(params)
        return lax.pmean(value, fabric.axes), gradients

    specs = mmj.fsdp.sharded_specs(params, fabric)
    return mapped(fabric, local, (specs, P(fabric.axes), program.spec), (P(), specs))(params, x, program)


@pytest.mark.parametrize(
    ("shape", "failed", "n_layers"), [pytest.param("4x4", "2x2@0,0", 12, marks=pytest.mark.slow), ("2x3", "0,0", 1)]
)
def test_gradients_are_those_of_plain_jax(shape: str, failed: str, n_layers: int) -> None:
    fabric, pair = programs(shape, failed)
    layers, x = layers_tree(n_layers), batch(fabric.mesh.n_chips)
    wanted = jax.jit(jax.value_and_grad(plain))(layers, x)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(wanted[1]))
    check_close(gradients_over_chips(fabric, layers, x, whole_program(fabric)), wanted)
    params = mmj.fsdp.shard_params(layers, fabric, pair, stacked=True)
    value, gradients = gradients_over_chips(fabric, params, x, pair)
    check_close((value, mmj.fsdp.unshard_params(gradients, fabric, pair)), wanted)


def layer_of_integers(w: Any, x: Any) -> Any:
    h = x + x * w["norm"]
    return x + (jax.nn.relu(h @ w["up"]) @ w["down"]) * w["scale"]


@pytest.mark.slow
def test_unrolled_steps_sums_instead_of_means_and_nothing_hidden() -> None:
    """With small integers, of which no sum or product is rounded, however it is compiled; nor when divided by four."""
    fabric, pair = programs("2x2")
    rng = np.random.default_rng(0)
    layers = jax.tree.map(lambda leaf: jnp.asarray(rng.integers(-1, 2, leaf.shape), jnp.float32), layers_tree(2))
    layers["scale"] = jnp.ones(2)
    x = rng.integers(-1, 2, batch(4).shape).astype(np.float32)
    params = mmj.fsdp.shard_params(layers, fabric, pair, stacked=True)
    wanted = jax.jit(jax.value_and_grad(partial(plain, layer=layer_of_integers)))(layers, x)
    assert all(0 < np.abs(leaf).max() < 2**24 / 8 for leaf in jax.tree.leaves(wanted))
    for given, program in ((layers, whole_program(fabric)), (params, pair)):
        one = partial(gradients_over_chips, fabric, given, x, program, layer_of_integers)
        value, gradients = one()
        whole = gradients if given is layers else mmj.fsdp.unshard_params(gradients, fabric, pair)
        check_close((value, whole), wanted, rounding=0)
        sums = jax.tree.map(lambda leaf: 4 * leaf, gradients)
        check_close(one(unroll=True, mean=False), (value, sums), rounding=0)
        check_close(one(hide=False), (value, gradients), rounding=0)


def test_whatever_a_layer_closes_over_has_its_gradient_and_integers_pass_through() -> None:
    """A factor that is differentiated by, a mask and a key, and a counter in x, which a layer uses as its number."""
    fabric, pair = programs("2x3", "0,0")
    layers, x = layers_tree(3), batch(5)
    params = mmj.fsdp.shard_params(layers, fabric, pair, stacked=True)
    mask = np.arange(WIDTH) % 3 > 0

    def make(factor: Any, mask: Any, key: Any) -> Any:
        def one(w: Any, state: Any) -> Any:
            x, number = state
            kept = jax.random.bernoulli(jax.random.fold_in(key, number), 0.5, (WIDTH,))
            return layer(w, x) + factor * jnp.where(mask & kept, jnp.sin(x), 0.0), number + 1

        return one

    def wanted(layers: Any, x: Any, factor: Any) -> Any:
        one = make(factor, mask, jax.random.key(3))
        (y, _), _ = lax.scan(lambda state, w: (one(w, state), None), (x, jnp.int32(0)), layers)
        return jnp.mean(jnp.sum(y**2, axis=-1))

    def local(params: Any, x: Any, factor: Any, mask: Any, pair: Any) -> Any:
        def loss(params: Any, x: Any, factor: Any) -> Any:
            one = make(factor, mask, jax.random.key(3))
            y, number = mmj.fsdp.scan_layers(one, params, (x, jnp.int32(0)), pair)
            return jnp.mean(jnp.sum(y**2, axis=-1)), number

        found, number = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(params, x, factor)
        return found[0], found[1] / 5, lax.pmean(found[2], fabric.axes), number

    specs = mmj.fsdp.sharded_specs(params, fabric)
    step = mapped(fabric, local, (specs, P("chip"), P(), P(), pair.spec), (specs, P("chip"), P(), P()))
    gradients, dx, d_factor, number = step(params, x, 0.3, mask, pair)
    assert number == 3
    found = (mmj.fsdp.unshard_params(gradients, fabric, pair), dx, d_factor)
    check_close(found, jax.jit(jax.grad(wanted, argnums=(0, 1, 2)))(layers, x, 0.3))


def test_bfloat16_weights_are_summed_in_float32_and_kept_as_float32() -> None:
    """One chip brings 256, four bring 1: 260 is exact. In bfloat16, 256 + 1 is 256."""
    fabric, pair = programs("2x3", "0,0")
    whole = {"w": jnp.full((2, 3), 1 / 3, jnp.float32)}
    params = mmj.fsdp.shard_params(whole, fabric, pair, stacked=True, gather_dtype=jnp.bfloat16)
    brought = np.array([256.0] + [1.0] * 4, np.float32)

    def local(params: Any, x: Any, pair: Any) -> Any:
        def one(w: Any, y: Any) -> Any:
            assert w["w"].dtype == jnp.bfloat16
            return y + jnp.sum(w["w"] * x.astype(jnp.bfloat16))

        return jax.grad(lambda params: mmj.fsdp.scan_layers(one, params, jnp.bfloat16(0), pair).astype(jnp.float32))(
            params
        )

    specs = mmj.fsdp.sharded_specs(params, fabric)
    gradients = mapped(fabric, local, (specs, P("chip"), pair.spec), specs)(params, brought, pair)
    assert [shard.dtype for shard in params.shards] == [shard.dtype for shard in gradients.shards] == [jnp.float32]
    np.testing.assert_array_equal(mmj.fsdp.unshard_params(gradients, fabric, pair)["w"], np.full((2, 3), 52.0))
    np.testing.assert_array_equal(mmj.fsdp.unshard_params(params, fabric, pair)["w"], whole["w"])


def test_halves_that_do_not_fit_each_other_are_refused() -> None:
    fabric, _ = programs("2x3", "0,0")
    whole = mm.plan(fabric.mesh, "weave")
    scatter, gather = (
        mm.plan(fabric.mesh, "gather", chunks=chunks, collective=what)
        for chunks, what in ((7, "reduce-scatter"), (8, "all-gather"))
    )
    with pytest.raises(ParameterError, match="do not have the same chunks with the same owners"):
        mmj.install(whole, fabric, scatter=scatter, gather=gather, update="two-phase")
    with pytest.raises(ParameterError, match="Expected a schedule for all-gather, got one for reduce-scatter"):
        mmj.install(whole, fabric, scatter=scatter, gather=scatter, update="two-phase")
    with pytest.raises(ParameterError, match="there is no schedule for all-gather"):
        mmj.install(whole, fabric, scatter=scatter, update="two-phase")


def test_what_does_not_fit_is_refused() -> None:
    fabric, pair = programs("2x3", "0,0")
    layers = layers_tree(2)
    params = mmj.fsdp.shard_params(layers, fabric, pair, stacked=True)
    other = mmj.install(mm.plan(fabric.mesh, "weave", chunks=10, owners="even"), fabric, update="two-phase")

    def call(params: Any, program: Any, one: Any = layer) -> Any:
        specs = mmj.fsdp.sharded_specs(params, fabric), P("chip"), program.spec
        run = mapped(fabric, lambda *given: mmj.fsdp.scan_layers(one, *given), specs, P("chip"))
        return jax.eval_shape(run, params, batch(5), program)

    with pytest.raises(ParameterError, match="cut by another plan, for other chunks or other owners"):
        call(params, other)
    with pytest.raises(ParameterError, match=r"the program has update='two-phase'\. Give one from mmj\.install"):
        call(layers, pair)
    with pytest.raises(ParameterError, match="sharded by a program with update='two-phase', got update='replicated'"):
        call(params, whole_program(fabric))
    with pytest.raises(ParameterError, match="expected the same first axis for all, the layers"):
        call({**layers, "more": jnp.ones(3)}, whole_program(fabric))
    with pytest.raises(ParameterError, match="dtype int32, which has no gradient"):
        call({**layers, "more": jnp.ones(2, jnp.int32)}, whole_program(fabric))
    with pytest.raises(ParameterError, match="one tree, expected a stack of layers"):
        call(mmj.fsdp.shard_params(layers, fabric, pair), pair)
    with pytest.raises(ParameterError, match=r"expected the same, because its output is the next layer's input"):
        call(params, pair, lambda w, x: layer(w, x)[:1])
    with pytest.raises(ParameterError, match=r"shards of float32.* summed in bfloat16. Give accumulate_dtype"):
        mmj.fsdp.shard_params(layers, fabric, pair, gather_dtype=jnp.bfloat16, accumulate_dtype=None)
    with pytest.raises(ParameterError, match="dtype int32, which has no gradient"):
        mmj.fsdp.shard_params({"n": jnp.ones(2, jnp.int32)}, fabric, pair)
