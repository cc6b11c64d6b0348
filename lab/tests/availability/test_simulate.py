from __future__ import annotations

import math
import runpy
from pathlib import Path

import pytest
from scipy import stats

from meshmend import Mesh
from meshmend.errors import MeshError, ParameterError
from meshmend_lab.availability import POLICIES, Assumptions, Estimate, simulate
from meshmend_lab.availability.history import draw
from meshmend_lab.availability.simulate import sweep
from meshmend_lab.availability.throughput import Throughput
from pages import ROOT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hardware", "payload_bytes", "plans", "error"), [("tpu-v3", 668e6, 5, 0.01), ("tpu-v3-xla", 1.336e9, 7, 0.03)]
)
def test_a_year_of_the_papers_machine_takes_few_plans(
    hardware: str, payload_bytes: float, plans: int, error: float
) -> None:
    """Plans are what takes the time. Seconds are no measure here: on a busy machine the same work takes three times."""
    study = simulate(Assumptions.of("32x32", hardware=hardware, payload_bytes=payload_bytes))
    assert study.planned == plans
    assert (study.days, study.runs) == (365, 20)
    goodput = {outcome.name: outcome.goodput for outcome in study.outcomes}
    cost = {outcome.name: outcome.cost.mean for outcome in study.outcomes}
    if hardware == "tpu-v3":
        assert max(goodput, key=lambda name: goodput[name].mean) == "fault-tolerant"
    assert min(cost, key=lambda name: cost[name]) == "fault-tolerant"
    assert all(abs(check.error) < error for check in study.checks)
    assert len(study.checks) == 2


def test_the_interval_is_students() -> None:
    values = [0.91, 0.94, 0.9, 0.97]
    low, high = stats.t.interval(0.95, 3, loc=sum(values) / 4, scale=stats.sem(values))
    got = Estimate.over(values)
    assert (got.mean - got.half_width, got.mean + got.half_width) == pytest.approx((low, high))
    assert Estimate.over([0.5]) == Estimate(0.5, math.inf)


def test_policies_see_the_same_history_and_seeds_repeat() -> None:
    machine = Assumptions.of("8x8", payload_bytes=1e6)
    one, same, other = (simulate(machine, days=50, runs=2, seed=seed, checks=0) for seed in (1, 1, 2))
    assert one == same
    assert one.outcomes[0].goodput != other.outcomes[0].goodput


def test_strikes_come_as_often_as_asked() -> None:
    machine = Assumptions.of("32x32")
    failures = draw(machine, hours=100_000, seed=3, run=0)
    for number, (level, parts) in enumerate(zip(machine.levels, (128, 256, 1024), strict=True)):
        mean = parts * 100_000 / level.mtbf_h
        found = [failure for failure in failures if failure.level == number]
        assert abs(len(found) - mean) < 4 * math.sqrt(mean)
        assert {failure.part for failure in found} <= set(range(parts))
    assert failures == sorted(failures)


def test_defaults_are_what_their_sources_say() -> None:
    """419 interruptions in 54 days on 16,384 GPUs, 2,048 hosts; 246 laid to GPUs, 35 to switches and cables."""
    hours = 54 * 24
    host, board, chip = Assumptions.of("32x32").levels
    assert chip.mtbf_h == pytest.approx(hours * 16384 / 246, rel=0.02)
    assert board.mtbf_h == pytest.approx(hours * 4096 / 35, rel=0.02)
    assert host.mtbf_h == pytest.approx(hours * 2048 / 138, rel=0.02)
    per_chip_and_hour = Assumptions.of("32x32").failures_per_h / 1024
    assert per_chip_and_hour == pytest.approx(419 / hours / 16384, rel=0.02)


def test_money() -> None:
    machine = Assumptions.of("8x8", mtbf_host_h=500, payload_bytes=1e6, price=3.0, crew_price=100.0, spares=2)
    quick, _, spares, cubes, dynamic, slices, tolerant = simulate(machine, days=100, runs=1, checks=0).outcomes
    assert quick.cost.mean == pytest.approx((3 * 64 + 100) / (64 * quick.goodput.mean))
    assert spares.cost.mean == pytest.approx(3 * (64 + 16) / (64 * spares.goodput.mean))
    assert spares.utilisation.mean == pytest.approx(spares.goodput.mean * 64 / 80)
    # Two spare cubes of 8x8 are twice the machine again.
    assert cubes.cost.mean == pytest.approx(3 * (64 + 128) / (64 * cubes.goodput.mean))
    assert dynamic.cost.mean == pytest.approx(3 / dynamic.goodput.mean), "no spares"
    assert slices.cost.mean == pytest.approx(3 / slices.goodput.mean)
    assert tolerant.cost.mean == pytest.approx(3 / tolerant.goodput.mean)


