from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from meshmend import Mesh
from meshmend.errors import MeshError, RoutingError
from meshmend.routing import detour, dimension_order
from strategies import meshes


@settings(max_examples=40)
@given(meshes(max_side=5))
def test_loads_and_lengths_agree_with_following_every_flow(mesh: Mesh) -> None:
    routes = detour(mesh)
    src, dst = (grid.ravel() for grid in np.indices((mesh.n_chips, mesh.n_chips)))
    trace = routes.follow(src, dst)
    load = np.bincount(trace.link, minlength=mesh.n_link_slots)
    assert np.array_equal(routes.all_to_all_load(), load)
    lengths = np.bincount(trace.flow, minlength=len(src)).reshape(mesh.n_chips, mesh.n_chips)
    assert np.array_equal(np.maximum(routes.hops, 0), lengths)


def test_a_way_round_the_hole() -> None:
    routes = detour(Mesh("8x8", failed=["2x2@2,2"]))
    assert routes.path((1, 2), (4, 2)) == [(1, 2), (1, 1), (2, 1), (3, 1), (4, 1), (4, 2)]


def test_a_missing_route_is_reported() -> None:
    routes = dimension_order(Mesh("4x4", failed=["1,1"]))
    with pytest.raises(RoutingError, match=r"dimension-order has no route from \(1,0\) to \(1,2\)") as caught:
        routes.path((1, 0), (1, 2))
    assert (caught.value.src, caught.value.dst) == ((1, 0), (1, 2))


def test_a_failed_chip_has_no_route() -> None:
    with pytest.raises(MeshError, match=r"\(1,1\) has failed"):
        detour(Mesh("4x4", failed=["1,1"])).path((1, 1), (0, 0))


def test_other_destinations_are_refused() -> None:
    with pytest.raises(RoutingError, match=r"\(0,1\) is not among the destinations"):
        detour(Mesh("4x4"), [0]).follow(3, 1)
    with pytest.raises(MeshError, match="ranks from 0 to 15"):
        detour(Mesh("4x4"), [16])


def test_a_table_over_a_dead_link_or_with_a_loop_is_reported() -> None:
    routes = dimension_order(Mesh("1x3"))
    off_the_edge = routes.port.copy()
    off_the_edge[0, 0, 2] = 3
    with pytest.raises(RoutingError, match=r"from \(0,0\) over a failed link, on the way to \(0,2\)"):
        _ = replace(routes, port=off_the_edge).hops
    to_and_fro = routes.port.copy()
    to_and_fro[0, 1, 2] = 3
    with pytest.raises(RoutingError, match="has a routing loop"):
        _ = replace(routes, port=to_and_fro).hops
