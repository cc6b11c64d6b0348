"""No schedule is faster than the floor with latency; and where all schedules can be tried, the best is as fast."""

from __future__ import annotations

import heapq
import itertools
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend import Collective, Mesh, bound, predict
from meshmend.cost import PRESETS, Hardware, StepDemand
from meshmend.cost.hardware import MODES
from meshmend.errors import ParameterError
from meshmend.planning import Derived, Gather, Hamiltonian, Latency, Planner, RowPairs, TwoColor, Weave
from meshmend.topology import Mesh as AnyMesh
from strategies import meshes

MACHINES = [
    PRESETS["tpu-v4-xla"],
    PRESETS["tpu-v3-xla"],
    PRESETS["ethernet-10g"],
    PRESETS["ideal"],
    Hardware("long hops", 1e9, step_latency_s=1e-6, hop_latency_s=2e-5),
    Hardware("long steps", 1e9, step_latency_s=5e-5, hop_latency_s=1e-7, links_at_once=2),
]
PLANNERS: list[Planner] = [
    Hamiltonian(),
    TwoColor(),
    RowPairs(),
    *(Weave(chunks) for chunks in (1, 2, 9)),
    *(Latency(halvings, parts) for halvings in (0, 1, 3) for parts in (1, 2)),
    *(Gather(chunks, half) for chunks in (1, 5, 20) for half in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)),
    *(Derived(Weave(4), half) for half in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)),
]
XLA = PRESETS["tpu-v4-xla"]


def check(mesh: Mesh, planner: Planner, payload: float, hardware: Hardware) -> None:
    if planner.unsupported_reason(mesh) is not None:
        return
    schedule = planner.plan(mesh)
    for mode in MODES:
        forecast = predict(schedule, payload, hardware, mode=mode)
        assert forecast.seconds >= forecast.least_seconds * (1 - 1e-9), (planner, mode, forecast)
        assert forecast.least_seconds >= forecast.bound_seconds * (1 - 1e-9)


ANYTHING = (st.sampled_from(PLANNERS), st.sampled_from([1.0, 1e3, 1e5, 1e8]), st.sampled_from(MACHINES))


@settings(max_examples=40, deadline=None)
@given(meshes(max_side=4, connected=True), *ANYTHING)
def test_no_plan_of_any_planner_is_faster(mesh: Mesh, planner: Planner, payload: float, hardware: Hardware) -> None:
    check(mesh, planner, payload, hardware)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None)
@given(meshes(max_side=5, connected=True), *ANYTHING)
def test_no_plan_is_faster_on_thousands(mesh: Mesh, planner: Planner, payload: float, hardware: Hardware) -> None:
    check(mesh, planner, payload, hardware)


def best_latency(mesh: Mesh, hardware: Hardware) -> float:
    """The least lock-step time of any all-reduce of an empty payload: all sequences of steps, by Dijkstra's search.

    A state is what each chip holds, a set of contributions; with nothing to carry, one chunk is as good as many.
    """
    n = mesh.n_chips
    graph: nx.Graph[int] = nx.Graph(mesh.cables.tolist())
    hops = dict(nx.all_pairs_shortest_path_length(graph))
    whole = (1 << n) - 1
    start = tuple(1 << rank for rank in range(n))
    best, done = {start: 0.0}, np.inf
    queue = [(0.0, start)]
    while queue:
        spent, state = heapq.heappop(queue)
        if spent >= done:
            break
        if spent > best[state]:
            continue
        # What each chip may hold after a step, and over how many hops it came.
        options: list[list[tuple[int, int]]] = []
        for rank, held in enumerate(state):
            came = {held: 0}
            for other in range(n):
                if other != rank:
                    for result in {state[other]} | ({held | state[other]} if not held & state[other] else set()):
                        came[result] = min(came.get(result, 99), hops[rank][other])
            options.append(list(came.items()))
        ends = [dict(option).get(whole, np.inf) for option in options]
        done = min(done, spent + hardware.step_latency_s + max(ends) * hardware.hop_latency_s)
        if spent + 2 * (hardware.step_latency_s + hardware.hop_latency_s) >= done:
            continue  # two more steps are no better than what was found
        for choice in itertools.product(*options):
            far = max(distance for _, distance in choice)
            after = tuple(held for held, _ in choice)
            cost = spent + hardware.step_latency_s + far * hardware.hop_latency_s
            if far and cost < best.get(after, np.inf):
                best[after] = cost
                heapq.heappush(queue, (cost, after))
    return float(done)


