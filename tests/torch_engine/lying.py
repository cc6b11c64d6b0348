"""A job under torchft in which one chip computes wrong numbers, and what its end must be, computed without any chips.

All gradients are whole numbers, so sums are exact whoever adds them up, and depend on the weights, so that a wrong
weight anywhere shows in all later ones.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchft
from numpy.typing import NDArray

import meshmend.torch as mmt
from meshmend import Mesh
from meshmend.bench.replica import divert, lighthouse
from meshmend.errors import MeshmendError, QuarantineError
from meshmend.lab.chips import Chips
from meshmend.planning import PlanCache, PlanFunction, plan
from meshmend.torch.place import LOOPBACK
from meshmend.torch.plans import Plans
from meshmend.torch.sampling import order_of

LIGHTHOUSE = (-1,)
HEARTBEAT_MS = 3000
"""Longer than a job needs: on a machine where many processes share few cores, those who are alive seem dead earlier."""
N_SAMPLES, PER_CHIP, WIDTH = 90, 2, 40
RATE, MOMENTUM = 2.0**-9, 0.5

Chip = tuple[int, ...]


@dataclass(frozen=True)
class Lying:
    """What a chip does wrong from a step on.

    "update", "gradient": its weights, or its gradients, are wrong. "once": one update is. "noise": what it recomputes
    is never the same twice. "deaf": it loses the others at the check of that step, and never reads the sign book.
    "slow": it takes longer than the others.
    """

    chip: Chip = (0, 0)
    how: str = "nothing"
    step: int = 0


@dataclass(frozen=True)
class LyingJob:
    """What every chip of the job receives."""

    shape: str
    folder: Path
    checks: mmt.Checks | None
    liars: tuple[Lying, ...] = ()
    steps: int = 12
    pause_s: float = 0.0

    @property
    def shared(self) -> Path:
        return self.folder / "shared"

    @property
    def plan(self) -> PlanFunction:
        return functools.partial(plan, cache=PlanCache(self.folder / "plans"))


def samples() -> torch.Tensor:
    return torch.tensor(np.random.default_rng(7).integers(-3, 4, (N_SAMPLES, WIDTH)).astype(np.float64))


def first_weights() -> NDArray[np.float64]:
    return np.random.default_rng(8).integers(-99, 99, WIDTH) / 64


class Exact(torch.nn.Module):
    """Weights whose gradient is the sum of some samples, times a small whole number that depends on the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(first_weights()))
        self.error = 0.0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        level = torch.floor(self.w.detach() * 64) % 8 - 3
        wrong = torch.zeros_like(self.w)
        wrong[5] = self.error
        return (self.w * (batch.sum(dim=0) * level + wrong)).sum()


