"""Bounds and forecasts over cables of different rates, held to brute force and to sums by hand."""

from __future__ import annotations

from fractions import Fraction

import networkx as nx
import numpy as np
import pytest
from numpy.typing import NDArray

from meshmend import Collective, plan
from meshmend.cost import bound, busiest_link_load, predict
from meshmend.cost.cuts import cable_widths, narrowest_cut, narrowest_partition
from meshmend.planning import Hamiltonian
from meshmend.schedule import Op, Schedule
from meshmend.topology import Mesh
from partitions import partitions
from strategies import tear


def torn(rng: np.random.Generator, max_chips: int) -> Mesh:
    """A random mesh or torus of one or two axes that may have lost chips and cables, of at least two chips."""
    while True:
        shape = tuple(int(n) for n in rng.integers(1, 7, rng.integers(1, 3)))
        if 2 <= np.prod(shape) <= max_chips:
            wrap = tuple(bool(w) for w in rng.random(len(shape)) < 0.4)
            mesh = tear(shape, wrap, float(rng.choice([0, 0.2])), float(rng.choice([0, 0.2])), int(rng.integers(2**31)))
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


def rate_between(mesh: Mesh, labels: NDArray[np.generic]) -> Fraction:
    """The sum of the rates of the cables between parts, by the description of the mesh alone."""
    total = Fraction(0)
    for a, b in mesh.cables.tolist():
        if labels[a] != labels[b]:
            first, second = sorted((mesh.chip(a), mesh.chip(b)))
            total += mesh.cable_rates.get((first, second), Fraction(1))
    return total


def best_of_all_partitions(mesh: Mesh) -> Fraction:
    labels = partitions(mesh.n_chips)[1:]
    width, unit = cable_widths(mesh)
    between = sum((labels[:, a] != labels[:, b]) * w for (a, b), w in zip(mesh.cables.tolist(), width, strict=True))
    extra = labels.max(axis=1).astype(np.int64)
    best = int(np.argmax(extra / between))
    found = Fraction(int(extra[best]) * unit, int(np.asarray(between)[best]))
    assert found == Fraction(int(extra[best])) / rate_between(mesh, labels[best])
    return found


def best_of_all_cuts(mesh: Mesh, shares: list[int]) -> Fraction:
    best = Fraction(0)
    for number in range(1, 2**mesh.n_chips - 1):
        inside = (number >> np.arange(mesh.n_chips)) & 1 == 1
        lacking = sum(share for share, here in zip(shares, inside.tolist(), strict=True) if not here)
        best = max(best, Fraction(lacking) / rate_between(mesh, inside))
    return best


@pytest.mark.parametrize(("n", "chips", "most"), [(60, 8, 6), pytest.param(400, 10, 12, marks=pytest.mark.slow)])
def test_partitions_against_brute_force(n: int, chips: int, most: int) -> None:
    rng = np.random.default_rng(n)
    for _ in range(n):
        mesh = slowed(torn(rng, max_chips=chips), rng, most)
        labels = narrowest_partition(mesh)
        assert Fraction(int(labels.max())) / rate_between(mesh, labels) == best_of_all_partitions(mesh)
        assert bound(mesh).units == pytest.approx(float(best_of_all_partitions(mesh)), rel=1e-12)
        assert bound(mesh).is_exact


def test_cuts_against_brute_force() -> None:
    rng = np.random.default_rng(2)
    for _ in range(40):
        mesh = slowed(torn(rng, max_chips=7), rng)
        for shares in ([1] * mesh.n_chips, [1, *rng.integers(0, 4, mesh.n_chips - 1).tolist()]):
            cut = narrowest_cut(mesh, shares)
            assert cut is not None
            lacking = sum(share for share, here in zip(shares, cut.tolist(), strict=True) if not here)
            best = best_of_all_cuts(mesh, shares)
            assert Fraction(lacking) / rate_between(mesh, cut) == best
            found = bound(mesh, collective=Collective.ALL_GATHER, shares=tuple(shares))
            assert found.units == pytest.approx(float(best / sum(shares)), rel=1e-12)


def test_every_chip_can_get_what_it_lacks_in_time() -> None:
    rng = np.random.default_rng(3)
    for _ in range(10):
        mesh = slowed(torn(rng, max_chips=30), rng)
        time = Fraction(bound(mesh, collective=Collective.ALL_GATHER).units * mesh.n_chips).limit_denominator(10**6)
        graph: nx.DiGraph[int | str] = nx.DiGraph()
        for (a, b), rate in zip(mesh.cables.tolist(), mesh.rates.tolist(), strict=True):
            for ends in ((a, b), (b, a)):
                graph.add_edge(*ends, capacity=rate * float(time))
        graph.add_edges_from((("source", rank) for rank in range(mesh.n_chips)), capacity=1.0)
        for rank in range(mesh.n_chips):
            assert nx.maximum_flow_value(graph, "source", rank) == pytest.approx(mesh.n_chips, rel=1e-6)


