"""Each policy against arithmetic: formulas for long lives, hand-made histories for short ones."""

from __future__ import annotations

import dataclasses
import math
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend_lab.availability import POLICIES, Assumptions, Outcome, Study, simulate
from meshmend_lab.availability.assumptions import GROWS
from meshmend_lab.availability.history import FailureEvent
from meshmend_lab.availability.job import TimeSpent, simulate_run
from meshmend_lab.availability.policies import Policy, make_policies
from meshmend_lab.availability.throughput import Throughput

NEVER = math.inf
FREE: dict[str, Any] = {
    "payload_bytes": 0.0,
    "checkpoint_min": 1e-3,
    "save_s": 0.0,
    "detect_s": 0.0,
    "restart_s": 0.0,
    "swap_s": 0.0,
    "replan_s": 0.0,
}
"""Nothing costs anything: what is left is which chips are up."""

ONLY_HOSTS: dict[str, Any] = {"mtbf_chip_h": NEVER, "mtbf_board_h": NEVER}


def by_name(study: Study) -> dict[str, Outcome]:
    return {outcome.name: outcome for outcome in study.outcomes}


def long_life(assumptions: Assumptions, policy: str, hours: float) -> Outcome:
    kinds = [kind for kind in POLICIES if kind.name == policy]
    (outcome,) = simulate(assumptions, days=hours / 24, runs=4, checks=0, kinds=kinds).outcomes
    return outcome


def kept_per_failure(rate: float, interval: float, save: float) -> float:
    """Mean work kept when failures come at `rate` from the start of training: whole intervals only."""
    whole = math.exp(-rate * (interval + save))
    return interval * whole / (1 - whole)


def test_one_host_that_waits_for_its_repair() -> None:
    mtbf, repair, detect, restart, interval, save = 150.0, 8.0, 0.2, 0.5, 1.0, 0.05
    outcome = long_life(
        Assumptions.of(
            "4x2",
            **ONLY_HOSTS,
            mtbf_host_h=mtbf,
            quick_repair_h=repair,
            detect_s=detect * 3600,
            restart_s=restart * 3600,
            checkpoint_min=interval * 60,
            save_s=save * 3600,
        ),
        "quick repair",
        hours=500_000,
    )
    # A cycle begins as the host comes up. It must outlive the restart to train at all; it fails after mtbf on
    # average, and is down until it is both noticed and repaired.
    up = mtbf
    down = detect + repair * math.exp(-detect / repair)
    kept = math.exp(-restart / mtbf) * kept_per_failure(1 / mtbf, interval, save)
    assert outcome.goodput.mean == pytest.approx(kept / (up + down), rel=0.01)
    assert abs(outcome.goodput.mean - kept / (up + down)) < 2 * outcome.goodput.half_width
    assert outcome.interruptions_per_year.mean == pytest.approx(8760 / (up + down), rel=0.03)


def test_daly_loses_half_an_interval_a_failure() -> None:
    """Young and Daly: with rare failures, half an interval is lost at each, and save / interval to saving."""
    machine = Assumptions.of("4x2", **ONLY_HOSTS, mtbf_host_h=500.0, spares=10**6, checkpoint_min=60, save_s=36)
    outcome = long_life(machine, "hot spares", hours=1_000_000)
    assert outcome.losses["lost work"].mean == pytest.approx(0.5 / 500, rel=0.03)
    assert outcome.losses["checkpoints"].mean == pytest.approx(0.01 / 1.01, rel=0.01)


def test_a_whole_machine_is_up_when_every_part_is() -> None:
    rates: dict[str, Any] = {"mtbf_chip_h": 2000.0, "mtbf_board_h": 3000.0, "mtbf_host_h": 1500.0}
    machine = Assumptions.of("8x4", **rates, **FREE, quick_repair_h=5.0)
    up = (2000 / 2005) ** 32 * (3000 / 3005) ** 8 * (1500 / 1505) ** 4
    assert long_life(machine, "quick repair", hours=100_000).goodput.mean == pytest.approx(up, rel=0.01)


