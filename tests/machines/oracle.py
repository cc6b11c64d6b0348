"""Whether a layout is the true one up to symmetry, decided by networkx on graphs built here."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import networkx as nx

Place = tuple[int, ...]


def grid_graph(shape: Sequence[int], wrap: Sequence[bool]) -> nx.Graph[Place]:
    graph: nx.Graph[Place] = nx.Graph()
    for coordinate in itertools.product(*map(range, shape)):
        graph.add_node(coordinate)
        for axis, (n, wraps) in enumerate(zip(shape, wrap, strict=True)):
            x = coordinate[axis] + 1
            if x < n or (wraps and n > 2):
                graph.add_edge(coordinate, (*coordinate[:axis], x % n, *coordinate[axis + 1 :]))
    return graph


def same_layout(
    one: tuple[Sequence[int], Sequence[bool], Mapping[str, Place]],
    other: tuple[Sequence[int], Sequence[bool], Mapping[str, Place]],
) -> bool:
    """Whether some isomorphism of the two grids puts every chip of the first where the second has it."""
    graphs = []
    for shape, wrap, coordinates in (one, other):
        graph = grid_graph(shape, wrap)
        nx.set_node_attributes(graph, dict.fromkeys(graph, ""), "chip")
        for chip, coordinate in coordinates.items():
            graph.nodes[coordinate]["chip"] = chip
        graphs.append(graph)
    return bool(nx.vf2pp_is_isomorphic(graphs[0], graphs[1], node_label="chip"))
