"""Templates that are repeated: right on any survivors, one chunk per link and step, and the same on every host."""

from __future__ import annotations

from collections import Counter
from typing import Any

import networkx as nx
import numpy as np
import pytest
from checks import assert_all_reduces
from hypothesis import given, settings
from hypothesis import strategies as st

import meshmend as mm
from meshmend.errors import ParameterError
from meshmend.planning import Weave
from meshmend.planning.weave.packing import pack
from meshmend.planning.weave.periodic import choose_trees, least_period
from meshmend.planning.weave.runs import MeshLines
from meshmend.planning.weave.tracks import MAX_PHASES, _Taken, find_tracks
from meshmend.planning.weave.trees import measure, reroot
from meshmend.schedule.split import all_gather_of, reduce_scatter_of
from strategies import torn_meshes

QUICK = 0.05
"""Seconds of planning that leave time for a single attempt on small meshes."""


def assert_one_chunk_per_link_and_period(schedule: mm.Schedule) -> None:
    template = schedule.template
    link = schedule.mesh.link(template.src, template.dst)
    assert (link >= 0).all()
    slots = link * schedule.period + template.step % schedule.period
    assert len(np.unique(slots)) == template.n_transfers


@settings(max_examples=25, deadline=None)
@given(mesh=torn_meshes(), trees=st.integers(1, 9), repeats=st.integers(2, 5))
def test_any_survivors(mesh: mm.Mesh, trees: int, repeats: int) -> None:
    weave = Weave(chunks=trees * repeats, trees=trees, budget_s=QUICK)
    schedule = mm.plan(mesh, weave)
    assert schedule.total_chunks == trees * repeats
    assert schedule.n_transfers == 2 * (mesh.n_chips - 1) * trees * repeats
    assert_all_reduces(schedule)
    if mesh.n_chips > 1:
        assert schedule.repeats == repeats
        assert_one_chunk_per_link_and_period(schedule)
        mm.verify(schedule.expanded())


@settings(max_examples=12, deadline=None)
@given(mesh=torn_meshes())
def test_every_chunk_goes_up_to_its_owner_and_comes_down_again(mesh: mm.Mesh) -> None:
    schedule = mm.plan(mesh, Weave(chunks=12, trees=4, budget_s=QUICK))
    for half in (reduce_scatter_of(schedule), all_gather_of(schedule)):
        mm.verify(half)
    template = schedule.template
    for chunk in range(template.total_chunks):
        mine = template.first_chunk == chunk
        up, down = mine & (template.op == mm.Op.REDUCE), mine & (template.op == mm.Op.COPY)
        root = int(template.owners[chunk])
        others = Counter(range(mesh.n_chips)) - Counter([root])
        assert Counter(template.src[up].tolist()) == Counter(template.dst[down].tolist()) == others
        if mesh.n_chips > 1:
            last = template.step[up & (template.dst == root)].max()
            assert last < template.step[down & (template.src == root)].min()


def test_a_full_square_mesh_is_packed_exactly() -> None:
    for n in (4, 6, 8):
        mesh = mm.Mesh((n, n))
        assert choose_trees(mesh) == 2 * n
        trees = pack(mesh, 2 * n, n + 1, moves=0)
        assert set(np.bincount(trees.cables.ravel()).tolist()) == {n + 1}


def test_overload_moves_until_no_cable_is_in_more_trees_than_its_share_rounded_up() -> None:
    mesh = mm.Mesh("8x10", failed=["2x2@2,2"])
    n_trees = 11
    most = least_period(mesh, n_trees)
    grown, packed = (pack(mesh, n_trees, most, moves) for moves in (0, 400))
    load = [np.bincount(trees.cables.ravel(), minlength=mesh.n_cables).max() for trees in (grown, packed)]
    assert load[0] > load[1] == most
    for cables in packed.cables:
        assert nx.is_tree(nx.Graph(mesh.cables[cables].tolist()))
        assert len(cables) == mesh.n_chips - 1


