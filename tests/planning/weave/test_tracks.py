"""Tracks, step by step against the same rules in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend import Mesh
from meshmend.planning.weave.packing import pack
from meshmend.planning.weave.periodic import least_period
from meshmend.planning.weave.runs import MeshLines, TreeRuns
from meshmend.planning.weave.tracks import SLACK, find_tracks
from meshmend.planning.weave.trees import measure, reroot
from strategies import torn_meshes
from tracks_reference import place_all


def packed(mesh: Mesh, n_trees: int, seed: int = 0) -> tuple[MeshLines, list[TreeRuns], int]:
    """Return the lines of a mesh, trees on them, and the shortest period. A seed above 0 puts roots anywhere."""
    trees = pack(mesh, n_trees, least_period(mesh, n_trees), moves=50)
    eccentricity, somewhere = measure(trees)
    roots = eccentricity.argmin(axis=1)
    if seed:
        roots = np.random.default_rng(seed).integers(0, mesh.n_chips, n_trees)
    rooted, lines = reroot(somewhere, np.arange(n_trees), roots), MeshLines(mesh)
    runs = [lines.runs(trees.cables[tree], rooted, tree) for tree in range(n_trees)]
    return lines, runs, int(np.bincount(trees.cables.ravel()).max())


def assert_as_the_reference(mesh: Mesh, n_trees: int, *, room: int, seed: int = 0) -> int:
    """Compare every step of the first attempt; return how many parts the runs were cut into beyond one each."""
    lines, trees, period = packed(mesh, n_trees, seed)
    period += room
    steps = find_tracks(lines, trees, period, budget=0)
    radius = np.array([max(tree.below) for tree in trees])
    order = np.argsort(-(100.0 * np.array([tree.bends for tree in trees]) + radius), kind="stable").tolist()
    limit = int(radius.max()) + SLACK + period // 2
    placements = place_all(lines, trees, order, period, limit)
    for number, placement in placements.items():
        for hop in placement.hops:
            assert (steps.up if hop.up else steps.down)[number, hop.chip] == hop.step
        assert len(placement.hops) == 2 * (mesh.n_chips - 1)
    slots = [(hop.line, hop.way, hop.link, hop.step % period) for one in placements.values() for hop in one.hops]
    assert len(set(slots)) == len(slots), "two trees meet on a link"
    return sum(one.n_parts for one in placements.values()) - sum(len(tree.runs) for tree in trees)


@settings(max_examples=40, deadline=None)
@given(
    mesh=torn_meshes().filter(lambda mesh: 1 < mesh.n_chips < 40),
    n_trees=st.integers(1, 6),
    room=st.integers(0, 2),
    seed=st.integers(0, 20),
)
def test_every_step_is_that_of_the_reference(mesh: Mesh, n_trees: int, room: int, seed: int) -> None:
    assert_as_the_reference(mesh, n_trees, room=room, seed=seed)


@pytest.mark.parametrize(("shape", "failed", "wrap"), [("8x5", ["2x2@2,2"], False), ("5x5", ["1,1"], True)])
def test_runs_that_find_no_track_are_cut_as_in_the_reference(shape: str, failed: list[str], wrap: bool) -> None:
    mesh = Mesh(shape, failed=failed, wrap=wrap)
    assert assert_as_the_reference(mesh, 8, room=0) > 0


def test_a_single_line() -> None:
    for n_chips in (2, 3, 7):
        for n_trees in (1, 4):
            assert_as_the_reference(Mesh((1, n_chips)), n_trees, room=0)
