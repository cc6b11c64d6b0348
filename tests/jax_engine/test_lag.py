"""Slow hosts and chips of a JAX job, on a clock and an exchange of the tests' own: nobody sleeps.

The simulation says what each host and each chip takes; process 0 is real, the others are what it is told of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from typing import Any

import jax
import numpy as np
import pytest
from numpy.typing import NDArray

import meshmend.jax as mmj
from meshmend import Mesh
from meshmend.errors import ParameterError
from meshmend.jax.checks.lag import EVERY, PROBE_S, TRIAL_ROUNDS, HostClock, LagWatch, make_probes
from meshmend.jax.job import initialize_alone
from meshmend.launch import Hosts
from meshmend.quarantine import Judge, Sign

HOSTS = Hosts.of("8x8", "4x2")
MESH = Mesh("8x8", failed=["4x2@0,2", "7,7"])  # host 1 is gone, and one chip of host 7
LIVE = [number for number in range(len(HOSTS)) if number != 1]
CHIPS = [HOSTS.chips(number) for number in range(len(HOSTS))]
PROCESS_OF_CHIP = [
    LIVE.index(next(number for number in LIVE if MESH.chip(rank) in CHIPS[number])) for rank in range(MESH.n_chips)
]
HOST_S, STEP_S = 0.03, 0.2
Floats = NDArray[np.float64]


def host_times(n_steps: int, seed: int, slow: dict[int, float] | None = None) -> Floats:
    """Seconds [step, process]: jitter, tenfold hiccups, pauses of up to five steps, a drift of all; some are slow."""
    dice = np.random.default_rng(seed)
    found = HOST_S * np.exp(0.1 * dice.standard_normal((n_steps, len(LIVE))))
    found[dice.random(found.shape) < 5e-3] *= 10
    for process in range(len(LIVE)):
        for begin in np.flatnonzero(dice.random(n_steps) < 2e-3):
            found[begin : begin + dice.integers(1, 6), process] += 1.0
    found *= 1 + 0.2 * np.sin(np.arange(n_steps) / 700)[:, None]
    for number, factor in (slow or {}).items():
        found[:, LIVE.index(number)] *= factor
    return found


def probe_times(n_steps: int, seed: int, slow: dict[int, float] | None = None) -> Floats:
    """Seconds [step, rank] of the probe."""
    dice = np.random.default_rng(seed)
    found = PROBE_S * np.exp(0.08 * dice.standard_normal((n_steps, MESH.n_chips)))
    found[dice.random(found.shape) < 2e-3] *= 10
    for rank, factor in (slow or {}).items():
        found[:, rank] *= factor
    return found


def watched(hosts: Floats, probes: Floats | None = None, step_s: float = STEP_S) -> list[Sign]:
    """Return the signs that process 0 gets, told the times of all others."""
    told_steps: list[int] = []

    def row(step: int, process: int) -> dict[str, Any]:
        found: dict[str, Any] = {"step": step, "host": hosts[step, process], "whole": step_s}
        if probes is not None:
            ranks = [rank for rank, owner in enumerate(PROCESS_OF_CHIP) if owner == process]
            found["chips"] = {str(rank): probes[step, rank] for rank in ranks}
        return found

    def exchange(own: Any) -> list[Any]:
        steps = [one["step"] for one in own]
        told_steps.extend(steps)
        return [own] + [[row(step, process) for step in steps] for process in range(1, len(LIVE))]

    mine = [rank for rank, owner in enumerate(PROCESS_OF_CHIP) if owner == 0]
    now = [0]
    timed: dict[int, Callable[[], float]] | None = None
    if probes is not None:
        timed = {rank: lambda rank=rank: probes[now[0], rank] for rank in mine}  # type: ignore[misc]
    watch = LagWatch(MESH, exchange, PROCESS_OF_CHIP, hosts=CHIPS, probes=timed)
    signs: list[Sign] = []
    for step in range(len(hosts)):
        now[0] = step
        signs += watch.add(step, hosts[step, 0], step_s)
    assert told_steps == list(range(len(hosts) // EVERY * EVERY))
    return signs


def names(signs: list[Sign]) -> list[str]:
    return [str(one) for sign in signs for one in sign.suspects]


@pytest.mark.parametrize("number", [0, 3, 7])
def test_a_host_that_is_half_as_slow_again_is_named_within_50_steps(number: int) -> None:
    signs = watched(host_times(48, 5, slow={number: 1.5}))
    assert names(signs) == [f"host {number}"]
    assert signs[0].step < 50
    (verdict,) = Judge().add(signs)
    assert verdict.suspect == signs[0].suspects[0]


@pytest.mark.parametrize("rank", [0, 30])
def test_the_probe_names_a_chip_within_50_steps(rank: int) -> None:
    signs = watched(host_times(48, 6), probe_times(48, 7, slow={rank: 1.5}))
    assert names(signs) == [",".join(map(str, MESH.chip(rank)))]


def test_a_host_whose_chips_are_all_slow_is_named_by_the_probe() -> None:
    ranks = {rank: 1.5 for rank, owner in enumerate(PROCESS_OF_CHIP) if LIVE[owner] == 4}
    assert names(watched(host_times(48, 8), probe_times(48, 9, slow=ranks))) == ["host 4"]


def test_a_host_that_hardly_makes_the_step_longer_is_left_alone() -> None:
    """Twice as slow is three hundredths of a second: enough of a step of 0.2 s, too little of one of a second."""
    times = host_times(48, 10, slow={3: 2.0})
    assert names(watched(times, step_s=0.2)) == ["host 3"]
    assert watched(times, step_s=1.0) == []


def test_hiccups_name_nobody() -> None:
    times = np.full((400, len(LIVE)), HOST_S)
    for begin in range(0, 400, 50):
        times[begin : begin + 20, 2] = 5.0  # a pause of 20 steps of every 50
    assert watched(times) == []


def test_ordinary_noise_names_nobody() -> None:
    assert watched(host_times(1000, 11), probe_times(1000, 12)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_ten_thousand_steps_of_noise_name_nobody(seed: int) -> None:
    assert watched(host_times(10_000, 20 + seed), probe_times(10_000, 40 + seed)) == []


def test_what_waits_for_devices_is_not_the_hosts_own_time() -> None:
    now = [10.0]
    clock = HostClock(lambda: now[0])
    for _ in range(2):
        now[0] += 1.0  # data
        with clock.waiting():
            now[0] += 20.0
        now[0] += 0.5  # the caller
        with clock.waiting():
            now[0] += 3.0
        assert clock.lap() == (1.5, 24.5)


def test_processes_that_add_different_steps_are_told() -> None:
    def exchange(own: Any) -> list[Any]:
        return [own, [{**row, "step": row["step"] + 1} for row in own]]

    watch = LagWatch(Mesh("2x2"), exchange, [0, 0, 1, 1], every=1)
    with pytest.raises(ParameterError, match=r"different steps to their times: \[3, 4\]"):
        watch.add(3, 1.0)
    with pytest.raises(ParameterError, match="needs a process for each chip: got 1"):
        LagWatch(Mesh("2x2"), exchange, [0])
    with pytest.raises(ParameterError, match="every 0 steps"):
        LagWatch(Mesh("2x2"), exchange, [0] * 4, every=0)


def test_a_session_of_one_process_probes_its_own_devices() -> None:
    with initialize_alone(mmj.discover(jax.devices()[:4], shape="2x2")) as session:
        watch = LagWatch.of(session, probe=True)
        for step in range(EVERY):
            watch.add(step, 0.001, 0.1)
        assert watch._chip_lag._chips_late._n_steps == EVERY
        ratios = watch._chip_lag._chips_late._ratios[:EVERY]
        assert np.isfinite(ratios).all()


def test_the_probe_is_as_much_work_on_every_chip() -> None:
    """As the median process says: one that finds itself four times as slow does not get less to do."""
    fabric = mmj.discover(jax.devices()[:4], shape="2x2")
    read = count()

    def exchange(own: Any) -> list[Any]:
        assert own == pytest.approx(PROBE_S / 8)
        return json.loads(json.dumps([own, own, 4 * own, None]))  # type: ignore[no-any-return]

    probes = make_probes(fabric, 0, exchange, now=lambda: next(read) * PROBE_S / 8)
    assert sorted(probes) == [0, 1, 2, 3]
    assert {probe.rounds for probe in probes.values()} == {8 * TRIAL_ROUNDS}
    assert probes[2]() == pytest.approx(PROBE_S / 8)
    assert make_probes(fabric, 1, lambda own: [own, 1.0]) == {}
