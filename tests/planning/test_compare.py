"""Compare: every figure is that of its planner alone, planned, priced and bounded apart from it."""

from __future__ import annotations

import math

import pytest

from meshmend import Mesh, PlanError, plan
from meshmend.cost import Hardware, bound, find_hardware, predict
from meshmend.cost.hardware import Mode
from meshmend.planning import PLANNERS
from meshmend.planning.compare import COLUMNS, Comparison, PlannerResult, compare

HOLED = Mesh("4x6", failed=["2x2@0,2"])
LAB = Hardware("lab", link_bytes_per_s=1e8, step_latency_s=2e-5, hop_latency_s=3e-6, links_at_once=2)


def by_name(comparison: Comparison) -> dict[str, PlannerResult]:
    return {entry.planner: entry for entry in comparison.entries}


@pytest.mark.parametrize(
    ("mesh", "hardware", "mode"),
    [(HOLED, LAB, "asynchronous"), (Mesh("4x4"), "tpu-v3", "lock-step")],
    ids=["holed", "full"],
)
def test_every_figure_is_that_of_the_planner_alone(mesh: Mesh, hardware: str | Hardware, mode: Mode) -> None:
    payload_bytes = 3e5
    found = compare(mesh, payload_bytes, hardware, mode=mode)
    chosen = find_hardware(hardware)
    assert [entry.planner for entry in found.entries] == list(PLANNERS)
    for name, entry in by_name(found).items():
        if name == "auto":
            continue
        if entry.unsupported_reason is not None:
            with pytest.raises(PlanError) as refused:
                plan(mesh, name)
            assert refused.value.why == entry.unsupported_reason
            assert (entry.forecast, dict(entry.figures)) == (None, {})
            continue
        # As `plan` tunes it for the payload: what somebody who compares would get.
        schedule = plan(mesh, name, payload_bytes=payload_bytes, hardware=chosen, mode=mode)
        assert entry.forecast is not None
        assert entry.forecast.seconds == predict(schedule, payload_bytes, chosen, mode=mode).seconds
        assert entry.figures["steps"] == len(set(schedule.step.tolist()))
        assert entry.figures["transfers"] == len(schedule.src)
        assert entry.figures["chunks"] == len(schedule.owners)
        assert entry.plan_seconds > 0


@pytest.mark.parametrize("payload", [1e2, 1e4, 1e6, 1e8])
def test_auto_is_never_slower_than_any_other(payload: float) -> None:
    found = {name: entry.forecast for name, entry in by_name(compare(HOLED, payload, LAB)).items()}
    auto, others = found.pop("auto"), [forecast.seconds for forecast in found.values() if forecast is not None]
    assert len(others) >= 3
    assert auto is not None
    assert auto.seconds <= min(others)
    assert auto.seconds == predict(plan(HOLED, payload_bytes=payload, hardware=LAB), payload, LAB).seconds


def test_the_bound_is_the_mesh_own_for_the_links_that_a_chip_drives() -> None:
    wide, narrow = (compare(HOLED, 1e6, Hardware("b", 1e8, 1e-4, links_at_once=n)) for n in (None, 1))
    for comparison, links in ((wide, None), (narrow, 1)):
        least = bound(HOLED, links_at_once=links)
        assert comparison.bound == least
        # Units are of M/b: a megabyte over links of 100 MB/s takes 10 ms each.
        assert math.isclose(comparison.bound_seconds, least.units * 0.01)
        for entry in comparison.entries:
            if entry.forecast is not None:
                assert entry.forecast.seconds >= comparison.bound_seconds
                assert math.isclose(entry.forecast.ratio_to_bound, entry.forecast.seconds / comparison.bound_seconds)
    assert narrow.bound_seconds > wide.bound_seconds


def test_a_saved_plan_comes_last_and_is_priced_as_it_is() -> None:
    saved = plan(HOLED, "weave", chunks=7)
    entry = compare(HOLED, 1e6, LAB, saved=saved).entries[-1]
    assert entry.planner == "saved plan"
    assert entry.forecast is not None
    assert entry.forecast.seconds == predict(saved, 1e6, LAB).seconds
    assert entry.figures["chunks"] == 7


def test_it_tells_of_each_planner_before_it_is_planned_and_every_column_is_filled() -> None:
    heard: list[str] = []
    found = compare(Mesh("2x4"), 1e4, on_planner=heard.append)
    assert heard == list(PLANNERS)
    keys = [column.key for column in COLUMNS]
    assert len(set(keys)) == len(keys)
    assert all(list(entry.figures) == keys for entry in found.entries if entry.unsupported_reason is None)
