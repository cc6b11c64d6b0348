"""Where the time of a forecast goes: the parts add up, and each is what it would be counted by hand."""

from __future__ import annotations

import dataclasses
import functools

import pytest

import meshmend as mm
from meshmend.cost import Gap, Hardware, predict
from meshmend.cost.hardware import MODES, Mode

HOLED = mm.Mesh("8x8", failed=["2x2@2,2"])
plan = functools.cache(mm.plan)
HARDWARE = (
    "ideal",
    "tpu-v4",
    "tpu-v4-xla",
    "tpu-v3-xla",
    Hardware("odd", link_bytes_per_s=3e9, step_latency_s=1e-5, hop_latency_s=3e-6, links_at_once=2),
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hardware", HARDWARE, ids=str)
@pytest.mark.parametrize("planner", ["hamiltonian", pytest.param("row-pairs", marks=pytest.mark.slow), "weave"])
def test_the_parts_add_up_to_the_forecast(planner: str, hardware: str | Hardware, mode: Mode) -> None:
    schedule = plan(HOLED, planner)
    for payload in (0.0, 4e3, 1e8):
        forecast = predict(schedule, payload, hardware, mode=mode)
        parts = dataclasses.astuple(forecast.gap)
        assert sum(parts) == pytest.approx(forecast.seconds, rel=1e-12, abs=0)
        assert sum(forecast.gap.parts.values()) == pytest.approx(forecast.seconds, rel=1e-11, abs=0)
        assert mode == "asynchronous" or min(forecast.gap.parts.values()) >= 0


def test_a_ring_counted_by_hand() -> None:
    # Both directions of one ring of 16 chips: 30 steps of 1/32 of the payload over each link of the ring.
    schedule = mm.plan(mm.Mesh("4x4"), "hamiltonian")
    hardware = Hardware("counted", link_bytes_per_s=1e9, step_latency_s=2e-3, hop_latency_s=1e-3)
    carried = 30 / 32
    gap = predict(schedule, 1e9, hardware).gap
    assert gap.bandwidth == pytest.approx(15 / 24)  # 15 of 24 cables
    assert gap.uneven_load == pytest.approx(carried - 15 / 24)
    assert gap.filling_and_draining == pytest.approx(0, abs=1e-12)
    assert gap.latency == pytest.approx(30 * 1e-3)
    assert gap.engine_limits == pytest.approx(30 * 2e-3)

    # With one link at a time the two directions take turns: as long again.
    slow = predict(schedule, 1e9, dataclasses.replace(hardware, links_at_once=1)).gap
    assert slow.engine_limits == pytest.approx(30 * 2e-3 + carried)
    assert dataclasses.replace(slow, engine_limits=gap.engine_limits) == gap


def test_filling_and_draining_of_a_line_counted_by_hand() -> None:
    # One chunk over 1x5 to the middle and back. Every link works in one step only, and there are five: one from both
    # ends at once, two into the middle, which is written once per step, and two back.
    gap = predict(mm.plan(mm.Mesh("1x5"), "weave", chunks=1), 1e9, "ideal").gap
    assert gap == Gap(1.0, 0.0, 4.0, 0.0, 0.0)


def test_more_chunks_are_less_filling_and_draining_and_more_latency() -> None:
    few, many = (predict(mm.plan(HOLED, "weave", chunks=chunks), 1e8, "tpu-v4").gap for chunks in (60, 480))
    assert many.filling_and_draining < few.filling_and_draining / 2
    assert many.latency > few.latency * 2
    assert many.bandwidth == few.bandwidth