def test_rates_of_one_change_nothing_and_slower_cables_never_help() -> None:
    mesh = Mesh("8x8", failed=["2x2@2,2"])
    assert bound(Mesh("8x8", failed=["2x2@2,2"], cable_rates={"8x8@0,0": 1})) == bound(mesh)
    column = [bound(Mesh("8x8", failed=["2x2@2,2"], cable_rates={"8x1@0,5": rate})).units for rate in (1, 0.75, 0.5)]
    assert column == sorted(column)
    assert column[0] < column[-1]
    half = Mesh("8x8", failed=["2x2@2,2"], cable_rates={"8x8@0,0": 0.5})
    assert bound(half).units == pytest.approx(2 * bound(mesh).units)
    assert bound(half, collective=Collective.REDUCE_SCATTER).units == pytest.approx(
        2 * bound(mesh, collective=Collective.REDUCE_SCATTER).units
    )


def test_what_binds_is_said() -> None:
    assert "a slow cable is the only way between two parts" in bound(Mesh("1x4", cable_rates={"0,1-0,2": 0.5})).why
    assert "over its 2 cables (1 slow)" in bound(Mesh("4x4", cable_rates={"0,0-0,1": 0.25})).why
    assert (
        "2 cables (all slow) are all that joins" in bound(Mesh("2x4", cable_rates={"1x2@0,1": 0.5, "1x2@1,1": 0.5})).why
    )
    one_at_a_time = bound(Mesh("2x2", cable_rates={"0,0-0,1": 0.5}), links_at_once=1)
    assert not one_at_a_time.is_exact
    assert one_at_a_time.units == pytest.approx(2 * 3 / 4)


def line(rates: dict[str, float], steps: list[tuple[int, int, int, int]], chunks: int) -> Schedule:
    """Copies along 1x4: (step, src, dst, chunk)."""
    step, src, dst, chunk = zip(*steps, strict=True)
    mesh = Mesh("1x4", cable_rates=rates)
    op = [Op.COPY] * len(steps)
    return Schedule(
        mesh, total_chunks=chunks, step=step, src=src, dst=dst, first_chunk=chunk, op=op, owners=[0] * chunks
    )


def test_forecasts_by_hand() -> None:
    # Two chunks of 1 s each over 0→1→2, whose second cable has a third of the rate.
    schedule = line({"0,1-0,2": 1 / 3}, [(0, 0, 1, 0), (1, 1, 2, 0), (1, 0, 1, 1), (2, 1, 2, 1)], chunks=2)
    assert predict(schedule, 2e9, "ideal").seconds == pytest.approx(1 + 3 + 3)
    assert predict(schedule, 2e9, "ideal", mode="asynchronous").seconds == pytest.approx(1 + 3 + 3)
    assert busiest_link_load(schedule) == pytest.approx(3.0)
    first = predict(schedule, 2e9, "ideal").busiest_links[0]
    assert (str(first), first.load) == ("(0,1)→(0,2)", 1.0)
    assert first.time == pytest.approx(3.0)
    assert first.rate == pytest.approx(1 / 3)
    # The first cable slow instead: in lock-step the third step is quick, asynchronously the second chunk waits.
    both_ways = line({"0,0-0,1": 1 / 3}, [(0, 0, 1, 0), (1, 1, 2, 0), (1, 0, 1, 1), (2, 1, 2, 1)], chunks=2)
    assert predict(both_ways, 2e9, "ideal").seconds == pytest.approx(3 + 3 + 1)


def test_a_slow_hop_on_the_way_delays_the_end_whichever_it_is() -> None:
    for slow in ("0,0-0,1", "0,1-0,2", "0,2-0,3"):
        schedule = line({slow: 0.25}, [(0, 0, 3, 0)], chunks=1)
        for mode in ("lock-step", "asynchronous"):
            assert predict(schedule, 1e9, "ideal", mode=mode).seconds == pytest.approx(4.0)


def test_the_gap_adds_up() -> None:
    forecast = predict(plan(Mesh("4x4", cable_rates={"4x1@0,1": 0.5}), "weave"), 1e8, "tpu-v4-xla")
    assert sum(forecast.gap.parts.values()) == pytest.approx(forecast.seconds)
    assert min(forecast.gap.parts.values()) >= 0


def test_auto_takes_the_fastest_by_forecasts_that_know_rates() -> None:
    mesh = Mesh("4x4", cable_rates={"0,0-0,1": 0.25})
    best = predict(plan(mesh, payload_bytes=1e6, hardware="tpu-v3"), 1e6, "tpu-v3").seconds
    for name in ("hamiltonian", "two-color", "row-pairs", "weave"):
        assert best <= predict(plan(mesh, name), 1e6, "tpu-v3").seconds * (1 + 1e-9)
    # Every ring passes the corner, and every step of it waits for the slow cable.
    ring = Hamiltonian().plan(mesh)
    whole = predict(Hamiltonian().plan(Mesh("4x4")), 1e9, "ideal").seconds
    assert predict(ring, 1e9, "ideal").seconds == pytest.approx(4 * whole)
