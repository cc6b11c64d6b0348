from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from route_checks import check_proof, dimension_order, hops_of, shortest_lengths, walk_all_pairs

from meshmend import Mesh, Region
from meshmend.routing import Routes, detour
from meshmend.topology import all_placements
from strategies import battered_meshes, meshes

HOLES = [(2, 2), (2, 4), (4, 2)]


def check_hole(mesh: Mesh) -> None:
    routes = detour(mesh)
    lengths = walk_all_pairs(routes)
    shortest = shortest_lengths(mesh)
    # The bound is 10 % over the mean; round one rectangle every route is in fact a shortest one.
    assert np.array_equal(lengths, shortest)
    assert np.array_equal(lengths, hops_of(routes))
    assert check_proof(routes).deadlock_free
    assert routes.n_channels <= 2


@pytest.mark.parametrize("hole", [h for shape in HOLES for h in all_placements((8, 8), shape)], ids=str)
def test_every_aligned_hole_on_8x8(hole: Region) -> None:
    check_hole(Mesh("8x8", failed=[hole]))


@pytest.mark.slow
@pytest.mark.parametrize("hole", [h for shape in HOLES for h in all_placements((16, 16), shape)], ids=str)
def test_every_aligned_hole_on_16x16(hole: Region) -> None:
    check_hole(Mesh("16x16", failed=[hole]))


@pytest.mark.parametrize("hole", ["4x2@6,6", "2x4@14,12"])
def test_some_holes_on_16x16(hole: str) -> None:
    check_hole(Mesh("16x16", failed=[hole]))


@settings(max_examples=40)
@given(battered_meshes())
def test_any_survivors_of_a_2d_mesh_get_routes_and_a_proof(mesh: Mesh) -> None:
    routes = detour(mesh)
    lengths = walk_all_pairs(routes)
    assert np.array_equal(lengths, hops_of(routes))
    assert (lengths >= shortest_lengths(mesh)).all()
    assert check_proof(routes).deadlock_free
    assert routes.n_channels <= 3


@settings(max_examples=40)
@given(meshes(max_side=5, connected=True))
def test_any_survivors_of_any_mesh_get_routes_and_a_proof(mesh: Mesh) -> None:
    routes = detour(mesh)
    assert np.array_equal(walk_all_pairs(routes), hops_of(routes))
    assert check_proof(routes).deadlock_free


@settings(max_examples=40)
@given(meshes(max_side=5))
def test_dimension_order_is_kept_where_it_survives(mesh: Mesh) -> None:
    routes, direct = detour(mesh), dimension_order(mesh)
    kept = direct.port[0] >= 0
    assert (routes.class_of[kept] == 0).all()
    assert np.array_equal(routes.port[0], direct.port[0])


@settings(max_examples=40)
@given(meshes(max_side=5))
def test_only_pairs_that_are_cut_apart_have_no_route(mesh: Mesh) -> None:
    joined = mesh.component_of[:, None] == mesh.component_of
    assert np.array_equal(hops_of(detour(mesh)) >= 0, joined)


def test_detours_spread_instead_of_hugging_the_hole() -> None:
    def busiest_link(routes: Routes) -> int:
        pairs = np.indices((routes.mesh.n_chips, routes.mesh.n_chips)).reshape(2, -1)
        return int(np.bincount(routes.follow(*pairs).link).max())

    whole, holed = Mesh("16x16"), Mesh("16x16", failed=["4x2@6,6"])
    assert busiest_link(detour(holed)) < 2 * busiest_link(dimension_order(whole))


def test_a_table_for_some_destinations_is_part_of_the_whole_table() -> None:
    mesh = Mesh("8x8", failed=["2x2@2,2", "5,6"])
    whole, part = detour(mesh), detour(mesh, [3, 40, 17])
    assert part.destinations.tolist() == [3, 17, 40]
    assert np.array_equal(part.port, whole.port[:, :, part.destinations])
    assert np.array_equal(part.class_of, whole.class_of[:, part.destinations])
