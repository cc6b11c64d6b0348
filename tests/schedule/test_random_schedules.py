"""Schedules that no planner made, run by the reference engine and by what each lowering makes of them, exactly.

`pytest -m slow tests/schedule/test_random_schedules.py` is the long sweep.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

import meshmend.numpy as mmn
from counting import is_right
from meshmend import Collective, Schedule, verify
from random_schedules import random_schedule

SEEDS = [
    pytest.param(range(60), id="60"),
    pytest.param(range(60, 2_500), id="2440", marks=pytest.mark.slow),
]


def payload_of(schedule: Schedule, seed: int) -> NDArray[np.int64]:
    """Large integers, of a size that does not divide by the chunks."""
    size = 3 * schedule.total_chunks - 1
    return np.random.default_rng(seed).integers(-(2**40), 2**40, (schedule.mesh.n_chips, size))


def check_result(schedule: Schedule, payload: NDArray[np.int64], result: NDArray[np.int64]) -> None:
    """Hold a result to sums that are made here; `payload` has three numbers per chunk, less one in the last."""
    owner = schedule.owners[np.arange(payload.shape[1]) // 3]
    total = payload.sum(axis=0)
    match schedule.collective:
        case Collective.ALL_REDUCE | Collective.ALL_REDUCE_WITH_UPDATE:
            assert (result == total).all()
        case Collective.REDUCE_SCATTER:
            assert (result[owner, np.arange(payload.shape[1])] == total).all()
        case Collective.ALL_GATHER:
            assert (result == payload[owner, np.arange(payload.shape[1])]).all()


def test_they_are_varied_and_repeatable() -> None:
    facts: Counter[str] = Counter()
    for seed in range(150):
        schedule = random_schedule(seed)
        mesh = schedule.mesh
        assert mesh.is_connected
        assert 1 <= mesh.n_chips <= 12
        reads = set(zip(schedule.step.tolist(), schedule.src.tolist(), strict=True))
        facts.update(
            {
                schedule.collective: 1,
                f"{mesh.n_axes} axes": 1,
                "torus": any(mesh.wrap),
                "holes": bool(mesh.holes),
                "cables": bool(mesh.failed_cables),
                "far": bool((mesh.link(schedule.src, schedule.dst) < 0).any()),
                "runs": len(set(schedule.n_chunks.tolist())) > 1,
                "read and written in one step": any(
                    write in reads for write in zip(schedule.step.tolist(), schedule.dst.tolist(), strict=True)
                ),
                "copies before the last sum": schedule.n_transfers > 0
                and bool((np.diff(schedule.op.astype(int)) < 0).any()),
            }
        )
    assert len(facts) == 3 + 3 + 7
    assert min(facts.values()) >= 10, facts
    assert random_schedule(7) == random_schedule(7) != random_schedule(8)
    wide = [random_schedule(seed, collective=Collective.ALL_REDUCE, max_chips=30) for seed in range(30)]
    assert {schedule.collective for schedule in wide} == {Collective.ALL_REDUCE}
    assert 12 < max(schedule.mesh.n_chips for schedule in wide) <= 30


@pytest.mark.parametrize("seeds", SEEDS)
def test_they_are_right_by_every_way_of_counting(seeds: range) -> None:
    for seed in seeds:
        schedule = random_schedule(seed)
        assert is_right(schedule), seed
        for method in ("exact", "fingerprint"):
            assert verify(schedule, method=method).transfers == schedule.n_transfers


@pytest.mark.parametrize("seeds", SEEDS)
def test_the_reference_engine_sums_them_exactly(seeds: range) -> None:
    for seed in seeds:
        schedule = random_schedule(seed)
        payload = payload_of(schedule, seed)
        check_result(schedule, payload, mmn.run(schedule, payload))
