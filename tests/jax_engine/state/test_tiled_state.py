"""The state of a model that is split inside tiles: shards survive a lost host, and find their places on other tiles."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

import meshmend as mm
import meshmend.jax as mmj
from jax_engine.restart_cases import Vectors, collect, empty, read_vectors, vectors_of
from meshmend.jax.engine.program import Update
from meshmend.jax.state import fetch, put
from meshmend.jax.state.candidates import rank_sources
from meshmend.jax.state.layout.state_layout import StateLayout
from meshmend.jax.state.memory.copies import Copy
from meshmend.jax.state.memory.peer_copy import copy_of, make_parts_fn
from meshmend.jax.state.memory.placement import place
from meshmend.launch.hosts import Hosts

HOSTS = Hosts.of("4x4", "2x2")
SPECS = {"columns": P(None, ("fsdp", "tensor")), "rows": P("tensor"), "whole": P(), "half": P("fsdp")}
SHAPES = {"columns": (3, 8), "rows": (6, 2), "whole": (5,), "half": (4,)}


def params_tree() -> dict[str, NDArray[Any]]:
    """Whole numbers, no two of them alike, in two dtypes."""
    first = 1
    tree = {}
    for name, shape in SHAPES.items():
        n = int(np.prod(shape))
        tree[name] = np.arange(first, first + n).reshape(shape).astype(jnp.bfloat16 if name == "half" else np.float32)
        first += n
    return tree


class OnTiles:
    """A state on 4×4 chips, without those that failed, in tiles of 2×1 or 2×2 chips of two axes."""

    def __init__(self, failed: tuple[str, ...], side: str, sharded: bool | str, inner: dict[str, int]) -> None:
        """`sharded` is whether the update is, or "fsdp", where the parameters are, too."""
        chips = mmj.discover(jax.devices()[:16], shape="4x4", failed=failed)
        self.fabric = mmj.tile(chips, side, **inner)
        owners: dict[str, Any] = {"collective": "all-reduce-with-update"} if sharded else {}
        schedule = mm.plan(self.fabric.mesh, "weave", chunks=2 * self.fabric.mesh.n_chips, **owners)
        updates: dict[bool | str, Update] = {False: "replicated", True: "fused", "fsdp": "two-phase"}
        self.program = mmj.install(schedule, self.fabric, update=updates[sharded])
        self.training: Any
        if sharded == "fsdp":
            self._shard()
            return
        self.training = mmj.train_step(
            lambda params, batch: jnp.mean(batch) * sum(jnp.sum(x) for x in jax.tree.leaves(params)),
            optax.adam(0.25),
            self.fabric,
            shardings=SPECS,
        )
        params = put(params_tree(), self.fabric, SPECS)
        self.fresh = params, jax.jit(self.training.init)(params, self.program)
        self.layout = StateLayout.of(self.training, self.program, params)

    def _shard(self) -> None:
        def loss(*_: Any) -> Any:
            raise AssertionError("nothing is trained here")

        self.training = mmj.fsdp.sharded_train_step(loss, optax.adam(0.25), self.fabric)
        stack = {name: np.stack([values, values + 100]) for name, values in params_tree().items()}
        params = {
            "ends": mmj.fsdp.shard_params(params_tree(), self.fabric, self.program, shardings=SPECS),
            "layers": mmj.fsdp.shard_params(stack, self.fabric, self.program, stacked=True, shardings=SPECS),
        }
        self.fresh = params, jax.jit(self.training.init)(params, self.program)
        self.layout = StateLayout.of(self.training, self.program, params)

    def hosts(self) -> list[int]:
        """Pretend that this process were all the hosts: the host of each device, tile after tile."""
        where = {chip: host for host in range(len(HOSTS)) for chip in HOSTS.chips(host)}
        tiling = self.fabric.tiling
        return [where[tiling.chips.chip(int(rank))] for rank in tiling.ranks.ravel()]

    def values(self, vectors: Vectors) -> Any:
        return self.layout.to_devices(read_vectors(vectors), self.fresh)


INNER = {"fsdp": 2, "tensor": 2}


@cache
def tiles(failed: tuple[str, ...], sharded: bool | str) -> OnTiles:
    return OnTiles(failed, "2x2", sharded, INNER)


def numbers(layout: StateLayout) -> Vectors:
    """A state in which hardly two elements of an array are alike."""
    vectors = empty(layout.outline)
    for name, pieces in layout.pieces.items():
        for first, user, box in pieces:
            shape = layout.users[user].shape
            array = (np.arange(np.prod(shape)).reshape(shape) + 17 * user) % 251 + 1
            part = array[tuple(slice(*ends) for ends in box)].ravel()
            vectors[name][first : first + part.size] = part
    return vectors


def copies_of(job: OnTiles, state: Any) -> dict[int, Copy]:
    placement = place(job.fabric, host_of_chip=job.hosts())
    parts = jax.jit(make_parts_fn(job.layout, placement))(*state)
    return {host: copy_of(parts, job.layout, placement, host, 1, 7, None, "run") for host in placement.hosts}


def collected(copies: dict[int, Copy], layout: StateLayout) -> Vectors:
    """What the survivors' copies have between them, as `gather` puts it together."""
    (source,) = rank_sources([[copy.offer(layout.copy_identity)] for copy in copies.values()])
    assert source.is_whole
    assert not source.differs
    vectors = empty(layout.outline)
    for process, copy in enumerate(copies.values()):
        collect(copy, source, process, vectors)
    return vectors


