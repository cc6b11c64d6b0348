"""Owners on the PyTorch engine: exact updates, reduce-scatters and all-gathers, an error on every chip or on none."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshmend import Collective, Mesh, Op, Schedule, plan, verify
from meshmend.errors import (
    DisagreementError,
    LostChipError,
    MeshmendError,
    ParameterError,
    PayloadError,
    PlanError,
    ScheduleError,
    UpdateError,
)
from meshmend.schedule.fused_update import with_update
from random_schedules import random_schedule

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")
import torch.distributed as dist  # noqa: E402

import meshmend.torch as mmt  # noqa: E402
from meshmend.torch.engine import digest_of  # noqa: E402
from meshmend.torch.program import OwnedRun, compile_program  # noqa: E402
from torch_engine.processes import on_every_chip  # noqa: E402
from torch_engine.threads import on_every_thread  # noqa: E402

WITH_UPDATE = Collective.ALL_REDUCE_WITH_UPDATE
LINE = Mesh("1x3")
EXAMPLE = Path(__file__).parents[2] / "examples/torch/sharded_update.py"
SOON = timedelta(seconds=20)


def integers(rank: int, size: int) -> Any:
    return torch.from_numpy(np.random.default_rng(rank).integers(-(2**15), 2**15, size))


def changed(total: Any, first: int = 0) -> Any:
    """Neither linear nor the same for all elements: what is applied twice, to a part or elsewhere shows."""
    return total * total % 100_003 + torch.arange(first, first + len(total))


def sums(n_chips: int, size: int) -> Any:
    return torch.stack([integers(rank, size) for rank in range(n_chips)]).sum(dim=0)


def update_all(schedule: Schedule, size: int) -> None:
    """Run an update on threads; hold the result to a plain sum, and the calls to each element once, at its owner."""
    n_chips = schedule.mesh.n_chips

    def main(rank: int, group: Any) -> Any:
        engine = mmt.Engine(schedule, rank, group, timeout=SOON)
        payload = integers(rank, size)
        calls: list[slice] = []

        def update(where: slice, values: Any) -> None:
            assert not torch.is_grad_enabled()
            calls.append(where)
            values.copy_(changed(values, where.start))

        engine.all_reduce(payload, update=update)
        assert sorted(calls, key=lambda where: where.start) == list(engine.owned(size))
        return payload, calls

    found = on_every_thread(n_chips, main)
    for result in found:
        assert not isinstance(result, BaseException), result
    wanted = changed(sums(n_chips, size))
    assert all(torch.equal(payload, wanted) for payload, _ in found)
    places = sorted((where.start, where.stop) for _, calls in found for where in calls)
    assert [start for start, _ in places] == [0, *(stop for _, stop in places[:-1])][: len(places)]
    assert sum(stop - start for start, stop in places) == size


@pytest.mark.parametrize("size", [0, 5, 1003])
@pytest.mark.parametrize("planner", ["weave", "hamiltonian", "row-pairs"])
def test_every_element_is_updated_once_at_its_owner(planner: str, size: int) -> None:
    chunks: dict[str, Any] = {"chunks": 40} if planner == "weave" else {}
    update_all(plan(Mesh("4x4", failed=["2x2@0,2"]), planner, collective=WITH_UPDATE, **chunks), size)


def test_random_schedules_that_are_updated() -> None:
    tried = 0
    for seed in range(60):
        schedule = with_update(random_schedule(seed, collective=Collective.ALL_REDUCE, max_chips=6, max_chunks=5))
        try:
            verify(schedule)
        except UpdateError:
            continue
        update_all(schedule, 3 * schedule.total_chunks + seed % 3)
        tried += 1
    assert tried > 10


def test_owned_runs_by_hand() -> None:
    # Chunks 0 to 3 are summed at chip 2. Chunk 0 is complete one step before the others, which come as one message.
    step, src, dst, first, n_chunks, op = zip(
        (0, 0, 1, 0, 4, Op.REDUCE), (1, 1, 2, 0, 1, Op.REDUCE), (2, 1, 2, 1, 3, Op.REDUCE),
        (3, 2, 1, 0, 4, Op.COPY), (4, 1, 0, 0, 4, Op.COPY), strict=True,
    )  # fmt: skip
    facts: dict[str, Any] = {"total_chunks": 4, "step": step, "src": src, "dst": dst, "first_chunk": first, "op": op}
    schedule = Schedule(LINE, n_chunks=n_chunks, owners=[2] * 4, collective=WITH_UPDATE, **facts)
    verify(schedule)
    assert compile_program(schedule, 2).owned == (OwnedRun(0, 1, 0), OwnedRun(1, 4, 1))
    assert compile_program(schedule, 0).owned == ()
    plain = Schedule(LINE, n_chunks=n_chunks, owners=[2] * 4, **facts)
    assert compile_program(plain, 2).owned == ()
    update_all(schedule, 10)


def three_ways(chip: Any, mesh: Mesh, group: Any, schedules: dict[str, dict[Collective, Schedule]]) -> Any:
    rank = mesh.rank(chip)
    found: dict[str, bool] = {}
    for planner, by_collective in schedules.items():
        engines = {
            collective: mmt.Engine(schedule, rank, group, timeout=SOON)
            for collective, schedule in by_collective.items()
        }
        for size in (1, 1000, 4321):
            summed = integers(rank, size)
            group.allreduce([summed]).wait()  # Gloo's own
            wanted = changed(summed)
            if WITH_UPDATE in engines:
                payload = integers(rank, size)
                engines[WITH_UPDATE].all_reduce(payload, update=lambda where, v: change(where, v))
                found[f"{planner} {size} update"] = torch.equal(payload, wanted)
            scatter, gather = engines[Collective.REDUCE_SCATTER], engines[Collective.ALL_GATHER]
            payload = integers(rank, size)
            scatter.reduce_scatter(payload)
            assert scatter.owned(size) == gather.owned(size)
            weights = torch.full((size,), -1)
            for where in scatter.owned(size):
                found[f"{planner} {size} {where}"] = torch.equal(payload[where], summed[where])
                weights[where] = changed(payload[where], where.start)
            gather.all_gather(weights)
            found[f"{planner} {size} phases"] = torch.equal(weights, wanted)
    bits = torch.arange(1000) % 3 == rank % 3
    gather.all_gather(bits)
    gathered = [torch.empty_like(bits) for _ in range(mesh.n_chips)]
    group.allgather([gathered], [bits]).wait()
    found["bools, the same everywhere"] = all(torch.equal(other, bits) for other in gathered)
    return found


def change(where: slice, values: Any) -> None:
    values.copy_(changed(values, where.start))


def test_three_ways_over_processes_give_what_gloo_gives() -> None:
    mesh = Mesh("2x6", failed=["2x2@0,2"], failed_cables=["0,0-0,1"], wrap=True)
    schedules: dict[str, dict[Collective, Schedule]] = {}
    parameters: dict[str, dict[str, Any]] = {"weave": {"chunks": 40}, "hamiltonian": {}, "gather": {"chunks": 33}}
    for planner, given in parameters.items():
        for collective in (WITH_UPDATE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER):
            try:
                schedule = plan(mesh, planner, collective=collective, **given)
            except PlanError:
                continue
            schedules.setdefault(planner, {})[collective] = schedule
    assert set(schedules) >= {"weave", "gather"}
    for chip, results in on_every_chip(mesh, three_ways, schedules).items():
        assert all(results.values()), (chip, results)
        assert len(results) > 12


@pytest.mark.parametrize(
    ("op", "wanted"), [(dist.ReduceOp.AVG, [20.0, 30.0]), (dist.ReduceOp.MAX, [30.0, 40.0])], ids=["mean", "largest"]
)
def test_an_update_is_given_what_was_asked_for(op: Any, wanted: list[float]) -> None:
    schedule = plan(LINE, "weave", chunks=2, collective=WITH_UPDATE)
    scatter = plan(LINE, "weave", chunks=2, collective="reduce-scatter")

    def main(rank: int, group: Any) -> Any:
        payload = torch.tensor([10.0 * (rank + 1), 10.0 * (rank + 2)])
        scattered = payload.clone()
        mmt.Engine(schedule, rank, group, timeout=SOON).all_reduce(
            payload, op, update=lambda _, values: values.mul_(-1) and None
        )
        engine = mmt.Engine(scatter, rank, group, timeout=SOON)
        engine.reduce_scatter(scattered, op)
        assert all(scattered[where].tolist() == wanted[where] for where in engine.owned(2))
        return payload.tolist()

    assert on_every_thread(3, main) == [[-value for value in wanted]] * 3


def test_a_future_of_an_update_and_an_all_reduce_without_one() -> None:
    schedule = plan(LINE, "weave", chunks=4, collective=WITH_UPDATE)

    def main(rank: int, group: Any) -> Any:
        engine = mmt.Engine(schedule, rank, group, timeout=SOON)
        started = engine.start(integers(rank, 50), update=change)
        plain = integers(rank, 50)
        engine.all_reduce(plain)
        mmt.all_reduce(tree := {"w": integers(rank, 50)}, engine)
        return started.wait(), plain, tree["w"]

    total = sums(3, 50)
    for updated, plain, tree in on_every_thread(3, main):
        assert torch.equal(updated, changed(total))
        assert torch.equal(plain, total)
        assert torch.equal(tree, total)


@pytest.mark.parametrize("failing", range(3))
def test_an_error_in_an_update_ends_the_call_on_every_chip(failing: int) -> None:
    schedule = plan(LINE, "weave", chunks=12, collective=WITH_UPDATE)

    def main(rank: int, group: Any) -> Any:
        engine = mmt.Engine(schedule, rank, group, timeout=SOON)
        payload, calls = integers(rank, 1200), 0

        def update(where: slice, values: Any) -> None:
            nonlocal calls
            calls += 1
            if rank == failing and calls == len(engine.owned(1200)):  # the last of its parts
                raise ZeroDivisionError("in the optimizer")
            change(where, values)

        started = time.monotonic()
        try:
            engine.all_reduce(payload, update=update)
        except Exception as error:
            took = time.monotonic() - started
            with pytest.raises((LostChipError, MeshmendError)):
                engine.all_reduce(payload)
            return error, took, engine.error
        return "no error"

    for rank, result in enumerate(on_every_thread(3, main)):
        assert result != "no error", f"chip {rank} has a result that another chip never finished"
        error, took, broken = result
        assert took < 5
        assert type(error) is (ZeroDivisionError if rank == failing else LostChipError)
        assert ("in the optimizer" in str(broken)) == (rank == failing)


def test_a_turn_that_takes_too_long_is_a_lost_chip() -> None:
    schedule = plan(LINE, "weave", chunks=6, collective=WITH_UPDATE)

    def main(rank: int, group: Any) -> Any:
        engine = mmt.Engine(schedule, rank, group, timeout=timedelta(seconds=1))

        def update(where: slice, values: Any) -> None:
            if rank == 1:
                time.sleep(2)
            change(where, values)

        started = time.monotonic()
        with pytest.raises(LostChipError):
            engine.all_reduce(integers(rank, 600), update=update)
        return time.monotonic() - started

    found = on_every_thread(3, main)
    assert all(isinstance(took, float) for took in found), found
    assert max(found[0], found[2]) < 1.9


def test_updates_are_called_one_at_a_time() -> None:
    mesh = Mesh("3x3")
    schedule = plan(mesh, "weave", chunks=90, collective=WITH_UPDATE)

    def main(rank: int, group: Any) -> Any:
        engine, inside, most = mmt.Engine(schedule, rank, group, timeout=SOON), threading.Semaphore(1), True

        def update(where: slice, values: Any) -> None:
            nonlocal most
            most &= inside.acquire(blocking=False)
            time.sleep(0.001)
            inside.release()

        engine.all_reduce(integers(rank, 900), update=update)
        return most

    assert on_every_thread(9, main) == [True] * 9


def test_an_update_that_returns_something() -> None:
    schedule = plan(LINE, "weave", chunks=1, collective=WITH_UPDATE)

    def main(rank: int, group: Any) -> Any:
        engine = mmt.Engine(schedule, rank, group, timeout=SOON)
        engine.all_reduce(torch.ones(4), update=lambda _, values: values * 2)

    found = on_every_thread(3, main)
    (refused,) = (error for error in found if isinstance(error, ParameterError))
    assert "returns nothing, got a Tensor" in str(refused)
    assert sum(isinstance(error, LostChipError) for error in found) == 2


def test_an_update_that_calls_its_own_engine() -> None:
    schedule = plan(LINE, "weave", chunks=3, collective=WITH_UPDATE)

    def main(rank: int, group: Any) -> Any:
        engine = mmt.Engine(schedule, rank, group, timeout=SOON)
        engine.all_reduce(torch.ones(30), update=lambda _, values: engine.all_reduce(values))

    found = on_every_thread(3, main)
    assert all(isinstance(error, ParameterError | LostChipError) for error in found)
    assert any("would wait for ever" in str(error) for error in found)


def test_an_update_that_only_some_pass_is_refused_by_all() -> None:
    schedule = plan(LINE, "weave", chunks=3, collective=WITH_UPDATE)

    def main(rank: int, group: Any) -> Any:
        engine = mmt.Engine(schedule, rank, group, timeout=SOON)
        with pytest.raises(DisagreementError, match="with a fused update"):
            engine.all_reduce(integers(rank, 30), update=change if rank else None)
        payload = integers(rank, 30)
        engine.all_reduce(payload, update=change)  # the group is intact
        return torch.equal(payload, changed(sums(3, 30)))

    assert on_every_thread(3, main) == [True] * 3


def test_calls_that_the_schedule_is_not_for() -> None:
    plans = {c: plan(Mesh("1x1"), "weave", collective=c) for c in Collective}

    def main(rank: int, group: Any) -> Any:
        engines = {c: mmt.Engine(schedule, rank, group) for c, schedule in plans.items()}
        one = torch.ones(1)
        calls: dict[Collective, Any] = {
            Collective.ALL_REDUCE: lambda engine: engine.all_reduce(one),
            WITH_UPDATE: lambda engine: engine.all_reduce(one, update=change),
            Collective.REDUCE_SCATTER: lambda engine: engine.reduce_scatter(one),
            Collective.ALL_GATHER: lambda engine: engine.all_gather(one),
        }
        for ours, engine in engines.items():
            for asked, call in calls.items():
                if ours is asked or (ours is WITH_UPDATE and asked is Collective.ALL_REDUCE):
                    call(engine)
                    continue
                with pytest.raises(ScheduleError, match=rf"which is no {asked}\. .* collective='{asked}'"):
                    call(engine)
            if not ours.is_all_reduce:
                for call in (lambda e: mmt.all_reduce(one, e), lambda e: e.start(one)):
                    with pytest.raises(ScheduleError, match="which is no all-reduce"):
                        call(engine)
        with pytest.raises(ScheduleError, match="which has no owners"):
            engines[Collective.ALL_REDUCE].owned(3)
        with pytest.raises(PayloadError, match="contiguous"):
            engines[Collective.ALL_GATHER].all_gather(torch.ones(4, 4).T)
        return engines[WITH_UPDATE].owned(3), engines[Collective.ALL_GATHER].owned(0)

    assert on_every_thread(1, main) == [((slice(0, 3),), ())]


def test_members_agree_on_owners_where_they_matter() -> None:
    facts: dict[str, Any] = {"total_chunks": 1, "step": [0, 1], "src": [0, 1], "dst": [1, 0], "op": [0, 1]}

    def digest(owner: int, collective: Collective) -> str:
        return digest_of(Schedule(Mesh("1x2"), owners=[owner], collective=collective, **facts), [0, 1])

    assert digest(0, Collective.ALL_REDUCE) == digest(1, Collective.ALL_REDUCE)
    assert len({digest(owner, WITH_UPDATE) for owner in (0, 1)} | {digest(1, Collective.ALL_REDUCE)}) == 3


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("momentum", marks=pytest.mark.slow)])
def test_the_example_updates_as_torch_does_in_one_process(optimizer: str) -> None:
    words = [sys.executable, str(EXAMPLE), "--optimizer", optimizer, "--steps", "6"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"within \d\.\de-\d\d of torch.optim in one process", done.stdout)
