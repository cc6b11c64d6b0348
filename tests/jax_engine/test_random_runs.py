"""Schedules that no planner made, run by the JAX engine itself on CPU devices, exactly, against sums made here.

`pytest -m slow tests/jax_engine/test_random_runs.py` is the long sweep: each schedule is a program to compile.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from numpy.typing import NDArray

import meshmend.jax as mmj
from jax_engine import cases
from meshmend import Collective, Schedule
from random_schedules import COLLECTIVES, random_schedule

SEEDS = [
    pytest.param(range(9_000, 9_012), id="12"),
    *(
        pytest.param(range(first, first + 42), id=f"42 from {first}", marks=pytest.mark.slow)
        for first in range(0, 252, 42)
    ),
]
SMALL = {"max_chips": 6, "max_chunks": 6}
"""Quick to compile."""
PER_CHUNK = 3
"""Elements of a chunk; the last of several chunks has one less, so that there is padding."""


def run(schedule: Schedule, payload: NDArray[np.int32]) -> NDArray[np.int32]:
    """Run a schedule by the collective that it is for; one row per chip, as many elements as it leaves there."""
    fabric = cases.fabric_for(schedule.mesh)
    program = mmj.install(schedule, fabric)
    match schedule.collective:
        case Collective.ALL_REDUCE | Collective.ALL_REDUCE_WITH_UPDATE:
            return np.asarray(cases.on_chips(fabric, mmj.all_reduce, payload, program))
        case Collective.REDUCE_SCATTER:
            (shards,) = cases.on_chips(fabric, mmj.reduce_scatter, payload, program)
            return np.asarray(shards)
        case Collective.ALL_GATHER:

            def gather(shard: Any, like: Any, program: mmj.Program) -> Any:
                return mmj.all_gather((shard,), program, like=like)

            return np.asarray(cases.on_chips(fabric, gather, own_chunks(schedule, payload), payload, program))


def own_chunks(schedule: Schedule, rows: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return each chip's own chunks of its row, in ascending order, then zeros: what a shard is."""
    n_chips, most = schedule.mesh.n_chips, np.bincount(schedule.owners).max()
    flat = np.zeros((n_chips, schedule.total_chunks * PER_CHUNK), np.int32)
    flat[:, : rows.shape[1]] = rows
    chunks = flat.reshape(n_chips, schedule.total_chunks, PER_CHUNK)
    shards = np.zeros((n_chips, most, PER_CHUNK), np.int32)
    for chip in range(n_chips):
        mine = np.flatnonzero(schedule.owners == chip)
        shards[chip, : len(mine)] = chunks[chip, mine]
    return shards


def wanted(schedule: Schedule, payload: NDArray[np.int32]) -> NDArray[np.int32]:
    """What the collective promises, by sums that know nothing of schedules."""
    total = np.broadcast_to(payload.sum(axis=0, dtype=np.int32), payload.shape)
    match schedule.collective:
        case Collective.ALL_REDUCE | Collective.ALL_REDUCE_WITH_UPDATE:
            return total
        case Collective.REDUCE_SCATTER:
            return own_chunks(schedule, total)
        case Collective.ALL_GATHER:
            owner = schedule.owners[np.arange(payload.shape[1]) // PER_CHUNK]
            return np.broadcast_to(payload[owner, np.arange(payload.shape[1])], payload.shape)


@pytest.mark.parametrize("seeds", SEEDS)
def test_the_engine_does_what_any_valid_schedule_says(seeds: range) -> None:
    run_so_far = dict.fromkeys(COLLECTIVES, 0)
    for seed in seeds:
        collective = COLLECTIVES[seed % 3]
        schedule = random_schedule(seed, collective=collective, **SMALL if len(seeds) == 12 else {})
        size = PER_CHUNK * schedule.total_chunks - (schedule.total_chunks > 1)
        payload = np.random.default_rng(seed).integers(-(2**20), 2**20, (schedule.mesh.n_chips, size), dtype=np.int32)
        got = run(schedule, payload)
        assert got.dtype == np.int32
        assert np.array_equal(got, wanted(schedule, payload)), f"seed {seed}: {schedule!r}"
        run_so_far[collective] += 1
    jax.clear_caches()
    assert set(run_so_far.values()) == {len(seeds) // 3}
