"""Gather: everybody gets everything once, over live links, in about the least time there is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend import Mesh
from meshmend.planning.gather.spreading import share_out, spread
from strategies import meshes

CORRIDOR = Mesh("8x8", failed=["3x1@0,3", "3x1@5,3"])


def follow(mesh: Mesh, owners: list[int]) -> int:
    """Replay the deliveries with sets, by the rules alone; return the number of steps."""
    found = spread(mesh, np.array(owners))
    rows = list(zip(*(column.tolist() for column in (found.step, found.src, found.dst, found.chunk)), strict=True))
    holds = [{chunk for chunk, owner in enumerate(owners) if owner == rank} for rank in range(mesh.n_chips)]
    steps = 0
    for step, together in itertools.groupby(sorted(rows), key=lambda row: row[0]):
        assert step == steps
        steps += 1
        moves = [row[1:] for row in together]
        links = {(src, dst) for src, dst, _ in moves}
        assert len(links) == len(moves), "a link carries two chunks"
        assert len({(src, chunk) for src, _, chunk in moves}) == len(moves), "a chip sends a chunk twice in a step"
        assert len({(dst, chunk) for _, dst, chunk in moves}) == len(moves), "a chip takes a chunk twice in a step"
        for src, dst, chunk in moves:
            assert dst in mesh.neighbours[src]
            assert chunk in holds[src]
            assert chunk not in holds[dst]
        for _, dst, chunk in moves:
            holds[dst].add(chunk)
    assert all(len(held) == len(owners) for held in holds)
    return steps


@settings(max_examples=40, deadline=None)
@given(meshes(max_side=5), st.integers(1, 150))
def test_every_chunk_comes_to_every_chip_once_over_live_links(mesh: Mesh, chunks: int) -> None:
    if mesh.is_connected:
        follow(mesh, share_out(mesh.n_chips, chunks).tolist())


@given(st.integers(1, 300), st.integers(1, 2000))
def test_shares_differ_by_one_chunk_at_most(n_chips: int, chunks: int) -> None:
    shares = np.bincount(share_out(n_chips, chunks), minlength=n_chips)
    assert shares.sum() == chunks
    assert shares.max() - shares.min() <= 1


def test_any_owners_will_do() -> None:
    assert follow(Mesh("1x3"), [0] * 10) == 11  # ten chunks over one link, and one step more to the far end
    assert follow(Mesh("2x2"), [3, 3]) == 2  # one chunk each way round, and on to the two that lack it


def test_the_same_mesh_gives_the_same_plan() -> None:
    owners = share_out(CORRIDOR.n_chips, 70)
    one, other = (spread(CORRIDOR, owners) for _ in range(2))
    assert np.array_equal(one.chunk, other.chunk)
    assert np.array_equal(one.step, other.step)


@pytest.mark.parametrize("per_chip", [2, 4])
def test_two_cables_between_two_parts_bring_different_chunks(per_chip: int) -> None:
    least = 57 * per_chip / 2  # a corner receives what 57 others own over two cables
    assert follow(CORRIDOR, share_out(58, 58 * per_chip).tolist()) <= 1.02 * least