def test_fault_tolerant_trains_on_every_live_chip() -> None:
    """A chip is live when it, its board and its host are up: the mean live part of the mesh, with nothing else lost."""
    rates: dict[str, Any] = {"mtbf_chip_h": 1500.0, "mtbf_board_h": 4000.0, "mtbf_host_h": 2500.0}
    repairs: dict[str, Any] = {"repair_chip_h": 10.0, "repair_board_h": 60.0, "repair_host_h": 30.0}
    machine = Assumptions.of("16x16", **rates, **repairs, **FREE)
    live = (1500 / 1510) * (4000 / 4060) * (2500 / 2530)
    assert long_life(machine, "fault-tolerant", hours=5_000).goodput.mean == pytest.approx(live, rel=0.002)


def test_plenty_of_spares_lose_only_the_swap() -> None:
    mtbf, detect, swap, restart, interval, save = 400.0, 0.1, 0.3, 0.4, 1.0, 0.02
    machine = Assumptions.of(
        "8x4",
        **ONLY_HOSTS,
        mtbf_host_h=mtbf,
        spares=10**6,
        detect_s=detect * 3600,
        swap_s=swap * 3600,
        restart_s=restart * 3600,
        checkpoint_min=interval * 60,
        save_s=save * 3600,
    )
    outcome = long_life(machine, "hot spares", hours=200_000)
    rate = 4 / mtbf
    # Between two failures there are 1/rate hours, of which the first detect + swap + restart bring nothing.
    kept = math.exp(-rate * (detect + swap + restart)) * kept_per_failure(rate, interval, save)
    assert outcome.goodput.mean == pytest.approx(rate * kept, rel=0.01)
    assert outcome.losses["waiting"].mean == 0


@pytest.mark.parametrize("spares", [0, 2])
def test_spares_run_out_as_a_birth_and_death_chain_says(spares: int) -> None:
    hosts, mtbf, repair = 4, 100.0, 12.0
    machine = Assumptions.of("8x4", **ONLY_HOSTS, **FREE, mtbf_host_h=mtbf, repair_host_h=repair, spares=spares)
    # With n hosts in repair, those beyond the spares leave empty places, which cannot fail.
    weights = [1.0]
    for n in range(hosts + spares):
        births = (hosts - max(0, n - spares)) / mtbf
        weights.append(weights[-1] * births * repair / (n + 1))
    up = sum(weights[: spares + 1]) / sum(weights)
    assert long_life(machine, "hot spares", hours=200_000).goodput.mean == pytest.approx(up, rel=0.01)


def test_dynamic_slices_train_on_the_largest_box_of_whole_cubes() -> None:
    """Six cubes of one host, three by two: by how many are up, which any optical switch can put anywhere."""
    machine = Assumptions.of(
        "12x4", **ONLY_HOSTS, **FREE, ocs_s=0.0, cube=(4, 2), mtbf_host_h=100.0, repair_host_h=50.0
    )
    up = 100 / 150
    # Of five whole cubes a box has four, two by two; of four too; three in a row, two, one.
    largest = {6: 6, 5: 4, 4: 4, 3: 3, 2: 2, 1: 1, 0: 0}
    expected = sum(math.comb(6, n) * up**n * (1 - up) ** (6 - n) * largest[n] / 6 for n in largest)
    assert long_life(machine, "dynamic slices", hours=50_000).goodput.mean == pytest.approx(expected, rel=0.01)
    # Cubes of two hosts are up when both are: three in a row.
    two = dataclasses.replace(machine, cube=(4, 4))
    assert long_life(two, "dynamic slices", hours=50_000).goodput.mean == pytest.approx(up**2, rel=0.01)


def test_elastic_slices_train_on_the_slices_that_are_up() -> None:
    """A slice of two hosts is up when both are; nothing is lost at a failure, unless it was the last slice."""
    machine = Assumptions.of(
        "8x8", **ONLY_HOSTS, **FREE, elastic_s=0.0, slice_shape=(4, 4), mtbf_host_h=200.0, repair_host_h=20.0
    )
    assert long_life(machine, "elastic slices", hours=50_000).goodput.mean == pytest.approx((200 / 220) ** 2, rel=0.01)
    replaced = long_life(dataclasses.replace(machine, replace_h=2.0), "elastic slices", hours=50_000)
    assert replaced.goodput.mean == pytest.approx((200 / 202) ** 2, rel=0.005)


