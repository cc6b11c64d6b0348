from __future__ import annotations

import itertools

import networkx as nx
import pytest

from meshmend.machines.grid import Grid, likely_grids
from oracle import grid_graph

GRIDS = [
    ((2, 3), (False, False)),
    ((3, 3), (False, False)),
    ((1, 5), (False, True)),
    ((2, 4), (False, True)),
    ((3, 3), (True, True)),
    ((4, 4), (True, True)),
    ((4, 4), (False, True)),
    ((2, 2, 3), (False, False, False)),
    ((3, 5), (True, False)),
]


@pytest.mark.parametrize(("shape", "wrap"), GRIDS)
def test_symmetries_are_those_that_networkx_finds(shape: tuple[int, ...], wrap: tuple[bool, ...]) -> None:
    grid, graph = Grid.of(shape, wrap), grid_graph(shape, wrap)
    assert (grid.size, grid.n_cables) == (graph.number_of_nodes(), graph.number_of_edges())
    assert grid.degree == max(dict(graph.degree).values())
    assert grid.least_degree == min(dict(graph.degree).values())
    numbers = {grid.coordinate(p): p for p in range(grid.size)}
    edges = {frozenset((numbers[a], numbers[b])) for a, b in graph.edges}
    assert {frozenset((p, q)) for p in range(grid.size) for q in range(grid.size) if grid.near[p] >> q & 1} == edges
    every = [
        {numbers[a]: numbers[b] for a, b in match.items()}
        for match in nx.isomorphism.GraphMatcher(graph, graph).isomorphisms_iter()
    ]
    orbits = [{image[p] for image in every} for p in grid.orbits]
    assert sorted(itertools.chain(*orbits)) == list(range(grid.size))
    for p in grid.orbits:
        fixing = {tuple(image[q] for q in range(grid.size)) for image in every if image[p] == p}
        assert set(grid.fixing(p)) == fixing
        assert len(grid.fixing(p)) == len(fixing)


def test_likely_grids_are_all_and_each_once() -> None:
    found = likely_grids(12, 0)
    graphs = [grid_graph(grid.shape, grid.wrap) for grid in found]
    for a, b in itertools.combinations(graphs, 2):
        assert not nx.is_isomorphic(a, b)
    for shape in [(1, 12), (2, 6), (3, 4), (2, 2, 3)]:
        for wrap in itertools.product((False, True), repeat=len(shape)):
            assert any(nx.is_isomorphic(grid_graph(shape, wrap), graph) for graph in graphs)
