"""Up*/down* serves what the other classes of `detour` cannot; here it serves all pairs, on its own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from route_checks import check_proof, hops_of, shortest_lengths, up_down, walk_all_pairs

from meshmend import Mesh
from strategies import battered_meshes, meshes


@settings(max_examples=60)
@given(battered_meshes())
def test_any_survivors_of_a_2d_mesh(mesh: Mesh) -> None:
    routes = up_down(mesh)
    lengths = walk_all_pairs(routes)
    assert np.array_equal(lengths, hops_of(routes))
    assert (lengths >= shortest_lengths(mesh)).all()
    assert check_proof(routes).deadlock_free


@settings(max_examples=60)
@given(meshes(max_side=5))
def test_any_mesh_or_torus_even_cut_apart(mesh: Mesh) -> None:
    routes = up_down(mesh)
    joined = mesh.component_of[:, None] == mesh.component_of
    assert np.array_equal(hops_of(routes) >= 0, joined)
    assert check_proof(routes).deadlock_free


@pytest.mark.parametrize(("hole", "limit"), [("2x2@2,2", 1.05), ("4x2@2,4", 1.1)])
def test_routes_stay_near_the_shortest(hole: str, limit: float) -> None:
    mesh = Mesh("8x8", failed=[hole])
    assert hops_of(up_down(mesh)).sum() < limit * shortest_lengths(mesh).sum()
