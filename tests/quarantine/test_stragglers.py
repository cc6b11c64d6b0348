"""Stragglers, on simulated times with all noise that is ordinary.

The simulation is the oracle: it knows which chip or host it has made slow.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from meshmend import Mesh
from meshmend.errors import ParameterError
from meshmend.launch import Hosts
from meshmend.quarantine import Observation, Stragglers
from meshmend.quarantine.judge import judge
from meshmend.quarantine.stragglers import FALSE_ALARMS, LATE, WINDOW, least_count

HOSTS = Hosts.of("8x8", "4x2")
MESH = Mesh("8x8")
CHIPS = [HOSTS.chips(number) for number in range(len(HOSTS))]


def times(
    n_steps: int, seed: int, *, mesh: Mesh = MESH, jitter: float = 0.08, slow: dict[int, float] | None = None
) -> NDArray[np.float64]:
    """Return compute times [step, rank] of a mesh in which some are slow.

    Jitter of each chip; hiccups of single chips, tenfold; pauses of a host that last for up to five
    steps; all of them drift by a fifth, and once become 30 % slower for good.
    """
    rng = np.random.default_rng(seed)
    compute = np.exp(jitter * rng.standard_normal((n_steps, mesh.n_chips)))
    compute[rng.random(compute.shape) < 2e-3] *= 10
    for chips in CHIPS:
        ranks = [int(mesh.rank_of[chip]) for chip in chips if mesh.rank_of[chip] >= 0]
        for begin in np.flatnonzero(rng.random(n_steps) < 2e-3):
            compute[begin : begin + rng.integers(1, 6), ranks] += 3.0
    compute *= 1 + 0.2 * np.sin(np.arange(n_steps) / 700)[:, None]
    compute[n_steps // 2 :] *= 1.3
    for rank, factor in (slow or {}).items():
        compute[:, rank] *= factor
    return compute


def watched(compute: NDArray[np.float64], mesh: Mesh = MESH) -> list[Observation]:
    watch = Stragglers(mesh, CHIPS)
    return [observation for step in range(len(compute)) for observation in watch.add(step, compute[step])]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("jitter", [0.02, 0.08, 0.15])
def test_a_chip_that_is_half_as_slow_again_is_named_within_50_steps(seed: int, jitter: float) -> None:
    rank = (seed * 13 + 5) % MESH.n_chips
    (observation,) = watched(times(300, seed, jitter=jitter, slow={rank: 1.5}))
    assert [str(one) for one in observation.suspects] == [",".join(map(str, MESH.chip(rank)))]
    assert observation.step < 50
    assert 1.4 < observation.numbers["factor"] < 1.6
    (verdict,) = judge([observation])
    assert verdict.suspect == observation.suspects[0]


@pytest.mark.parametrize("seed", range(3))
def test_a_slow_host_is_named_and_not_its_chips(seed: int) -> None:
    host = seed % len(HOSTS)
    observations = watched(times(300, seed, slow={int(MESH.rank(chip)): 1.5 for chip in CHIPS[host]}))
    assert [str(one) for observation in observations for one in observation.suspects] == [f"host {host}"]
    assert observations[0].step < 50


def test_ordinary_noise_names_nobody() -> None:
    assert watched(times(10_000, 100)) == []


@pytest.mark.slow
@pytest.mark.parametrize("jitter", [0.02, 0.08, 0.15, 0.2, 0.3])
@pytest.mark.parametrize("seed", range(6))
def test_ordinary_noise_of_any_size_names_nobody(seed: int, jitter: float) -> None:
    assert watched(times(10_000, 1000 + seed, jitter=jitter)) == []


def test_around_a_hole_and_several_at_once() -> None:
    mesh = Mesh("8x8", failed=["4x2@0,2"], failed_cables=["6,6-6,7"])
    observations = watched(
        times(300, 7, mesh=mesh, slow={int(mesh.rank((0, 7))): 1.5, int(mesh.rank((5, 0))): 2.0}), mesh
    )
    assert {str(one) for observation in observations for one in observation.suspects} == {"0,7", "5,0"}


def test_what_recovers_is_named_again_when_it_is_slow_again() -> None:
    watch, named = Stragglers(MESH), []
    for step in range(200):
        compute = np.ones(64)
        compute[9] = 1.5 if step % 100 < 50 else 1.0
        named += [observation.step for observation in watch.add(step, compute)]
    assert named == [23, 123]


def test_what_was_not_measured_is_nobodys_fault() -> None:
    watch, rng = Stragglers(MESH), np.random.default_rng(0)
    for step in range(200):
        compute = np.where(rng.random(64) < 0.5, np.nan, 1.0)
        compute[3] = np.nan
        assert watch.add(step, compute) == ()
    for step in range(100):
        assert watch.add(step, [math.nan] * 63 + [1.0]) == ()
    with pytest.raises(ParameterError, match="compute_s has the shape"):
        watch.add(0, [1.0])


@pytest.mark.parametrize(("step_s", "named"), [(0.0, [23]), (9.9, [23]), (10.1, [])])
def test_what_hardly_makes_a_step_longer_is_not_worth_a_chip(step_s: float, named: list[int]) -> None:
    watch, compute = Stragglers(MESH), np.ones(64)
    compute[9] = 1.5  # half a second longer: 5 % of ten
    assert [observation.step for step in range(60) for observation in watch.add(step, compute, step_s=step_s)] == named


def test_half_of_the_chips_being_slow_gives_no_verdict() -> None:
    watch = Stragglers(MESH, CHIPS)
    for step in range(100):
        assert watch.add(step, np.where(np.arange(64) < 32, 1.5, 1.0)) == ()


@pytest.mark.parametrize("usual", [1, 2, 4, 8, 12, 20, 40])
def test_the_bound_on_false_alarms(usual: int) -> None:
    """Against the binomial distribution counted by its recurrence, and the least count that keeps the bound."""
    p = usual / WINDOW
    ways = [1.0]
    for _ in range(WINDOW):  # one more step: late or not
        ways = [
            (ways[k] * (1 - p) if k < len(ways) else 0.0) + (ways[k - 1] * p if k else 0.0)
            for k in range(len(ways) + 1)
        ]
    least = least_count(usual)
    assert sum(ways[least:]) < FALSE_ALARMS
    assert least == 24 or sum(ways[least - 1 :]) >= FALSE_ALARMS


def test_how_often_jitter_makes_a_chip_late_is_what_the_normal_distribution_says() -> None:
    """The p of the bound, at the simulation's jitter, by its own formula."""
    compute = times(2000, 5, jitter=0.15)
    late = compute > LATE * np.median(compute, axis=1, keepdims=True)
    p = 0.5 * math.erfc(math.log(LATE) / 0.15 / math.sqrt(2))
    assert p == pytest.approx(0.112, abs=0.001)
    assert late.mean() == pytest.approx(p, abs=0.02)
