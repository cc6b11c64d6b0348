"""Oracles for routes that share no code with the routing part: plain walks, networkx graphs, scipy distances."""

from __future__ import annotations

import networkx as nx
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components, shortest_path

from meshmend import Mesh
from meshmend.routing import DeadlockProof, Routes, prove
from meshmend.routing.deadlock import Dependencies, dependencies
from meshmend.routing.dimension_order import dimension_order_channels, surviving_ports
from meshmend.routing.up_down import up_down_ports


def hops_of(routes: Routes) -> NDArray[np.int64]:
    """Return the length of every route, `[src, column]`; −1 where there is none."""
    n_chips, n_columns = routes.mesh.n_chips, len(routes.destinations)
    src, column = (grid.ravel() for grid in np.indices((n_chips, n_columns)))
    dst = routes.destinations[column]
    lengths = np.bincount(routes.follow(src, dst).flow, minlength=len(src))
    lengths[(lengths == 0) & (src != dst)] = -1
    return lengths.reshape(n_chips, n_columns)


def shortest_lengths(mesh: Mesh) -> NDArray[np.float64]:
    a, b = mesh.cables.T
    graph = coo_array((np.ones(len(a)), (a, b)), shape=(mesh.n_chips, mesh.n_chips)).tocsr()
    return np.asarray(shortest_path(graph, directed=False, unweighted=True))


def dimension_order(mesh: Mesh) -> Routes:
    """Dimension order for all pairs that no failure blocks: the first class of `detour`."""
    everybody = np.arange(mesh.n_chips, dtype=np.int32)
    ports, classes = surviving_ports(mesh, everybody)[None], np.zeros((mesh.n_chips, mesh.n_chips), dtype=np.uint8)
    return Routes(mesh, "dimension-order", dimension_order_channels(mesh), everybody, ports, classes)


def up_down(mesh: Mesh) -> Routes:
    """Up*/down* for all pairs, of which `detour` takes what its other classes cannot serve."""
    everybody = np.arange(mesh.n_chips, dtype=np.int32)
    classes = np.zeros((mesh.n_chips, mesh.n_chips), dtype=np.uint8)
    return Routes(mesh, "up-down", 1, everybody, up_down_ports(mesh, everybody)[None], classes)


def live_graph(mesh: Mesh) -> nx.DiGraph[tuple[int, ...]]:
    """The survivors by name, built from what failed, not from the mesh's own neighbour table."""
    graph: nx.DiGraph[tuple[int, ...]] = nx.DiGraph()
    alive = {tuple(map(int, chip)) for chip in np.argwhere(mesh.live)}
    graph.add_nodes_from(alive)
    for chip in alive:
        for axis, length in enumerate(mesh.shape):
            beyond = list(chip)
            beyond[axis] += 1
            if mesh.wrap[axis]:
                beyond[axis] %= length
            far = tuple(beyond)
            if far in alive and (min(chip, far), max(chip, far)) not in mesh.failed_cables:
                graph.add_edge(chip, far)
                graph.add_edge(far, chip)
    return graph


def walk_all_pairs(routes: Routes) -> NDArray[np.int64]:
    """Follow every flow through the table, chip by chip; return the lengths and fail at the first dead link."""
    mesh = routes.mesh
    graph = live_graph(mesh)
    chips = [mesh.chip(rank) for rank in range(mesh.n_chips)]
    rank_of = {chip: rank for rank, chip in enumerate(chips)}
    ports, kinds = routes.port.tolist(), routes.class_of.tolist()
    lengths = np.zeros((mesh.n_chips, len(routes.destinations)), dtype=np.int64)
    for column, dst in enumerate(routes.destinations.tolist()):
        for src in range(mesh.n_chips):
            at, hops, kind = src, 0, kinds[src][column]
            while at != dst:
                axis, back = divmod(ports[kind][at][column] % mesh.n_directions, 2)
                beyond = list(chips[at])
                beyond[axis] += -1 if back else 1
                if mesh.wrap[axis]:
                    beyond[axis] %= mesh.shape[axis]
                assert graph.has_edge(chips[at], tuple(beyond)), f"dead link {chips[at]}→{tuple(beyond)}"
                at, hops = rank_of[tuple(beyond)], hops + 1
                assert hops <= mesh.n_chips, f"{chips[src]}→{chips[dst]} goes round and round"
            lengths[src, column] = hops
    return lengths


def is_acyclic_by_scipy(graph: Dependencies) -> bool:
    """No two channels in one strong component, and none that waits for itself."""
    ones = np.ones(len(graph.held), dtype=np.int8)
    matrix = coo_array((ones, (graph.held, graph.wanted)), shape=(graph.n_nodes, graph.n_nodes)).tocsr()
    n_components, _ = connected_components(matrix, directed=True, connection="strong")
    return bool(n_components == graph.n_nodes and not (graph.held == graph.wanted).any())


def is_acyclic_by_networkx(graph: Dependencies) -> bool:
    return nx.is_directed_acyclic_graph(nx.DiGraph(zip(graph.held.tolist(), graph.wanted.tolist(), strict=True)))


def check_proof(routes: Routes) -> DeadlockProof:
    """The proof, its certificate and two independent checks agree."""
    proof, graph = prove(routes), dependencies(routes)
    assert proof.deadlock_free == is_acyclic_by_scipy(graph) == is_acyclic_by_networkx(graph)
    if proof.deadlock_free:
        assert (proof.level[graph.held] < proof.level[graph.wanted]).all()
        assert proof.cycle == ()
    else:
        names = {(graph.name(a), graph.name(b)) for a, b in zip(graph.held, graph.wanted, strict=True)}
        assert {(a, b) for a, b in zip(proof.cycle, [*proof.cycle[1:], proof.cycle[0]], strict=True)} <= names
    return proof