def test_a_machine_of_one_host_whose_states_have_nothing_to_check() -> None:
    study = simulate(Assumptions.of("4x2", mtbf_host_h=300, payload_bytes=1e6), days=100, runs=2)
    assert all(check.mesh != "4x2" for check in study.checks)
    assert study.outcomes[-1].losses["waiting"].mean > 0


def test_three_axes() -> None:
    machine = Assumptions.of("4x4x4", host=(2, 2, 1), board=None, mtbf_host_h=300, payload_bytes=1e6)
    study = simulate(machine, days=60, runs=2, checks=1)
    assert [0 < outcome.goodput.mean < 1 for outcome in study.outcomes] == [True] * len(POLICIES)


@pytest.mark.parametrize(
    ("shape", "given", "message"),
    [
        ("32x31", {}, "host of 4x2 chips does not tile"),
        ("32x32", {"host": (4, 3)}, "host of 4x3 chips does not tile"),
        ("8x8", {"board": (2, 4)}, "host of 4x2 chips is not made of boards of 2x4"),
        ("4x4x4", {}, "host of 4x2 chips does not tile a 4x4x4 mesh"),
        ("8x8", {"cube": (4, 4, 4)}, "cube of 4x4x4 chips does not tile a 8x8 mesh"),
        ("8x8", {"slice_shape": (2, 4)}, "slice of 2x4 chips is not made of hosts of 4x2"),
    ],
)
def test_parts_that_do_not_fit(shape: str, given: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        Assumptions.of(shape, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "host", "cube", "slice_shape"),
    [
        ("32x32", (4, 2), (8, 8), (16, 16)),
        ("16x16x16", (2, 2, 1), (4, 4, 4), (8, 8, 16)),
        ("4x2", (4, 2), (4, 2), (4, 2)),
        ("12x10", (4, 2), (4, 2), (4, 2)),
        ("24x20", (4, 2), (8, 4), (12, 10)),
    ],
)
def test_cubes_and_slices_fit_hosts_and_machine(
    shape: str, host: tuple[int, ...], cube: tuple[int, ...], slice_shape: tuple[int, ...]
) -> None:
    machine = Assumptions.of(shape, host=host, board=None)
    assert (machine.cube, machine.slice_shape) == (cube, slice_shape)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"checkpoint_min": 0.0}, "checkpoint_min is 0.0, expected a positive number"),
        ({"restart_s": -1.0}, "restart_s is -1.0, expected 0 or more"),
        ({"mtbf_host_h": 0.0}, "host's mean time between failures is 0.0 h"),
        ({"repair_chip_h": math.inf}, "chip's mean time to repair is inf h"),
        ({"copies_s": -1.0}, "copies_s is -1.0, expected 0 or more"),
        ({"replace_h": -1.0}, "replace_h is -1.0, expected 0 or more"),
        ({"grow": "soon"}, "grow is 'soon', expected one of: worth"),
    ],
)
def test_numbers_that_make_no_sense(given: dict[str, float], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Assumptions.of("8x8", **given)  # type: ignore[arg-type]


def test_a_study_begins_with_a_whole_machine() -> None:
    with pytest.raises(MeshError, match="starts with a whole machine"):
        Assumptions.of(Mesh("8x8", failed=["0,0"]))
    with pytest.raises(ParameterError, match="at least one run of some days: got 0 runs"):
        simulate(Assumptions.of("8x8"), runs=0)


def test_the_documented_plot_is_there_and_its_script_draws(tmp_path: Path) -> None:
    page = ROOT / "docs" / "availability.md"
    assert "figures/availability.svg" in page.read_text(encoding="utf-8")
    assert (page.parent / "figures" / "availability.svg").exists()
    machine = Assumptions.of("8x8", payload_bytes=1e6)
    known = Throughput(machine)
    study = simulate(machine, days=30, runs=2, checks=0, throughput=known)
    drawn = tmp_path / "worth.svg"
    runpy.run_path(str(page.parent / "figures" / "availability.py"))["plot"](study, sweep(study, known), drawn)
    text = drawn.read_text(encoding="utf-8")
    assert all(f"<!-- {kind.name} -->" in text for kind in POLICIES)
