"""Which mesh a group's chips form: rectangles, tiles and lines that lie apart, against brute force over paths."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, product

import networkx as nx
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")

from meshmend import Mesh
from meshmend.topology import cut_into_tiles
from meshmend.torch.subgroups import mesh_of

HOLED = Mesh("4x4", failed=["2x2@2,2"])


def straight(live: Mesh, chips: set[tuple[int, ...]], a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Return whether a and b are next to each other on a line of the members' grid, with a live path between."""
    apart = [axis for axis in range(live.n_axes) if a[axis] != b[axis]]
    if len(apart) != 1:
        return False
    (axis,) = apart
    low, high = sorted((a[axis], b[axis]))
    if any(low < chip[axis] < high for chip in chips):
        return False
    return all(live.live[(*a[:axis], at, *a[axis + 1 :])] for at in range(low, high + 1))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_groups_are_meshes_exactly_where_straight_paths_join_them(size: int) -> None:
    chips = [HOLED.chip(rank) for rank in range(HOLED.n_chips)]
    n_meshes = 0
    for members in combinations(chips, size):
        graph = nx.Graph([(a, b) for a, b in combinations(members, 2) if straight(HOLED, set(members), a, b)])
        graph.add_nodes_from(members)
        found = mesh_of(members, HOLED)
        assert (found is not None) == nx.is_connected(graph), members
        if found is not None:
            n_meshes += 1
            assert found.n_chips == size
            assert found.n_cables == graph.number_of_edges(), members
    assert n_meshes > 20


def test_tiles_and_what_lies_across_them() -> None:
    tiling = cut_into_tiles(HOLED, "2x2")
    for tile in tiling.ranks.tolist():
        assert mesh_of([HOLED.chip(rank) for rank in tile], HOLED) == Mesh("2x2")
    for place in range(4):
        across = [HOLED.chip(int(rank)) for rank in tiling.ranks[:, place]]
        assert mesh_of(across, HOLED) == tiling.tiles
    # Tiles of 2×1: across them, messages along the first axis share links with another group's.
    tall = cut_into_tiles(Mesh("4x4"), "2x1")
    across = [Mesh("4x4").chip(int(rank)) for rank in tall.ranks[:, 1]]
    assert mesh_of(across, Mesh("4x4")) == tall.tiles
    assert set(tall.tiles.cable_rates.values()) == {Fraction(1, 2)}


def test_a_torus_and_slow_cables() -> None:
    torus = Mesh("4x6", wrap=True, cable_rates={"0,0-0,1": "1/2"})
    row = mesh_of([(0, x) for x in range(6)], torus)
    assert row == Mesh("1x6", wrap=(False, True), cable_rates={"0,0-0,1": "1/2"})
    every_second = mesh_of([(1, x) for x in (0, 2, 4)], torus)
    assert every_second == Mesh("1x3", wrap=(False, True))
    assert mesh_of([(1, x) for x in (0, 2, 3)], torus) is not None
    everybody = list(product(range(4), range(6)))
    assert mesh_of(everybody, torus) is torus
