from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import meshmend.numpy as mmn
from engine_contract import check_engine
from meshmend import Mesh, Schedule, plan
from meshmend.schedule.verify import ensure_proven


def test_the_reference_keeps_the_contract() -> None:
    """But for the proof: it runs schedules that are wrong, and other tests look at what comes of them."""

    def proven(schedule: Schedule, payload: NDArray[Any]) -> NDArray[Any]:
        ensure_proven(schedule)
        return mmn.run(schedule, payload)

    check_engine(proven)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (96,), (5, 3, 2), (0,)])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32])
def test_any_shape_and_size_is_summed_exactly(shape: tuple[int, ...], dtype: type) -> None:
    mesh = Mesh("4x6", failed=["2x2@0,2"])
    payload: NDArray[Any] = np.random.default_rng(1).integers(-50, 50, (mesh.n_chips, *shape)).astype(dtype)
    summed = mmn.run(plan(mesh, "row-pairs"), payload)
    assert summed.dtype == dtype
    assert summed.shape == payload.shape
    assert np.array_equal(summed, np.broadcast_to(payload.sum(axis=0), payload.shape))


def test_all_chips_end_with_the_same_bits_of_floats() -> None:
    mesh = Mesh("8x8", failed=["2x2@2,2"])
    payload = np.random.default_rng(2).standard_normal((60, 1000))
    for planner in ("hamiltonian", "row-pairs"):
        summed = mmn.run(plan(mesh, planner), payload)
        assert (summed == summed[0]).all()
        np.testing.assert_allclose(summed[0], payload.sum(axis=0), rtol=1e-12, atol=1e-12)