def test_sub_mesh_is_the_longest_run_of_live_hosts() -> None:
    mtbf, repair = 60.0, 20.0
    machine = Assumptions.of("4x8", **ONLY_HOSTS, **FREE, mtbf_host_h=mtbf, repair_host_h=repair)
    up = mtbf / (mtbf + repair)
    mean = 0.0
    for states in product([True, False], repeat=4):
        runs = "".join("x" if state else " " for state in states).split()
        mean += math.prod(up if state else 1 - up for state in states) * max(map(len, runs), default=0) / 4
    assert long_life(machine, "sub-mesh", hours=100_000).goodput.mean == pytest.approx(mean, rel=0.01)


def test_nothing_fails() -> None:
    machine = Assumptions.of("8x8", **ONLY_HOSTS, mtbf_host_h=NEVER, checkpoint_min=30, save_s=90, payload_bytes=1e6)
    study = simulate(machine, days=200, runs=2, checks=0)
    for outcome in study.outcomes:
        assert outcome.goodput.mean == pytest.approx(1800 / 1890, rel=1e-4)
        assert outcome.interruptions_per_year.mean == 0
        assert outcome.downtime == 0


@given(st.integers(0, 10**6))
@settings(max_examples=15)
def test_where_restarts_are_free_nothing_beats_going_on_with_all_survivors(seed: int) -> None:
    rates: dict[str, Any] = {"mtbf_chip_h": 3000.0, "mtbf_board_h": 5000.0, "mtbf_host_h": 3000.0}
    machine = Assumptions.of("8x8", **rates, **FREE, quick_repair_h=24.0, spares=0, spare_cubes=0)
    got = {name: o.goodput.mean for name, o in by_name(simulate(machine, days=60, runs=1, seed=seed, checks=0)).items()}
    for other in ("quick repair", "sub-mesh", "hot spares", "optical cubes", "dynamic slices", "elastic slices"):
        # Training in flight at a failure is lost: a few milliseconds of an interval for each.
        assert got["fault-tolerant"] >= got[other] - 1e-5


# One host of a 4x4 machine fails 10.25 h into its life and comes back 24 h later; the other does the rest.
BY_HAND: dict[str, Any] = {
    **ONLY_HOSTS,
    "mtbf_host_h": 1000.0,
    "payload_bytes": 0.0,
    "checkpoint_min": 60.0,
    "save_s": 0.0,
    "detect_s": 0.1 * 3600,
    "restart_s": 0.4 * 3600,
    "swap_s": 0.2 * 3600,
    "replan_s": 0.3 * 3600,
    "quick_repair_h": 5.0,
    "ocs_s": 0.05 * 3600,
    "elastic_s": 0.02 * 3600,
}


def play(policy: str, failures: list[FailureEvent], **others: Any) -> TimeSpent:
    machine = Assumptions.of("4x4", **(BY_HAND | others))
    chosen = next(a for a in make_policies(machine, Throughput(machine)) if a.name == policy)
    return simulate_run(chosen, failures, hours=100.0)


FAILURE = FailureEvent(at_h=10.25, level=0, part=1, repair_factor=1.0)


HALF = {"cube": (4, 2), "grow": "failure"}


