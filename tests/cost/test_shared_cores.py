"""Chips that share the cores of one machine: what all of them send together counts, summed transfer by transfer."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from meshmend import Hardware, Mesh, plan, predict
from meshmend.cost.step_demand import ADDED, CORES_PER_MESSAGE
from meshmend.schedule import Op, Schedule

PROCESSES = Hardware(
    "processes", 1e9, step_latency_s=1e-5, start_s=1e-2, message_s=1e-4, is_switched=True, shared_cores=2
)
MESH = Mesh("4x4", failed=["2x2@0,0"])
PLANS = [
    plan(MESH, "weave", chunks=1),
    plan(MESH, "weave", chunks=24),
    plan(MESH, "hamiltonian"),
    plan(MESH, "latency", halvings=1, parts=2),
    plan(Mesh("8x8"), "weave", chunks=512),
]


def summed(schedule: Schedule, payload_bytes: float, hardware: Hardware) -> float:
    """The lock-step time: each step's messages and bytes on the cores, but one message on few of them."""
    cores = hardware.shared_cores or 1
    steps: dict[int, list[float]] = defaultdict(list)
    for step, n_chunks, op in zip(schedule.step, schedule.n_chunks, schedule.op, strict=True):
        work = int(n_chunks) * (ADDED if op == Op.REDUCE else 1.0) * payload_bytes / schedule.total_chunks / 1e9
        steps[int(step)].append(work if hardware.is_switched else 0.0)
    seconds = hardware.start_s
    for works in steps.values():
        seconds += hardware.step_latency_s + hardware.message_s * max(len(works) / cores, 1 / CORES_PER_MESSAGE)
        seconds += max(sum(works) / cores, max(works) / CORES_PER_MESSAGE)
    return seconds


@pytest.mark.parametrize("schedule", PLANS, ids=repr)
@pytest.mark.parametrize("payload_bytes", [1e3, 1e8])
def test_a_step_lasts_as_long_as_the_cores_need_for_all_chips(schedule: Schedule, payload_bytes: float) -> None:
    expected = summed(schedule, payload_bytes, PROCESSES)
    forecast = predict(schedule, payload_bytes, PROCESSES)
    assert forecast.seconds == pytest.approx(expected, rel=1e-9)
    assert sum(forecast.by_phase.values()) == pytest.approx(expected, rel=1e-9)
    assert sum(forecast.gap.parts.values()) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("schedule", PLANS, ids=repr)
def test_over_links_cores_handle_messages_and_links_carry_bytes(schedule: Schedule) -> None:
    links = replace(PROCESSES, is_switched=False)
    bytes_alone = predict(schedule, 1e8, replace(links, message_s=0.0, start_s=0.0, step_latency_s=0.0)).seconds
    assert predict(schedule, 1e8, links).seconds == pytest.approx(bytes_alone + summed(schedule, 0.0, links), rel=1e-9)


@pytest.mark.parametrize("schedule", PLANS, ids=repr)
def test_without_steps_the_cores_are_busy_until_the_end_at_least(schedule: Schedule) -> None:
    added = schedule.n_chunks[schedule.op == int(Op.REDUCE)].sum()
    work_s = (schedule.n_chunks.sum() + (ADDED - 1) * added) * 1e8 / schedule.total_chunks / 1e9
    busy_s = (work_s + schedule.n_transfers * PROCESSES.message_s) / 2
    seconds = predict(schedule, 1e8, PROCESSES, mode="asynchronous").seconds
    assert PROCESSES.start_s + 0.9 * busy_s <= seconds


def test_one_long_message_is_better_than_many_and_two_cores_want_two() -> None:
    chosen = [plan(Mesh("2x3"), payload_bytes=size, hardware=PROCESSES) for size in (4e3, 6.4e7)]
    assert chosen[0].n_transfers <= 12  # no all-reduce of six chips has fewer than ten
    assert chosen[1].n_transfers <= 40
    rings = predict(plan(Mesh("2x3"), "hamiltonian"), 4e3, PROCESSES).seconds
    assert predict(chosen[0], 4e3, PROCESSES).seconds < 0.7 * rings
