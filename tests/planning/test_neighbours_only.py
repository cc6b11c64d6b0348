"""`plan(…, neighbours_only=True)`: the same all-reduce for networks whose routers cannot route round a hole."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from checks import assert_all_reduces

from commandline import run_json
from meshmend import Mesh, Schedule, plan
from meshmend.cost import DEFAULT_HARDWARE, find_hardware
from meshmend.errors import CacheWarning, LoweringError
from meshmend.planning import PlanCache, Planner, RowPairs, make_planner, round_payload
from meshmend.planning.auto import CHOICES, Candidates
from meshmend.schedule import Op

HOLED = Mesh("6x6", failed=["2x2@2,2"])


def has_far_transfers(schedule: Schedule) -> bool:
    """By coordinates alone, on meshes that do not wrap and have no failed cables."""
    coords = np.argwhere(schedule.mesh.live)
    return bool((np.abs(coords[schedule.src] - coords[schedule.dst]).sum(axis=1) != 1).any())


@dataclass(frozen=True)
class Doubling(Planner):
    """Recursive doubling along a line of four: everybody keeps a partial sum, so nobody can let another's pass."""

    name: ClassVar[str] = "doubling"

    def n_transfers(self, mesh: Mesh) -> int:
        return 2 * mesh.n_chips

    def is_routed(self, mesh: Mesh, phase: str) -> bool:
        return True

    def _check(self, mesh: Mesh) -> None:
        assert mesh == Mesh("1x4")

    def _plan(self, mesh: Mesh) -> Schedule:
        pairs = [(0, 1), (1, 0), (2, 3), (3, 2), (0, 2), (2, 0), (1, 3), (3, 1)]
        src, dst = zip(*pairs, strict=True)
        step = [0] * 4 + [1] * 4
        return Schedule(mesh, total_chunks=1, step=step, src=src, dst=dst, op=Op.REDUCE, owners=[0], planner=self.name)


@pytest.mark.parametrize("name", ["hamiltonian", "two-color", "row-pairs", "weave", "auto"])
@pytest.mark.parametrize("mesh", [Mesh("4x6"), HOLED], ids=str)
def test_planners_that_serve_a_mesh_serve_it_with_hops_between_neighbours(name: str, mesh: Mesh) -> None:
    if name == "two-color" and not mesh.is_full:
        pytest.skip("two-color is for full meshes")
    schedule = plan(mesh, name, neighbours_only=True, payload_bytes=1e5)
    assert not has_far_transfers(schedule)
    assert schedule.is_proven
    assert_all_reduces(schedule)
    # Whoever sends to neighbours anyway is left as it is.
    usual = plan(mesh, name, payload_bytes=1e5)
    assert (schedule == usual) == (not has_far_transfers(usual))


def test_what_is_rewritten_is_proven_though_the_caller_asks_for_no_proof() -> None:
    assert plan(HOLED, "row-pairs", neighbours_only=True, verify=False).is_proven
    assert not plan(HOLED, "row-pairs", verify=False).is_proven


def test_a_schedule_that_has_no_such_form_is_refused_with_what_to_do() -> None:
    line = Mesh("1x4")
    assert has_far_transfers(plan(line, Doubling()))
    with pytest.raises(
        LoweringError, match=r"doubling cannot be lowered .*or plan with weave, which sends to neigh"
    ) as told:
        plan(line, Doubling(), neighbours_only=True)
    assert told.value.planner == "doubling"


def test_auto_goes_on_to_the_fastest_that_has_such_a_form(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Mesh("1x4")
    monkeypatch.setattr("meshmend.planning.auto.CHOICES", (Doubling, *CHOICES))
    # One chunk in two steps: nothing is faster for a few bytes.
    assert plan(line, payload_bytes=4.0).planner == "doubling"
    schedule = plan(line, payload_bytes=4.0, neighbours_only=True)
    ranked = [
        candidate.planner.name for candidate in Candidates(line).choose(4.0, find_hardware(DEFAULT_HARDWARE)).considered
    ]
    assert schedule.planner.removesuffix(" by neighbour hops") == ranked[1]
    assert not has_far_transfers(schedule)


def test_both_forms_are_kept_side_by_side(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    usual, near = (plan(HOLED, "row-pairs", cache=cache, neighbours_only=only) for only in (False, True))
    assert len(cache) == 2
    assert usual != near
    assert (cache.get(HOLED, RowPairs()), cache.get(HOLED, RowPairs(), neighbours_only=True)) == (usual, near)
    # A plan in the wrong place is noticed: its hops are looked at, not its name.
    cache.put(HOLED, RowPairs(), usual, neighbours_only=True)
    with pytest.warns(CacheWarning, match="it has transfers between chips that are not neighbours"):
        assert plan(HOLED, "row-pairs", cache=cache, neighbours_only=True) == near


def test_what_prepare_kept_is_found_by_plan(tmp_path: Path) -> None:
    words = ["prepare", "4x4", "--host", "2x2", "--planner", "row-pairs", "--cache", str(tmp_path), "--neighbours-only"]
    facts = run_json(*words)
    # The mesh as it is, and the loss of each of its four hosts.
    assert (facts["plans"], facts["refused"]) == (5, {})
    cache = PlanCache(tmp_path)
    target: dict[str, Any] = {"payload_bytes": round_payload(1e8), "hardware": "tpu-v3"}
    asked = make_planner("row-pairs", **target)
    for mesh in (Mesh("4x4"), Mesh("4x4", failed=["2x2@2,0"])):
        kept = cache.get(mesh, asked, neighbours_only=True)
        assert kept == plan(mesh, "row-pairs", neighbours_only=True, **target)
        assert cache.get(mesh, asked) is None


def test_the_command_line_has_it() -> None:
    words = ["plan", "6x6", "--fail", "2x2@2,2", "--planner", "row-pairs"]
    usual, near = run_json(*words), run_json(*words, "--neighbours-only")
    assert (usual["planner"], near["planner"]) == ("row-pairs", "row-pairs by neighbour hops")
    assert usual["steps"] < near["steps"]
