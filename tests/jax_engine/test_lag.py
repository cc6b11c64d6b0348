"""Slow hosts of a JAX job, on a clock and an exchange of the tests' own: nobody sleeps.

The simulation says what each host takes; process 0 is real, the others are what it is told of them.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from numpy.typing import NDArray

import meshmend.jax as mmj
from meshmend import Mesh
from meshmend.errors import ParameterError
from meshmend.jax.checks.lag import EVERY, HostClock, LagWatch
from meshmend.jax.job import initialize_alone
from meshmend.launch import Hosts
from meshmend.quarantine import Observation
from meshmend.quarantine.judge import judge

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
    rng = np.random.default_rng(seed)
    found = HOST_S * np.exp(0.1 * rng.standard_normal((n_steps, len(LIVE))))
    found[rng.random(found.shape) < 5e-3] *= 10
    for process in range(len(LIVE)):
        for begin in np.flatnonzero(rng.random(n_steps) < 2e-3):
            found[begin : begin + rng.integers(1, 6), process] += 1.0
    found *= 1 + 0.2 * np.sin(np.arange(n_steps) / 700)[:, None]
    for number, factor in (slow or {}).items():
        found[:, LIVE.index(number)] *= factor
    return found


def watched(hosts: Floats, step_s: float = STEP_S) -> list[Observation]:
    """Return the observations that process 0 gets, told the times of all others."""
    told_steps: list[int] = []

    def exchange(own: Any) -> list[Any]:
        steps = [one["step"] for one in own]
        told_steps.extend(steps)
        others = range(1, len(LIVE))
        return [own, *([{"step": n, "host": hosts[n, i], "whole": step_s} for n in steps] for i in others)]

    watch = LagWatch(MESH, exchange, PROCESS_OF_CHIP, hosts=CHIPS)
    observations = [
        observation for step in range(len(hosts)) for observation in watch.add(step, hosts[step, 0], step_s)
    ]
    assert told_steps == list(range(len(hosts) // EVERY * EVERY))
    return observations


def names(observations: list[Observation]) -> list[str]:
    return [str(one) for observation in observations for one in observation.suspects]


@pytest.mark.parametrize("number", [0, 3, 7])
def test_a_host_that_is_half_as_slow_again_is_named_within_50_steps(number: int) -> None:
    observations = watched(host_times(48, 5, slow={number: 1.5}))
    assert names(observations) == [f"host {number}"]
    assert observations[0].step < 50
    (verdict,) = judge(observations)
    assert verdict.suspect == observations[0].suspects[0]


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
    assert watched(host_times(1000, 11)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_ten_thousand_steps_of_noise_name_nobody(seed: int) -> None:
    assert watched(host_times(10_000, 20 + seed)) == []


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


def test_a_session_of_one_process_is_a_host() -> None:
    with initialize_alone(mmj.discover(jax.devices()[:4], shape="2x2")) as session:
        watch = LagWatch.of(session)
        assert [watch.add(step, 0.001, 0.1) for step in range(EVERY)] == [()] * EVERY
