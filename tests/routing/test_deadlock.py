from __future__ import annotations

from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
from numpy.typing import NDArray
from route_checks import check_proof, dimension_order

from meshmend import Mesh
from meshmend.errors import DeadlockError
from meshmend.routing import Routes, Trace, deadlock, detour, prove, require_deadlock_free
from meshmend.routing.deadlock import Dependencies, find_levels


def clockwise_square() -> Routes:
    """On 2×2 every packet to the opposite corner turns clockwise: the textbook deadlock."""
    mesh = Mesh("2x2")
    south, north, east, west = range(4)
    #       to (0,0) (0,1)  (1,0)  (1,1)
    port = [
        [-1, east, south, east],  # at (0,0)
        [west, -1, south, south],  # at (0,1)
        [north, north, -1, east],  # at (1,0)
        [west, north, west, -1],  # at (1,1)
    ]
    return Routes(
        mesh=mesh,
        scheme="clockwise",
        n_channels=1,
        destinations=np.arange(4, dtype=np.int32),
        port=np.array([port], dtype=np.int8),
        class_of=np.zeros((4, 4), dtype=np.uint8),
    )


def test_a_cyclic_table_is_caught_and_its_cycle_named() -> None:
    routes = clockwise_square()
    proof = check_proof(routes)
    assert not proof.deadlock_free
    assert set(proof.cycle) == {
        ((0, 0), (0, 1), 0),
        ((0, 1), (1, 1), 0),
        ((1, 1), (1, 0), 0),
        ((1, 0), (0, 0), 0),
    }
    with pytest.raises(DeadlockError, match=r"4 channels wait .* in a cycle, .*\(0,0\)→\(0,1\) on channel 0") as caught:
        require_deadlock_free(routes)
    assert caught.value.cycle == proof.cycle
    assert caught.value.scheme == "clockwise"
    assert "can deadlock" in str(proof)


@pytest.mark.parametrize(
    ("routes", "cycle"),
    [
        (dimension_order(Mesh("1x5", wrap=True)), 5),  # without its dateline
        (dimension_order(Mesh("5x3", wrap=True)), 5),  # on an axis of three chips every way is one hop
        (detour(Mesh("8x8", failed=["2x2@2,2"])), None),  # both classes of turns together
    ],
)
def test_what_needs_two_channels_deadlocks_on_one(routes: Routes, cycle: int | None) -> None:
    assert check_proof(routes).deadlock_free
    one_channel = replace(routes, n_channels=1, port=np.where(routes.port >= 0, routes.port % 4, routes.port))
    proof = check_proof(one_channel)
    assert not proof.deadlock_free
    assert cycle in (None, len(proof.cycle))


def test_no_flow_at_all_is_fine() -> None:
    assert prove(dimension_order(Mesh("1x1"))).deadlock_free


def test_a_proof_says_what_it_covers() -> None:
    one = prove(dimension_order(Mesh("4x4")))
    assert str(one) == (
        "free of deadlock: 68 dependencies between the channels of dimension-order form no cycle (1 virtual channel)"
    )
    assert (one.n_channels, one.n_dependencies) == (1, 68)
    two = prove(dimension_order(Mesh("1x5", wrap=True)))
    assert two.n_channels == 2
    assert str(two).endswith(
        f"{two.n_dependencies} dependencies between the channels of dimension-order form no cycle (2 virtual channels)"
    )
    cycle = prove(clockwise_square())
    first, *others = (f"({a},{b})→({c},{d}) on channel 0" for (a, b), (c, d), _ in cycle.cycle)
    assert str(cycle) == "can deadlock: clockwise lets 4 channels wait in a cycle: " + ", ".join([first, *others])