def same_bits(found: Any, expected: Any) -> bool:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


@pytest.mark.parametrize("sharded", [False, True], ids=["program", "fused"])
def test_what_is_put_on_devices_are_the_shards_of_their_slots(sharded: bool) -> None:
    job = tiles((), sharded)
    vectors = vectors_of(job.layout, job.fresh)
    back, state = job.values(vectors)
    assert same_bits((back, state), job.fresh)
    assert jax.tree.map(lambda x: x.sharding, back) == jax.tree.map(lambda x: x.sharding, job.fresh[0])
    assert same_bits(fetch(back), params_tree())


@pytest.mark.parametrize(
    "sharded", [pytest.param(False, marks=pytest.mark.slow), True, "fsdp"], ids=["program", "fused", "fsdp"]
)
@pytest.mark.parametrize("lost", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_what_a_lost_host_had_is_found_and_goes_to_other_tiles(lost: int, sharded: bool | str) -> None:
    job = tiles((), sharded)
    vectors = numbers(job.layout)
    copies = copies_of(job, job.values(vectors))
    assert sorted(copies) == [0, 1, 2, 3]
    del copies[lost]
    found = collected(copies, job.layout)
    assert {name: v.tobytes() for name, v in found.items()} == {name: v.tobytes() for name, v in vectors.items()}
    # Tiles that span hosts, and lie in other lines, take it up.
    smaller = tiles(("0,0",), sharded)
    assert smaller.layout.copy_identity == job.layout.copy_identity
    if sharded != "fsdp":
        params, _ = smaller.values(found)
        assert same_bits(fetch(params), fetch(job.values(vectors)[0]))
    again = collected(copies_of(smaller, smaller.values(found)), smaller.layout)
    assert {name: v.tobytes() for name, v in again.items()} == {name: v.tobytes() for name, v in vectors.items()}


def test_sharded_parameters_are_found_whole_on_other_tiles() -> None:
    """The oracle: the arrays that they were cut from, put together by the collectives themselves."""
    job, smaller = tiles((), "fsdp"), tiles(("0,0",), "fsdp")
    vectors = vectors_of(job.layout, job.fresh)
    params, _ = smaller.values(vectors)
    whole = mmj.fsdp.unshard_params(params, smaller.fabric, smaller.program)
    wanted = {name: values.astype(np.float32) for name, values in params_tree().items()}
    assert same_bits(whole["ends"], wanted)
    expected = {name: np.stack([values, values + 100]).astype(np.float32) for name, values in params_tree().items()}
    assert same_bits(whole["layers"], expected)


def test_copies_of_another_way_to_split_are_of_another_state() -> None:
    job, other = tiles((), False), OnTiles((), "2x2", False, {"tensor": 2, "fsdp": 2})
    assert not job.layout.identity.difference(other.layout.identity), "on disk there are whole arrays"
    why = job.layout.copy_identity.difference(other.layout.copy_identity)
    assert why.startswith("params['columns']: expected float32[3,8], (None, ('fsdp', 'tensor')) of tiles with fsdp=2")
