"""What every planner keeps, whatever the mesh: it serves it over live cables, or says in a sentence why not."""

from __future__ import annotations

import itertools
import os
import resource
import subprocess
import sys
from typing import Any, ClassVar

import networkx as nx
import numpy as np
import pytest
from checks import assert_serves
from hypothesis import given, settings
from hypothesis import strategies as st

from memory import PEAK_MEGABYTES
from meshmend import Mesh, PlanError, plan
from meshmend.cost import find_hardware
from meshmend.errors import ParameterError
from meshmend.planning import (
    PLANNERS,
    Auto,
    Gather,
    Hamiltonian,
    Latency,
    Planner,
    RowPairs,
    Tuned,
    Weave,
    make_planner,
)
from meshmend.planning.auto import CHOICES, OTHERS, Candidates, candidates
from meshmend.planning.base import MAX_TRANSFERS
from meshmend.planning.latency.sites import lay_out
from meshmend.planning.weave.planner import TRANSFER_SECONDS
from meshmend.schedule import Collective, Op, Schedule
from strategies import cut_block_meshes, meshes

CUT = Mesh("3x3", failed=["1x3@1,0"])


def live_cables(mesh: Mesh) -> nx.Graph[tuple[int, ...]]:
    """The survivors and their cables, by the description of the mesh alone."""
    graph: nx.Graph[tuple[int, ...]] = nx.Graph()
    graph.add_nodes_from(tuple(map(int, chip)) for chip in np.argwhere(mesh.live))
    for chip in list(graph):
        for axis, length in enumerate(mesh.shape):
            if chip[axis] + 1 < length or mesh.wrap[axis]:
                beyond = (*chip[:axis], (chip[axis] + 1) % length, *chip[axis + 1 :])
                if beyond in graph:
                    graph.add_edge(chip, beyond)
    graph.remove_edges_from(mesh.failed_cables)
    return graph


def claims_neighbours(schedule: Schedule, phase: str) -> bool:
    """What docs/variants.md says of the phases: shards skip rows, and rings fold on an axis that does not wrap."""
    if schedule.planner == "latency":
        return False
    if schedule.planner == "row-pairs":
        return "of shards" not in phase
    if schedule.planner == "two-color":
        return schedule.mesh.wrap[0 if "along Y" in phase else 1]
    return True


def check(mesh: Mesh, planner: Planner) -> bool:
    """Say whether the planner serves the mesh; if so, by what it promises."""
    unsupported_reason = planner.unsupported_reason(mesh)
    if unsupported_reason is not None:
        with pytest.raises(PlanError) as refused:
            planner.plan(mesh)
        assert refused.value.why == unsupported_reason
        return False
    schedule = planner.plan(mesh)
    assert schedule.n_transfers == planner.n_transfers(mesh)
    cables = live_cables(mesh)
    assert nx.is_connected(cables)
    hops = np.unique(np.stack([schedule.src, schedule.dst, schedule.phase.astype(np.int32)]), axis=1)
    for src, dst, phase in hops.T.tolist():
        if claims_neighbours(schedule, schedule.phase_names[phase]):
            assert cables.has_edge(mesh.chip(src), mesh.chip(dst)), (mesh.chip(src), mesh.chip(dst))
    assert schedule.collective is planner.collective
    assert_serves(schedule)
    return True


ANY_PLANNER = st.one_of(
    st.sampled_from([kind() for kind in CHOICES]),
    st.builds(RowPairs, st.sampled_from(["auto", "rows", "columns"]), st.integers(1, 3)),
    st.builds(Weave, st.one_of(st.none(), st.integers(1, 40)), lag=st.sampled_from([0, 0, 1, 5])),
    st.builds(Latency, st.integers(0, 4), st.sampled_from([1, 2])),
    st.builds(Gather, st.integers(1, 40), st.sampled_from([*Collective])),
)


@settings(max_examples=80, deadline=None)
@given(st.one_of(cut_block_meshes(), meshes(max_side=5)), ANY_PLANNER)
def test_every_planner_keeps_its_claims(mesh: Mesh, planner: Planner) -> None:
    check(mesh, planner)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*CHOICES, *OTHERS])
@settings(max_examples=1500, deadline=None)
@given(data=st.data())
def test_every_planner_keeps_its_claims_on_thousands(kind: type[Planner], data: st.DataObject) -> None:
    mesh = data.draw(st.one_of(cut_block_meshes(), meshes(max_side=6)))
    check(mesh, data.draw(ANY_PLANNER.filter(lambda planner: isinstance(planner, kind))))


