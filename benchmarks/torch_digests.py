"""The cost of comparing replicas under torchft: digests of a chip's state and a copy of it, beside a training step.

    python benchmarks/torch_digests.py

One process on one core: a network with 10 million parameters and Adam, so three times as many elements of state. All
three are timed in turn, by the core's own clock for this process, so that others on the machine count little; medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from meshmend.torch.digests import digest, pieces
from meshmend.torch.snapshot import copied

WIDTH, LAYERS, SAMPLES = 1024, 10, 64
EVERY = 100
TIMES = 7


def main() -> None:
    """Time a step, the digests and the copy, and print their shares."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    adam = torch.optim.Adam(model.parameters())
    batch = torch.randn(SAMPLES, WIDTH)

    def step() -> None:
        adam.zero_grad()
        model(batch).square().mean().backward()
        adam.step()

    def digests() -> None:
        for _, piece in pieces([model.state_dict(), adam.state_dict()]):
            digest(piece)

    def copy() -> None:
        copied([model.state_dict(), adam.state_dict()])

    step()
    seconds: dict[str, list[float]] = {"step": [], "digests": [], "copy": []}
    tasks: list[Callable[[], None]] = [step, digests, copy]
    for _ in range(TIMES):
        for task in tasks:
            began = time.thread_time()
            task()
            seconds[task.__name__].append(time.thread_time() - began)
    n_elements = sum(piece.numel() for _, piece in pieces([model.state_dict(), adam.state_dict()]))
    whole, *rest = (statistics.median(times) for times in seconds.values())
    print(f"a step of {SAMPLES} samples: {whole * 1e3:.0f} ms; the state has {n_elements:,} elements")
    for name, part in zip(("digests", "copy"), rest, strict=True):
        print(f"{name}: {part * 1e3:.0f} ms, {part / whole / EVERY:.2%} of the steps if every {EVERY}")


if __name__ == "__main__":
    main()
