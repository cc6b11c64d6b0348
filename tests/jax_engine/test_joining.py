"""Leaves are joined into one payload, on TPU tile by tile where most of them are whole tiles."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshmend.jax as mmj
from jax_engine.training_cases import check_close, chips_of, in_tiles, matrices, normal, program_of, train, train_alone
from meshmend.jax.engine.collectives import groups_of

Shapes = list[tuple[int, ...]]
JOINED: dict[str, tuple[Shapes, tuple[int, ...], int]] = {
    "all are whole tiles": ([(8, 128), (2048,), (2, 4, 256)], (0, 1, 2), 3),
    "less than a twentieth is loose": ([(400,), (9, 1024)], (1, 0), 1),
    "more than a twentieth is": ([(600,), (9, 1024)], (0, 1), 0),
    "a small leaf comes last": ([(7,), (16, 128), (), (1024,)], (1, 3, 0, 2), 2),
    "rows of another width": ([(128, 64), (8, 128)], (0, 1), 0),
    "rows that fill no tile": ([(12, 128), (8, 128)], (0, 1), 0),
    "none": ([(3,)], (0,), 0),
}
"""Shapes, the order in which they are joined, and how many are joined tile by tile."""


def layout_of(stored: str) -> Any:
    program = program_of(chips_of("2x2"), "replicated")
    return (in_tiles(program) if stored == "in tiles" else program).layout


@pytest.mark.parametrize("name", JOINED)
def test_what_is_joined_tile_by_tile(name: str) -> None:
    shapes, order, n_in_tiles = JOINED[name]
    leaves = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    (group,) = groups_of(leaves, layout_of("in tiles"), None)
    assert (group.members, group.n_in_tiles) == (order, n_in_tiles)
    (flat,) = groups_of(leaves, layout_of("flat"), None)
    assert (flat.members, flat.n_in_tiles) == (tuple(range(len(shapes))), 0)


@pytest.mark.parametrize("name", JOINED)
@pytest.mark.parametrize("stored", ["flat", "in tiles"])
def test_leaves_come_back_as_they_were(name: str, stored: str) -> None:
    """What is between is one leaf after the other, in their order, and zeros."""
    rng = np.random.default_rng(0)
    leaves = [jnp.asarray(rng.integers(1, 99, shape), jnp.float32) for shape in JOINED[name][0]]
    (group,) = groups_of(leaves, layout_of(stored), None)
    packed = jax.jit(lambda leaves: group.pack(leaves))(leaves)
    size = sum(leaf.size for leaf in leaves)
    flat = np.asarray(packed).reshape(-1)
    assert np.array_equal(flat[:size], np.concatenate([np.ravel(leaves[i]) for i in group.members]))
    assert not flat[size:].any()
    assert not jax.jit(lambda leaves: group.pack(leaves, jnp.asarray(False)))(leaves).any()
    found: dict[int, Any] = dict(group.unpack(packed.reshape(-1), leaves))
    assert sorted(found) == list(range(len(leaves)))
    for i, leaf in enumerate(leaves):
        assert found[i].shape == leaf.shape
        assert np.array_equal(found[i], leaf)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sharded", "fsdp"])
def test_layers_have_their_own_norms_where_the_order_changes(kind: str) -> None:
    """LAMB with a mask asks for both: which layer an element is of, and whether that is chosen."""
    params = normal({"a": (7,), "w": (16, 128), "x": (), "y": (8, 256)})
    fabric = chips_of("2x3", "0,0")

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(batch) * sum((i + 1) * jnp.sum(jnp.sin(x)) for i, x in enumerate(jax.tree.leaves(params)))

    batches = [np.full((5, 1), 1.0 + i, np.float32) for i in range(3)]
    program = in_tiles(program_of(fabric, kind))
    assert groups_of(jax.tree.leaves(params), program.layout, None)[0].members == (1, 3, 0, 2)
    options: dict[str, Any] = {"weight_decay": 0.1, "mask": matrices}
    found = train(loss, params, mmj.lamb(1e-2, **options), fabric, kind, batches, program=program)
    alone = train_alone(loss, params, optax.lamb(1e-2, **options), batches)
    check_close(found.params, alone.params, 1e-5, 1e-7)