def train(chip: Chip, job: LyingJob, life: int = 0) -> dict[str, Any]:
    """Train as a chip that may lie; return how it ended."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")  # those of torchft, as errors, would fail each quorum
    divert(job.folder / f"{chip}.{life}.err")
    torch.set_num_threads(1)
    os.environ["TORCHFT_LIGHTHOUSE"] = (job.folder / "lighthouse").read_text()
    lies = {one.how: one.step for one in job.liars if one.chip == chip}
    module = Exact()
    sgd = torch.optim.SGD(module.parameters(), lr=RATE, momentum=MOMENTUM)
    group = mmt.MeshProcessGroup(job.shape, chip, interface="lo", plan=job.plan)
    if "deaf" in lies:
        group.gather = deafened(group.gather, f"after step {lies['deaf']},")  # type: ignore[method-assign]
    steps: dict[int, int] = {}
    """How many chips took part in each step that is not undone."""
    try:
        manager = mmt.Manager.of(group, shared=job.shared, checks=job.checks, module=module, sgd=sgd)
    except QuarantineError as error:
        return {"refused": str(error)}
    if "deaf" in lies:
        assert manager._guard is not None
        manager._guard.before_quorum = lambda: None  # type: ignore[method-assign]
    if life == 0:
        # Torchft trains with whoever is there. All of them shall be.
        (job.folder / f"here-{group.whole.rank(chip)}").touch()
        until(lambda: len(list(job.folder.glob("here-*"))) == group.whole.n_chips)
    data, counting = samples(), itertools.count()
    sampler = mmt.StepSampler(manager, N_SAMPLES, PER_CHIP, seed=3)
    parallel = mmt.DistributedDataParallel(manager, module)
    optimizer = torchft.Optimizer(manager, sgd)
    try:
        while manager.current_step() < job.steps and not (job.folder / "stop").exists():
            optimizer.zero_grad()
            step = manager.current_step()
            steps = {number: n for number, n in steps.items() if number <= step}
            batch = data[sampler.indices()]
            module.error = float("gradient" in lies and step >= lies["gradient"])

            def gradients(batch: torch.Tensor) -> Any:
                noise = float("noise" in lies) * next(counting)
                return [gradient + noise for gradient in torch.autograd.grad(module(batch), [module.w])]

            manager.recompute(gradients, batch)
            parallel(batch).backward()
            optimizer.step()
            if manager.current_step() > step:
                steps[step + 1] = manager.num_participants()
                if ("update" in lies and step >= lies["update"]) or ("once" in lies and step == lies["once"]):
                    lies.pop("once", None)
                    with torch.no_grad():
                        module.w[3] += 0.25
            (job.folder / f"at-{group.whole.rank(chip)}").write_text(str(manager.current_step()))
            time.sleep(job.pause_s * (1.5 if "slow" in lies and step >= lies["slow"] else 1.0))
    except QuarantineError as error:
        return {"left": str(error), "steps": steps, "cables": group.mesh.failed_cables}
    manager.shutdown()
    return {
        "weights": module.w.detach().numpy().tobytes(),
        "steps": steps,
        "batches": manager.batches_committed(),
        "verified": manager.verified,
        "cables": group.mesh.failed_cables,
        "events": [event for event in manager.timeline.events if event["event"] in ("gave up", "unrepeatable")],
    }


def deafened(gather: Any, when: str) -> Any:
    """Return a group's `gather` that fails once, at the last moment."""
    left = [when]

    def fail_once(description: str, own: bytes) -> Any:
        told = gather(description, own)
        if left and left[0] in description:
            left.clear()
            raise MeshmendError("nothing was heard")
        return told

    return fail_once


def until(condition: Any, patience_s: float = 60.0) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


def at_step(job: LyingJob, rank: int) -> int:
    """Return how far a chip is."""
    with suppress(FileNotFoundError, ValueError):
        return int((job.folder / f"at-{rank}").read_text())
    return 0


def start(job: LyingJob, chips: Chips) -> None:
    """Start the lighthouse and all chips; `finish` says how they end."""
    # The first optimizer imports a compiler, which takes seconds: once here, not once in every chip that is forked.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    mesh, plans = Mesh(job.shape), Plans(job.plan, hardware=LOOPBACK)
    for survivors in (mesh, *(mesh.fail(one.chip) for one in job.liars)):
        plans.get(survivors, payload_bytes=1)
    chips.start(LIGHTHOUSE, lighthouse, job.folder / "lighthouse", HEARTBEAT_MS)
    until((job.folder / "lighthouse").exists)
    for rank in range(mesh.n_chips):
        chips.start(mesh.chip(rank), train, job)


def finish(job: LyingJob, chips: Chips, timeout_s: float = 120.0) -> dict[Chip, dict[str, Any]]:
    """Return how each chip ended."""
    found: dict[Chip, dict[str, Any]] = {}

    def is_over() -> bool:
        found.update(chips.poll())
        return chips.alive == [LIGHTHOUSE]

    until(is_over, timeout_s)
    chips.kill([LIGHTHOUSE])
    return found | chips.results(10)


def expected(members: dict[int, int]) -> bytes:
    """Return the weights after steps with so many chips each, by NumPy in one process."""
    data = samples().numpy()
    weights, speed, position = first_weights(), np.zeros(WIDTH), 0
    for _, n_chips in sorted(members.items()):
        places = np.arange(position, position + n_chips * PER_CHIP)
        records = [order_of(3, int(place // N_SAMPLES), N_SAMPLES)[place % N_SAMPLES] for place in places]
        gradient = data[records].sum(axis=0) * (np.floor(weights * 64) % 8 - 3) / n_chips
        speed = MOMENTUM * speed + gradient
        weights = weights - RATE * speed
        position += n_chips * PER_CHIP
    return weights.tobytes()
