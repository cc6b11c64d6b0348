from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import meshmend.numpy as mmn
from engine_contract import check_any_shape, check_bits, check_reads_come_before_writes, check_sums
from meshmend import Collective, Mesh, Op, Schedule, plan
from meshmend.errors import ScheduleError


def test_the_reference_keeps_the_contract() -> None:
    """But for schedules that are wrong, which it runs: other tests look at what comes of them."""
    check_sums(mmn.run, 60)
    check_any_shape(mmn.run)
    check_reads_come_before_writes(mmn.run)
    check_bits(mmn.run)


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


def test_the_payload_is_left_alone() -> None:
    payload = np.ones((4, 8))
    mmn.run(plan(Mesh("2x2"), "hamiltonian"), payload)
    assert (payload == 1).all()


def test_reads_see_the_state_before_the_step() -> None:
    # Two chips swap their values in one step.
    swap = Schedule(
        Mesh("1x2"),
        total_chunks=1,
        step=[0, 0],
        src=[0, 1],
        dst=[1, 0],
        op=[Op.COPY, Op.COPY],
        owners=[0],
        collective=Collective.ALL_GATHER,
    )
    assert mmn.run(swap, np.array([[3], [5]])).tolist() == [[5], [3]]


def test_a_payload_for_other_chips_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"shape \(3, 8\), expected one row for each of 4 live chips"):
        mmn.run(plan(Mesh("2x2"), "hamiltonian"), np.ones((3, 8)))