@pytest.mark.parametrize(
    ("mesh", "hardware"),
    [
        (Mesh("1x2"), XLA),
        (Mesh("1x3"), XLA),
        (Mesh("2x2", failed=["0,0"]), MACHINES[4]),
        (Mesh("2x2"), XLA),
        (Mesh("1x4"), MACHINES[3]),
        pytest.param(Mesh("2x2"), MACHINES[3], marks=pytest.mark.slow),
        pytest.param(Mesh("2x3", failed=["0,1", "0,2"]), MACHINES[4], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_floor_is_what_the_best_of_all_schedules_takes(mesh: AnyMesh, hardware: Hardware) -> None:
    best = best_latency(mesh, hardware)
    least = bound(mesh, hardware=hardware).least_seconds(0.0, hardware.link_bytes_per_s)
    assert least <= best * (1 + 1e-12)
    if mesh.n_chips in (2, 4):
        assert least == pytest.approx(best)
        made = [StepDemand(planner.plan(mesh)).seconds(0.0, hardware) for planner in PLANNERS if serves(planner, mesh)]
        assert min(made) >= best * (1 - 1e-12)


def serves(planner: Planner, mesh: Mesh) -> bool:
    return planner.collective is Collective.ALL_REDUCE and planner.unsupported_reason(mesh) is None


def test_what_the_paper_mesh_needs_at_least() -> None:
    found = bound(Mesh("16x32", failed=["4x2@6,8"]), hardware="tpu-v4-xla")
    # 504 contributions in one cell take 9 steps of 2 µs; 15 + 31 hops join opposite corners, with two cables each.
    for payload in (0.0, 4e3, 64e3):
        assert found.least_seconds(payload, 50e9) == pytest.approx(18e-6 + 46e-6 + payload / 2 / 50e9)
    assert "9 steps and the 46 hops from chip (0,0)" in found.highest_line(4e3, 50e9).why
    assert found.least_seconds(1e9, 50e9) == pytest.approx(9 * 3e-6 + found.units * 1e9 / 50e9)
    slow = bound(Mesh("16x32", failed=["4x2@6,8"]), hardware="tpu-v4-xla", mode="asynchronous")
    assert slow.least_seconds(4e3, 50e9) == pytest.approx(2e-6 + 46e-6 + 4e3 / 2 / 50e9)


def test_latency_is_within_a_third_of_the_floor() -> None:
    schedule = Latency().plan(Mesh("16x32", failed=["4x2@6,8"]))
    forecast = predict(schedule, 4e3, XLA)
    assert 1 <= forecast.seconds / forecast.least_seconds <= 4 / 3


@pytest.mark.parametrize("wrap", [False, True])
def test_distances_are_those_of_the_graph(wrap: bool) -> None:
    mesh = Mesh("5x7", wrap=wrap, failed=["2x2@1,2"])
    diameter = nx.diameter(nx.Graph(mesh.cables.tolist()))
    hops = Hardware("hops", 1e9, hop_latency_s=1.0)
    assert bound(mesh, hardware=hops).least_seconds(0.0, 1e9) == diameter
    assert bound(mesh, hardware=hops, collective=Collective.ALL_GATHER).least_seconds(0.0, 1e9) == diameter
    assert bound(Mesh("1x5000"), hardware=hops).least_seconds(0.0, 1e9) == 4999


def test_without_hardware_there_is_bandwidth_alone() -> None:
    plain: Any = bound(Mesh("4x4"))
    assert plain.with_latency == ()
    assert plain.least_seconds(1e6, 1e9) == plain.seconds(1e6, 1e9)
    with pytest.raises(ParameterError, match="links_at_once is 3, and the hardware has its own: tpu-v3-xla"):
        bound(Mesh("4x4"), hardware="tpu-v3-xla", links_at_once=3)
