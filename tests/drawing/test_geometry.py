from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend import Mesh, Op, Schedule, routing
from meshmend.drawing.geometry import (
    MAX_OFFSET,
    STUB,
    FigureLayout,
    Points,
    Stroke,
    cables,
    head,
    same_way_back,
    shorten,
    strokes,
)
from meshmend.drawing.views import pair_lines
from meshmend.errors import DrawingError
from strategies import meshes

CHIP = 0.2


def sampled(stroke: Stroke) -> Points:
    """Points all along a line, a fiftieth of a cell apart."""
    parts = []
    for piece in stroke.pieces:
        for a, b in pairwise(piece):
            n = max(2, int(50 * np.hypot(*(b - a))))
            parts.append(a + np.linspace(0, 1, n)[:, None] * (b - a))
    return np.concatenate(parts)


def test_rows_go_down_and_columns_go_right() -> None:
    layout = FigureLayout(Mesh("3x4", failed=[(1, 2)]))
    assert layout.live[layout.mesh.rank((2, 3))].tolist() == [3, 2]
    assert layout.failed.tolist() == [[2, 1]]


def test_planes_of_a_3d_mesh_do_not_overlap() -> None:
    layout = FigureLayout(Mesh("5x3x2"))
    assert len({tuple(position) for position in layout.positions.tolist()}) == 30


def test_there_is_one_line_for_every_cable_and_two_stubs_for_a_wrapped_one() -> None:
    assert len(cables(FigureLayout(Mesh("4x5")))) == 4 * 4 + 3 * 5
    assert len(cables(FigureLayout(Mesh("4x5", wrap=True)))) == 4 * 4 + 3 * 5 + 2 * (4 + 5)
    assert len(cables(FigureLayout(Mesh("4x5", failed_cables=["0,0-0,1"])))) == 4 * 4 + 3 * 5 - 1


@given(meshes(max_axes=3, max_side=5, connected=True), st.data())
def test_every_line_leaves_its_source_and_ends_at_its_destination(mesh: Mesh, data: st.DataObject) -> None:
    if mesh.n_chips < 2:
        return
    rank = st.integers(0, mesh.n_chips - 1)
    pairs = data.draw(st.lists(st.tuples(rank, rank).filter(lambda p: p[0] != p[1]), min_size=1, max_size=8))
    layout = FigureLayout(mesh)
    for offsets in ("beside", "behind"):
        found = strokes(layout, [a for a, _ in pairs], [b for _, b in pairs], chip=CHIP, offsets=offsets)
        assert len(found) == len(pairs)
        for stroke, (src, dst) in zip(found, pairs, strict=True):
            assert (stroke.src, stroke.dst) == (src, dst)
            assert np.abs(stroke.pieces[0][0] - layout.live[src]).max() <= MAX_OFFSET + 1e-9
            assert np.abs(stroke.pieces[-1][-1] - layout.live[dst]).max() <= MAX_OFFSET + 1e-9
            assert all(np.isfinite(piece).all() for piece in stroke.pieces)


@pytest.mark.parametrize("hole", ["2x2@2,2", "4x2@2,4", "2x4@4,2", "2x2@0,0"])
def test_no_line_crosses_a_hole(hole: str) -> None:
    mesh = Mesh("8x8", failed=[hole])
    layout = FigureLayout(mesh)
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, mesh.n_chips, (2, 60))
    src, dst = src[src != dst], dst[src != dst]
    for offsets in ("beside", "behind"):
        for stroke in strokes(layout, src, dst, chip=CHIP, offsets=offsets):
            points = sampled(stroke)
            distance = np.abs(points[:, None, :] - layout.failed[None]).max(axis=2)
            assert distance.min() > CHIP


def test_lines_keep_to_the_links_of_their_route() -> None:
    mesh = Mesh("6x6", failed=["2x2@2,2"])
    layout = FigureLayout(mesh)
    src, dst = mesh.rank((2, 0)), mesh.rank((3, 5))
    (stroke,) = strokes(layout, [src], [dst], chip=CHIP, offsets="behind")
    walk = routing.trace(mesh, [src], [dst])
    assert stroke.n_hops == len(walk.link)
    ends = [mesh.link_ends(int(link)) for link in walk.link]
    middles = np.array([[(a[1] + b[1]) / 2, (a[0] + b[0]) / 2] for a, b in ends])
    for middle in middles:
        assert np.hypot(*(sampled(stroke) - middle).T).min() < 0.25


def test_routes_that_share_a_cable_lie_beside_each_other() -> None:
    mesh = Mesh("1x8")
    for offsets in ("beside", "behind"):
        found = strokes(FigureLayout(mesh), [0, 1, 2, 0], [5, 6, 7, 7], chip=CHIP, offsets=offsets)
        heights = [float(sampled(stroke)[np.abs(sampled(stroke)[:, 0] - 4).argmin(), 1]) for stroke in found]
        assert np.diff(np.sort(heights)).min() > 0.02
        assert np.abs(heights).max() <= MAX_OFFSET


def test_the_two_directions_of_a_cable_drive_on_the_right() -> None:
    layout = FigureLayout(Mesh("1x2"))
    east, west = strokes(layout, [0, 1], [1, 0], chip=CHIP, aside=0.1)
    assert np.allclose(east.pieces[0], [[0.2, 0.1], [0.8, 0.1]])
    assert np.allclose(west.pieces[0], [[0.8, -0.1], [0.2, -0.1]])


def test_a_wrapped_hop_leaves_at_one_edge_and_comes_in_at_the_other() -> None:
    (stroke,) = strokes(FigureLayout(Mesh("1x4", wrap=True)), [3], [0], chip=CHIP)
    out, back = stroke.pieces
    assert np.allclose(out, [[3 + CHIP, 0], [3 + STUB, 0]])
    assert np.allclose(back, [[-STUB, 0], [-CHIP, 0]])


def test_heads_point_along_the_line_and_cover_its_end() -> None:
    (stroke,) = strokes(FigureLayout(Mesh("2x1")), [0], [1], chip=CHIP)
    assert np.allclose(head(stroke, 0.2, 0.1), [[0, 0.8], [-0.05, 0.6], [0.05, 0.6]])
    assert np.allclose(shorten(stroke, 0.1)[-1][-1], [0, 0.7])


def test_chips_that_are_cut_apart_cannot_be_joined() -> None:
    mesh = Mesh("1x5", failed=[(0, 2)])
    with pytest.raises(DrawingError, match=r"There is no route from \(0,0\) to \(0,4\)"):
        strokes(FigureLayout(mesh), [0], [3], chip=CHIP)


def test_dimension_order_comes_back_another_way_round_a_corner() -> None:
    mesh = Mesh("3x3")
    corner, across, beside = mesh.rank((0, 0)), mesh.rank((2, 2)), mesh.rank((0, 2))
    src, dst = np.array([corner, corner, corner]), np.array([across, beside, 1])
    assert same_way_back(mesh, src, dst).tolist() == [False, True, True]
    # So a pair round a corner is two arrows, not one line for both ways.
    schedule = Schedule(
        mesh,
        total_chunks=2,
        step=[0, 0],
        src=[corner, across],
        dst=[across, corner],
        first_chunk=[0, 1],
        op=Op.REDUCE,
        owners=[across, corner],
    )
    lines = pair_lines(schedule, 0)
    assert sorted(zip(lines.src.tolist(), lines.dst.tolist(), strict=True)) == [(corner, across), (across, corner)]
    assert not lines.both.any()
