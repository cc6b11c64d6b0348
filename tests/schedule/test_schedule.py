from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from meshmend import Collective, Mesh, Op, Schedule
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


def test_an_empty_schedule_is_fine_where_there_is_nothing_to_do() -> None:
    alone = Schedule(Mesh("1x1"), total_chunks=1, step=[], src=[], dst=[], op=[], owners=[0])
    assert alone.n_steps == 0
    assert alone.phases == ()


RANGE = "on Mesh(1x3: 3 chips) with 2 chunks."


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"src": [0, 1, 2, 3]}, f"Transfer 3: src is 3, expected 0 to 2 {RANGE}"),
        ({"src": [0, -1, 2, 3]}, f"Transfer 1: src is -1, expected 0 to 2 {RANGE}"),
        ({"dst": [1, -2, 1, 0]}, f"Transfer 1: dst is -2, expected 0 to 2 {RANGE}"),
        ({"dst": [1, 3, 1, 0]}, f"Transfer 1: dst is 3, expected 0 to 2 {RANGE}"),
        ({"op": [0, 0, 1, 2]}, f"Transfer 3: op is 2, expected 0 to 1 {RANGE}"),
        ({"op": [0, -1, 1, 1]}, f"Transfer 1: op is -1, expected 0 to 1 {RANGE}"),
        ({"first_chunk": 1}, "Transfer 0: chunks 1 to 2 reach past the last chunk, 1."),
        (
            {"first_chunk": [0, 0, 1, 1], "n_chunks": [2, 1, 1, 2]},
            "Transfer 3: chunks 1 to 2 reach past the last chunk, 1.",
        ),
        ({"first_chunk": 2, "n_chunks": 1}, f"Transfer 0: first_chunk is 2, expected 0 to 1 {RANGE}"),
        ({"first_chunk": -1}, f"Transfer 0: first_chunk is -1, expected 0 to 1 {RANGE}"),
        ({"n_chunks": 0}, f"Transfer 0: n_chunks is 0, expected 1 to 2 {RANGE}"),
        ({"n_chunks": 3}, f"Transfer 0: n_chunks is 3, expected 1 to 2 {RANGE}"),
        ({"phase": 1}, f"Transfer 0: phase is 1, expected 0 to 0 {RANGE}"),
        ({"phase": -1}, f"Transfer 0: phase is -1, expected 0 to 0 {RANGE}"),
        ({"phase_names": ()}, "A schedule has 1 to 256 phases: got 0."),
        ({"phase_names": ("x",) * 257}, "A schedule has 1 to 256 phases: got 257."),
        ({"dst": [1, 1, 1, 0]}, "Transfer 1: rank 1 sends to itself."),
        ({"step": [0, 1, 3, 3]}, "Step 2 has no transfer; number the steps without gaps from 0."),
        ({"step": [1, 1, 2, 3]}, "Step 0 has no transfer; number the steps without gaps from 0."),
        ({"step": [0, 1, 2, 2**40]}, f"Transfer 3: step is 1099511627776, expected 0 to 3 {RANGE}"),
        ({"step": [0, 1, 2, -1]}, f"Transfer 3: step is -1, expected 0 to 3 {RANGE}"),
        ({"step": [0, 1, 2]}, "src has shape (4,), expected 3 numbers."),
        ({"step": 0}, "step has shape (), expected one number per transfer."),
        ({"step": [[0, 1], [2, 3]]}, "step has shape (2, 2), expected one number per transfer."),
        ({"src": [[0, 1, 2, 1]]}, "src has shape (1, 4), expected 4 numbers."),
        ({"step": [0.0, 1.0, 2.0, 3.0]}, "step holds float64, expected whole numbers."),
        ({"op": [True, True, False, False]}, "op holds bool, expected whole numbers."),
        ({"owners": [0]}, "owners has shape (1,), expected 2 numbers."),
        ({"owners": [0, 3]}, "Owners are ranks from 0 to 2."),
        ({"owners": [-1, 2]}, "Owners are ranks from 0 to 2."),
        ({"owners": [0.0, 1.0]}, "owners holds float64, expected whole numbers."),
        ({"total_chunks": 0}, "A payload is cut into 1 to 2,147,483,647 chunks: got 0."),
        ({"total_chunks": 2**31}, "A payload is cut into 1 to 2,147,483,647 chunks: got 2,147,483,648."),
        (
            {"src": np.array([2**64 - 1, 1, 2, 1], dtype=np.uint64)},
            "src holds 18446744073709551615, beyond any rank, step or chunk.",
        ),
        (
            {"n_chunks": np.array([2**31, 1, 2, 1], dtype=np.uint64)},
            "n_chunks holds 2147483648, beyond any rank, step or chunk.",
        ),
        (
            {"n_chunks": np.array([2**31 - 1, 1, 2, 1], dtype=np.uint32)},
            f"Transfer 0: n_chunks is 2147483647, expected 1 to 2 {RANGE}",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        make(**changes)
    assert str(caught.value) == message


def test_the_limits_themselves_are_allowed() -> None:
    many = make(phase=[255] * 4, phase_names=tuple(map(str, range(256))))
    assert many.phases == (Phase("255", 0, 3, 4),)
    assert make(total_chunks=1, n_chunks=1, owners=0).owners.tolist() == [0]
    ends = make(first_chunk=[0, 1, 0, 1], n_chunks=[2, 1, 1, 1], step=[0, 1, 2, 3], src=[0, 2, 1, 0], dst=[2, 0, 0, 1])
    assert (ends.first_chunk.tolist(), ends.n_chunks.tolist()) == ([0, 1, 0, 1], [2, 1, 1, 1])


def test_arrays_are_kept_as_they_were_and_narrow() -> None:
    schedule = make(phase=[0, 1, 1, 0], phase_names=("a", "b"), collective="all-gather", planner="mine")
    for name in ("step", "src", "dst", "first_chunk", "n_chunks", "owners"):
        assert getattr(schedule, name).dtype == np.int32
    for name in ("op", "phase"):
        assert getattr(schedule, name).dtype == np.uint8
    assert schedule.step.tolist() == [0, 1, 2, 3]
    assert schedule.src.tolist() == [0, 1, 2, 1]
    assert schedule.dst.tolist() == [1, 2, 1, 0]
    assert schedule.op.tolist() == [0, 0, 1, 1]
    assert schedule.phase.tolist() == [0, 1, 1, 0]
    assert schedule.first_chunk.tolist() == [0] * 4
    assert schedule.n_chunks.tolist() == [2] * 4
    assert schedule.owners.tolist() == [2, 2]
    assert (schedule.mesh, schedule.planner, schedule.phase_names) == (MESH, "mine", ("a", "b"))
    assert schedule.collective is Collective.ALL_GATHER
    assert schedule.step_starts.dtype == np.int64
    assert not schedule.is_proven


def test_what_is_not_said_has_plain_defaults() -> None:
    plain = Schedule(MESH, total_chunks=3, step=[0], src=[0], dst=[1], op=[0], owners=[0, 1, 2])
    assert (plain.first_chunk.tolist(), plain.n_chunks.tolist(), plain.phase.tolist()) == ([0], [1], [0])
    assert (plain.phase_names, plain.collective, plain.planner) == (("all",), Collective.ALL_REDUCE, "hand-made")
    assert repr(plain) == "Schedule(hand-made all-reduce on 1x3: 3 chips, 1 step, 3 chunks, 1 transfer)"


def test_rows_of_one_step_stay_in_their_order() -> None:
    step = [1, 0, 1, 0, 1, 0] * 10
    first = list(range(60))
    schedule = make(total_chunks=60, owners=0, step=step, src=0, dst=1, op=0, first_chunk=first, n_chunks=1)
    assert schedule.first_chunk.tolist() == first[1::2] + first[::2]


def test_phases_that_start_together_are_in_order_of_their_end() -> None:
    schedule = make(step=[0, 0, 1, 2], dst=[1, 2, 0, 0], phase=[0, 1, 1, 0], phase_names=("long", "short"))
    assert schedule.phases == (Phase("short", 0, 1, 2), Phase("long", 0, 2, 2))


@pytest.mark.parametrize(
    "changes",
    [
        {"planner": "other"},
        {"owners": [2, 1]},
        {"op": [0, 0, 1, 0]},
        {"collective": Collective.ALL_GATHER},
        {"phase_names": ("other",)},
        {"step": [0, 1, 2, 2], "dst": [1, 2, 1, 2]},
        {"dst": [1, 2, 0, 0]},
        {"n_chunks": [2, 2, 2, 1]},
    ],
)
def test_a_difference_anywhere_is_a_difference(changes: dict[str, Any]) -> None:
    assert make() != make(**changes)
    assert not make() == make(**changes)  # noqa: SIM201  # both operators


def test_equal_schedules_need_equal_meshes_and_chunks() -> None:
    one = Schedule(Mesh("1x3"), total_chunks=1, step=[], src=[], dst=[], op=[], owners=[0])
    assert one != Schedule(Mesh("3x1"), total_chunks=1, step=[], src=[], dst=[], op=[], owners=[0])
    assert one != Schedule(Mesh("1x3"), total_chunks=2, step=[], src=[], dst=[], op=[], owners=[0, 0])
    assert one.__eq__(1) is NotImplemented


def test_a_copy_is_equal_read_only_and_not_proven() -> None:
    schedule = make()
    schedule._is_proven = True
    for other in (copy.deepcopy(schedule), pickle.loads(pickle.dumps(schedule))):  # noqa: S301  # our own
        assert other == schedule
        assert schedule.is_proven
        assert other.is_proven is False
        for name in ("step", "src", "dst", "first_chunk", "n_chunks", "op", "phase", "owners"):
            assert not getattr(other, name).flags.writeable
            assert not getattr(schedule, name).flags.writeable