@settings(max_examples=20, deadline=None)
@given(mesh=torn_meshes())
def test_runs_are_straight_and_hold_every_cable_once(mesh: mm.Mesh) -> None:
    if mesh.n_chips == 1:
        return
    trees = pack(mesh, 2, 2, moves=0)
    eccentricity, somewhere = measure(trees)
    roots = eccentricity.argmin(axis=1)
    rooted = reroot(somewhere, np.arange(2), roots)
    lines = MeshLines(mesh)
    for tree in range(2):
        runs = lines.runs(trees.cables[tree], rooted, tree)
        parent = rooted.parent[tree]
        assert runs.root == roots[tree]
        seen = set()
        for run in runs.runs:
            chips = lines.chips[run.line]
            for position in range(run.low, run.high + 1):
                if position != run.top:
                    towards = position + 1 if position < run.top else position - 1
                    assert parent[chips[position]] == chips[towards]
                    seen.add(chips[position])
        assert seen == set(range(mesh.n_chips)) - {runs.root}


def test_tracks_stay_within_their_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = mm.Mesh("12x12", failed=["4x2@4,4"])
    trees = pack(mesh, 12, least_period(mesh, 12), moves=200)
    period = int(np.bincount(trees.cables.ravel()).max())
    eccentricity, somewhere = measure(trees)
    rooted = reroot(somewhere, np.arange(12), eccentricity.argmin(axis=1))
    lines = MeshLines(mesh)
    runs = [lines.runs(trees.cables[tree], rooted, tree) for tree in range(12)]
    calls = Counter[str]()
    choose = _Taken._choose_tracks

    def counted(self: _Taken, *arguments: Any) -> Any:
        calls["choices"] += 1
        return choose(self, *arguments)

    monkeypatch.setattr(_Taken, "_choose_tracks", counted)

    def search(budget: int) -> tuple[int, int]:
        calls.clear()
        steps = find_tracks(lines, runs, period, budget=budget)
        together = np.stack([steps.up, steps.down])
        return calls["choices"], int(together.max() - together.min())

    first, longest = search(0)
    most_of_a_tree = MAX_PHASES * 3 * max(len(tree.runs) for tree in runs)
    for budget in (first + 1, 2 * first, 4 * first):
        took, n_steps = search(budget)
        assert first <= took <= budget + most_of_a_tree
        assert n_steps <= longest
    assert took > 2 * first, "nothing was left to search for"


def test_a_template_costs_no_less_than_its_floor() -> None:
    for mesh in (
        mm.Mesh("8x8", failed=["2x2@2,2"]),
        mm.Mesh("6x6", wrap=True),
        mm.Mesh("5x7", failed_cables=["0,0-0,1"]),
    ):
        for trees in (3, 8):
            planner = Weave(chunks=10 * trees, trees=trees)
            schedule, floor = planner.plan(mesh), planner.floor(mesh)
            load = Counter(zip(schedule.src.tolist(), schedule.dst.tolist(), strict=True))
            assert max(load.values()) / schedule.total_chunks >= floor.link_load
            assert schedule.n_steps >= floor.steps == round(floor.link_load * schedule.total_chunks)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ParameterError, match="chunks is 100, expected a multiple of trees, 16: 96, say"):
        Weave(chunks=100, trees=16)
    with pytest.raises(ParameterError, match="owners is 'mine', expected one of: even, any"):
        Weave(owners="mine")  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="give either trees or owners='even'"):
        Weave(trees=8, owners="even")
    for budget in (0, -1, float("nan"), float("inf"), True, "10"):
        with pytest.raises(ParameterError, match=r"budget_s is .*, expected a positive number of seconds"):
            Weave(budget_s=budget)  # type: ignore[arg-type]


def test_a_small_budget_leaves_out_what_takes_long() -> None:
    mesh = mm.Mesh("32x32", failed=["4x2@6,8"])
    for budget_s in (2, 10, 60):
        variants = Weave(budget_s=budget_s).variants(mesh, step_cost=0.0)
        assert variants
        assert any(weave.trees for weave in variants)
        woven = [weave for weave in variants if weave.trees is None]
        assert sum(2e-6 * weave.n_transfers(mesh) for weave in woven) <= budget_s
    assert all(weave.trees is None for weave in Weave(owners="even").variants(mesh, step_cost=0.0))
    # The shortest payloads are cut into few chunks, which are planned one by one.
    assert Weave(budget_s=2).variants(mesh, step_cost=10.0)[0].trees is None


@pytest.mark.parametrize("shape", ["16x32", "32x32"])
def test_long_payloads_come_near_the_bound_in_two_seconds(shape: str) -> None:
    mesh = mm.Mesh(shape, failed=["4x2@6,8"])
    schedule = mm.plan(mesh, payload_bytes=1.34e9, hardware="ideal", budget_s=2)
    assert mm.predict(schedule, 1.34e9, "ideal").ratio_to_bound < 1.06
