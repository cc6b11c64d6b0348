from collections.abc import Iterator

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend.cost import Hardware, bound, predict
from meshmend.errors import MeshError
from meshmend.schedule import Collective, Schedule
from meshmend.topology import Mesh
from strategies import plans, survivors


@pytest.mark.parametrize(("shape", "units"), [("16x32", 0.527), ("32x32", 0.517)])
def test_paper_meshes(shape: str, units: float) -> None:
    found = bound(Mesh(shape, failed=["4x2@6,8"]))
    assert round(found.units, 3) == units
    assert "cables on its way up" in found.why


def test_full_square_mesh_has_the_closed_form() -> None:
    for n in (2, 3, 8, 32):
        assert bound(Mesh((n, n))).units == pytest.approx((n + 1) / (2 * n))


def test_torus_has_no_corner() -> None:
    assert bound(Mesh("8x8", wrap=True)).units == pytest.approx(63 / 128)


def test_a_chip_with_one_cable_takes_the_whole_payload() -> None:
    found = bound(Mesh("4x4", failed_cables=["0,0-0,1"]))
    assert found.units == 1
    assert found.why == "a cable is the only way between two parts of the mesh, of 1 and 15 chips"


def test_a_corridor_binds_harder_than_cut_or_count() -> None:
    # Two 8×8 halls joined by a corridor of two rows: 2 cables cut it (1/2), and P − 1 of E is 0.57, but
    # the ladder's own 16 chips hang on 26 cables.
    halls = Mesh("8x24", failed=["3x8@0,8", "3x8@5,8"])
    graph = nx.Graph([(int(a), int(b)) for a, b in halls.cables])
    simple = max(1 / nx.edge_connectivity(graph), (halls.n_chips - 1) / halls.n_cables)
    found = bound(halls)
    assert found.units == pytest.approx((18 - 1) / (8 + 9 * 2))
    assert found.units > 1.1 * simple
    assert (found.parts, found.cables) == (18, 26)
    assert "narrow places" in found.why


def test_one_link_at_a_time_doubles_the_ring() -> None:
    mesh = Mesh("4x4")
    found = bound(mesh, links_at_once=1)
    assert found.units == pytest.approx(2 * 15 / 16)
    assert "only some of its links at once" in found.why
    assert bound(mesh, links_at_once=4).units == bound(mesh).units


def test_half_a_collective_takes_half() -> None:
    mesh = Mesh("8x8", failed=["2x2@2,2"])
    whole = bound(mesh).units
    for collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER):
        assert bound(mesh, collective=collective).units == whole / 2


def test_single_chip_has_nothing_to_do() -> None:
    assert bound(Mesh("1x1")).units == 0


def test_survivors_in_two_parts_are_refused() -> None:
    with pytest.raises(MeshError, match="are in 2 parts with no live cable between them"):
        bound(Mesh("4x4", failed=["4x1@0,1"]))


@settings(max_examples=60, deadline=None)
@given(survivors())
def test_never_weaker_than_connectivity_and_count(mesh: Mesh) -> None:
    if mesh.n_chips == 1:
        return
    graph = nx.Graph([(int(a), int(b)) for a, b in mesh.cables])
    simple = max(1 / nx.edge_connectivity(graph), (mesh.n_chips - 1) / mesh.n_cables)
    assert bound(mesh).units >= simple * (1 - 1e-12)


def partitions(n: int) -> Iterator[list[int]]:
    """Every partition of n things, as labels."""

    def grow(labels: list[int]) -> Iterator[list[int]]:
        if len(labels) == n:
            yield labels
            return
        for label in range(max(labels) + 2):
            yield from grow([*labels, label])

    yield from grow([0])


@settings(max_examples=25, deadline=None)
@given(survivors(max_chips=8))
def test_equals_the_best_of_all_partitions(mesh: Mesh) -> None:
    if mesh.n_chips == 1:
        return
    best = 0.0
    for labels in partitions(mesh.n_chips):
        parts = max(labels) + 1
        if parts > 1:
            between = sum(labels[a] != labels[b] for a, b in mesh.cables.tolist())
            best = max(best, (parts - 1) / between)
    assert bound(mesh).units == pytest.approx(best)


def check_bound_holds(schedule: Schedule, links_at_once: int | None) -> None:
    hardware = Hardware("bandwidth only", 1.0, links_at_once=links_at_once)
    for mode in ("lock-step", "asynchronous"):
        forecast = predict(schedule, 1.0, hardware, mode=mode)
        assert forecast.seconds >= forecast.bound_seconds * (1 - 1e-9)
        assert forecast.bound_seconds == bound(schedule.mesh, links_at_once=links_at_once).units


@settings(max_examples=120, deadline=None)
@given(plans(), st.sampled_from([None, 1, 2, 3]))
def test_no_schedule_beats_it(schedule: Schedule, links_at_once: int | None) -> None:
    check_bound_holds(schedule, links_at_once)


@pytest.mark.slow
@settings(max_examples=4000, deadline=None)
@given(plans(), st.sampled_from([None, 1, 2, 3]))
def test_no_schedule_beats_it_thousands(schedule: Schedule, links_at_once: int | None) -> None:
    check_bound_holds(schedule, links_at_once)


def test_large_meshes_get_the_plain_bounds() -> None:
    mesh = Mesh("256x256", failed=["2x2@10,10"])
    assert bound(mesh).units == pytest.approx((mesh.n_chips - 1) / mesh.n_cables)


def test_repeatable() -> None:
    mesh = Mesh("8x24", failed=["3x8@0,8", "3x8@5,8"])
    bound.cache_clear()
    first = bound(mesh)
    bound.cache_clear()
    assert bound(mesh) == first
    assert np.isfinite(first.units)