def test_flows_are_checked_channel_by_channel() -> None:
    """Round a square on one channel the flows close a cycle; the last one on a second channel opens it."""
    mesh = Mesh("2x2")
    corners = clockwise_square().follow([0, 1, 3, 2], [3, 2, 0, 1])
    three = corners.flow < 3
    some = Trace(corners.flow[three], corners.hop[three], corners.link[three], corners.channel[three])
    assert prove(some, mesh).deadlock_free
    proof = prove(corners, mesh)
    assert (proof.scheme, proof.n_channels, proof.n_dependencies, len(proof.cycle)) == ("these flows", 1, 4, 4)
    for number in (1, 2):
        dateline = Trace(corners.flow, corners.hop, corners.link, np.where(corners.flow == 3, number, 0))
        proof = require_deadlock_free(dateline, mesh)
        assert (proof.n_channels, proof.n_dependencies) == (number + 1, 4)
        graph = deadlock.trace_dependencies(mesh, dateline)
        check_levels(graph, proof.level)
        arrows = zip(map(graph.name, graph.held), map(graph.name, graph.wanted), strict=True)
        by_hand = set()
        for flow in range(4):
            (link, beyond) = corners.link[corners.flow == flow]  # two hops each, in order
            channel = number if flow == 3 else 0
            by_hand.add(((*mesh.link_ends(int(link)), channel), (*mesh.link_ends(int(beyond)), channel)))
        assert set(arrows) == by_hand
    with pytest.raises(DeadlockError, match="these flows can deadlock"):
        require_deadlock_free(corners, mesh)
    nothing = Trace(*(array[:0] for array in (corners.flow, corners.hop, corners.link, corners.channel)))
    assert prove(nothing, mesh).n_channels == 1
    with pytest.raises(TypeError, match=r"^prove\(trace\) needs the mesh that the trace runs on$"):
        require_deadlock_free(corners)


@pytest.mark.parametrize("cells", [1, 64, 100, 2**20])
def test_a_table_may_be_followed_in_blocks(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    routes = detour(Mesh("5x4", failed=["1,1"]))
    whole = deadlock.dependencies(routes)
    monkeypatch.setattr(deadlock, "BLOCK_CELLS", cells)
    parts = deadlock.dependencies(routes)
    assert np.array_equal(whole.held, parts.held)
    assert np.array_equal(whole.wanted, parts.wanted)


def check_levels(graph: Dependencies, level: NDArray[np.int32]) -> None:
    """The certificate, one arrow at a time; and it is as low as it can be."""
    assert level.dtype == np.int32
    arrows = nx.DiGraph(list(zip(graph.held.tolist(), graph.wanted.tolist(), strict=True)))
    arrows.add_nodes_from(range(graph.n_nodes))
    on_or_after = {n for part in nx.strongly_connected_components(arrows) if len(part) > 1 for n in part}
    on_or_after |= {a for a, b in arrows.edges if a == b}
    on_or_after |= {after for node in list(on_or_after) for after in nx.descendants(arrows, node)}
    lowest: dict[int, int] = {}
    for node in nx.topological_sort(arrows.subgraph(set(arrows) - on_or_after)):
        lowest[node] = max((lowest[before] + 1 for before in arrows.predecessors(node)), default=0)
    assert [lowest.get(node, -1) for node in range(graph.n_nodes)] == level.tolist()


def random_graph(rng: np.random.Generator) -> Dependencies:
    mesh = Mesh((int(rng.integers(1, 4)), int(rng.integers(2, 4))))
    n_channels = int(rng.integers(1, 3))
    n = mesh.n_link_slots * n_channels
    live = np.flatnonzero(mesh.neighbours.reshape(-1) >= 0)
    nodes = (live[:, None] * n_channels + np.arange(n_channels)).reshape(-1)
    arrows = np.unique(rng.choice(nodes, (int(rng.integers(0, 2 * len(nodes))), 2)), axis=0).astype(np.int64)
    assert n > nodes.max()
    return Dependencies(mesh, n_channels, arrows[:, 0], arrows[:, 1])


def test_levels_and_cycles_of_random_graphs_are_those_of_networkx() -> None:
    rng = np.random.default_rng(7)
    cyclic = 0
    for _ in range(400):
        graph = random_graph(rng)
        level = find_levels(graph)
        check_levels(graph, level)
        arrows = nx.DiGraph(list(zip(graph.held.tolist(), graph.wanted.tolist(), strict=True)))
        has_cycle = bool((level[graph.held] < 0).any())
        assert has_cycle == (not nx.is_directed_acyclic_graph(arrows))
        if has_cycle:
            cyclic += 1
            cycle = deadlock._find_cycle(graph, level)
            assert len(set(cycle)) == len(cycle)
            assert all(arrows.has_edge(a, b) for a, b in zip(cycle, [*cycle[1:], cycle[0]], strict=True))
    assert 100 < cyclic < 390
