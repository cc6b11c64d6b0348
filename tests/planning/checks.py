"""How planner tests check a schedule: with the verifier, and with NumPy's own sums."""

from __future__ import annotations

import numpy as np

import meshmend.numpy as mmn
from meshmend import Schedule, verify


def assert_all_reduces(schedule: Schedule) -> None:
    """Both oracles: every contribution once, and integers summed exactly at every chip; owners are first to know."""
    verify(schedule)
    rng = np.random.default_rng(schedule.n_transfers)
    payload = rng.integers(-(2**40), 2**40, (schedule.mesh.n_chips, schedule.total_chunks + 3))
    summed = mmn.run(schedule, payload)
    assert np.array_equal(summed, np.broadcast_to(payload.sum(axis=0), payload.shape))
