from __future__ import annotations

import resource
import time

import pytest
from hypothesis import given, settings
from route_checks import check_proof, shortest_lengths

from meshmend import Mesh
from meshmend.errors import ParameterError, RoutingError
from meshmend.routing import choose, route
from strategies import battered_meshes


@pytest.mark.parametrize(
    ("mesh", "scheme", "channels"),
    [
        (Mesh("8x8"), "dimension-order", 1),
        (Mesh("8x8", wrap=True), "dimension-order", 2),
        (Mesh("1x8", failed=["0,7"]), "dimension-order", 1),
        (Mesh("8x8", failed=["2x2@2,2"]), "detour", 2),
        (Mesh("8x8", failed_cables=["2,2-2,3"]), "detour", 2),
        (Mesh("8x8", wrap=True, failed=["2x2@2,2"]), "detour", 3),
        (Mesh("4x4x4", failed=["2x2x2@0,0,0"]), "detour", 2),
    ],
    ids=str,
)
def test_the_first_scheme_that_serves_all_is_taken(mesh: Mesh, scheme: str, channels: int) -> None:
    routes, proof = choose(mesh)
    assert (routes.scheme, routes.n_channels, proof.n_channels) == (scheme, channels, channels)
    assert proof.deadlock_free
    assert routes.is_complete


def test_fewer_channels_force_another_scheme() -> None:
    mesh = Mesh("8x8", failed=["2x2@2,2"])
    assert choose(mesh, max_channels=1)[0].scheme == "up-down"
    with pytest.raises(RoutingError, match="with 0 virtual channels"):
        choose(mesh, max_channels=0)


@settings(max_examples=40)
@given(battered_meshes())
def test_any_survivors_are_served(mesh: Mesh) -> None:
    routes, proof = choose(mesh)
    assert proof.deadlock_free
    assert check_proof(routes).deadlock_free
    assert routes.is_complete


def test_unconnected_survivors_are_reported() -> None:
    with pytest.raises(RoutingError, match=r"not connected: no live path joins \(0,0\) and \(0,2\)"):
        choose(Mesh("1x3", failed=["0,1"]))


def test_names_and_sizes_are_checked() -> None:
    with pytest.raises(ParameterError, match=r"no scheme 'north'\. Schemes: dimension-order, detour, up-down"):
        route(Mesh("2x2"), "north")
    with pytest.raises(RoutingError, match=r"65,536 live chips; .* limited to 8,192"):
        choose(Mesh("256x256"))


def test_32x32_with_its_proof_takes_under_10_seconds() -> None:
    mesh = Mesh("32x32", failed=["4x2@6,8"])
    started = time.process_time()
    routes, proof = choose(mesh)
    assert time.process_time() - started < 10
    assert proof.deadlock_free
    assert (routes.hops == shortest_lengths(mesh)).all()


@pytest.mark.slow
def test_64x64_with_its_proof_takes_under_2_minutes_and_4_gb() -> None:
    started = time.process_time()
    routes, proof = choose(Mesh("64x64", failed=["4x2@6,8"]))
    assert time.process_time() - started < 120
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4e6  # kilobytes
    assert proof.deadlock_free
    assert routes.n_channels == 2
