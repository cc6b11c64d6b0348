"""Programs, without processes: any order in which messages may arrive gives the sums that NumPy gives."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshmend.numpy as mmn
from meshmend import Mesh, Op, PlanError, Schedule, plan
from meshmend.planning import PLANNERS
from strategies import block_meshes

program = pytest.importorskip("meshmend.torch.program", reason="torch is not installed")


def play(schedule: Schedule, seed: int) -> bool:
    """Run every chip's program with messages that leave and arrive in random order; compare with NumPy."""
    rng = random.Random(seed)
    n = schedule.mesh.n_chips
    programs = [program.compile_program(schedule, rank) for rank in range(n)]
    payload = np.random.default_rng(seed).integers(0, 1000, (n, schedule.total_chunks))
    held = payload.copy()
    sent: list[set[int]] = [set() for _ in range(n)]
    written: list[set[int]] = [set() for _ in range(n)]
    wire: dict[tuple[int, int, int], np.ndarray] = {}
    while True:
        moves = []
        for rank, own in enumerate(programs):
            for number, send in enumerate(own.sends):
                if number not in sent[rank] and written[rank].issuperset(send.after_receives):
                    moves.append((rank, number, True))
            for number, receive in enumerate(own.receives):
                ready = written[rank].issuperset(receive.after_receives) and sent[rank].issuperset(receive.after_sends)
                if number not in written[rank] and ready and (receive.peer, rank, receive.tag) in wire:
                    moves.append((rank, number, False))
        if not moves:
            break
        rank, number, is_send = rng.choice(moves)
        if is_send:
            send = programs[rank].sends[number]
            key = (rank, send.peer, send.tag)
            assert key not in wire
            wire[key] = held[rank, send.first : send.last].copy()
            sent[rank].add(number)
        else:
            receive = programs[rank].receives[number]
            arrived = wire[receive.peer, rank, receive.tag]
            place = held[rank, receive.first : receive.last]
            place[:] = place + arrived if receive.adds else arrived
            written[rank].add(number)
    assert all(len(sent[r]) == len(p.sends) and len(written[r]) == len(p.receives) for r, p in enumerate(programs))
    return bool(np.array_equal(held, mmn.run(schedule, payload)))


@pytest.mark.parametrize("name", sorted(PLANNERS.keys() - {"auto"}))
@pytest.mark.parametrize("failed", [[], ["2x2@0,0"], ["2x2@2,2"]])
def test_any_order_gives_numpys_sums(name: str, failed: list[str]) -> None:
    mesh = Mesh("4x4", failed=failed)
    try:
        few: dict[str, Any] = {"chunks": 12} if name == "weave" else {}
        schedule = plan(mesh, name, **few)
    except PlanError as error:
        pytest.skip(error.why)
    assert all(play(schedule, seed) for seed in range(2))


@settings(max_examples=25)
@given(block_meshes(max_blocks=2), st.integers(0, 2**32 - 1))
def test_any_mesh(mesh: Mesh, seed: int) -> None:
    if mesh.is_connected:
        assert play(plan(mesh, "hamiltonian"), seed)


def test_a_value_leaves_before_it_is_overwritten() -> None:
    # Chips 0 and 1 swap a chunk in one step: each send must carry the value from before the step.
    mesh = Mesh((1, 2))
    swap = Schedule(mesh, total_chunks=1, step=[0, 0], src=[0, 1], dst=[1, 0], op=[Op.COPY, Op.COPY], owners=[0])
    own = program.compile_program(swap, 0)
    assert own.receives[0].after_sends == (0,)
    assert own.sends[0].after_receives == ()
    assert play(swap, seed=0)


def test_runs_side_by_side_travel_as_one_message() -> None:
    mesh = Mesh((1, 2))
    split = Schedule(
        mesh,
        total_chunks=4,
        step=[0] * 4,
        src=[1] * 4,
        dst=[0] * 4,
        first_chunk=[3, 1, 0, 2],
        op=Op.REDUCE,
        owners=0 * np.arange(4),
    )
    (message,) = program.compile_program(split, 0).receives
    assert (message.first, message.last, message.tag) == (0, 4, 0)
    assert len(program.compile_program(split, 1).sends) == 1


def test_both_ends_count_alike() -> None:
    schedule = plan(Mesh("6x6", failed=["2x2@2,2"]), "row-pairs")
    ends: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for rank in range(schedule.mesh.n_chips):
        for send in program.compile_program(schedule, rank).sends:
            ends[rank, send.peer].append((send.tag, send.first, send.last))
    for rank in range(schedule.mesh.n_chips):
        got: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for receive in program.compile_program(schedule, rank).receives:
            got[receive.peer].append((receive.tag, receive.first, receive.last))
        for peer, messages in got.items():
            assert messages == ends[peer, rank]
