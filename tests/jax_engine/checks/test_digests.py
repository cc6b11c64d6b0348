"""Digests of replicas against a digest in Python's own integers, and against flips of every bit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import meshmend as mm
import meshmend.jax as mmj
from jax_engine.checks.recompute_cases import by_hand
from meshmend.errors import ParameterError
from meshmend.jax.checks import digests
from meshmend.jax.checks.digests import Disagreement, compare_replicas, digest_observations, replica_digests
from meshmend.quarantine import Observation
from meshmend.quarantine.judge import judge

HOLED = ("4x4", ("2x2@0,0",))


@cache
def holed(planner: str = "row-pairs") -> tuple[mmj.Fabric, mmj.Program]:
    fabric = mmj.discover(jax.devices()[:16], shape=HOLED[0], failed=list(HOLED[1]))
    return fabric, mmj.install(mm.plan(fabric.mesh, planner), fabric)


@cache
def digest_on(fabric: mmj.Fabric, *shardings: Any) -> Any:
    return jax.jit(lambda params, program: replica_digests(params, program, fabric, shardings=dict(shardings) or None))


def with_copy(array: Any, device: int, changed: Any) -> jax.Array:
    """Return a replicated array of which one device holds something else, as memory that has flipped would."""
    shards = [shard.data for shard in array.addressable_shards]
    shards[device] = jax.device_put(changed, shards[device].sharding)
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def flipped(array: np.ndarray[Any, Any], element: int, bit: int) -> np.ndarray[Any, Any]:
    copy = array.copy()
    words = copy.reshape(-1).view(f"u{copy.dtype.itemsize}")
    words[element] ^= words.dtype.type(1 << bit)
    return copy


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "complex64"])
def test_digests_are_those_of_pythons_integers(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "PIECE", 7)
    fabric, program = holed()
    values = np.random.default_rng(3).normal(size=(3, 5)) * 50
    params = {"a": jnp.asarray(values).astype(dtype), "b": jnp.arange(7, dtype=jnp.int32)}
    found = np.asarray(jax.jit(replica_digests, static_argnums=2)(params, program, fabric))
    assert found.shape == (1, 12, 4)
    wanted = by_hand(np.asarray(params["a"]), 7) + by_hand(np.asarray(params["b"]), 7)
    assert found[0].tolist() == [wanted] * 12
    assert compare_replicas(found, params, fabric) == []


def inject(count: int, seed: int) -> None:
    """Flip one bit of one element on one device, so many times, and find exactly that."""
    fabric, program = holed()
    rng = np.random.default_rng(seed)
    plain = {"w": rng.normal(size=(40, 3)).astype(np.float32), "b": rng.normal(size=9).astype(jnp.bfloat16)}
    params = {name: jax.device_put(leaf, fabric.sharding()) for name, leaf in plain.items()}
    for number in range(count):
        name = "wb"[int(rng.integers(2))]
        leaf = plain[name]
        bit = number % (8 * leaf.dtype.itemsize)
        device, element = int(rng.integers(12)), int(rng.integers(leaf.size))
        broken = {**params, name: with_copy(params[name], device, flipped(leaf, element, bit))}
        found = compare_replicas(digest_on(fabric)(broken, program), params, fabric)
        where = f"params['{name}'], elements 0 to {leaf.size - 1}"
        piece = "bw".index(name)
        expected = Disagreement(fabric.mesh.chip(device), where, 11, 12, piece)
        assert found == [expected], (name, bit, device, element)


def test_a_flip_names_the_chip_and_the_piece() -> None:
    inject(16, seed=0)


@pytest.mark.slow
def test_five_thousand_flips_of_every_bit_are_all_named() -> None:
    inject(5000, seed=1)


def test_swapped_words_flipped_signs_and_shifted_zeros_are_noticed() -> None:
    fabric, program = holed()
    plain = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
    params = jax.device_put(plain, fabric.sharding())
    observations = plain.copy()
    observations[0, :2] *= -1  # the top bit of two words, which a sum of words would not notice
    for changed in (plain[::-1].copy(), observations, np.roll(plain, 1)):
        found = compare_replicas(digest_on(fabric)(with_copy(params, 5, changed), program), params, fabric)
        assert [one.chip for one in found] == [fabric.mesh.chip(5)]


def test_without_a_majority_everybody_is_listed_and_nobody_named() -> None:
    fabric = mmj.discover(jax.devices()[:2], shape="1x2")
    program = mmj.install(mm.plan(fabric.mesh, "two-color"), fabric)
    params = jax.device_put(np.ones(3, np.float32), fabric.sharding())
    found = compare_replicas(digest_on(fabric)(with_copy(params, 1, np.zeros(3, np.float32)), program), params, fabric)
    assert [(one.chip, one.agreeing, one.of) for one in found] == [((0, 0), 0, 2), ((0, 1), 0, 2)]


def test_inside_tiles_chips_of_the_same_slot_are_compared() -> None:
    fabric = mmj.tile(mmj.discover(jax.devices()[:16], shape="4x4", failed=["0,1"]), "2x2", fsdp=2, tensor=2)
    program = mmj.install(mm.plan(fabric.mesh, "weave"), fabric)
    shardings = {"w": PartitionSpec("fsdp", "tensor"), "b": PartitionSpec("tensor")}
    plain = {"w": np.arange(24, dtype=np.float32).reshape(4, 6), "b": np.arange(4, dtype=np.float32)}
    params = {name: jax.device_put(leaf, fabric.sharding(*shardings[name])) for name, leaf in plain.items()}
    run = digest_on(fabric, *shardings.items())
    digested = run(params, program)
    assert digested.shape == (4, 3, 2)
    assert len({*np.asarray(digested)[:, 0, 1].tolist()}) == 4  # each place of a tile has a shard of its own
    assert compare_replicas(digested, params, fabric, shardings=shardings) == []
    for number, device in enumerate(fabric.jax_mesh.devices.flat):
        at = next(i for i, shard in enumerate(params["w"].addressable_shards) if shard.device == device)
        shard = np.asarray(params["w"].addressable_shards[at].data)
        broken = {**params, "w": with_copy(params["w"], at, flipped(shard, 2, 11))}
        (found,) = compare_replicas(run(broken, program), params, fabric, shardings=shardings)
        chips = fabric.chips.jax_mesh.devices.tolist()
        assert found == Disagreement(
            fabric.chips.mesh.chip(chips.index(device)), "params['w'], elements 0 to 5", 2, 3, 1
        ), number


def test_two_cores_a_chip_are_compared_core_by_core() -> None:
    fabric = mmj.discover(jax.devices()[:8], shape="2x2", coords=[(i // 4, i // 2 % 2) for i in range(8)])
    program = mmj.install(mm.plan(fabric.mesh, "two-color"), fabric)
    params = jax.device_put(np.ones((4, 4), np.float32), fabric.sharding())
    order = fabric.jax_mesh.devices.flatten().tolist()
    at = next(i for i, shard in enumerate(params.addressable_shards) if shard.device == order[5])
    broken = with_copy(params, at, flipped(np.ones((4, 4), np.float32), 3, 30))
    (found,) = compare_replicas(digest_on(fabric)(broken, program), params, fabric)
    assert (found.chip, found.agreeing, found.of) == (fabric.mesh.chip(2), 7, 8)


def test_digests_of_other_parameters_are_refused() -> None:
    fabric, program = holed()
    digested = digest_on(fabric)({"w": jnp.ones(3)}, program)
    with pytest.raises(ParameterError, match="The digests are of 1 pieces, but these parameters have 2"):
        compare_replicas(digested, {"w": jnp.ones(3), "b": jnp.ones(2)}, fabric)


@pytest.mark.parametrize(
    ("optimizer", "n_copies"),
    [(optax.sgd(0.1), 1), (optax.sgd(0.1, momentum=0.9), 2), (optax.adam(0.1), 3)],
    ids=["sgd", "momentum", "adam"],
)
def test_one_flip_is_one_observation_however_many_arrays_it_spreads_to(optimizer: Any, n_copies: int) -> None:
    """One element of one chip's gradient, in one step: parameters and moments differ ever after."""
    fabric = mmj.discover(jax.devices()[:4], shape="2x2")
    program = mmj.install(mm.plan(fabric.mesh, "hamiltonian"), fabric)

    def local(tree: Any, flip: jax.Array) -> Any:
        params, state = tree
        is_hit = (jax.lax.axis_index("chip") == 2) & flip
        gradients = {"w": (2 * params["w"]).at[3, 1].add(jnp.where(is_hit, 0.5, 0.0))}
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    none = PartitionSpec()
    step = jax.jit(jax.shard_map(local, mesh=fabric.jax_mesh, in_specs=(none, none), out_specs=none, check_vma=False))
    params = {"w": jnp.ones((8, 4))}
    tree = jax.device_put((params, optimizer.init(params)), fabric.sharding())
    digest = jax.jit(replica_digests, static_argnums=2)
    seen: list[Observation] = []
    for number in range(1, 9):
        tree = step(tree, number == 4)
        if number in (6, 8):
            found = compare_replicas(digest(tree, program, fabric), tree, fabric)
            assert {one.chip for one in found} == {(1, 0)}
            assert len(found) == n_copies
            observations = [
                replace(observation, numbers={**observation.numbers, "attempt": 1})
                for observation in digest_observations(found, number)
            ]
            seen += observations
            assert judge(seen) == []
    # The same chip once more, after the state was restored: that is the second observation.
    again = replace(seen[0], numbers={**seen[0].numbers, "attempt": 2})
    assert [str(verdict.suspect) for verdict in judge([*seen, again])] == ["1,0"]
