from __future__ import annotations

import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings

from meshmend import Mesh, plan
from meshmend.errors import RoutingError
from meshmend.routing import Trace, detour, prove, trace
from strategies import battered_meshes, meshes


def rows_of(found: Trace) -> list[tuple[int, ...]]:
    columns = (found.flow, found.hop, found.link, found.channel)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def check_against_the_table(mesh: Mesh) -> None:
    src, dst = (grid.ravel() for grid in np.indices((mesh.n_chips, mesh.n_chips)))
    assert rows_of(trace(mesh, src, dst)) == rows_of(detour(mesh).follow(src, dst))


@settings(max_examples=60)
@given(meshes(max_side=5))
def test_it_is_what_the_whole_table_says(mesh: Mesh) -> None:
    check_against_the_table(mesh)


@settings(max_examples=20)
@given(battered_meshes(max_side=8))
def test_it_is_what_the_whole_table_says_round_many_holes(mesh: Mesh) -> None:
    check_against_the_table(mesh)


def test_the_papers_second_phases_are_free_of_deadlock() -> None:
    for shape in ("16x32", "32x32"):
        mesh = Mesh(shape, failed=["4x2@6,8"])
        schedule = plan(mesh, "row-pairs", verify=False)
        far = mesh.link(schedule.src, schedule.dst) < 0
        assert far.any()
        pairs = np.unique(np.stack([schedule.src[far], schedule.dst[far]]), axis=1)
        found = trace(mesh, *pairs)
        assert prove(found, mesh).deadlock_free
        assert found.channel.max() <= 1
        # Some of them do go round the hole: longer than the way straight through it.
        straight = np.abs(mesh.coords[pairs[0]] - mesh.coords[pairs[1]]).sum(axis=1)
        assert (np.bincount(found.flow) > straight).any()


def test_256x256_needs_no_table_of_all_pairs() -> None:
    mesh = Mesh("256x256", failed=["4x2@6,8"])
    src, dst = np.random.default_rng(0).integers(0, mesh.n_chips, (2, 2000))
    started = time.process_time()
    found = trace(mesh, np.append(src, mesh.rank((8, 3))), np.append(dst, mesh.rank((8, 13))))
    assert time.process_time() - started < 20
    assert (found.flow == 2000).sum() == 14


def test_a_flow_that_is_cut_apart_has_no_hops() -> None:
    found = trace(Mesh("1x3", failed=["0,1"]), [0, 0], [1, 0])
    assert len(found.link) == 0


def test_more_hops_than_can_be_followed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["meshmend.routing.trace"]
    line, ring, cut = Mesh("1x9"), Mesh("1x9", wrap=True), Mesh("1x9", wrap=True, failed_cables=["0,0-0,8"])
    # From 0 to 8: along the line, over the wrap cable, and the long way round where that has failed.
    for mesh, hops, message in ((line, 8, "takes 8 hops"), (ring, 1, "takes 1 hops"), (cut, 8, "takes 8 hops or more")):
        monkeypatch.setattr(module, "MAX_HOPS", hops)
        assert len(trace(mesh, 0, 8).hop) == hops
        monkeypatch.setattr(module, "MAX_HOPS", hops - 1)
        with pytest.raises(RoutingError, match=f"{message}; the limit is {hops - 1}"):
            trace(mesh, 0, 8)


def test_larger_tables_than_can_be_made_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["meshmend.routing.trace"]
    cut = Mesh("1x9", wrap=True, failed_cables=["0,0-0,8"])
    # Two destinations of nine chips in one table, or in a table each.
    for cells, work in ((18, (2 + 64) * 9), (9, (2 + 128) * 9)):
        monkeypatch.setattr(module, "MAX_TABLE_CELLS", cells)
        monkeypatch.setattr(module, "MAX_DETOUR_WORK", work)
        assert len(trace(cut, [0, 1], [8, 7]).hop) == 8 + 6
        monkeypatch.setattr(module, "MAX_DETOUR_WORK", work - 1)
        with pytest.raises(RoutingError, match=f"takes {work:,} cells of route tables; the limit is {work - 1:,}"):
            trace(cut, [0, 1], [8, 7])
