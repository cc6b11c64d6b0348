from __future__ import annotations

import resource
import time

import numpy as np
import pytest
from hypothesis import given, settings
from route_checks import check_proof, hops_of, shortest_lengths

from meshmend import Mesh
from meshmend.errors import RoutingError
from meshmend.routing import all_pairs
from strategies import battered_meshes


@pytest.mark.parametrize(
    ("mesh", "channels"),
    [
        (Mesh("8x8"), 1),
        (Mesh("8x8", wrap=True), 2),
        (Mesh("1x8", failed=["0,7"]), 1),
        (Mesh("8x8", failed=["2x2@2,2"]), 2),
        (Mesh("8x8", failed_cables=["2,2-2,3"]), 2),
        (Mesh("8x8", wrap=True, failed=["2x2@2,2"]), 3),
        (Mesh("4x4x4", failed=["2x2x2@0,0,0"]), 2),
    ],
    ids=str,
)
def test_all_pairs_are_served_on_few_channels(mesh: Mesh, channels: int) -> None:
    routes, proof = all_pairs(mesh)
    assert (routes.n_channels, proof.n_channels) == (channels, channels)
    assert proof.deadlock_free
    assert (hops_of(routes) >= 0).all()


@settings(max_examples=40)
@given(battered_meshes())
def test_any_survivors_are_served(mesh: Mesh) -> None:
    routes, proof = all_pairs(mesh)
    assert proof.deadlock_free
    assert check_proof(routes).deadlock_free
    assert (hops_of(routes) >= 0).all()


def test_unconnected_survivors_are_reported() -> None:
    with pytest.raises(RoutingError, match=r"not connected: no live path joins \(0,0\) and \(0,2\)"):
        all_pairs(Mesh("1x3", failed=["0,1"]))


def test_sizes_are_checked() -> None:
    with pytest.raises(RoutingError, match=r"65,536 live chips; .* limited to 8,192"):
        all_pairs(Mesh("256x256"))


def test_32x32_with_its_proof_takes_under_10_seconds() -> None:
    mesh = Mesh("32x32", failed=["4x2@6,8"])
    started = time.process_time()
    routes, proof = all_pairs(mesh)
    assert time.process_time() - started < 10
    assert proof.deadlock_free
    src, dst = np.random.default_rng(0).integers(0, mesh.n_chips, (2, 10_000))
    lengths = np.bincount(routes.follow(src, dst).flow, minlength=len(src))
    assert (lengths == shortest_lengths(mesh)[src, dst]).all()


@pytest.mark.slow
def test_64x64_with_its_proof_takes_under_2_minutes_and_4_gb() -> None:
    started = time.process_time()
    routes, proof = all_pairs(Mesh("64x64", failed=["4x2@6,8"]))
    assert time.process_time() - started < 120
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4e6  # kilobytes
    assert proof.deadlock_free
    assert routes.n_channels == 2
