"""The engine over real processes and real sockets: exact sums, the same bits everywhere, an error and never a hang."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import meshmend.numpy as mmn
from meshmend import Mesh, PlanError, plan
from meshmend.planning import PLANNERS

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")

import meshmend.torch as mmt  # noqa: E402
from meshmend.errors import LostChipError  # noqa: E402
from torch_engine.processes import on_every_chip  # noqa: E402

MESHES = [
    pytest.param("2x4", [], id="2x4", marks=pytest.mark.slow),
    pytest.param("4x4", ["2x2@0,2"], id="4x4 minus 2x2", marks=pytest.mark.slow),
    pytest.param("6x6", ["2x2@2,2"], id="6x6 minus 2x2", marks=pytest.mark.slow),
    pytest.param("4x4", ["1,1"], id="4x4 minus a chip"),
    pytest.param("3x5", ["1,1", "1,2", "2,4"], id="3x5 minus an odd hole"),
]


def integers(rank: int, size: int) -> Any:
    return np.random.default_rng(rank).integers(-(2**30), 2**30, size)


def reduce_all(chip: Any, mesh: Mesh, group: Any, schedules: dict[str, Any]) -> dict[str, Any]:
    rank, n = mesh.rank(chip), mesh.n_chips
    found: dict[str, Any] = {}
    for name, schedule in schedules.items():
        engine = mmt.Engine(schedule, rank, group, timeout=timedelta(seconds=30))
        for size in (1, 7, 1000, 12345):
            payload = torch.from_numpy(integers(rank, size))
            engine.all_reduce(payload)
            wanted = sum(integers(other, size) for other in range(n))
            found[f"{name} {size}"] = bool((payload.numpy() == wanted).all())
        reals = torch.rand(4321, generator=torch.Generator().manual_seed(rank))
        twice = reals.clone()
        engine.all_reduce(reals)
        engine.all_reduce(twice)
        found[f"{name} again"] = bool(torch.equal(reals, twice))
        found[f"{name} bits"] = hashlib.sha256(reals.numpy().tobytes()).hexdigest()
    return found


@pytest.mark.parametrize(("shape", "failed"), MESHES)
def test_every_planner_is_exact_and_all_chips_agree(shape: str, failed: list[str]) -> None:
    mesh = Mesh(shape, failed=failed)
    schedules = {}
    for name in PLANNERS.keys() - {"auto"}:  # it takes one of the others
        try:
            schedules[name] = plan(mesh, name)
        except PlanError:
            continue
    if not schedules:
        pytest.skip(f"no planner serves {mesh}")
    found = on_every_chip(mesh, reduce_all, schedules)
    reals = np.stack(
        [torch.rand(4321, generator=torch.Generator().manual_seed(r)).numpy() for r in range(mesh.n_chips)]
    )
    first = next(iter(found.values()))
    for chip, results in found.items():
        assert all(value is True for key, value in results.items() if not key.endswith(" bits")), (chip, results)
        assert {k: v for k, v in results.items() if k.endswith(" bits")} == {
            k: v for k, v in first.items() if k.endswith(" bits")
        }
    # The sums of reals are made in the order of the schedule, so they are NumPy's to the last bit
    # where chunks are cut alike: in one run of every planner the reference engine cuts with padding.
    for name, schedule in schedules.items():
        if 4321 % schedule.total_chunks == 0:
            wanted = mmn.run(schedule, reals)[0]
            assert first[f"{name} bits"] == hashlib.sha256(wanted.tobytes()).hexdigest()


@pytest.mark.parametrize("moment", [pytest.param("before", marks=pytest.mark.slow), "inside"])
def test_a_dead_chip_gives_every_survivor_an_error_at_once(moment: str) -> None:
    mesh = Mesh("4x4")
    schedule = plan(mesh, "hamiltonian")
    from meshmend.launch.chips import Chips
    from torch_engine.processes import free_port, gloo

    port = free_port()

    def body(chip: tuple[int, ...]) -> Any:
        group = gloo(mesh, chip, port)
        engine = mmt.Engine(schedule, mesh.rank(chip), group, timeout=timedelta(seconds=20))
        payload = torch.ones(2_000_000)
        engine.all_reduce(payload)
        group.barrier().wait()
        if chip == (2, 1):
            if moment == "inside":
                threading.Thread(target=engine.all_reduce, args=(payload,), daemon=True).start()
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        # A chip may finish one all-reduce that the lost one had already served; it cannot finish the next.
        messages = []
        for _ in range(2):
            try:
                engine.all_reduce(payload)
            except LostChipError as error:
                messages.append(str(error))
        took = time.monotonic() - started
        time.sleep(2)
        return took, messages

    with Chips() as chips:
        for rank in range(mesh.n_chips):
            chips.start(mesh.chip(rank), body)
        found: dict[Any, Any] = {}
        deadline = time.monotonic() + 60
        while len(found) < 15 and time.monotonic() < deadline:
            try:
                found |= chips.poll()
            except Exception as error:
                assert "(2,1)" in str(error)  # noqa: PT017
            time.sleep(0.01)
    assert len(found) == 15
    for took, messages in found.values():
        assert took < 10
        assert messages
        assert "gave up a collective on 4x4" in messages[-1]
