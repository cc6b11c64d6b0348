"""What `meshmend prepare` plans is what a job asks for: every kind of update, in tiles, any payload of that size."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from commandline import run_json
from meshmend.cost import find_hardware
from meshmend.errors import ParameterError
from meshmend.planning import PlanCache, Workload
from meshmend.planning.step import PLANNED_FOR, StepDemands
from meshmend.schedule import Collective
from meshmend.topology import Mesh
from rows import others_slow

HARDWARE = "tpu-v6e-xla"


prepare = partial(run_json, "prepare", "4x4", "--host", "2x2")


def asks_for_nothing_new(demands: StepDemands, cache: PlanCache) -> bool:
    """Whether a job that has no time finds all of its plans after the loss of a host."""
    before = len(cache)
    for hole in ("2x2@0,0", "2x2@2,2"):
        demands.plan(Mesh("4x4", failed=[hole]), cache=cache, budget_s=2.0)
    return len(cache) == before


@pytest.mark.parametrize("tile", [None, "2x1"])
@pytest.mark.parametrize(
    "collective", others_slow(["all-reduce", "all-reduce-with-update", "all-gather"], quick=["all-reduce-with-update"])
)
def test_a_job_finds_what_was_prepared_before_it_began(collective: str, tile: str | None, tmp_path: Path) -> None:
    words = ["--payload", "210kB", "--hardware", HARDWARE, "--collective", collective, "--cache", str(tmp_path)]
    facts = prepare(*words, *([] if tile is None else ["--tile", tile]))
    assert (facts["plans"], facts["payload_bytes"]) == (5, 131072)
    workload = Workload(190_000, Collective(collective)).rounded()
    hurried = StepDemands(workload, find_hardware(HARDWARE), tile, max_steps=96)
    assert asks_for_nothing_new(hurried, PlanCache(tmp_path))


def test_a_job_says_itself_what_it_plans_for(tmp_path: Path) -> None:
    written = StepDemands(Workload(8192, Collective.ALL_GATHER), find_hardware(HARDWARE), "1x2", 96)
    written.write(tmp_path)
    assert StepDemands.read(tmp_path) == written
    facts = prepare("--shared", str(tmp_path))
    assert (facts["collective"], facts["tile"], facts["hardware"]) == ("all-gather", "1x2", HARDWARE)
    assert facts["cache"] == str(tmp_path / "plans")
    assert asks_for_nothing_new(written, PlanCache(tmp_path / "plans"))


def test_what_a_shared_folder_says_and_what_it_does_not(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"does not say what a job plans for.*--payload, --collective and --tile"):
        StepDemands.read(tmp_path)
    StepDemands(Workload(8192), find_hardware(HARDWARE)).write(tmp_path)
    facts = json.loads((tmp_path / PLANNED_FOR).read_text())
    damages: dict[str, tuple[object, ...]] = {
        "payload_bytes": ("much", None, True, -1, float("nan"), float("inf"), 10**400),
        "max_steps": ("few", True, 0, -3, 1.5),
        "tile": (3, [2, 2], "2x2" * 100),
        "planner": (3, None, ["weave"]),
        "collective": ("gossip", None, ["all-reduce"]),
        "hardware": (None,),
    }
    for key, value in ((key, value) for key, values in damages.items() for value in values):
        (tmp_path / PLANNED_FOR).write_text(json.dumps({**facts, key: value}))
        with pytest.raises(ParameterError, match=key if key != "hardware" else "is not one of ours"):
            StepDemands.read(tmp_path)
    (tmp_path / PLANNED_FOR).write_text(json.dumps(facts))
    told = prepare("--shared", tmp_path, "--payload", "1MB", code=1)["message"]
    assert "already says what its job plans for: leave out --payload" in told
