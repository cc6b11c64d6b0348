"""Programs, without processes: any order in which messages may arrive gives the sums that NumPy gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")

from meshmend import Collective, Mesh, Op, PlanError, Schedule, plan, verify
from meshmend.planning import PLANNERS
from meshmend.torch import program
from random_schedules import random_schedule
from torch_engine.adversary import play


def hand_made(shape: tuple[int, ...], total_chunks: int, *rows: tuple[int, int, int, int, int, Op]) -> Schedule:
    """Return a proven schedule of (step, src, dst, first chunk, number of chunks, op)."""
    step, src, dst, first, n_chunks, op = zip(*rows, strict=True)
    schedule = Schedule(
        Mesh(shape),
        total_chunks=total_chunks,
        step=step,
        src=src,
        dst=dst,
        first_chunk=first,
        n_chunks=n_chunks,
        op=op,
        owners=np.zeros(total_chunks, dtype=int),
    )
    verify(schedule)
    return schedule


def test_a_program_by_hand() -> None:
    # Chips 0, 1, 2 in a line, four chunks. Chunks 0 and 1 are summed at chip 2, chunks 2 and 3 at chip 0, and return;
    # step 1 also takes chunk 3 alone, out of order with chunk 2.
    schedule = hand_made(
        (1, 3), 4,
        (0, 0, 1, 0, 2, Op.REDUCE), (0, 2, 1, 2, 2, Op.REDUCE),
        (1, 1, 2, 0, 2, Op.REDUCE), (1, 1, 0, 3, 1, Op.REDUCE), (2, 1, 0, 2, 1, Op.REDUCE),
        (3, 2, 1, 0, 1, Op.COPY), (3, 2, 1, 1, 1, Op.COPY), (3, 0, 1, 2, 1, Op.COPY), (4, 0, 1, 3, 1, Op.COPY),
        (5, 1, 0, 0, 1, Op.COPY), (5, 1, 0, 1, 1, Op.COPY), (5, 1, 2, 2, 2, Op.COPY),
    )  # fmt: skip
    Send, Receive = program.Send, program.Receive  # noqa: N806
    own = program.compile_program(schedule, 1)
    assert own == program.ChipProgram(
        rank=1,
        total_chunks=4,
        sends=(
            Send(peer=0, tag=0, first=3, last=4, staged=False, after_receives=(1,)),
            Send(peer=2, tag=0, first=0, last=2, staged=False, after_receives=(0,)),
            Send(peer=0, tag=1, first=2, last=3, staged=False, after_receives=(1,)),
            Send(peer=0, tag=2, first=0, last=2, staged=False, after_receives=(3,)),
            Send(peer=2, tag=1, first=2, last=4, staged=False, after_receives=(2, 4)),
        ),
        receives=(
            Receive(0, 0, 0, 2, adds=True, direct=False, after_receives=(), after_sends=()),
            Receive(2, 0, 2, 4, adds=True, direct=False, after_receives=(), after_sends=()),
            # From the chip that was sent the old value, and after it: straight to its place.
            Receive(0, 1, 2, 3, adds=False, direct=True, after_receives=(1,), after_sends=(2,)),
            Receive(2, 1, 0, 2, adds=False, direct=True, after_receives=(0,), after_sends=(1,)),
            Receive(0, 2, 3, 4, adds=False, direct=True, after_receives=(1,), after_sends=(0,)),
        ),
    )
    assert own.waiting_for_receive == (((1,), (3,)), ((0, 2), (2, 4)), ((4,), ()), ((3,), ()), ((4,), ()))
    assert own.waiting_for_send == ((4,), (3,), (2,), (), ())
    right = program.compile_program(schedule, 2)
    assert right.sends == (Send(1, 0, 2, 4, False, ()), Send(1, 1, 0, 2, False, (0,)))
    assert right.receives == (
        Receive(1, 0, 0, 2, True, False, (), ()),
        Receive(1, 1, 2, 4, False, True, (), (0,)),
    )


def test_what_travels_as_one_message_and_what_does_not() -> None:
    # Of the transfers of chip 1 to chip 0, those of one step and one op that lie side by side are joined.
    rows = [
        (0, 1, 0, 0, 1, Op.REDUCE), (0, 1, 0, 1, 2, Op.REDUCE),  # side by side
        (0, 1, 0, 4, 1, Op.REDUCE),  # a gap before it
        (0, 1, 0, 5, 1, Op.COPY), (0, 1, 0, 6, 1, Op.COPY),  # another op
        (1, 1, 0, 7, 1, Op.COPY),  # another step
        (1, 1, 2, 8, 1, Op.COPY),  # another destination
        (1, 2, 0, 9, 1, Op.COPY),  # another source
    ]  # fmt: skip
    step, src, dst, first, n_chunks, op = zip(*rows[::-1], strict=True)
    cut = Schedule(
        Mesh((1, 3)), total_chunks=10, step=step, src=src, dst=dst, first_chunk=first, n_chunks=n_chunks, op=op,
        owners=np.zeros(10, dtype=int),
    )  # fmt: skip
    sends = program.compile_program(cut, 1).sends
    messages = [(0, 0, 0, 3), (0, 1, 4, 5), (0, 2, 5, 7), (0, 3, 7, 8), (2, 0, 8, 9)]
    assert [(send.peer, send.tag, send.first, send.last) for send in sends] == messages
    receives = program.compile_program(cut, 0).receives
    assert [(r.peer, r.tag, r.first, r.last, r.adds) for r in receives] == [
        (1, 0, 0, 3, True),
        (1, 1, 4, 5, True),
        (1, 2, 5, 7, False),
        (1, 3, 7, 8, False),
        (2, 0, 9, 10, False),
    ]


def test_what_is_exchanged_within_a_step_leaves_from_a_copy() -> None:
    # Chip 0 adds to chip 1 while chip 1 overwrites it: both read what the other writes, so neither may write in place.
    reduce_and_copy = hand_made(
        (1, 2), 1, (0, 0, 1, 0, 1, Op.REDUCE), (0, 1, 0, 0, 1, Op.COPY), (1, 1, 0, 0, 1, Op.COPY)
    )
    own = program.compile_program(reduce_and_copy, 0)
    assert [send.staged for send in own.sends] == [True]
    # The second copy is no more direct than the first: nothing was sent since the first arrived.
    assert [(receive.direct, receive.after_sends) for receive in own.receives] == [(False, (0,)), (False, ())]
    # Chip 1 sends in step 0 what step 0 writes, and in step 1 what no step writes any more.
    assert [send.staged for send in program.compile_program(reduce_and_copy, 1).sends] == [True, False]
    for seed in range(20):
        play(reduce_and_copy, seed)


def test_only_what_its_own_step_writes_is_copied_before_it_is_sent() -> None:
    # Each chip sends one chunk while the other arrives, as in a ring.
    ring = hand_made(
        (1, 2), 2,
        (0, 0, 1, 0, 1, Op.REDUCE), (0, 1, 0, 1, 1, Op.REDUCE), (1, 1, 0, 0, 1, Op.COPY), (1, 0, 1, 1, 1, Op.COPY),
    )  # fmt: skip
    for rank in range(2):
        assert [send.staged for send in program.compile_program(ring, rank).sends] == [False, False]


def test_a_copy_of_a_later_step_goes_straight_to_its_place() -> None:
    there_and_back = hand_made((1, 2), 1, (0, 0, 1, 0, 1, Op.REDUCE), (1, 1, 0, 0, 1, Op.COPY))
    own = program.compile_program(there_and_back, 0)
    assert [send.staged for send in own.sends] == [False]
    assert [receive.direct for receive in own.receives] == [True]
    # Not if a third chip was sent the old value too: nobody knows whether it has it yet.
    line = hand_made(
        (1, 3), 1,
        (0, 2, 1, 0, 1, Op.REDUCE), (1, 1, 0, 0, 1, Op.REDUCE), (2, 1, 2, 0, 1, Op.COPY), (3, 0, 1, 0, 1, Op.COPY),
        (4, 1, 2, 0, 1, Op.COPY),
    )  # fmt: skip
    middle = program.compile_program(line, 1)
    (copied,) = (receive for receive in middle.receives if not receive.adds)
    assert not copied.direct
    assert copied.after_sends == (0, 1)
    for seed in range(20):
        play(line, seed)


def test_an_all_gather_arrives_in_place() -> None:
    for chunks in (12, 36):
        gathered = plan(Mesh("4x4", failed=["2x2@1,1"]), "gather", collective="all-gather", chunks=chunks)
        for rank in range(12):
            own = program.compile_program(gathered, rank)
            assert len(own.receives) > 0
            assert all(receive.direct for receive in own.receives)


def test_a_crossed_exchange_within_a_step_cannot_deadlock() -> None:
    # Chips 0 and 1 exchange chunks 0, 2, 4 and 6, 8, 10 in one step, reduced one way and copied the other. On each link
    # reductions come before copies, so each chip's first write wants its own last message to have left: with few
    # receives posted ahead, waiting for its arrival would never end.
    halves = ((0, 2, 4), (6, 8, 10))
    rows = [
        (0, src, dst, chunk, 1, op)
        for chunks, ends in zip(halves, ((0, 1), (1, 0)), strict=True)
        for chunk in chunks
        for src, dst, op in ((*ends, Op.REDUCE), (*ends[::-1], Op.COPY))
    ]
    rows += [
        (1, *ends, chunk, 1, Op.COPY) for chunks, ends in zip(halves, ((1, 0), (0, 1)), strict=True) for chunk in chunks
    ]
    rows += [(2, 0, 1, chunk, 1, Op.REDUCE) for chunk in range(1, 11, 2)]
    rows += [(3, 1, 0, chunk, 1, Op.COPY) for chunk in range(1, 11, 2)]
    crossed = hand_made((1, 2), 11, *rows)
    for seed in range(20):
        play(crossed, seed, depth=1)


def test_two_receives_may_wait_for_one_send() -> None:
    # The middle of a line sends both chunks to the left; then one comes back from there and one from the right.
    shared = hand_made(
        (1, 3), 2,
        (0, 0, 1, 0, 2, Op.REDUCE), (1, 2, 1, 0, 2, Op.REDUCE), (2, 1, 2, 0, 2, Op.COPY), (3, 1, 0, 0, 2, Op.COPY),
        (4, 0, 1, 0, 1, Op.COPY), (4, 2, 1, 1, 1, Op.COPY),
    )  # fmt: skip
    own = program.compile_program(shared, 1)
    assert own.waiting_for_send[1] == (2, 3)
    for seed in range(20):
        play(shared, seed)


def test_a_run_of_billions_of_chunks_is_followed_as_one() -> None:
    rows = ((0, 0, 1, 0, 2**30, Op.REDUCE), (1, 1, 0, 5, 2**30 - 5, Op.COPY), (1, 1, 0, 0, 5, Op.COPY))
    step, src, dst, first, n_chunks, op = zip(*rows, strict=True)

    class Long:
        """A schedule with one owner for all chunks, without the array of owners."""

        total_chunks = 2**30
        repeats, period = 1, 0
        collective = Collective.ALL_REDUCE

    long: Any = Long()
    long.template = long
    for name, column in zip(
        ("step", "src", "dst", "first_chunk", "n_chunks", "op"), (step, src, dst, first, n_chunks, op), strict=True
    ):
        setattr(long, name, np.array(column))
    own = program.compile_program(long, 0)
    # The two copies lie side by side, so they travel as one.
    assert [(send.first, send.last) for send in own.sends] == [(0, 2**30)]
    assert [(receive.first, receive.last, receive.after_sends) for receive in own.receives] == [(0, 2**30, (0,))]


@pytest.mark.parametrize("name", sorted(PLANNERS.keys() - {"auto"}))
@pytest.mark.parametrize("failed", [[], ["2x2@0,0"], ["2x2@2,2"]])
def test_any_order_gives_numpys_sums(name: str, failed: list[str]) -> None:
    mesh = Mesh("4x4", failed=failed)
    try:
        few: dict[str, Any] = {"chunks": 12} if name == "weave" else {}
        schedule = plan(mesh, name, **few)
    except PlanError as error:
        pytest.skip(error.why)
    for seed in range(2):
        play(schedule, seed)


def random_all_reduce(seed: int) -> Schedule:
    schedule = random_schedule(seed, collective=Collective.ALL_REDUCE)
    verify(schedule)
    return schedule


def test_schedules_that_no_planner_made() -> None:
    for seed in range(60):
        play(random_all_reduce(seed), seed)


@pytest.mark.slow
def test_thousands_of_schedules_that_no_planner_made() -> None:
    for seed in range(1000, 3000):
        schedule = random_all_reduce(seed)
        for again in range(2):
            play(schedule, 10 * seed + again)


@pytest.mark.parametrize("seed", range(0, 20, 3))
def test_a_repeated_schedule_is_the_program_of_its_expanded_form(seed: int) -> None:
    template = random_schedule(seed, max_chips=6, max_chunks=4)
    if template.n_transfers == 0:
        return
    whole = template.repeated(3, 1 + seed % template.n_steps)
    for rank in range(whole.mesh.n_chips):
        assert program.compile_program(whole, rank) == program.compile_program(whole.expanded(), rank)
