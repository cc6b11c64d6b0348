"""How planner tests slow cables down, and check a schedule: with the verifier, and with NumPy's own sums."""

from __future__ import annotations

import numpy as np

import meshmend.numpy as mmn
from meshmend import Collective, Mesh, Schedule, verify

QUARTERS = ["1/4", "1/2", "3/4", "1"]


def slowed(mesh: Mesh, rates: list[str], part: float, seed: int) -> Mesh:
    """The mesh with one of these rates on a part of its cables."""
    rng = np.random.default_rng(seed)
    slow = {
        (mesh.chip(int(a)), mesh.chip(int(b))): str(rng.choice(rates))
        for a, b in mesh.cables[rng.random(mesh.n_cables) < part]
    }
    return Mesh(mesh.shape, wrap=mesh.wrap, failed=mesh.holes, failed_cables=mesh.failed_cables, cable_rates=slow)


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