@pytest.mark.parametrize(
    ("shape", "hole", "planner"),
    [
        ("8x8", "2x2@2,2", Weave(64)),
        ("5x6", "1,1", Weave(80, trees=8, budget_s=0.2)),
        ("4x4x3", "0,0,0", Weave(60, lag=2)),
        ("5x7", "2,2", Latency(2, 2)),
        ("8x8", "3x1@0,3", Gather(120)),
    ],
    ids=str,
)
def test_every_host_comes_to_the_same_plan(shape: str, hole: str, planner: Planner) -> None:
    lay_out.cache_clear()
    first = planner.plan(Mesh(shape, failed=[hole]))
    lay_out.cache_clear()
    assert planner.plan(Mesh(shape, failed=[hole])) == first


def test_every_two_failed_cables_of_a_small_mesh() -> None:
    whole = Mesh("4x4")
    cables = [(whole.chip(int(a)), whole.chip(int(b))) for a, b in whole.cables]
    served = sum(check(Mesh("4x4", failed_cables=pair), Hamiltonian()) for pair in itertools.combinations(cables, 2))
    # A corner that loses a cable has no ring, and 8 of the 24 cables touch a corner.
    assert 0 < served <= 16 * 15 // 2


def test_a_hop_that_is_none_is_caught_where_it_is_made() -> None:
    class Leaper(Planner):
        name: ClassVar[str] = "leaper"

        def n_transfers(self, mesh: Mesh) -> int:
            return 1

        def _check(self, mesh: Mesh) -> None:
            pass

        def _plan(self, mesh: Mesh) -> Schedule:
            return Schedule(mesh, total_chunks=1, step=[0], src=[0], dst=[2], op=[Op.COPY], owners=[0])

    with pytest.raises(AssertionError, match=r"leaper claims a neighbour hop from \(0,0\) to \(0,2\) on 1x3, where no"):
        Leaper().plan(Mesh("1x3"))


@pytest.mark.parametrize("planner", [*(make_planner(name) for name in PLANNERS), Tuned(Weave(), 1e6, "tpu-v3")])
def test_survivors_cut_apart_are_refused_by_everything_in_the_same_words(planner: Planner) -> None:
    words = "the survivors form 2 disconnected groups. Plan for one of them, or repair a cable."
    assert planner.unsupported_reason(CUT) == words
    for ask in (planner.plan, lambda mesh: plan(mesh, planner)):
        with pytest.raises(PlanError, match=f"{planner.name} cannot plan for 3x3 minus 1x3@1,0: {words}"):
            ask(CUT)


NO_PAIR = ["2x2@0,2", "2x2@2,6", "2x2@4,0", "2x2@6,4"]


@pytest.mark.parametrize(
    ("planner", "shape", "failures", "message"),
    [
        ("hamiltonian", "4x4", ["1,1"], r"block at \(0,0\) chip \(1,1\) has failed while \(0,0\) lives"),
        ("hamiltonian", "3x3", [], "3x3 has an odd side. Planners that can serve this mesh: two-color"),
        ("hamiltonian", "2x2x2", [], "needs a mesh of two axes, and 2x2x2 has 3"),
        ("hamiltonian", "5x4", ["2x2@0,0"], "5x4 has an odd side"),
        ("hamiltonian", "1x4", [], "1x4 has an odd side"),
        ("two-color", "4x4", ["2x2@0,0"], "have failed. Planners that can serve this mesh: hamiltonian"),
        ("two-color", "4x4", ["0,0-0,1"], "chips or cables have failed"),
        ("two-color", "4x4x4", [], "two axes, and 4x4x4 has 3"),
        ("row-pairs", "8x8", NO_PAIR, "by rows, every row pair has a failure.*By columns, every column"),
        ("row-pairs", "4x4", ["1,1"], r"a chip of the 2×2 block of chip \(0,0\) has failed, but not the whole block"),
        ("row-pairs", "3x3", [], "3 rows of 3 chips do not form pairs"),
        ("row-pairs", "4x5", ["2x2@0,0"], "must fall into 2×2 blocks, and it is 5 chips long"),
        ("row-pairs", "4x4x4", [], "two axes, and 4x4x4 has 3"),
        ("row-pairs", "4x4", ["0,0-0,1", "2,2-2,3"], "a cable of the 2×2 block of chip"),
        ("row-pairs", "6x6", ["2x2@0,2", "2x2@2,0"], "survivors form 2 disconnected groups"),
        ("row-pairs", "4x4", ["2x2@0,2", "1,0-2,0"], r"block of chip \(0,0\) has no way through whole blocks to a"),
    ],
)
def test_other_meshes_are_refused_with_a_reason(planner: str, shape: str, failures: list[str], message: str) -> None:
    cables = [name for name in failures if "-" in name]
    mesh = Mesh(shape, failed=[name for name in failures if "-" not in name], failed_cables=cables)
    with pytest.raises(PlanError, match=message):
        plan(mesh, planner)


