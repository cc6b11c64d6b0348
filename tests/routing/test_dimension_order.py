from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from route_checks import check_proof, dimension_order, hops_of, live_graph, walk_all_pairs

from meshmend import Mesh
from meshmend.errors import Coordinate
from strategies import meshes


def plain_path(mesh: Mesh, src: tuple[int, ...], dst: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Dimension order as figure 1 draws it: one axis after the other, the last first, the shorter way round."""
    path, at = [src], list(src)
    for axis in reversed(range(mesh.n_axes)):
        length = mesh.shape[axis]
        while at[axis] != dst[axis]:
            ahead = (dst[axis] - at[axis]) % length
            if mesh.wrap[axis]:
                at[axis] = (at[axis] + (1 if 2 * ahead <= length else -1)) % length
            else:
                at[axis] += 1 if dst[axis] > at[axis] else -1
            path.append(tuple(at))
    return path


@settings(max_examples=60)
@given(meshes(max_side=5))
def test_it_is_figure_1_where_that_is_live_and_nothing_elsewhere(mesh: Mesh) -> None:
    routes, graph = dimension_order(mesh), live_graph(mesh)
    pairs = list(product(range(mesh.n_chips), repeat=2))
    found = routes.follow(*np.array(pairs).T)
    links: list[list[tuple[Coordinate, Coordinate]]] = [[] for _ in pairs]
    for flow, link in zip(found.flow, found.link, strict=True):
        links[flow].append(mesh.link_ends(int(link)))
    for (src, dst), crossed in zip(pairs, links, strict=True):
        wanted = list(pairwise(plain_path(mesh, mesh.chip(src), mesh.chip(dst))))
        live = all(graph.has_edge(*link) for link in wanted)
        assert crossed == (wanted if live else [])
    assert check_proof(routes).deadlock_free


@pytest.mark.parametrize(
    ("shape", "wrap", "channels"),
    [
        ("5x6", False, 1),
        ("3x3x4", False, 1),
        ("7", True, 2),
        ("5x6", (False, True), 2),
        ("4x5", True, 2),
        ("3x4x5", True, 2),
    ],
)
def test_full_meshes_and_tori(shape: str, wrap: bool | tuple[bool, ...], channels: int) -> None:
    mesh = Mesh(shape, wrap=wrap)
    routes = dimension_order(mesh)
    assert np.array_equal(walk_all_pairs(routes), hops_of(routes))
    assert check_proof(routes).deadlock_free
    assert routes.n_channels == channels


def test_the_wrap_link_is_crossed_on_channel_0_and_left_on_channel_1() -> None:
    mesh = Mesh("1x6", wrap=True)
    trace = dimension_order(mesh).follow(4, 1)
    assert [mesh.link_ends(int(link)) for link in trace.link] == [
        ((0, 4), (0, 5)),
        ((0, 5), (0, 0)),
        ((0, 0), (0, 1)),
    ]
    assert trace.channel.tolist() == [0, 0, 1]
