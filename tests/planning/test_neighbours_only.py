"""`plan(…, neighbours_only=True)`: for networks whose routers cannot route around a hole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checks import assert_all_reduces

from commandline import run_json
from meshmend import Collective, Mesh, Schedule, plan
from meshmend.cost import find_hardware
from meshmend.errors import CacheWarning, PlanError
from meshmend.planning import PlanCache, Weave
from meshmend.planning.auto import Candidates, candidates
from meshmend.planning.base import is_between_neighbours

HOLED = Mesh("6x6", failed=["2x2@2,2"])
SHORT: dict[str, Any] = {"payload_bytes": 4e3, "hardware": "tpu-v4-xla"}
"""`auto` takes `latency` for this."""


def has_far_transfers(schedule: Schedule) -> bool:
    """By coordinates alone, on meshes that do not wrap and have no failed cables."""
    coords = np.argwhere(schedule.mesh.live)
    return bool((np.abs(coords[schedule.src] - coords[schedule.dst]).sum(axis=1) != 1).any())


@pytest.mark.parametrize("name", ["hamiltonian", "two-color", "row-pairs", "weave", "latency"])
@pytest.mark.parametrize("mesh", [Mesh("4x6"), HOLED], ids=str)
def test_a_planner_that_is_named_sends_to_neighbours_or_is_refused(name: str, mesh: Mesh) -> None:
    if name == "two-color" and not mesh.is_full:
        pytest.skip("two-color is for full meshes")
    usual = plan(mesh, name)
    assert is_between_neighbours(usual) is not has_far_transfers(usual)
    if not has_far_transfers(usual):
        assert plan(mesh, name, neighbours_only=True) == usual
        return
    with pytest.raises(PlanError, match=f"{name} cannot plan .* not neighbours. Plan with weave, .* or configure the"):
        plan(mesh, name, neighbours_only=True)


def test_auto_takes_the_fastest_that_sends_to_neighbours() -> None:
    assert has_far_transfers(plan(HOLED, **SHORT))
    schedule = plan(HOLED, neighbours_only=True, **SHORT)
    assert not has_far_transfers(schedule)
    assert_all_reduces(schedule)
    entered = Candidates(HOLED, candidates(Collective.ALL_REDUCE))
    ranked = entered.choose(SHORT["payload_bytes"], find_hardware(SHORT["hardware"])).considered
    near = [one for one in ranked if one.seconds is not None and not has_far_transfers(one.planner.plan(HOLED))]
    assert schedule == near[0].planner.plan(HOLED)


def test_both_are_kept_side_by_side(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    usual, near = (plan(HOLED, cache=cache, neighbours_only=only, **SHORT) for only in (False, True))
    assert len(cache) == 2
    assert plan(HOLED, cache=cache, neighbours_only=True, **SHORT) == near != usual
    # A plan in the wrong place is noticed: its hops are looked at, not its name.
    weave = Weave(chunks=4)
    cache.put(HOLED, weave, usual, neighbours_only=True)
    with pytest.warns(CacheWarning, match="it has transfers between chips that are not neighbours"):
        assert not has_far_transfers(plan(HOLED, weave, cache=cache, neighbours_only=True))


def test_what_prepare_kept_is_found_by_plan(tmp_path: Path) -> None:
    words = ["prepare", "4x4", "--host", "2x2", "--cache", str(tmp_path), "--neighbours-only"]
    facts = run_json(*words, "--planner", "weave:chunks=16")
    # The mesh as it is, and the loss of each of its four hosts.
    assert (facts["plans"], facts["refused"]) == (5, {})
    refused = run_json(*words, "--planner", "row-pairs")["refused"]
    assert "it sends to chips that are not neighbours" in refused["nothing"]


def test_the_command_line_has_it() -> None:
    words = ["plan", "6x6", "--fail", "2x2@2,2", "--payload", "4KB", "--hardware", "tpu-v4-xla"]
    usual, near = run_json(*words), run_json(*words, "--neighbours-only")
    assert (usual["planner"], near["planner"]) == ("latency", "weave")
