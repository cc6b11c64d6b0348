"""Shards as a TPU stores them, in tiles of 8 × 128 elements: the same numbers, and the same bytes of a copy.

Virtual devices store them so, too, where a program says that they are TPUs.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

import meshmend.jax as mmj
from jax_engine import cases
from jax_engine.restart_cases import collect, empty, read_vectors, vectors_of
from jax_engine.state.trained import Trained, params_tree, stacked_tree
from jax_engine.training_cases import chips_of, in_tiles, program_of
from meshmend.errors import ParameterError
from meshmend.jax.engine.collectives import shard_of
from meshmend.jax.state.candidates import rank_sources
from meshmend.jax.state.layout.state_layout import StateLayout
from meshmend.jax.state.memory.copies import Copy
from meshmend.jax.state.memory.peer_copy import copy_of, make_parts_fn
from meshmend.jax.state.memory.placement import place
from rows import others_slow

SLOW = pytest.mark.slow
KINDS = ["two-phase", "fused", "fsdp", "replicated", "tiled fused", "tiled fsdp"]
SHARDED = ["two-phase", "fused", "fsdp"]
QUICK = ["fused", "fsdp"]
MATRIX = (6890, 8)
"""Of no whole tiles. A chunk has 2,205 elements on twelve chips: three tiles of 1,024; inside tiles 1,061: two."""
WHOLE = (520, 128)
"""Of 65 whole tiles: joined tile by tile, on chips."""


@cache
def trained(kind: str, stored: str, *failed: str, matrix: tuple[int, int] = MATRIX) -> tuple[Trained, Any]:
    found = Trained(kind, failed or ("2x2@0,0",), matrix=matrix, stored=stored)
    return found, found.after_two_steps()


def copies_of(one: Trained, state: Any) -> dict[int, Copy]:
    """What two hosts keep: one has all chips but four."""
    n_chips = one.fabric.n_chips
    placement = place(one.fabric, host_of_chip=[0] * (n_chips - 4) + [1] * 4)
    parts = jax.jit(make_parts_fn(one.layout, placement))(*state)
    return {host: copy_of(parts, one.layout, placement, host, 1, 2, None, "run") for host in placement.hosts}


@pytest.mark.parametrize("kind", others_slow(KINDS, quick=QUICK))
@pytest.mark.parametrize("matrix", [MATRIX, pytest.param(WHOLE, marks=SLOW)])
def test_every_update_ends_with_the_same_bits_however_shards_are_stored(kind: str, matrix: tuple[int, int]) -> None:
    """Array i has the gradient i, then 2 i. Momentum 0.5 and the rates 0.25 and 0.5 change it by 1.5 i, by hand."""
    (flat, before), (tiled, after) = (trained(kind, stored, matrix=matrix) for stored in ("flat", "in tiles"))
    wanted, got = flat.arrays(before), tiled.arrays(after)
    bits = {name: (values.dtype, values.tobytes()) for name, values in wanted.items()}
    assert {name: (values.dtype, values.tobytes()) for name, values in got.items()} == bits
    starts = {"params.": params_tree(matrix)}
    if "fsdp" in kind:
        starts = {"params.ends.": params_tree(matrix), "params.layers.": stacked_tree(matrix)}
    for prefix, start in starts.items():
        for name, path, i in (("matrix", ("matrix",), 1), ("pair.0", ("pair", 0), 3), ("pair.1", ("pair", 1), 4)):
            expected: Any = start
            for key in path:
                expected = expected[key]
            expected = np.asarray(expected, np.float32) - 1.5 * i
            assert np.array_equal(np.asarray(got[prefix + name], np.float32), expected)


@pytest.mark.parametrize("kind", others_slow([kind for kind in KINDS if kind != "replicated"], quick=QUICK))
def test_shards_are_whole_tiles_on_every_device(kind: str) -> None:
    """The last two axes of a device's part are: those are what a TPU pads."""
    one, state = trained(kind, "in tiles")
    shards = [leaf for leaf, yes in zip(jax.tree.leaves(state), one.layout.is_sharded, strict=True) if yes]
    assert shards
    on_device = {shard.addressable_shards[0].data.shape[-3:] for shard in shards}
    n_rows = one.program.owned.shape[-1]
    assert on_device == {(n_rows, 8 * (2 if "tiled" in kind else 3), 128)}
    assert n_rows in (3, 6), "rows that would be padded, were they the last axis but one"


