"""The contract of an engine, as CONTRIBUTING states it: what any `run(schedule, payload)` must do.

The oracle is the collective's own definition, in sums of integers, and not another engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from meshmend import Collective, Mesh, Op, Schedule, plan
from meshmend.errors import ScheduleError, VerificationError
from random_schedules import random_schedule, repeated_with_idle_steps

Run = Callable[[Schedule, NDArray[Any]], NDArray[Any]]
"""Takes one row of values per live chip, in order of rank; returns what each holds at the end."""


def check_engine(run: Run, n_random: int = 60) -> None:
    """Check all clauses of the contract, but that the engine knows no planner: `test_architecture` does."""
    check_sums(run, n_random)
    check_any_shape(run)
    check_reads_come_before_writes(run)
    check_bits(run)
    check_refusals(run)


def check_sums(run: Run, n_random: int) -> None:
    """Schedules that no planner made, of every collective; and repeated ones, with steps in which nothing moves."""
    schedules = [random_schedule(seed) for seed in range(n_random)]
    idle = [repeated_with_idle_steps(seed, max_chips=6) for seed in range(n_random)]
    schedules += [schedule for schedule in idle if schedule is not None]
    mesh = Mesh("4x4", failed=["2x2@0,0"])
    schedules += [plan(mesh, "hamiltonian"), plan(mesh, "row-pairs"), plan(mesh, "weave", chunks=24, trees=8)]
    for number, schedule in enumerate(schedules):
        chunks = schedule.total_chunks
        shape = (schedule.mesh.n_chips, chunks, 3)
        payload = np.random.default_rng(number).integers(-(2**40), 2**40, shape)
        found = run(schedule, payload.reshape(len(payload), -1)).reshape(shape)
        owned = schedule.owners, np.arange(chunks)
        match schedule.collective:
            case Collective.ALL_REDUCE:
                assert (found == payload.sum(axis=0)).all(), schedule
            case Collective.REDUCE_SCATTER:
                assert (found[owned] == payload.sum(axis=0)).all(), schedule
            case Collective.ALL_GATHER:
                assert (found == payload[owned]).all(), schedule


def check_any_shape(run: Run) -> None:
    """Rows of any shape and size, also of fewer values than there are chunks. The caller's payload stays as it was."""
    schedule = plan(Mesh("4x2"), "hamiltonian")
    for shape in ((), (1,), (7,), (5, 3, 2)):
        payload: NDArray[Any] = np.random.default_rng(1).integers(-50, 50, (8, *shape)).astype(np.int32)
        before = payload.copy()
        found = run(schedule, payload)
        assert (found.shape, found.dtype) == (payload.shape, payload.dtype)
        assert (found == before.sum(axis=0)).all()
        assert (payload == before).all()


def check_reads_come_before_writes(run: Run) -> None:
    """Chip 0 adds to chip 1 while chip 1 overwrites chip 0: each sends what it held before the step."""
    schedule = Schedule(
        Mesh("1x2"),
        total_chunks=1,
        step=[0, 0, 1],
        src=[0, 1, 1],
        dst=[1, 0, 0],
        op=[Op.REDUCE, Op.COPY, Op.COPY],
        owners=[1],
    )
    assert run(schedule, np.array([[3], [5]])).tolist() == [[8], [8]]


def check_bits(run: Run) -> None:
    """All chips end with the same bits of floats: their weights must not drift apart."""
    for planner in ("hamiltonian", "row-pairs", "weave"):
        found = run(plan(Mesh("4x4", failed=["2x2@0,0"]), planner), np.random.default_rng(2).standard_normal((12, 200)))
        assert (found == found[0]).all(), planner


def check_refusals(run: Run) -> None:
    """What is not proven, or not for these chips, is refused before anything moves."""
    right = plan(Mesh("2x2"), "hamiltonian")
    rows = slice(0, right.n_transfers - 1)
    wrong = Schedule(
        right.mesh,
        total_chunks=right.total_chunks,
        step=right.step[rows],
        src=right.src[rows],
        dst=right.dst[rows],
        first_chunk=right.first_chunk[rows],
        n_chunks=right.n_chunks[rows],
        op=right.op[rows],
        owners=right.owners,
    )
    with pytest.raises(VerificationError):
        run(wrong, np.ones((4, 8)))
    with pytest.raises(ScheduleError, match="4 live chips"):
        run(right, np.ones((3, 8)))
