"""Masks and labels by name in sharded updates: what optax does to whole layers on one device."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshmend.jax as mmj
from jax_engine.restart_cases import read_vectors, vectors_of
from jax_engine.training_cases import (
    Trained,
    check_close,
    chips_of,
    in_tiles,
    matrices,
    normal,
    program_of,
    run,
    tiles_of,
    train,
    train_alone,
)
from meshmend.errors import ParameterError
from meshmend.jax.state.layout.state_layout import StateLayout
from rows import others_slow

SHAPES: dict[str, tuple[int, ...]] = {"a": (7,), "none": (0, 3), "scale": (), "w": (16, 12), "x": (3, 5)}
LABELS = {"a": "slow", "none": "fast", "scale": "slow", "w": "fast", "x": "frozen"}
MASK = {name: name in "wx" for name in SHAPES}
FABRIC = ("2x3", "0,0")


def by_name(tree: Any) -> Any:
    """A mask that a function makes of names."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("w", "scale"), tree)


def one_name_faster(updates: Any, params: Any) -> Any:
    del params
    return {name: leaf * (2.0 if name == "a" else 1.0) for name, leaf in updates.items()}


def two_layers_mixed(updates: Any, params: Any) -> Any:
    """Element by element: these have one shape, but other places in a shard."""
    del params
    return {**updates, "x": (updates["x"] + updates["y"]) / 2}


Pair = tuple[optax.GradientTransformation, optax.GradientTransformation]


def same(optimizer: optax.GradientTransformation) -> Pair:
    return optimizer, optimizer


OPTIMIZERS: dict[str, Pair] = {
    "decay by a tree": same(optax.adamw(1e-2, weight_decay=0.3, mask=MASK)),
    "decay by a function": same(optax.adamw(1e-2, weight_decay=0.3, mask=by_name)),
    "masked": same(optax.chain(optax.masked(optax.adam(1.0), MASK), optax.sgd(1e-2, momentum=0.9))),
    "labels": same(
        optax.multi_transform(
            {"fast": optax.adamw(1e-2), "slow": optax.sgd(1e-3, momentum=0.9), "frozen": optax.set_to_zero()}, LABELS
        )
    ),
    "a name": same(optax.chain(optax.stateless(one_name_faster), optax.adam(1e-2))),
    "injected": same(
        optax.inject_hyperparams(lambda rate: optax.chain(optax.masked(optax.set_to_zero(), MASK), optax.adam(rate)))(
            rate=optax.exponential_decay(0.1, 1, 0.5)
        )
    ),
    "clipped": (
        optax.chain(mmj.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.3, mask=MASK)),
        optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.3, mask=MASK)),
    ),
    "clipped by label": (
        optax.multi_transform({"yes": mmj.clip_by_global_norm(0.5), "no": optax.identity()}, {
            name: "yes" if yes else "no" for name, yes in MASK.items()}),
        optax.multi_transform({"yes": optax.clip_by_global_norm(0.5), "no": optax.identity()}, {
            name: "yes" if yes else "no" for name, yes in MASK.items()}),
    ),
}  # fmt: skip


def loss(params: Any, batch: Any) -> Any:
    """Every layer has gradients of its own, and they change from step to step."""
    return jnp.mean(batch) * sum((i + 1) * jnp.sum(jnp.sin(x)) for i, x in enumerate(jax.tree.leaves(params)))


def linear(params: Any, batch: Any) -> Any:
    """Whole numbers are the gradients of whole numbers."""
    return jnp.mean(batch) * sum((i + 1) * jnp.sum(x) for i, x in enumerate(jax.tree.leaves(params)))


def batches(n_devices: int) -> list[Any]:
    return [np.full((n_devices, 1), 1.0 + i, np.float32) for i in range(3)]


CASES = [(name, kind) for name in OPTIMIZERS for kind in ("sharded", "fused", "fsdp")]
QUICK = [("masked", "sharded"), ("clipped", "fsdp")]


