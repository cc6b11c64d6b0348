from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshmend import Collective, Mesh, Op, Schedule, plan
from meshmend.errors import ScheduleError
from meshmend.schedule import Phase

MESH = Mesh("1x3")


def make(**changes: Any) -> Schedule:
    """A correct all-reduce over a line of three chips, with some arguments replaced."""
    arguments: dict[str, Any] = {
        "total_chunks": 2,
        "step": [0, 1, 2, 3],
        "src": [0, 1, 2, 1],
        "dst": [1, 2, 1, 0],
        "op": [Op.REDUCE, Op.REDUCE, Op.COPY, Op.COPY],
        "first_chunk": 0,
        "n_chunks": 2,
        "owners": [2, 2],
    }
    return Schedule(MESH, **(arguments | changes))


def test_what_it_says_of_itself() -> None:
    schedule = make()
    assert (schedule.n_steps, schedule.n_transfers, schedule.total_chunks) == (4, 4, 2)
    assert schedule.collective is Collective.ALL_REDUCE
    assert repr(schedule) == "Schedule(hand-made all-reduce on 1x3: 3 chips, 4 steps, 2 chunks, 4 transfers)"
    assert schedule.step_starts.tolist() == [0, 1, 2, 3, 4]


def test_rows_are_put_in_order_of_step() -> None:
    shuffled = make(step=[3, 2, 1, 0], src=[1, 2, 1, 0], dst=[0, 1, 2, 1], op=[1, 1, 0, 0])
    assert shuffled == make()


def test_phases_are_found_in_time_order_and_may_overlap() -> None:
    schedule = make(step=[0, 1, 1, 2], dst=[1, 2, 0, 0], phase=[1, 1, 0, 0], phase_names=("late", "early", "never"))
    assert schedule.phases == (Phase("early", 0, 1, 2), Phase("late", 1, 2, 2))


def test_it_cannot_be_changed_not_even_through_its_arguments() -> None:
    step = np.array([0, 1, 2, 3], dtype=np.int32)
    schedule = make(step=step)
    step[0] = 3
    assert schedule.step[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        schedule.src[0] = 2
    with pytest.raises(TypeError, match="unhashable"):
        hash(schedule)


def test_equality_looks_at_everything() -> None:
    assert make() == make()
    assert make() != make(planner="other")
    assert make() != make(owners=[2, 1])
    assert make() != make(op=[0, 0, 1, 0])
    assert make() != plan(Mesh("2x2"), "hamiltonian")
    assert make() != "a schedule"


def test_an_empty_schedule_is_fine_where_there_is_nothing_to_do() -> None:
    alone = Schedule(Mesh("1x1"), total_chunks=1, step=[], src=[], dst=[], op=[], owners=[0])
    assert alone.n_steps == 0
    assert alone.phases == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"src": [0, 1, 2, 3]}, "Transfer 3: src is 3, expected 0 to 2"),
        ({"dst": [1, -2, 1, 0]}, "Transfer 1: dst is -2, expected 0 to 2"),
        ({"op": [0, 0, 1, 2]}, "Transfer 3: op is 2, expected 0 to 1"),
        ({"first_chunk": 1}, "chunks 1 to 2 reach past the last chunk, 1"),
        ({"first_chunk": 2, "n_chunks": 1}, "first_chunk is 2, expected 0 to 1"),
        ({"n_chunks": 0}, "n_chunks is 0, expected 1 to 2"),
        ({"phase": 1}, "phase is 1, expected 0 to 0"),
        ({"phase_names": ()}, "1 to 256 phases: got 0"),
        ({"dst": [0, 2, 1, 0]}, "Transfer 0: rank 0 sends to itself"),
        ({"step": [0, 1, 3, 3]}, "Step 2 has no transfer"),
        ({"step": [1, 1, 2, 3]}, "Step 0 has no transfer"),
        ({"step": [0, 1, 2, 2**40]}, "step is 1099511627776, expected 0 to 3"),
        ({"step": [0, 1, 2]}, r"src has shape \(4,\), expected 3 numbers"),
        ({"step": [0.0, 1.0, 2.0, 3.0]}, "step holds float64, expected whole numbers"),
        ({"owners": [0]}, r"owners has shape \(1,\), expected 2 numbers"),
        ({"owners": [0, 3]}, "Owners are ranks from 0 to 2"),
        ({"total_chunks": 0}, "1 to 2,147,483,647 chunks: got 0"),
        ({"total_chunks": 2**40}, "got 1,099,511,627,776"),
        ({"src": np.array([2**64 - 1, 1, 2, 1], dtype=np.uint64)}, "beyond any rank, step or chunk"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        make(**changes)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int64, np.uint64])
def test_any_kind_of_whole_number_will_do(dtype: type) -> None:
    columns = {"src": [0, 1, 2, 1], "dst": [1, 2, 1, 0], "n_chunks": [2, 2, 2, 2]}
    wide = {"total_chunks": 1000, "owners": np.zeros(1000, dtype=int)}
    assert make(**wide, **{name: np.array(c, dtype=dtype) for name, c in columns.items()}) == make(**wide, **columns)