@pytest.mark.parametrize(
    ("mesh", "name", "parameters", "message"),
    [
        (
            "4x4",
            "row-pairs",
            {"segments": 999_999_999},
            r"511,999,999,488 transfers, and the limit is 33,554,432. Ask ",
        ),
        ("4x4", "row-pairs", {"segments": 65_537}, "Ask for at most 65,536 segments"),
        ("4x4", "weave", {"chunks": 999_999_999}, "at most 1,118,481 chunks on 16 chips, and 999,999,999 were asked"),
        ("1x1", "weave", {"chunks": 2**31}, "at most 33,554,432 chunks on 1 chips"),
        ("1x5000", "two-color", {}, "199,960,000 transfers, and the limit is 33,554,432. Plan with weave"),
        ("64x64", "hamiltonian", {}, "67,092,480 transfers, and the limit is 33,554,432. Plan with weave"),
        ("256x256", "row-pairs", {}, "and the limit is 33,554,432. Plan with weave"),
    ],
)
def test_schedules_beyond_any_memory_are_refused_at_once(
    mesh: str, name: str, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        plan(Mesh(mesh), name, **parameters)


def test_the_largest_that_is_made_is_the_largest_that_is_not_refused() -> None:
    assert RowPairs(segments=65_536).unsupported_reason(Mesh("4x4")) is None
    assert Weave(chunks=1_118_481).unsupported_reason(Mesh("4x4")) is None
    assert Weave().n_transfers(Mesh("256x256")) <= MAX_TRANSFERS


@pytest.mark.parametrize("absurd", [0, -1, True, 2.0, "3", None])
def test_numbers_that_count_nothing_are_refused_by_name(absurd: Any) -> None:
    with pytest.raises(ParameterError, match=f"segments is {absurd!r}, expected a whole number, 1 or more"):
        plan(Mesh("4x4"), "row-pairs", segments=absurd)
    if absurd is not None:
        with pytest.raises(ParameterError, match=f"chunks is {absurd!r}, expected a whole number, 1 or more"):
            Weave(chunks=absurd)


def test_numbers_from_numpy_count_as_any_other() -> None:
    assert Weave(chunks=np.int64(4)) == Weave(chunks=4)  # type: ignore[arg-type]
    assert type(Weave(chunks=np.int64(4)).chunks) is int  # type: ignore[arg-type]


def test_auto_leaves_out_what_is_too_large_and_serves_the_rest() -> None:
    choice = Candidates(Mesh("1x5000"), candidates(Collective.ALL_REDUCE))
    auto = Auto(1e8, "tpu-v3")
    variants = choice.variants(1e8, find_hardware("tpu-v3"))
    assert [type(variant) for variant in variants] == [Weave]
    assert auto.n_transfers(Mesh("1x5000")) <= auto.budget_s / TRANSFER_SECONDS


UNDER_A_LIMIT = (
    PEAK_MEGABYTES
    + """
import sys, meshmend as mm
schedule = mm.plan(mm.Mesh(sys.argv[1]), verify=False)
print(schedule.planner, peak_megabytes())
"""
)


@pytest.mark.slow
def test_auto_on_a_long_line_stays_well_below_a_gigabyte() -> None:
    limit = 3 * 2**29  # of addresses, of which libraries take a few hundred megabytes that they never touch
    done = subprocess.run(
        [sys.executable, "-c", UNDER_A_LIMIT, "1x5000"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert done.returncode == 0, done.stderr
    planner, megabytes = done.stdout.split()
    assert planner == "weave"
    assert int(megabytes) < 700