@pytest.mark.parametrize(
    ("policy", "others", "lost_h", "waiting_h", "restarting_h", "useful_h"),
    [
        ("quick repair", {}, 0.25, 5 - 0.1, 0.1 + 0.4, 100 - 0.25 - 5.4),
        ("hot spares", {"spares": 1}, 0.25, 0, 0.1 + 0.2 + 0.4, 100 - 0.25 - 0.7),
        ("hot spares", {"spares": 0}, 0.25, 24 - 0.1, 0.1 + 0.2 + 0.4, 100 - 0.25 - 24.6),
        # A cube is half of the machine when asked for. Else it is all of it: with no spare it waits for the repair.
        ("optical cubes", {"cube": (4, 2), "spare_cubes": 1}, 0.25, 0, 0.1 + 0.05 + 0.4, 100 - 0.25 - 0.55),
        ("optical cubes", {"spare_cubes": 0}, 0.25, 24 - 0.1, 0.1 + 0.05 + 0.4, 100 - 0.25 - 24.45),
        # Half of the machine goes on after the switches and a restart. A machine of one cube has no other.
        ("dynamic slices", HALF, 0.25, 0, 0.1 + 0.05 + 0.4, 10 + (100 - 10.25 - 0.55) / 2),
        ("dynamic slices", {}, 0.25, 24 - 0.1, 0.1 + 0.05 + 0.4, 100 - 0.25 - 24.45),
        ("elastic slices", {"grow": "failure"}, 0, 0, 0.1 + 0.02, 10.25 + (100 - 10.25 - 0.12) / 2),
        # Back at 34.25: an extra checkpoint takes no time here, then the slice is taken in. Or replaced after 1.5 h.
        ("elastic slices", {"grow": "at-once"}, 0, 0, 0.1 + 0.04, 10.25 + (34.25 - 10.37) / 2 + 100 - 34.27),
        (
            *("elastic slices", {"grow": "at-once", "replace_h": 1.5}),
            *(0, 0, 0.1 + 0.04, 10.25 + (11.75 - 10.37) / 2 + 100 - 11.77),
        ),
        ("fault-tolerant", {"grow": "failure"}, 0.25, 0, 0.1 + 0.3 + 0.4, 10 + (100 - 10.25 - 0.8) / 2),
        ("fault-tolerant", {"grow": "failure", "copies_s": 36}, 0.01, 0, 0.8, 10.24 + (100 - 10.25 - 0.8) / 2),
    ],
)
def test_a_failure_by_hand(
    policy: str, others: dict[str, Any], lost_h: float, waiting_h: float, restarting_h: float, useful_h: float
) -> None:
    got = play(policy, [FAILURE], **others)
    found = (got.lost_h, got.waiting_h, got.restarting_h, got.useful_h)
    assert found == pytest.approx((lost_h, waiting_h, restarting_h, useful_h))
    assert (got.interruptions, got.regrowths) == (1, int(others.get("grow") == "at-once"))


def test_what_was_kept_is_counted_by_chips() -> None:
    assert play("elastic slices", [FAILURE], grow="failure").kept_h == pytest.approx({16: 10.25, 8: 100 - 10.25 - 0.12})


def test_without_any_slice_left_the_state_is_that_of_the_checkpoint() -> None:
    other = FailureEvent(at_h=20.5, level=0, part=0, repair_factor=1.0)
    got = play("elastic slices", [FAILURE, other], grow="failure")
    # On half the machine from 10.37, with checkpoints at 11.37, …, 20.37: 0.13 h of half the machine are lost.
    assert got.lost_h == pytest.approx(0.13 / 2)
    assert got.waiting_h == pytest.approx(34.25 - 20.6)


def test_a_failure_right_after_a_checkpoint_loses_less_than_the_copies_would() -> None:
    soon = play("fault-tolerant", [FAILURE._replace(at_h=10.002)], grow="failure", copies_s=36)
    assert soon.lost_h == pytest.approx(0.002)


@pytest.mark.parametrize(
    ("grow", "half_h", "full_h", "restarts"),
    [
        # On half the machine from 10.75 (noticed and restarted). The host is back at 34.25. The next checkpoint
        # after that is at 34.75, and the job on the whole machine begins at 35.15.
        ("checkpoint", 24.0, 64.85, 2),
        ("worth", 24.0, 64.85, 2),
        ("at-once", 23.5, 65.35, 2),
        ("failure", 89.25, 0.0, 1),
    ],
)
def test_sub_mesh_by_hand(grow: str, half_h: float, full_h: float, restarts: int) -> None:
    got = play("sub-mesh", [FAILURE], grow=grow)
    assert got.useful_h == pytest.approx(10 + half_h / 2 + full_h)
    assert got.short_h == pytest.approx(half_h / 2)
    assert got.restarting_h == pytest.approx(0.1 + 0.4 * restarts)
    assert (got.interruptions, got.regrowths) == (1, restarts - 1)


def test_a_checkpoint_out_of_schedule_costs_its_time() -> None:
    got = play("fault-tolerant", [FAILURE], grow="at-once", save_s=0.1 * 3600)
    # 9 checkpoints fit into 10.25 h of 1.1 h each; 0.35 h are lost. Back at 34.25, saved until 34.35.
    assert got.lost_h == pytest.approx(10.25 - 9 * 1.1)
    again = 34.25 - (10.25 + 0.8)
    saves = math.floor(again / 1.1)
    after = 100 - 34.35 - 0.7
    assert got.short_h == pytest.approx((again - 0.1 * saves) / 2)
    assert got.saving_h == pytest.approx(0.9 + 0.1 * saves + 0.1 + 0.1 * math.floor(after / 1.1))


