"""The exact bounds, over cables of one rate and of several, held to brute force over partitions and sets of chips, to a
linear programme and to networkx."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array, csr_array, eye_array, hstack, kron, vstack

from meshmend import Collective
from meshmend.cost import bound
from meshmend.cost.cuts import narrowest_cut, narrowest_partition
from meshmend.topology import Mesh
from partitions import partitions
from strategies import survivors, tear


def widths(mesh: Mesh) -> tuple[list[tuple[int, int, int]], int]:
    """The ends of each cable and its rate, in whole units; and how many of them are a rate of 1."""
    unit = math.lcm(*(rate.denominator for rate in mesh.cable_rates.values()))
    ends = [(a, b, sorted((mesh.chip(a), mesh.chip(b)))) for a, b in mesh.cables.tolist()]
    return [(a, b, int(unit * mesh.cable_rates.get((first, last), 1))) for a, b, (first, last) in ends], unit


def rate_between(mesh: Mesh, labels: NDArray[np.generic]) -> Fraction:
    """The sum of the rates of the cables between parts."""
    cables, unit = widths(mesh)
    return Fraction(sum(width for a, b, width in cables if labels[a] != labels[b]), unit)


def best_of_all_partitions(mesh: Mesh) -> Fraction:
    """The most of (parts − 1) / cables between parts, by trying all."""
    labels = partitions(mesh.n_chips)[1:]
    between = sum((labels[:, a] != labels[:, b]) * width for a, b, width in widths(mesh)[0])
    return quotient(mesh, labels[int(np.argmax(labels.max(axis=1).astype(np.int64) / between))])


def quotient(mesh: Mesh, labels: NDArray[np.generic]) -> Fraction:
    return Fraction(int(labels.max())) / rate_between(mesh, labels)


def connected_survivors(shape: tuple[int, ...]) -> list[Mesh]:
    """Every connected set of two chips or more, by the chips alone."""
    found = []
    for live in product([False, True], repeat=int(np.prod(shape))):
        if sum(live) > 1:
            dead = np.argwhere(~np.reshape(live, shape))
            mesh = Mesh(shape, failed=[tuple(map(int, chip)) for chip in dead])
            if mesh.is_connected:
                found.append(mesh)
    return found


def test_partitions_are_all_there() -> None:
    assert [len(partitions(n)) for n in range(1, 9)] == [1, 2, 5, 15, 52, 203, 877, 4140]
    assert len(np.unique(partitions(7), axis=0)) == 877


def test_every_survivor_set_of_a_small_mesh() -> None:
    meshes = connected_survivors((3, 3))
    assert len(meshes) == 218 - 9  # connected induced subgraphs of the 3×3 grid, without the single chips
    for mesh in meshes:
        assert quotient(mesh, narrowest_partition(mesh)) == best_of_all_partitions(mesh)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 4), (2, 6)])
def test_every_survivor_set_of_larger_meshes(shape: tuple[int, ...]) -> None:
    for mesh in sorted(connected_survivors(shape), key=lambda mesh: mesh.n_chips):
        assert quotient(mesh, narrowest_partition(mesh)) == best_of_all_partitions(mesh)


def torn(rng: np.random.Generator, max_chips: int) -> Mesh:
    """A random mesh or torus of one to three axes that has lost chips and cables, of at least two chips."""
    while True:
        shape = tuple(int(n) for n in rng.integers(1, 9, rng.integers(1, 4)))
        if 2 <= np.prod(shape) <= max_chips:
            wrap = tuple(bool(w) for w in rng.random(len(shape)) < 0.4)
            lost_chips, lost_cables = (float(lost) for lost in rng.choice([0, 0.1, 0.3], 2))
            mesh = tear(shape, wrap, lost_chips, lost_cables, int(rng.integers(2**31)))
            if mesh.n_chips > 1:
                return mesh


def slowed(mesh: Mesh, rng: np.random.Generator, most: int = 6) -> Mesh:
    """The mesh with a random rational rate on about half of its cables."""
    rates = {}
    for a, b in mesh.cables.tolist():
        if rng.random() < 0.5:
            whole = int(rng.integers(1, most + 1))
            rates[mesh.chip(a), mesh.chip(b)] = Fraction(int(rng.integers(1, whole + 1)), whole)
    return Mesh(mesh.shape, wrap=mesh.wrap, failed=mesh.holes, failed_cables=mesh.failed_cables, cable_rates=rates)


def check_small(mesh: Mesh, rng: np.random.Generator) -> None:
    best = best_of_all_partitions(mesh)
    assert quotient(mesh, narrowest_partition(mesh)) == best
    assert bound(mesh).units == pytest.approx(float(best), rel=1e-12)
    assert bound(mesh).is_exact
    for shares in ([1] * mesh.n_chips, rng.integers(0, 4, mesh.n_chips).tolist()):
        if any(shares):
            cut = narrowest_cut(mesh, shares)
            assert cut is not None
            best = best_of_all_cuts(mesh, shares)
            assert lack_per_cable(mesh, shares, cut) == best
            found = bound(mesh, collective=Collective.ALL_GATHER, shares=tuple(shares))
            assert found.units == pytest.approx(float(best / sum(shares)), rel=1e-12)


def lack_per_cable(mesh: Mesh, shares: list[int], inside: NDArray[np.bool_]) -> Fraction:
    return Fraction(int(np.array(shares)[~inside].sum())) / rate_between(mesh, inside)


def best_of_all_cuts(mesh: Mesh, shares: list[int]) -> Fraction:
    n = mesh.n_chips
    inside = (np.arange(1, 2**n - 1)[:, None] >> np.arange(n)) & 1
    cables = sum((inside[:, a] ^ inside[:, b]) * width for a, b, width in widths(mesh)[0])
    lacking = sum(shares) - inside @ np.array(shares)
    return lack_per_cable(mesh, shares, inside[int(np.argmax(lacking / cables))] == 1)


@pytest.mark.parametrize(("n", "chips"), [(60, 8), pytest.param(1500, 10, marks=pytest.mark.slow)])
def test_random_graphs_against_brute_force(n: int, chips: int) -> None:
    rng = np.random.default_rng(n)
    for _ in range(n):
        mesh = torn(rng, max_chips=chips)
        check_small(mesh, rng)
        check_small(slowed(mesh, rng), rng)


def least_largest_load(mesh: Mesh) -> float:
    """The least, over all mixtures of spanning trees, of what the busiest cable carries: a linear programme.

    A mixture of trees, directed away from chip 0, is a weight on every arc such that one unit can flow from chip 0
    to each other chip, one at a time, within these weights (Edmonds; Fulkerson). The variables are the weights, a flow
    for each of the other chips, and the largest load.
    """
    n, n_cables = mesh.n_chips, mesh.n_cables
    tail, head = np.concatenate([mesh.cables, mesh.cables[:, ::-1]]).T
    arcs, flows = np.arange(2 * n_cables), 2 * n_cables * (n - 1)
    leaves = coo_array((np.repeat([1.0, -1.0], 2 * n_cables), (np.concatenate([tail, head]), np.tile(arcs, 2))))
    both_ways = hstack([eye_array(n_cables), eye_array(n_cables)])
    loads = hstack([both_ways, coo_array((n_cables, flows)), coo_array(-mesh.rates[:, None])])
    within = hstack([-kron(np.ones((n - 1, 1)), eye_array(2 * n_cables)), eye_array(flows), coo_array((flows, 1))])
    kept = hstack([coo_array((n * (n - 1), 2 * n_cables)), kron(eye_array(n - 1), leaves), coo_array((n * (n - 1), 1))])
    wanted = np.hstack([np.ones((n - 1, 1)), -np.eye(n - 1)])
    solved = linprog(  # type: ignore[call-overload]  # the stubs know no sparse matrices
        np.append(np.zeros(2 * n_cables + flows), 1.0),
        A_ub=csr_array(vstack([loads, within])),
        b_ub=np.zeros(n_cables + flows),
        A_eq=csr_array(kept),
        b_eq=wanted.ravel(),
    )
    assert solved.status == 0
    return float(solved.fun)


@pytest.mark.parametrize(("n", "chips"), [(12, 16), pytest.param(200, 64, marks=pytest.mark.slow)])
def test_partitions_match_spanning_trees(n: int, chips: int) -> None:
    rng = np.random.default_rng(n)
    for _ in range(n):
        mesh = slowed(torn(rng, max_chips=chips), rng)
        assert float(quotient(mesh, narrowest_partition(mesh))) == pytest.approx(least_largest_load(mesh), rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(survivors(max_chips=24), st.integers(0, 2**32 - 1))
def test_all_that_a_chip_lacks_can_flow_to_it_in_time(mesh: Mesh, seed: int) -> None:
    if mesh.n_chips == 1:
        return
    rng = np.random.default_rng(seed)
    mesh = slowed(mesh, rng)
    shares = rng.integers(0, 3, mesh.n_chips).tolist()
    shares[0] += 1
    cut = narrowest_cut(mesh, shares)
    assert cut is not None
    time = lack_per_cable(mesh, shares, cut)
    graph: nx.DiGraph[int | str] = nx.DiGraph()
    cables, unit = widths(mesh)
    for a, b, width in cables:
        graph.add_edge(a, b, capacity=time.numerator * width)
        graph.add_edge(b, a, capacity=time.numerator * width)
    for rank, share in enumerate(shares):
        graph.add_edge("source", rank, capacity=share * time.denominator * unit)
    for rank in range(mesh.n_chips):
        assert nx.maximum_flow_value(graph, "source", rank) == sum(shares) * time.denominator * unit