@pytest.mark.parametrize(("name", "kind"), others_slow(CASES, quick=QUICK))
def test_layers_are_told_apart_by_name_as_on_one_device(name: str, kind: str) -> None:
    ours, theirs = OPTIMIZERS[name]
    fabric, params = chips_of(*FABRIC), normal(SHAPES)
    found = train(loss, params, ours, fabric, kind, batches(5))
    alone = train_alone(loss, params, theirs, batches(5))
    check_close(found.params, alone.params, 2e-6, 1e-7)
    assert any(not np.array_equal(found.params[name], params[name]) for name in SHAPES)


@pytest.mark.parametrize(
    ("kind", "stored"),
    others_slow(
        itertools.product(["sharded", "fused", "fsdp"], ["flat", "in tiles"]),
        quick=[("fused", "in tiles"), ("fsdp", "in tiles")],
    ),
)
def test_whole_numbers_have_the_bits_of_one_device(kind: str, stored: str) -> None:
    """Two rates, and layers that are frozen, with bfloat16 among them."""
    params = {name: jnp.asarray(np.random.default_rng(0).integers(-9, 9, shape), jnp.float32)
              for name, shape in SHAPES.items()}  # fmt: skip
    params["a"] = params["a"].astype(jnp.bfloat16)
    rates = {"fast": optax.sgd(0.5, momentum=0.5), "slow": optax.sgd(0.25), "frozen": optax.set_to_zero()}
    optimizer, fabric = optax.multi_transform(rates, LABELS), chips_of("2x2")
    program = program_of(fabric, kind)
    program = in_tiles(program) if stored == "in tiles" else program
    found = train(linear, params, optimizer, fabric, kind, batches(4), program=program)
    alone = train_alone(linear, params, optimizer, batches(4))
    assert {name: np.asarray(leaf, np.float32).tobytes() for name, leaf in found.params.items()} == {
        name: np.asarray(leaf, np.float32).tobytes() for name, leaf in alone.params.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sharded", "fsdp"])
def test_inside_tiles_too(kind: str) -> None:
    params = normal({"a": (8,), "w": (16, 12)})
    optimizer = optax.adamw(1e-2, weight_decay=0.3, mask={"a": False, "w": True})
    fabric = tiles_of("2x4", side="1x2", model=2)
    specs = {"a": P("model"), "w": P(None, "model")}
    found = train(loss, params, optimizer, fabric, kind, batches(8), shardings=specs)
    check_close(found.params, train_alone(loss, params, optimizer, batches(8)).params, 2e-6, 1e-7)


def test_the_state_is_kept_and_goes_on_on_other_chips() -> None:
    """Moments of the layers that a mask chooses; of the others there are zeros in their place."""
    optimizer, params = OPTIMIZERS["labels"][0], normal(SHAPES)
    found: dict[tuple[str, ...], Any] = {}
    for where in (FABRIC, ("2x2",)):
        fabric = chips_of(*where)
        program = program_of(fabric, "sharded")
        training = mmj.train_step(loss, optimizer, fabric)
        layout = StateLayout.of(training, program, params)
        fresh = jax.device_put(params, fabric.sharding())
        state = fresh, jax.jit(training.init)(fresh, program)
        given = batches(fabric.n_chips)
        if found:
            (vectors,) = found.values()
            state = layout.to_devices(read_vectors(vectors), state)
            given = given[2:]
        for batch in given[: 3 if found else 2]:
            state = jax.jit(training.step)(*state, batch, program)[:2]
        layout.check(*state)
        found = {where: vectors_of(layout, state)}
    alone = train_alone(loss, params, optimizer, batches(1))
    check_close(state[0], alone.params, 2e-6, 1e-7)
    moments = alone.state.inner_states["fast"].inner_state[0].mu
    wanted = np.concatenate([np.ravel(moments[name]) if LABELS[name] == "fast" else np.zeros(np.prod(shape, dtype=int))
                             for name, shape in SHAPES.items()])  # fmt: skip
    assert any(np.allclose(vector, wanted, 1e-5, 1e-7) for name, vector in found[("2x2",)].items() if "sharded" in name)


BESIDE = {**SHAPES, "w": (160, 144), "y": (3, 5)}
MASK_BESIDE = {name: name in "wx" for name in BESIDE}
REFUSED = {
    "a mask by ndim": (optax.adamw(0.1, mask=matrices), "treats some layers differently"),
    "muon": (optax.contrib.muon(0.1), "treats some layers differently|combines values"),
    "adafactor": (optax.adafactor(0.1), "combines values of several weights|treats some layers"),
    "adaptive clipping": (
        optax.chain(optax.masked(optax.adaptive_grad_clip(0.1), MASK_BESIDE), optax.sgd(0.1)),
        "treats some",
    ),
    "noise": (
        optax.chain(optax.masked(optax.add_noise(0.1, 0.5, 0), MASK_BESIDE), optax.sgd(0.1)),
        "treats some layers",
    ),
    "two layers mixed": (optax.chain(optax.stateless(two_layers_mixed), optax.sgd(0.1)), "treats some layers"),
    "norms": (optax.masked(optax.lamb(0.1), MASK_BESIDE), "treats some layers"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("kind", ["sharded", "fused", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_what_is_wrong_on_pieces_of_layers_stays_refused(name: str, kind: str) -> None:
    optimizer, why = REFUSED[name]
    with pytest.raises(ParameterError, match=why):
        train(loss, normal(BESIDE), optimizer, chips_of("2x2"), kind, [])


TREES: dict[str, dict[str, tuple[int, ...]]] = {
    "ends": {"embed": (9, 8), "none": (0, 3)},
    "layers": {"b": (4, 5), "w": (4, 6, 7)},
    "more": {"x": (11,)},
}
"""Where parameters are sharded, "layers" are a stack of four."""
TREE_LABELS: dict[str, Any] = {
    "arrays": {
        "ends": {"embed": "slow", "none": "slow"},
        "layers": {"b": "frozen", "w": "fast"},
        "more": {"x": "fast"},
    },
    "branches": {"ends": "slow", "layers": "fast", "more": "frozen"},
    "both": {"ends": "frozen", "layers": {"b": "slow", "w": "fast"}, "more": "slow"},
}
"""What has a label."""


def by_label(labels: Any, clip: Any) -> optax.GradientTransformation:
    """Only one of the labels is clipped."""
    fast = optax.chain(clip(0.5), optax.adamw(1e-2))
    rates = {"fast": fast, "slow": optax.sgd(1e-2, momentum=0.9), "frozen": optax.set_to_zero()}
    return optax.multi_transform(rates, labels)


def start_of_trees() -> Any:
    return {name: normal(shapes, seed=i) for i, (name, shapes) in enumerate(TREES.items())}


def loss_of_trees(params: Any, batch: Any) -> Any:
    arrays = params["ends"]["embed"], params["layers"]["b"], params["layers"]["w"], params["more"]["x"]
    return jnp.mean(batch) * sum((i + 1) * jnp.sum(jnp.sin(x)) for i, x in enumerate(arrays))


def loss_of_sharded_trees(params: Any, batch: Any, pair: mmj.Program) -> Any:
    """The same, with the layers of the stack one after the other."""

    def one(w: Any, x: Any) -> Any:
        return x + 2 * jnp.sum(jnp.sin(w["b"])) + 3 * jnp.sum(jnp.sin(w["w"]))

    ends, more = (mmj.fsdp.gather_params(params[name], pair) for name in ("ends", "more"))
    found = jnp.sum(jnp.sin(ends["embed"])) + 4 * jnp.sum(jnp.sin(more["x"])) + jnp.sum(ends["none"])
    return jnp.mean(batch) * mmj.fsdp.scan_layers(one, params["layers"], found, pair)


def sharded_trees(fabric: mmj.Fabric, pair: mmj.Program) -> Any:
    split: dict[str, Any] = {}
    if fabric.inner_axes:
        split = {"ends": P(), "layers": {"b": P(), "w": P("model")}, "more": P()}
    return {
        name: mmj.fsdp.shard_params(tree, fabric, pair, stacked=name == "layers", shardings=split.get(name))
        for name, tree in start_of_trees().items()
    }


def alone_by_label(labels: Any) -> Trained:
    """With the stack as arrays whose first axis is its layers."""
    return train_alone(loss_of_trees, start_of_trees(), by_label(labels, optax.clip_by_global_norm), batches(1))


@pytest.mark.parametrize("labels", others_slow(TREE_LABELS, quick=["both"]))
@pytest.mark.parametrize("where", ["chips", pytest.param("tiles", marks=pytest.mark.slow)])
def test_sharded_parameters_and_their_stacks_go_by_name(labels: str, where: str) -> None:
    """Around a hole."""
    fabric = chips_of(*FABRIC) if where == "chips" else tiles_of("2x4", "0,1", side="1x2", model=2)
    pair = program_of(fabric, "fsdp")
    optimizer = by_label(TREE_LABELS[labels], mmj.clip_by_global_norm)
    training = mmj.fsdp.sharded_train_step(loss_of_sharded_trees, optimizer, fabric)
    found = run(training, sharded_trees(fabric, pair), batches(fabric.n_parts), pair)
    alone = alone_by_label(TREE_LABELS[labels])
    assert found.losses == pytest.approx(alone.losses, rel=1e-5)
    check_close(mmj.fsdp.unshard_params(found.params, fabric, pair), alone.params, 2e-6, 1e-7)
    moments, wanted = (state.inner_states["fast"].inner_state[1][0].mu for state in (found.state, alone.state))
    whole = mmj.fsdp.unshard_params(moments, fabric, pair)
    np.testing.assert_allclose(whole["layers"]["w"], wanted["layers"]["w"], 1e-5, 1e-7)
    # What none of its label is in takes no memory.
    assert jax.tree.leaves(moments["ends"]) == jax.tree.leaves(whole["ends"]) == []
    assert "in shards of MaskedNode()" in repr(moments["ends"])


@pytest.mark.slow
@pytest.mark.parametrize("labels", ["branches", "both"])
def test_the_state_of_sharded_parameters_is_kept_and_goes_on_on_other_chips(labels: str) -> None:
    optimizer = by_label(TREE_LABELS[labels], mmj.clip_by_global_norm)
    vectors: Any = None
    for where in (FABRIC, ("2x2",)):
        fabric = chips_of(*where)
        pair = program_of(fabric, "fsdp")
        training = mmj.fsdp.sharded_train_step(loss_of_sharded_trees, optimizer, fabric)
        params = sharded_trees(fabric, pair)
        layout = StateLayout.of(training, pair, params)
        state = params, jax.jit(training.init)(params, pair)
        given = batches(fabric.n_chips)[:2]
        if vectors is not None:
            state, given = layout.to_devices(read_vectors(vectors), state), batches(fabric.n_chips)[2:]
        for batch in given:
            state = jax.jit(training.step)(*state, batch, pair)[:2]
        layout.check(*state)
        vectors = vectors_of(layout, state)
    alone = alone_by_label(TREE_LABELS[labels])
    check_close(mmj.fsdp.unshard_params(state[0], fabric, pair), alone.params, 2e-6, 1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sharded", "fused"])
def test_branches_of_whole_parameters_may_have_one_label(kind: str) -> None:
    fabric, labels = chips_of(*FABRIC), TREE_LABELS["both"]
    program = program_of(fabric, kind)
    training = mmj.train_step(loss_of_trees, by_label(labels, mmj.clip_by_global_norm), fabric)
    found = run(training, start_of_trees(), batches(5), program)
    check_close(found.params, alone_by_label(labels).params, 2e-6, 1e-7)
    StateLayout.of(training, program, found.params).check(found.params, found.state)


def test_a_shard_that_is_left_out_adds_nothing_to_a_norm() -> None:
    """Layers of two dtypes are in two shards."""
    params = {"a": jnp.arange(7, dtype=jnp.float32), "half": jnp.arange(5, dtype=jnp.bfloat16)}

    def optimizer(clip: Any) -> Any:
        rates = {"clipped": optax.chain(clip(0.5), optax.sgd(1.0)), "slow": optax.sgd(0.25)}
        return optax.multi_transform(rates, {"a": "clipped", "half": "slow"})

    ours, theirs = optimizer(mmj.clip_by_global_norm), optimizer(optax.clip_by_global_norm)
    found = train(linear, params, ours, chips_of("2x2"), "sharded", batches(4), accumulate_dtype=None)
    check_close(found.params, train_alone(linear, params, theirs, batches(1)).params, 2e-6, 1e-7)