def test_regrowth_that_is_not_worth_a_restart_is_left() -> None:
    chip = FailureEvent(at_h=10.25, level=2, part=0, repair_factor=1.0)
    # 1/16 of the machine, for 500 h to the next failure, is 31 h: more than a restart of 0.7 h, less than one of 50.
    assert play("fault-tolerant", [chip]).regrowths == 1
    assert play("fault-tolerant", [chip], restart_s=50 * 3600).regrowths == 0


def test_a_failure_outside_of_the_sub_mesh_does_not_touch_it() -> None:
    chip_of_the_dead_host = FailureEvent(at_h=20.0, level=2, part=2, repair_factor=1.0)
    got = play("sub-mesh", [FAILURE, chip_of_the_dead_host], grow="failure")
    assert got.interruptions == 1
    assert got.useful_h == play("sub-mesh", [FAILURE], grow="failure").useful_h
    assert play("fault-tolerant", [FAILURE, chip_of_the_dead_host], grow="failure").interruptions == 1


def test_a_part_that_is_down_cannot_fail_again() -> None:
    again = FAILURE._replace(at_h=15.0)
    assert play("quick repair", [FAILURE, again]) == play("quick repair", [FAILURE])


def test_a_failure_during_a_restart_begins_it_again() -> None:
    other = FailureEvent(at_h=10.5, level=2, part=0, repair_factor=1.0)
    got = play("fault-tolerant", [FAILURE, other], grow="failure")
    # Noticed at 10.35, struck again at 10.5, noticed at 10.6, training from 11.3 on 7 of 16 chips.
    assert got.interruptions == 2
    assert got.restarting_h == pytest.approx(11.3 - 10.25)
    assert got.useful_h == pytest.approx(10 + (100 - 11.3) * 7 / 16)


def test_all_chips_down_is_a_wait() -> None:
    got = play("fault-tolerant", [FAILURE, FailureEvent(at_h=12.0, level=0, part=0, repair_factor=0.1)], grow="failure")
    assert got.waiting_h == pytest.approx(2.4 - 0.1)


def test_survivors_that_are_cut_off_do_not_train() -> None:
    machine = Assumptions.of("2x6", host=(2, 2), board=None, payload_bytes=0.0)
    policy: Policy = next(a for a in make_policies(machine, Throughput(machine)) if a.name == "fault-tolerant")
    policy.fail(FailureEvent(0.0, 1, 1, 1.0))  # chips (0,1) and (1,1): the column behind them is cut off
    policy.fail(FailureEvent(0.0, 1, 7, 1.0))
    allocation = policy.allocation()
    assert allocation.chips.astype(int).tolist() == [[0, 0, 1, 1, 1, 1]] * 2
    assert allocation.rate == pytest.approx(8 / 12)


@given(
    st.integers(0, 10**6),
    st.sampled_from(GROWS),
    st.floats(0, 7200),
    st.floats(0, 600),
    st.floats(1, 300),
    st.integers(0, 2),
)
@settings(max_examples=40)
def test_every_hour_is_booked_once(
    seed: int, grow: str, restart_s: float, save_s: float, checkpoint_min: float, spares: int
) -> None:
    rates: dict[str, Any] = {"mtbf_chip_h": 1000.0, "mtbf_board_h": 2000.0, "mtbf_host_h": 500.0}
    machine = Assumptions.of(
        "8x4",
        **rates,
        payload_bytes=0.0,
        grow=grow,
        restart_s=restart_s,
        save_s=save_s,
        checkpoint_min=checkpoint_min,
        spares=spares,
        spare_cubes=spares,
    )
    for outcome in simulate(machine, days=20, runs=1, seed=seed, checks=0).outcomes:
        parts = [outcome.goodput.mean, *(loss.mean for loss in outcome.losses.values())]
        assert min(parts) >= -1e-9
        assert np.sum(parts) == pytest.approx(1, abs=1e-9)
