"""A cable that becomes slow while DDP trains: members find it and plan around it, and nothing happens where none is."""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import meshmend.torch as mmt  # noqa: E402
from meshmend import Mesh  # noqa: E402
from meshmend.launch import Chips  # noqa: E402
from meshmend.schedule import Schedule  # noqa: E402
from meshmend.torch import slow  # noqa: E402
from meshmend.torch.plans import Plans  # noqa: E402
from meshmend_lab.mesh import Lab  # noqa: E402
from namespaces import needs_lab  # noqa: E402
from torch_engine.processes import remembered  # noqa: E402
from torch_engine.test_wired import WIDTH, pieces, sent, weights  # noqa: E402

MESH, CABLE = Mesh("2x3"), ((0, 1), (1, 1))
GRADIENT_BYTES = 8 * (WIDTH * WIDTH + WIDTH)
SLOW_FROM, STEPS_AFTER = 5, 12
LOOKS = 3
"""Where no cable is slow, training ends after so many measurements."""


class Counted(slow.Pace):
    """A pace that counts measurements."""

    n_looks = 0

    def measured(self, now: float, took_s: float, *, has_changed: bool) -> None:
        self.n_looks += 1
        super().measured(now, took_s, has_changed=has_changed)


def train(chip: tuple[int, ...], lab: Lab, folder: Path) -> Any:
    """Train until the plan has changed, and for some steps more; or until cables were measured a few times."""
    warnings.simplefilter("ignore")  # both ends warn of the cable
    torch.set_num_threads(1)
    os.environ |= lab.environment(chip) | {"MASTER_PORT": "29571"}
    rank = lab.mesh.rank(chip)
    options = mmt.MeshOptions(plan=remembered, hardware=lab.hardware)
    timeout = timedelta(seconds=60)
    dist.init_process_group("cpu:meshmend", rank=rank, world_size=6, timeout=timeout, pg_options=options)
    world = dist.group.WORLD
    assert isinstance(world, mmt.MeshBackend)
    assert world.mesh_group is not None
    world.mesh_group._pace = pace = Counted()
    module, optimizer, loss = pieces(rank)
    model = DistributedDataParallel(module)
    losses: list[float] = []
    before: Counter[str] = Counter()
    changed = 0
    while len(losses) < changed + STEPS_AFTER if changed else pace.n_looks < LOOKS:
        optimizer.zero_grad()
        own = loss(model)
        own.backward()
        optimizer.step()
        losses.append(own.item())
        if not changed and world.mesh != MESH:
            changed = len(losses)
            # No measurement is to be among the bytes that are counted.
            slow.FIRST_S = 1e9
            world.mesh_group._pace = slow.Pace()
        if len(losses) == changed + 2:
            before = sent()
        (folder / f"at-{rank}").write_text(str(len(losses)))
    after = sent()
    after.subtract(before)
    dist.barrier()
    return len(losses), world.mesh, losses, weights(module), dict(after), pace.n_looks


def run(folder: Path, part: float | None) -> dict[tuple[int, ...], Any]:
    """Train on all chips of a lab, one of whose cables keeps a part of its rate after some steps."""
    with Lab.temporary(MESH, rate="40mbit") as lab, Chips(lab.enter) as chips:
        plans = Plans(remembered, hardware=lab.hardware)  # made here, once for all processes
        for mesh in (MESH, Mesh(MESH.shape, cable_rates={CABLE: "1/4"})):
            plans.get(mesh, GRADIENT_BYTES)
        for place in lab.namespaces:
            chips.start(place, train, lab, folder)
        at, deadline = folder / "at-0", time.monotonic() + 60
        while part is not None and (not at.exists() or int(at.read_text() or 0) < SLOW_FROM):
            assert time.monotonic() < deadline, "nobody trains"
            time.sleep(0.02)
        if part is not None:
            lab.slow({CABLE: part})
        return chips.results(240)


def check_training(found: dict[tuple[int, ...], Any]) -> None:
    """All have learnt what one process learns from all samples."""
    module, sgd, loss = pieces(None)
    (n_steps,) = {steps for steps, *_ in found.values()}
    alone = []
    for _ in range(n_steps):
        sgd.zero_grad()
        own = loss(module)
        own.backward()
        sgd.step()
        alone.append(own.item())
    torch.set_default_dtype(torch.float32)
    together = [sum(losses) / 6 for losses in zip(*(member[2] for member in found.values()), strict=True)]
    assert together == pytest.approx(alone, rel=1e-9)
    for member in found.values():
        assert member[3] == pytest.approx(weights(module), rel=0, abs=1e-12)


def carried(schedule: Schedule) -> dict[tuple[int, int], float]:
    """Return how many bytes of a step's gradients each chip sends to each other one."""
    chunks: Counter[tuple[int, int]] = Counter()
    plain = schedule.expanded()
    for src, dst, n in zip(plain.src.tolist(), plain.dst.tolist(), plain.n_chunks.tolist(), strict=True):
        chunks[src, dst] += n
    return {pair: n / schedule.total_chunks * GRADIENT_BYTES for pair, n in chunks.items()}


@pytest.mark.slow
@needs_lab
@pytest.mark.usefixtures("compiler")
def test_ddp_plans_around_a_cable_that_becomes_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow, "FIRST_S", 2.0)
    monkeypatch.setattr(slow, "COST", 0)
    found = run(tmp_path, 0.25)
    check_training(found)
    ((n_steps, mesh),) = {member[:2] for member in found.values()}
    assert n_steps > SLOW_FROM + STEPS_AFTER
    assert set(mesh.cable_rates) == {CABLE}
    assert mesh.cable_rates[CABLE] in [Fraction(1, 2), Fraction(1, 4), Fraction(1, 8)]  # others' noise is in it
    hardware = Lab("", MESH, "40mbit").hardware
    plans = Plans(remembered, hardware=hardware)
    expected, unplanned = carried(plans.get(mesh, GRADIENT_BYTES)), carried(plans.get(MESH, GRADIENT_BYTES))
    ends = MESH.rank(CABLE[0]), MESH.rank(CABLE[1])
    assert expected.get(ends, 0.0) < 0.7 * unplanned[ends]
    for chip, (*_, bytes_sent, _) in found.items():
        rank = MESH.rank(chip)
        for port, other in zip(("south", "north", "east", "west"), MESH.neighbours[rank].tolist(), strict=True):
            if other >= 0:
                least = expected.get((rank, other), 0.0) * (STEPS_AFTER - 2)
                # Headers, acknowledgements and agreements come on top.
                assert least <= bytes_sent[port] <= 1.1 * least + 4000 * (STEPS_AFTER - 2)


@pytest.mark.slow
@needs_lab
@pytest.mark.usefixtures("compiler")
def test_where_no_cable_is_slow_measuring_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow, "FIRST_S", 0.5)
    monkeypatch.setattr(slow, "COST", 0)
    found = run(tmp_path, None)
    check_training(found)
    assert {(member[1], member[-1]) for member in found.values()} == {(MESH, LOOKS)}
