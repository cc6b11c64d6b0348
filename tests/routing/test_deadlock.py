from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from route_checks import check_proof

from meshmend import Mesh
from meshmend.errors import DeadlockError
from meshmend.routing import Routes, Trace, detour, dimension_order, prove, require_deadlock_free


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
    assert routes.is_complete
    proof = check_proof(routes)
    assert not proof.deadlock_free
    assert set(proof.cycle) == {
        ((0, 0), (0, 1), 0),
        ((0, 1), (1, 1), 0),
        ((1, 1), (1, 0), 0),
        ((1, 0), (0, 0), 0),
    }
    with pytest.raises(
        DeadlockError, match=r"4 channels wait .* in a circle, .*\(0,0\)→\(0,1\) on channel 0"
    ) as caught:
        require_deadlock_free(routes)
    assert caught.value.cycle == proof.cycle
    assert caught.value.scheme == "clockwise"
    assert "can deadlock" in str(proof)


def test_a_torus_without_its_dateline_deadlocks() -> None:
    routes = dimension_order(Mesh("1x5", wrap=True))
    one_channel = replace(routes, n_channels=1, port=np.where(routes.port >= 0, routes.port % 4, routes.port))
    proof = check_proof(one_channel)
    assert not proof.deadlock_free
    assert len(proof.cycle) == 5
    assert check_proof(routes).deadlock_free


def test_both_turn_classes_on_one_channel_deadlock() -> None:
    routes = detour(Mesh("8x8", failed=["2x2@2,2"]))
    one_channel = replace(routes, n_channels=1, port=np.where(routes.port >= 0, routes.port % 4, routes.port))
    assert check_proof(routes).deadlock_free
    assert not check_proof(one_channel).deadlock_free


def test_the_shortest_cycle_is_named() -> None:
    """A small circle and a large one, side by side."""
    routes = dimension_order(Mesh("5x3", wrap=(True, True)))
    port = np.where(routes.port >= 0, routes.port % 4, routes.port)
    # On an axis of three chips every way is one hop, so only the axis of five closes a circle.
    assert len(check_proof(replace(routes, n_channels=1, port=port)).cycle) == 5


def test_flows_are_proven_together() -> None:
    square = clockwise_square()
    mesh = square.mesh
    corners = square.follow([0, 1, 3, 2], [3, 2, 0, 1])
    assert not prove(corners, mesh).deadlock_free
    three = corners.flow < 3
    some = Trace(corners.flow[three], corners.hop[three], corners.link[three], corners.channel[three])
    assert prove(some, mesh).deadlock_free
    with pytest.raises(TypeError, match="needs the mesh"):
        prove(some)


def test_no_flow_at_all_is_fine() -> None:
    assert prove(dimension_order(Mesh("1x1"))).deadlock_free
