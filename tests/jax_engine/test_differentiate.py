"""`value_and_grad` over tiles, against JAX's own on the whole batch, and what its compiled code sends where."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshmend.jax as mmj
from jax_engine import training_cases
from jax_engine.reach import ACROSS, INSIDE, STRAIGHT, reach_of_collectives
from jax_engine.training_cases import normal, program_of, tiles_of
from meshmend.errors import ParameterError
from meshmend.jax.engine.tiles import TiledFabric

N_TILES, WIDTH, HIDDEN = 3, 8, 16
SPECS = {"up": P(None, "model"), "down": P("model", None), "scale": P()}


def fabric() -> TiledFabric:
    """Three of four tiles: one chip of the first is lost."""
    return tiles_of("4x4", "0,1", model=4)


def program() -> mmj.Program:
    return program_of(fabric(), "replicated")


def params() -> dict[str, Any]:
    return normal({"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH), "scale": (WIDTH,)}, spread=0.5)


def examples(n: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(1).normal(0, 1, (n, WIDTH)).astype(np.float32)


def per_example(w: Any, x: Any) -> Any:
    hidden = jax.lax.with_sharding_constraint(jnp.tanh(x @ w["up"]), P(None, "model"))
    return jnp.mean((hidden @ w["down"] * w["scale"] - x) ** 2, axis=1)


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(per_example(w, x))


def plain(w: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"] * w["scale"] - x) ** 2)


def run(function: Any, *args: Any, **more: Any) -> Any:
    with jax.set_mesh(fabric().jax_mesh):
        return jax.jit(function)(*args, program=program(), **more)


def check_close(got: Any, want: Any) -> None:
    training_cases.check_close(got, want, rtol=1e-5, atol=1e-6)


def test_gradients_are_those_of_the_whole_batch_and_only_shards_travel() -> None:
    w, x = params(), examples(6)
    function = jax.jit(mmj.value_and_grad(loss, fabric(), SPECS))
    on = {name: jax.device_put(leaf, fabric().sharding(*SPECS[name])) for name, leaf in w.items()}
    with jax.set_mesh(fabric().jax_mesh):
        compiled = function.lower(on, jax.device_put(x, fabric().sharding("tile")), program=program()).compile()
        value, gradients = compiled(on, jax.device_put(x, fabric().sharding("tile")), program=program())
    check_close((value, gradients), jax.value_and_grad(plain)(w, x))
    assert {name: leaf.sharding.spec for name, leaf in gradients.items()} == SPECS
    reach = reach_of_collectives(str(compiled.as_text()), 4)
    assert reach["collective-permute", STRAIGHT] == sum(map(len, program().layout.shape.lanes))
    # Tensor parallelism adds up what chips have of the output and of the gradient; nothing else joins chips.
    assert set(reach) == {("collective-permute", STRAIGHT), ("all-reduce", INSIDE)}


def test_a_batch_that_is_split_inside_tiles_stays_split() -> None:
    two = tiles_of("4x4", "0,1", fsdp=2, tensor=2)
    there = program_of(two, "replicated")
    specs = {"up": P("fsdp", "tensor"), "down": P("tensor", "fsdp"), "scale": P()}
    w, x = params(), examples(12)
    on = {name: jax.device_put(leaf, two.sharding(*specs[name])) for name, leaf in w.items()}
    split = jax.device_put(x, two.sharding(("tile", "fsdp")))

    def model(w: Any, x: Any) -> Any:
        hidden = jax.lax.with_sharding_constraint(jnp.tanh(x @ w["up"]), P("fsdp", "tensor"))
        return jnp.mean((hidden @ w["down"] * w["scale"] - x) ** 2)

    with jax.set_mesh(two.jax_mesh):
        function = jax.jit(mmj.value_and_grad(model, two, specs, microbatches=2))
        compiled = function.lower(on, split, program=there).compile()
        got = compiled(on, split, program=there)
    check_close(got, jax.value_and_grad(plain)(w, x))
    reach = reach_of_collectives(str(compiled.as_text()), 4)
    assert not [kind for kind, where in reach if where == ACROSS]
    assert [kind for kind, where in reach if where == STRAIGHT] == ["collective-permute"]


def test_arguments_have_their_roles() -> None:
    """One that is shared, keys, and aux; in two microbatches."""

    def rich(w: Any, step: Any, x: Any, key: Any) -> Any:
        return loss(w, x) + step, {"mean": jnp.mean(x, axis=0), "noise": jax.random.uniform(key, (2,))}

    w, x = params(), examples(12)
    roles: dict[str, Any] = {"shared_argnums": 1, "key_argnums": 3, "has_aux": True}
    once = mmj.value_and_grad(rich, fabric(), SPECS, **roles)
    twice = mmj.value_and_grad(rich, fabric(), SPECS, microbatches=2, **roles)
    key = jax.random.key(7)
    want, wanted = jax.value_and_grad(lambda w: plain(w, x) + 0.5)(w)
    for function in (once, twice):
        (value, aux), gradients = run(function, w, 0.5, x, key)
        check_close((value, gradients), (want, wanted))
        check_close(aux["mean"], x.mean(axis=0))
        keys = [jax.random.fold_in(key, tile) for tile in range(N_TILES)]
        if function is once:
            drawn = [jax.random.uniform(k, (2,)) for k in keys]
        else:
            drawn = [jax.random.uniform(jax.random.fold_in(k, i), (2,)) for k in keys for i in range(2)]
        check_close(aux["noise"], np.mean(drawn, axis=0))


def test_weights_make_a_true_mean() -> None:
    w, x = params(), examples(12)
    weights = np.array([1, 0, 2, 1, 1, 0, 0, 0, 3, 1, 1, 1], np.float32)
    x[1] = np.nan  # of weight 0, so that it must have no influence

    def with_aux(w: Any, x: Any) -> Any:
        return per_example(w, x), {"first": x[:, 0]}

    function = mmj.value_and_grad(with_aux, fabric(), SPECS, has_aux=True, per_example=True, microbatches=2)
    (value, aux), gradients = run(function, w, x, weights=weights)
    used = np.nan_to_num(x)

    def mean(w: Any) -> Any:
        values = jnp.mean((jnp.tanh(used @ w["up"]) @ w["down"] * w["scale"] - used) ** 2, axis=1)
        return jnp.sum(weights * values) / weights.sum()

    check_close((value, gradients), jax.value_and_grad(mean)(w))
    check_close(aux["first"], (weights * used[:, 0]).sum() / weights.sum())


def test_a_feed_pads_what_does_not_divide() -> None:
    """Eight examples over three tiles: rows of three, one of them padding, shared by the devices of a tile."""
    x = examples(8)
    feed = mmj.Feed(x, mmj.KeepGlobal(8))
    (batch,) = feed.batches(fabric(), epochs=1)
    assert batch.data.shape == (9, WIDTH)
    assert batch.data.sharding.spec == P(("tile",))
    assert batch.weights.sum() == 8
    function = mmj.value_and_grad(per_example, fabric(), SPECS, per_example=True)
    value, gradients = run(function, params(), batch.data, weights=batch.weights)
    check_close((value, gradients), jax.value_and_grad(plain)(params(), x))


def test_bfloat16_gradients_are_summed_in_float32() -> None:
    """256 + 1 is 256 in bfloat16: whatever the order, the sum of 256, 1 and 4 would be even, and the mean not 87."""
    w = {"w": jnp.ones((4,), jnp.bfloat16)}
    x = np.array([[256.0] * 4, [1.0] * 4, [4.0] * 4], np.float32)

    def linear(w: Any, x: Any) -> Any:
        return jnp.sum(w["w"] * x.astype(jnp.bfloat16))

    _, gradients = run(mmj.value_and_grad(linear, fabric(), {"w": P("model")}), w, x)
    assert gradients["w"].dtype == jnp.bfloat16
    assert gradients["w"].tolist() == [87.0] * 4


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a batch that does not divide": ({}, {"x": examples(7)}, r"Argument 1 has 7 .* nearest sizes that do are 6 and 9"),
    "too few examples": (
        {},
        {"x": examples(2)},
        r"nearest sizes that do are 3 and 6\. For a batch of any size use mmj",
    ),
    "microbatches": ({"microbatches": 2}, {"x": examples(9)}, r"3 tiles and 2 microbatches each\..* 6 and 12"),
    "a number for a batch": ({}, {"x": 3.0}, r"Argument 1 is a single number.* List it in shared_argnums"),
    "an unknown axis": ({"shardings": P("tensor")}, {}, r"there is no such axis: .*inside a tile, of \('model',\)"),
    "the axis of tiles": ({"shardings": P("tile")}, {}, "parameters are the same on all tiles"),
    "an axis that does not divide": (
        {"shardings": {**SPECS, "scale": P(("model",))}},
        {"w": {**params(), "scale": jnp.ones(6)}},
        r"scale.*6 elements.*Pad it to 8",
    ),
    "too many axes": ({"shardings": {**SPECS, "scale": P(None, "model")}}, {}, "it has fewer axes"),
    "another tree": ({"shardings": [P(), P()]}, {}, "2 shardings for 3 parameters"),
    "no sharding": ({"shardings": "model"}, {}, "expected a PartitionSpec or a NamedSharding"),
    "weights": ({}, {"weights": np.ones(6)}, r"make it with value_and_grad\(…, per_example=True\)"),
    "parameters that are shared": ({"shared_argnums": 0}, {}, "expected numbers from 1 to 1, each in one of them"),
    "no batch": ({"shared_argnums": 1}, {}, "No argument of the loss is a batch"),
    "no key": ({"key_argnums": 1}, {"more": (examples(6),)}, "expected random keys"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_right_is_refused(name: str) -> None:
    made, called, message = WRONG[name]
    made = dict(made)
    function = mmj.value_and_grad(loss, fabric(), made.pop("shardings", SPECS), **made)
    w, x = called.get("w", params()), called.get("x", examples(6))
    more = {"weights": called["weights"]} if "weights" in called else {}
    with pytest.raises(ParameterError, match=message):
        run(function, w, x, *called.get("more", ()), **more)


def test_what_cannot_be_made_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"mmj\.tile\(fabric, '1x1'\)"):
        mmj.value_and_grad(loss, fabric().chips, SPECS)  # type: ignore[arg-type]
    pair = program_of(fabric(), "sharded")
    with pytest.raises(
        ParameterError, match="got update='two-phase': with that each tile has the sums of its own weights only"
    ):
        mmj.value_and_grad(loss, fabric(), SPECS)(params(), examples(3), program=pair)


def test_a_train_step_takes_shardings_on_tiles_only() -> None:
    with pytest.raises(ParameterError, match="shardings say how a model is split inside tiles, got Fabric"):
        mmj.train_step(loss, optax.sgd(0.1), fabric().chips, shardings=SPECS)
