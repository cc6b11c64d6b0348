"""Tiles: where they lie, against a search of all placements; what cables carry, against a count of all messages."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import combinations, pairwise, product

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend.errors import MeshError
from meshmend.topology import Mesh, cut_into_tiles
from meshmend.topology import tiles as module
from meshmend.topology.tiles import Tiling

Chip = tuple[int, ...]


def chips_of(corner: Chip, side: Chip, shape: Chip) -> list[Chip]:
    boxes = product(*(range(c, c + s) for c, s in zip(corner, side, strict=True)))
    return [tuple(x % n for x, n in zip(chip, shape, strict=True)) for chip in boxes]


def path(start: Chip, end: Chip, axis: int, shape: Chip) -> list[Chip]:
    """Every chip from one to another, towards larger coordinates along one axis."""
    chips = [start]
    while chips[-1] != end:
        chips.append((*start[:axis], (chips[-1][axis] + 1) % shape[axis], *start[axis + 1 :]))
    return chips


def straight_graph(mesh: Mesh, side: Chip, cuts: tuple[Chip, ...]) -> nx.Graph[Chip]:
    """The whole tiles, joined where every straight path between corresponding chips is alive."""
    cables: nx.Graph[Chip] = nx.Graph()
    cables.add_edges_from((mesh.chip(a), mesh.chip(b)) for a, b in mesh.cables.tolist())
    graph: nx.Graph[Chip] = nx.Graph()
    alive = {mesh.chip(rank) for rank in range(mesh.n_chips)}
    for tile in product(*(range(len(c)) for c in cuts)):
        corner = tuple(c[i] for c, i in zip(cuts, tile, strict=True))
        if alive.issuperset(chips_of(corner, side, mesh.shape)):
            graph.add_node(tile, corner=corner)
    for axis, starts in enumerate(cuts):
        for tile in list(graph):
            last = tile[axis] == len(starts) - 1
            if last and not (mesh.wrap[axis] and len(starts) > 2):
                continue
            other = (*tile[:axis], (tile[axis] + 1) % len(starts), *tile[axis + 1 :])
            if other not in graph:
                continue
            paths = [
                path(a, b, axis, mesh.shape)
                for a, b in zip(
                    chips_of(graph.nodes[tile]["corner"], side, mesh.shape),
                    chips_of(graph.nodes[other]["corner"], side, mesh.shape),
                    strict=True,
                )
            ]
            if all(cables.has_edge(a, b) for chips in paths for a, b in pairwise(chips)):
                graph.add_edge(tile, other, paths=paths, axis=axis)
    return graph


def every_cuts(length: int, side: int, wrap: bool) -> list[Chip]:
    """All sets of disjoint lines, by looking at all sets."""
    found = []
    for n in range(1, length // side + 1):
        for starts in combinations(range(length if wrap else length - side + 1), n):
            taken = Counter((at + i) % length for at in starts for i in range(side))
            if max(taken.values()) == 1:
                found.append(starts)
    return found


def best_by_search(mesh: Mesh, side: Chip) -> int:
    most = 0
    for cuts in product(*(every_cuts(n, s, w) for n, s, w in zip(mesh.shape, side, mesh.wrap, strict=True))):
        groups = nx.connected_components(straight_graph(mesh, side, cuts))
        most = max([most, *map(len, groups)])
    return most


@st.composite
def small_meshes(draw: st.DrawFn) -> tuple[Mesh, Chip]:
    shape = draw(st.tuples(st.integers(2, 6), st.integers(2, 6)))
    side = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (2, 3)]))
    failed = draw(st.lists(st.tuples(*(st.integers(0, n - 1) for n in shape)), max_size=4, unique=True))
    wrap = draw(st.tuples(st.booleans(), st.booleans()))
    if len(failed) == shape[0] * shape[1]:
        failed = failed[1:]
    return Mesh(shape, wrap=wrap, failed=failed), side


def check(tiling: Tiling) -> None:
    """A tiling is what it says: its tiles are disjoint boxes of live chips, its cables straight bundles of paths."""
    mesh, side = tiling.chips, tiling.side
    graph = straight_graph(mesh, side, tiling.cuts)
    group = max(nx.connected_components(graph), key=len)
    tiles = {tiling.tiles.chip(rank) for rank in range(tiling.tiles.n_chips)}
    assert len(tiles) == len(group)
    assert tiles in [set(found) for found in nx.connected_components(graph)]
    assert tiling.tiles.is_connected
    for tile, ranks in zip(tiling.tiles.coords.tolist(), tiling.ranks.tolist(), strict=True):
        corner = graph.nodes[tuple(tile)]["corner"]
        assert [mesh.chip(rank) for rank in ranks] == chips_of(corner, side, mesh.shape)
    assert len(np.unique(tiling.ranks)) == tiling.ranks.size
    assert tiling.n_wasted == mesh.n_chips - tiling.ranks.size
    cables = {frozenset((tiling.tiles.chip(a), tiling.tiles.chip(b))) for a, b in tiling.tiles.cables.tolist()}
    assert cables == {frozenset(edge) for edge in graph.subgraph(tiles).edges}


@settings(max_examples=20)
@given(small_meshes())
def test_no_placement_in_lines_keeps_more_tiles(case: tuple[Mesh, Chip]) -> None:
    mesh, side = case
    most = best_by_search(mesh, side)
    if not most:
        with pytest.raises(MeshError, match="Choose a smaller tile"):
            cut_into_tiles(mesh, side)
        return
    tiling = cut_into_tiles(mesh, side)
    check(tiling)
    assert tiling.tiles.n_chips == most
    with pytest.MonkeyPatch.context() as patch:
        counts = [module.bound_on_cuts(n, s, w) for n, s, w in zip(mesh.shape, side, mesh.wrap, strict=True)]
        patch.setattr(module, "MAX_TRIED", min(counts))
        tiling = cut_into_tiles(mesh, side)
    check(tiling)
    # Counting whole tiles alone may prefer many that are cut off to fewer that hang together.
    if len(straight_graph(mesh, side, tiling.cuts)) == tiling.tiles.n_chips:
        assert tiling.tiles.n_chips == most


@pytest.mark.parametrize("wrap", [False, True])
def test_sets_of_lines_are_counted(wrap: bool) -> None:
    for length, side in product(range(1, 9), range(1, 4)):
        if length < side:
            continue
        every = [set(cuts) for cuts in every_cuts(length, side, wrap)]
        maximal = [cuts for cuts in every if not any(cuts < other for other in every)]
        count = module.bound_on_cuts(length, side, wrap)
        assert len(maximal) <= count if wrap else len(maximal) == count


@settings(max_examples=20)
@given(small_meshes())
def test_the_search_on_large_meshes_is_right_too(case: tuple[Mesh, Chip]) -> None:
    mesh, side = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_TRIED", 1)
        try:
            tiling = cut_into_tiles(mesh, side)
        except MeshError:
            return
    check(tiling)
    aligned = tuple(tuple(range(0, n - s + 1, s)) for n, s in zip(mesh.shape, side, strict=True))
    groups = nx.connected_components(straight_graph(mesh, side, aligned))
    assert tiling.tiles.n_chips >= max([1, *map(len, groups)])


@pytest.mark.parametrize(
    ("mesh", "side"),
    [
        (Mesh("8x8", failed=["2x2@2,2"]), (2, 2)),
        (Mesh("8x8", failed=["2x2@2,2"]), (4, 2)),
        (Mesh("9x9", failed=["1,4", "4,4"]), (2, 2)),
        (Mesh("6x9", wrap=True, failed=["2,2"]), (2, 3)),
        (Mesh("4x4x4", wrap=True, failed=["1,1,1"]), (2, 2, 1)),
        (Mesh("4x6", cable_rates={"0,2-0,3": "1/2"}), (2, 2)),
    ],
)
def test_a_cable_of_tiles_carries_what_its_links_do(mesh: Mesh, side: Chip) -> None:
    """All cables send all shards at once, in both directions: the busiest link of each gives the rate it has."""
    tiling = cut_into_tiles(mesh, side)
    check(tiling)
    tiles = tiling.tiles
    graph = straight_graph(mesh, side, tiling.cuts).subgraph([tiles.chip(r) for r in range(tiles.n_chips)])
    for _, _, edge in graph.edges(data=True):
        assert max(len(chips) - 1 for chips in edge["paths"]) <= tiling.hops
    messages = Counter(
        (a, b)
        for *_, edge in graph.edges(data=True)
        for chips in edge["paths"]
        for ends in pairwise(chips)
        for a, b in (ends, ends[::-1])
    )
    slow = {frozenset(cable): rate for cable, rate in mesh.cable_rates.items()}
    for a, b, edge in graph.edges(data=True):
        links = {ends for chips in edge["paths"] for ends in pairwise(chips)}
        per_shard = min(slow.get(frozenset(ends), Fraction(1)) / messages[ends] for ends in links)
        rate = tiles.cable_rates.get((min(a, b), max(a, b)), Fraction(1))
        assert rate * tiling.link_share == per_shard


def test_a_healthy_mesh_is_cut_without_waste() -> None:
    tiling = cut_into_tiles(Mesh("8x8"), "4x2")
    assert tiling.tiles == Mesh("2x4", cable_rates={((0, j), (1, j)): "1/2" for j in range(4)})
    assert tiling.link_share == Fraction(1, 2)
    assert tiling.n_wasted == 0
    assert tiling.ranks[1].tolist() == [2, 3, 10, 11, 18, 19, 26, 27]


def test_lines_shift_to_save_tiles() -> None:
    # Two chips in a 2×2 block that an aligned grid would cut in four.
    tiling = cut_into_tiles(Mesh("9x9", failed=["3,3", "4,4"]), "2x2")
    assert tiling.tiles.n_chips == 15
    aligned = straight_graph(Mesh("9x9", failed=["3,3", "4,4"]), (2, 2), ((0, 2, 4, 6), (0, 2, 4, 6)))
    assert len(aligned) == 14


def test_tiles_that_nothing_reaches_are_given_up() -> None:
    tiling = cut_into_tiles(Mesh("2x8", failed=["0,5"]), "2x2")
    assert tiling.tiles.n_chips == 2
    assert tiling.n_wasted == 15 - 8


def test_long_meshes_are_cut_too() -> None:
    tiling = cut_into_tiles(Mesh((1, 5001), failed=[(0, 2501)]), "1x2")
    assert tiling.tiles.n_chips == 1250
    assert cut_into_tiles(Mesh("64x64", failed=["5,5"]), "2x2").tiles.n_chips == 32 * 32 - 1


def test_tiles_of_one_chip_are_the_mesh() -> None:
    mesh = Mesh("4x5", failed=["1,1"], failed_cables=["0,0-0,1"])
    tiling = cut_into_tiles(mesh, "1x1")
    assert tiling.tiles == mesh
    assert tiling.link_share == 1
    assert tiling.hops == 1


@pytest.mark.parametrize(
    ("side", "message"),
    [
        ("2", "each of its 2 axes, as in 2x2: got 2"),
        ("2x2x2", "as in 2x2: got 2x2x2"),
        ("0x2", "at least 1"),
        ("9x1", "has no 9x1 tile of live chips"),
        ("8x8", "has no 8x8 tile"),
    ],
)
def test_what_is_no_tile_is_refused(side: str, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        cut_into_tiles(Mesh("8x8", failed=["2,2"]), side)