@pytest.mark.parametrize("kind", others_slow(SHARDED, quick=QUICK))
def test_copies_have_the_bytes_of_flat_rows(kind: str) -> None:
    """As versions before this one have written them: each chunk's elements in order, a chip's chunks in its order."""
    one, state = trained(kind, "in tiles")
    vectors, outline = vectors_of(one.layout, state), one.layout.outline
    copies = copies_of(one, state)
    found = {part: data for copy in copies.values() for part, data in zip(copy.parts, copy.data, strict=True)}
    for device, owned in enumerate(outline.owned):
        (data,) = found[copies[0].outline.shards_part(device)]
        at = 0
        for which, array in enumerate(outline.sharded):
            for layer in np.split(vectors[f"sharded {which}"], array.n_layers):
                for chunk in owned:
                    row = layer[chunk * array.chunk : (chunk + 1) * array.chunk]
                    assert np.array_equal(data[at : at + len(row)], row)
                    at += array.chunk
        assert at == len(data)


@pytest.mark.parametrize(
    ("kind", "kept", "restored"),
    others_slow(
        [(kind, *ways) for kind in SHARDED for ways in (("flat", "in tiles"), ("in tiles", "flat"))],
        quick=[("fsdp", "in tiles", "flat")],
    ),
)
def test_copies_are_restored_however_shards_were_and_are_stored(kind: str, kept: str, restored: str) -> None:
    """On other chips, too: by the copy's own outline, whose chunks may have another length."""
    (one, state), (other, _) = trained(kind, kept), trained(kind, restored, "1x2@0,0")
    copies = copies_of(one, state)
    (source,) = rank_sources([[copy.offer(other.layout.copy_identity)] for copy in copies.values()])
    assert not source.differs
    vectors = empty(one.layout.outline)
    for process, copy in enumerate(copies.values()):
        collect(copy, source, process, vectors)
    again = other.arrays(other.layout.to_devices(read_vectors(vectors), other.fresh))
    wanted: dict[str, NDArray[Any]] = one.arrays(state)
    assert {name: values.tobytes() for name, values in again.items()} == {
        name: values.tobytes() for name, values in wanted.items()
    }


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("n_cores", [1, 2])
def test_shards_are_cut_summed_and_gathered_in_tiles(check_vma: bool, n_cores: int) -> None:
    fabric = cases.two_cores() if n_cores == 2 else cases.fabric_for(cases.PLANS["hamiltonian 4x4"][1])
    pair, n_devices = in_tiles(program_of(fabric, "sharded")), int(fabric.jax_mesh.size)
    rows = np.random.default_rng(0).integers(-9, 9, (n_devices, 70_000)).astype(np.float32)
    every = P(fabric.axes)

    def local(row: Any, pair: mmj.Program) -> Any:
        shards = mmj.reduce_scatter(row[0], pair)
        whole = mmj.all_gather(shards, pair, like=row[0])
        return whole[None], shards, shard_of(whole, pair)

    mapped = cases.mapped(fabric, local, in_specs=(every, pair.spec), out_specs=every, check_vma=check_vma)
    whole, (summed,), (cut,) = jax.jit(mapped)(rows, pair)
    assert np.array_equal(whole, np.broadcast_to(rows.sum(axis=0), rows.shape))
    assert np.array_equal(summed, cut)
    assert summed.shape[1:] == (8 * -(-70_000 // (8 * 128 * n_cores * pair.layout.shape.total_chunks)), 128)


def test_shards_of_another_shape_are_refused() -> None:
    """Those that were cut before shards were stored in tiles, say, or on other devices."""
    fabric = cases.fabric_for(cases.PLANS["hamiltonian 4x4"][1])
    pair = program_of(fabric, "sharded")

    def local(row: Any, flat: mmj.Program, tiled: mmj.Program) -> Any:
        return mmj.all_gather(shard_of(row, flat), tiled, like=row)

    rows = jnp.ones((16, 33 * 1024))
    with pytest.raises(ParameterError, match=r"shape \(3, 1024\), expected \(3, 8, 128\): it was cut from another"):
        cases.on_chips(fabric, local, rows, pair, in_tiles(pair))


def test_copies_of_leaves_that_were_joined_in_another_order_are_refused() -> None:
    """Only the order of elements differs, where one leaf is whole tiles and comes first."""
    optimizer = optax.sgd(0.5, momentum=0.5)
    fabric = chips_of("2x2")
    program = program_of(fabric, "sharded")
    params = {"a": jnp.zeros(7), "w": jnp.zeros((16, 128))}
    training = mmj.train_step(lambda params, batch: jnp.mean(batch), optimizer, fabric)
    flat, tiled = (StateLayout.of(training, one, params).copy_identity for one in (program, in_tiles(program)))
    assert re.match(r"order of elements: expected split by owner, \w+, got split by owner, \w+", tiled.difference(flat))
    still = {"a": jnp.zeros(7), "w": jnp.zeros((16, 127))}
    flat, tiled = (StateLayout.of(training, one, still).copy_identity for one in (program, in_tiles(program)))
    assert tiled.difference(flat) == ""
