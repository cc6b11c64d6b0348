"""Schedules that no planner made, end to end: real processes, real sockets, NumPy as the oracle."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import meshmend.numpy as mmn
from meshmend import Collective, Mesh, Op, Schedule, verify
from random_schedules import random_schedule, repeated_with_idle_steps

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")

import meshmend.torch as mmt  # noqa: E402
from meshmend.torch import run  # noqa: E402
from torch_engine.processes import on_every_chip  # noqa: E402
from torch_engine.threads import on_every_thread  # noqa: E402

SIZES = (1, 50, 4000)


def schedules(seeds: range, n_chips: int) -> list[Schedule]:
    """Return proven random all-reduces of some seeds: those for this number of chips."""
    found = [random_schedule(seed, collective=Collective.ALL_REDUCE, max_chips=n_chips) for seed in seeds]
    found = [schedule for schedule in found if schedule.mesh.n_chips == n_chips]
    for schedule in found:
        verify(schedule)
    return found


def payload(number: int, size: int, n_chips: int) -> Any:
    return np.random.default_rng([number, size]).integers(-(2**40), 2**40, (n_chips, size))


def reduce_each(chip: Any, mesh: Mesh, group: Any, todo: list[Schedule]) -> list[bytes]:
    found = []
    rank = mesh.rank(chip)
    for number, schedule in enumerate(todo):
        engine = mmt.Engine(schedule, rank, group, timeout=timedelta(seconds=60))
        for size in SIZES:
            own = torch.from_numpy(payload(number, size, mesh.n_chips)[rank].copy())
            engine.all_reduce(own)
            found.append(own.numpy().tobytes())
    return found


def run_all(todo: list[Schedule], n_chips: int) -> None:
    wanted = []
    for number, schedule in enumerate(todo):
        for size in SIZES:
            brought = payload(number, size, n_chips)
            summed = brought.sum(axis=0)
            assert (mmn.run(schedule, brought) == summed).all()
            wanted.append(summed.tobytes())
    # The processes stand for ranks: where a rank lies on the schedule's own mesh is no matter of the engine.
    for chip, found in on_every_chip(Mesh((1, n_chips)), reduce_each, todo, timeout_s=600).items():
        wrong = [str(todo[i // len(SIZES)]) for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b]
        assert not wrong, f"chip {chip}: {wrong}"


def test_random_schedules() -> None:
    todo = schedules(range(140), n_chips=4)[:20]
    assert len(todo) == 20
    run_all(todo, n_chips=4)


@pytest.mark.slow
@pytest.mark.parametrize("n_chips", [2, 4, 6, 9])
def test_two_hundred_random_schedules(n_chips: int) -> None:
    todo = schedules(range(10_000, 11_000), n_chips)[:75]
    assert len(todo) >= 50
    run_all(todo, n_chips)


def reduce_large(chip: Any, mesh: Mesh, group: Any, schedule: Schedule, n_elements: int, times: int) -> list[Any]:
    engine = mmt.Engine(schedule, mesh.rank(chip), group, timeout=timedelta(seconds=30))
    found = set()
    for _ in range(times):
        own = torch.full((n_elements,), float(mesh.rank(chip) + 1))
        engine.all_reduce(own)
        found |= set(own.unique().tolist())
    return sorted(found)


def test_a_chip_that_is_read_and_overwritten_in_one_step() -> None:
    # Chip 0 adds to chip 1 while chip 1 overwrites chip 0. Too large for the sockets' buffers: both stay under way for
    # long enough to meet.
    mesh = Mesh((1, 2))
    schedule = Schedule(
        mesh,
        total_chunks=1,
        step=[0, 0, 1],
        src=[0, 1, 1],
        dst=[1, 0, 0],
        op=[Op.REDUCE, Op.COPY, Op.COPY],
        owners=[1],
    )
    found = on_every_chip(mesh, reduce_large, schedule, 3_000_000, 4)
    assert found == {(0, 0): [3.0], (0, 1): [3.0]}


def test_one_send_that_two_receives_wait_for() -> None:
    # The middle of a line sends everything to the left, and then one part comes back from there and another from the
    # right, each in a thread of its own. A work of this network fails a test that waits for it twice.
    rows = [
        (0, 0, 1, 0, 8, Op.REDUCE),
        (1, 2, 1, 0, 8, Op.REDUCE),
        (2, 1, 2, 0, 8, Op.COPY),
        (3, 1, 0, 0, 8, Op.COPY),
        (4, 0, 1, 0, 1, Op.COPY),
        (4, 2, 1, 1, 1, Op.COPY),
    ]
    step, src, dst, first, n_chunks, op = zip(*rows, strict=True)
    mesh = Mesh((1, 3))
    schedule = Schedule(
        mesh, total_chunks=8, step=step, src=src, dst=dst, first_chunk=first, n_chunks=n_chunks, op=op, owners=[1] * 8
    )
    for _ in range(20):
        found = on_every_thread(3, lambda rank, group: reduce_large(mesh.chip(rank), mesh, group, schedule, 100, 1))
        assert found == [[6.0]] * 3


@pytest.mark.parametrize("n_short", [0, run.SHORT_MESSAGES, 10**6])
@pytest.mark.parametrize("n_chips", [1, 3, 8])
def test_random_schedules_among_threads(n_chips: int, n_short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SHORT_MESSAGES", n_short)  # a thread per neighbour, or one for all
    todo = schedules(range(300, 340), n_chips)
    wanted = [payload(i, size, n_chips).sum(axis=0).tobytes() for i, _ in enumerate(todo) for size in SIZES]
    mesh = Mesh((1, n_chips))
    found = on_every_thread(n_chips, lambda rank, group: reduce_each(mesh.chip(rank), mesh, group, todo))
    assert found == [wanted] * n_chips


@pytest.mark.parametrize("n_chips", [2, 5])
def test_templates_that_begin_with_idle_steps_among_threads(n_chips: int) -> None:
    found = [repeated_with_idle_steps(seed, max_chips=n_chips) for seed in range(400)]
    todo = [schedule for schedule in found if schedule is not None and schedule.mesh.n_chips == n_chips][:20]
    assert len(todo) >= 5
    todo += [schedule.expanded() for schedule in todo]
    for schedule in todo:
        verify(schedule)
    wanted = [payload(i, size, n_chips).sum(axis=0).tobytes() for i, _ in enumerate(todo) for size in SIZES]
    mesh = Mesh((1, n_chips))
    assert on_every_thread(n_chips, lambda rank, group: reduce_each(mesh.chip(rank), mesh, group, todo)) == (
        [wanted] * n_chips
    )
