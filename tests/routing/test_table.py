from __future__ import annotations

import pytest
from route_checks import dimension_order

from meshmend import Mesh
from meshmend.errors import MeshError, RoutingError
from meshmend.routing import detour


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
