"""ZeRO-1 with a fused update: every chip keeps the optimizer's state of the weights that it owns, and nothing else.

    python examples/torch/sharded_update.py --optimizer adamw

Eleven processes as a 3×4 mesh without one chip. Gradients go up to the owner of each part of the weights, the owner
updates that part with its share of the optimizer's state, and new weights come down again, all in one all-reduce. At
the end the weights are compared with those of torch's own optimizer in one process with the whole batch.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import torch
import torch.distributed as dist

import meshmend as mm
import meshmend.torch as mmt
from meshmend.launch import Chips

Tensors = dict[str, torch.Tensor]
Rule = Callable[[torch.Tensor, torch.Tensor, Tensors, int], tuple[torch.Tensor, Tensors]]
"""An optimizer's rule: from weights, gradients, their state and the step's number to new weights and new state."""


def momentum(weights: torch.Tensor, gradients: torch.Tensor, state: Tensors, step: int) -> tuple[torch.Tensor, Tensors]:
    """SGD with momentum, as torch.optim.SGD(lr=0.05, momentum=0.9)."""
    velocity = gradients.clone() if step == 1 else 0.9 * state["velocity"] + gradients
    return weights - 0.05 * velocity, {"velocity": velocity}


def adamw(weights: torch.Tensor, gradients: torch.Tensor, state: Tensors, step: int) -> tuple[torch.Tensor, Tensors]:
    """AdamW, as torch.optim.AdamW(lr=0.003)."""
    mean = 0.9 * state.get("mean", 0.0) + 0.1 * gradients
    square = 0.999 * state.get("square", 0.0) + 0.001 * gradients * gradients
    step_size, root = 0.003 / (1 - 0.9**step), (square / (1 - 0.999**step)).sqrt()
    return weights * (1 - 0.003 * 0.01) - step_size * mean / (root + 1e-8), {"mean": mean, "square": square}


RULES: dict[str, tuple[Rule, Callable[[Any], torch.optim.Optimizer]]] = {
    "momentum": (momentum, lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9)),
    "adamw": (adamw, lambda weights: torch.optim.AdamW(weights, lr=0.003)),
}


class ShardedOptimizer:
    """Updates a model's weights in one all-reduce; keeps the optimizer's state of what this chip owns.

    What the updates make is kept aside until the all-reduce has returned. If it raises, neither weights nor state have
    changed on this chip, and the step can be redone on a new group.
    """

    def __init__(self, model: torch.nn.Module, engine: mmt.Engine, rule: Rule) -> None:
        self.weights, self.engine, self.rule = list(model.parameters()), engine, rule
        n_weights = sum(weight.numel() for weight in self.weights)
        self.state: dict[int, Tensors] = {where.start: {} for where in engine.owned(n_weights)}
        self.step_number = 0

    def step(self) -> None:
        """Average the gradients over all chips, and update the weights everywhere."""
        old = torch.cat([weight.detach().reshape(-1) for weight in self.weights])
        payload = torch.cat([weight.grad.reshape(-1) for weight in self.weights if weight.grad is not None])
        pending: dict[int, Tensors] = {}

        def update(where: slice, values: torch.Tensor) -> None:
            new, pending[where.start] = self.rule(old[where], values, self.state[where.start], self.step_number + 1)
            values.copy_(new)

        self.engine.all_reduce(payload, dist.ReduceOp.AVG, update=update)
        self.state, self.step_number = pending, self.step_number + 1
        parts = payload.split([weight.numel() for weight in self.weights])
        with torch.no_grad():
            for weight, part in zip(self.weights, parts, strict=True):
                weight.copy_(part.view(weight.shape))

    @property
    def n_kept(self) -> int:
        """Number of elements of the optimizer's state on this chip."""
        return sum(kept.numel() for state in self.state.values() for kept in state.values())


def make_model() -> torch.nn.Module:
    """Return a small model with the same weights in every process."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One chip's samples: as many for every chip, so that the mean of means is the mean."""
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
    return inputs, inputs.square().sum(dim=1, keepdim=True).sin()


def train(chip: tuple[int, ...], mesh: mm.Mesh, schedule: mm.Schedule, name: str, steps: int, file: str) -> Any:
    """One chip: returns its weights at the end, and how much state it kept."""
    torch.set_num_threads(1)
    rank = mesh.rank(chip)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=mesh.n_chips)
    model = make_model()
    engine = mmt.Engine(schedule, rank, dist.group.WORLD, timeout=timedelta(seconds=60))
    optimizer = ShardedOptimizer(model, engine, RULES[name][0])
    for step in range(steps):
        model.zero_grad()
        inputs, targets = batch(step, rank)
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    dist.barrier()
    return [weight.detach().numpy() for weight in model.parameters()], optimizer.n_kept


def reference(n_chips: int, name: str, steps: int) -> tuple[list[torch.Tensor], int]:
    """Train the same in one process, with torch's optimizer and all samples in one batch."""
    model = make_model()
    optimizer = RULES[name][1](model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        parts = [batch(step, rank) for rank in range(n_chips)]
        inputs, targets = (torch.cat(column) for column in zip(*parts, strict=True))
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return [weight.detach() for weight in model.parameters()], sum(value.numel() for value in kept if value.dim())


def main() -> None:
    """Train on all chips, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=RULES, default="adamw")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    mesh = mm.Mesh("3x4", failed=["1,1"])
    schedule = mm.plan(mesh, "weave", chunks=4 * mesh.n_chips, collective="all-reduce-with-update")
    with tempfile.TemporaryDirectory() as folder, Chips() as chips:
        for rank in range(mesh.n_chips):
            chips.start(
                mesh.chip(rank), train, mesh, schedule, given.optimizer, given.steps, str(Path(folder) / "store")
            )
        found = list(chips.results(120).values())
    wanted, replicated = reference(mesh.n_chips, given.optimizer, given.steps)
    for weights, _ in found:
        if not all((mine == first).all() for mine, first in zip(weights, found[0][0], strict=True)):
            raise SystemExit("The chips have different weights.")
    pairs = list(zip(found[0][0], wanted, strict=True))
    off = max(float((torch.from_numpy(mine) - theirs).abs().max()) for mine, theirs in pairs)
    most = max(kept for _, kept in found)
    print(f"{given.optimizer} on {mesh}, {given.steps} steps: every chip has the same weights,")
    print(
        f"within {off:.1e} of torch.optim in one process. State per chip: at most {most:,} of {replicated:,} elements."
    )
    if off > 1e-5 or sum(kept for _, kept in found) != replicated:
        raise SystemExit("The weights or the shares of the state are wrong.")


if __name__ == "__main__":
    main()
