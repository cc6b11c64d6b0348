from __future__ import annotations

import time

import numpy as np
from hypothesis import given, settings

from meshmend import Mesh, plan
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
    started = time.perf_counter()
    found = trace(mesh, np.append(src, mesh.rank((8, 3))), np.append(dst, mesh.rank((8, 13))))
    assert time.perf_counter() - started < 20
    assert (found.flow == 2000).sum() == 14


def test_a_flow_that_is_cut_apart_has_no_hops() -> None:
    found = trace(Mesh("1x3", failed=["0,1"]), [0, 0], [1, 0])
    assert len(found.link) == 0
