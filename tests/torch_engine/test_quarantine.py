"""Quarantine under torchft: a job obeys its list while it trains, and the chips that are left out lose no sample.

All gradients are whole numbers, so sums are exact whoever adds them up. The weights at the end are held against NumPy
in one process, which knows only how many chips took part in each step.
"""

from __future__ import annotations

import functools
import logging
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")
pytest.importorskip("torchft", reason="torchft is not installed: pip install 'meshmend[torch]'")

import torch
import torchft
from torchft.coordination import LighthouseServer
from typer.testing import CliRunner

import meshmend.torch as mmt
from meshmend.cli import app
from meshmend.errors import QuarantineError
from meshmend.launch.chips import Chips
from meshmend.launch.timeline import read_timeline
from meshmend.planning import PlanCache, plan
from meshmend.torch.sampling import order_of

Chip = tuple[int, ...]

LIGHTHOUSE, SUSPECT = (-1,), (0, 1)
SHAPE, N_CHIPS = "3x3", 9
N_SAMPLES, PER_CHIP, WIDTH = 90, 2, 40
RATE = 2.0**-9
HEARTBEAT_MS = 3000
"""Longer than a job needs: on a machine where many processes share few cores, those who are alive seem dead earlier."""


def samples() -> torch.Tensor:
    return torch.tensor(np.random.default_rng(7).integers(-3, 4, (N_SAMPLES, WIDTH)).astype(np.float64))


class Exact(torch.nn.Module):
    """Weights whose gradient is the sum of some samples."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.w * batch.sum(dim=0)).sum()


def serve(_: Chip, address: Path) -> None:
    """Be the lighthouse until killed."""
    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=60_000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=HEARTBEAT_MS,
    )
    partial = address.with_suffix(".part")
    partial.write_text(f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}")
    partial.rename(address)
    while True:
        time.sleep(60)


def train(chip: Chip, folder: Path, life: int) -> dict[str, Any]:
    """Train until the file `stop` appears; return how it ended."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")  # those of torchft, as errors, would fail each quorum
    torch.set_num_threads(1)
    os.environ["TORCHFT_LIGHTHOUSE"] = (folder / "lighthouse").read_text()
    module = Exact()
    sgd = torch.optim.SGD(module.parameters(), lr=RATE)
    cached = functools.partial(plan, cache=PlanCache(folder / "plans"))
    group = mmt.MeshProcessGroup(SHAPE, chip, interface="lo", plan=cached)
    try:
        manager = mmt.Manager.of(group, shared=folder / "shared", module=module, sgd=sgd)
    except QuarantineError as error:
        return {"refused": str(error)}
    if life == 0:
        # Torchft trains with whoever is there. All of them shall be.
        (folder / f"here-{group.whole.rank(chip)}").touch()
        until(lambda: len(list(folder.glob("here-*"))) == N_CHIPS)
    data = samples()
    steps: dict[int, int] = {}
    """How many chips took part in each step."""
    sampler = mmt.StepSampler(manager, N_SAMPLES, PER_CHIP, seed=3)
    parallel = mmt.DistributedDataParallel(manager, module)
    optimizer = torchft.Optimizer(manager, sgd)
    try:
        while not (folder / "stop").exists():
            optimizer.zero_grad()
            step = manager.current_step()
            parallel(data[sampler.indices()]).backward()
            optimizer.step()
            if manager.current_step() > step:
                steps[step + 1] = manager.num_participants()
            (folder / f"at-{group.whole.rank(chip)}").write_text(str(manager.current_step()))
            time.sleep(0.05)
    except QuarantineError as error:
        return {"left": str(error)}
    manager.shutdown()
    weights = module.w.detach().numpy().tobytes()
    return {"weights": weights, "steps": steps, "cables": group.mesh.failed_cables}


def until(condition: Callable[[], bool], patience_s: float = 120.0) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


def expected(members: dict[int, int]) -> bytes:
    """Return the weights after steps with so many chips each."""
    data, weights, position = samples().numpy(), np.zeros(WIDTH), 0
    for _, n_chips in sorted(members.items()):
        places = np.arange(position, position + n_chips * PER_CHIP)
        records = [order_of(3, int(place // N_SAMPLES), N_SAMPLES)[place % N_SAMPLES] for place in places]
        weights = weights - RATE * (data[records].sum(axis=0) / n_chips)
        position += n_chips * PER_CHIP
    return weights.tobytes()


def command(*words: str) -> None:
    done = CliRunner().invoke(app, ["quarantine", *words])
    assert done.exit_code == 0, done.output


@pytest.mark.slow
def test_by_hand_and_back(tmp_path: Path) -> None:
    shared = str(tmp_path / "shared")
    # The first optimizer imports a compiler, which takes seconds: once here, not once in every chip that is forked.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])

    def at_step(rank: int) -> int:
        path = tmp_path / f"at-{rank}"
        return int(path.read_text() or 0) if path.exists() else 0

    with Chips() as chips:
        chips.start(LIGHTHOUSE, serve, tmp_path / "lighthouse")
        until((tmp_path / "lighthouse").exists)
        for rank in range(N_CHIPS):
            chips.start(divmod(rank, 3), train, tmp_path, 0)
        until(lambda: at_step(0) >= 3)
        command("add", shared, "0,1", "--why", "a smell of smoke")
        command("add", shared, "1,0-2,0", "--why", "a loose plug")
        found: dict[Chip, Any] = {}

        def has_ended(chip: Chip = SUSPECT) -> bool:
            found.update(chips.poll())
            return chip in found

        until(has_ended)
        assert "0,1 is in quarantine until" in found[SUSPECT]["left"]
        assert "because of a smell of smoke" in found[SUSPECT]["left"]
        assert f"`meshmend quarantine clear {shared} '0,1'`" in found[SUSPECT]["left"]
        here = at_step(0)
        until(lambda: at_step(0) >= here + 5)
        # It cannot come back yet: the lighthouse does not hear of it, and nobody waits for it.
        found.clear()
        chips.start(SUSPECT, train, tmp_path, 1)
        until(has_ended)
        assert "because of a smell of smoke" in found.pop(SUSPECT)["refused"]
        command("clear", shared, "0,1")
        chips.start(SUSPECT, train, tmp_path, 2)
        until(lambda: at_step(1) > here + 5)
        (tmp_path / "stop").touch()
        for rank in range(N_CHIPS):
            until(functools.partial(has_ended, divmod(rank, 3)))
    steps = found[0, 0]["steps"]
    changes = [n for n, before in zip(steps.values(), [0, *steps.values()], strict=False) if n != before]
    assert changes == [9, 8, 9]  # with the chip, without it, and with it again
    assert {end["weights"] for end in found.values()} == {expected(steps)}
    assert {end["cables"] for end in found.values()} == {(((1, 0), (2, 0)),)}
    written = [event for path in (tmp_path / "shared/timeline").iterdir() for event in read_timeline(path)]
    noted = {(event["suspect"], event["id"]) for event in written if event["event"] == "quarantined"}
    assert sorted(suspect for suspect, _ in noted) == ["0,1", "1,0-2,0"]
    assert (0, 1) not in [tuple(chip) for event in written if event["event"] == "host lost" for chip in event["chips"]]
