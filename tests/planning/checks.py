"""How planner tests check a schedule: with the verifier, and with NumPy's own sums."""

from __future__ import annotations

import numpy as np

import meshmend.numpy as mmn
from meshmend import Collective, Schedule, verify


def assert_serves(schedule: Schedule) -> None:
    """Both oracles, whatever the collective."""
    if schedule.collective is Collective.ALL_REDUCE:
        assert_all_reduces(schedule)
        return
    verify(schedule)
    rng = np.random.default_rng(schedule.n_transfers)
    n_chips, chunks = schedule.mesh.n_chips, schedule.total_chunks
    payload = rng.integers(-(2**40), 2**40, (n_chips, chunks, 2))
    held = mmn.run(schedule, payload)
    own = schedule.owners, np.arange(chunks)
    if schedule.collective is Collective.REDUCE_SCATTER:
        assert np.array_equal(held[own], payload.sum(axis=0))
    else:
        assert np.array_equal(held, np.broadcast_to(payload[own], payload.shape))


def assert_all_reduces(schedule: Schedule) -> None:
    """Both oracles: every contribution once, and integers summed exactly at every chip; owners are first to know."""
    verify(schedule)
    rng = np.random.default_rng(schedule.n_transfers)
    payload = rng.integers(-(2**40), 2**40, (schedule.mesh.n_chips, schedule.total_chunks + 3))
    summed = mmn.run(schedule, payload)
    assert np.array_equal(summed, np.broadcast_to(payload.sum(axis=0), payload.shape))
