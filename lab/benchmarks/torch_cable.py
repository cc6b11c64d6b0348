"""A cable is cut or slow while a lab trains: when training goes on, what is lost, and which cables carry bytes then.

    sudo python lab/benchmarks/torch_cable.py ddp
    sudo python lab/benchmarks/torch_cable.py torchft --renew 3
    sudo python lab/benchmarks/torch_cable.py ddp --renew never
    sudo python lab/benchmarks/torch_cable.py ddp --slow 0.25 --mend 150 --rate 10mbit --steps 360

One process per chip, on the links of a lab. Routes around the cable are set so many seconds after the cut (`--renew`),
as a routing daemon would. With `--slow` the cable keeps that part of its rate, and is as fast as before
after the step of `--mend`. Losses are held against one process that trains alone on all samples.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import meshmend.torch as mmt
from meshmend import Mesh
from meshmend.launch.chips import Chips
from meshmend_lab.mesh import Lab
from meshmend_lab.mesh.namespaces import INTERFACE

PER_CHIP, WIDTH, HIDDEN = 8, 64, 256
LIGHTHOUSE = "29510"
Step = tuple[float, float, str, dict[str, int]]
"""When a step ended, its loss on the chip's own samples, the mesh, and the bytes that each interface has sent."""


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)  # so that other orders of a sum stay far below what a lost step would change
    hidden = torch.nn.Linear(WIDTH, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.ReLU()
    module = torch.nn.Sequential(*hidden, torch.nn.Linear(HIDDEN, 1))
    return module, torch.optim.SGD(module.parameters(), lr=0.01)


def samples(n_chips: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape, seed = (PER_CHIP * n_chips, WIDTH), torch.Generator().manual_seed(1)
    inputs = torch.randn(*shape, generator=seed, dtype=torch.float64)
    return inputs, inputs.sum(1, keepdim=True)


def sent() -> dict[str, int]:
    """Return how many bytes each interface of this namespace has sent, by the kernel's account."""
    rows = (line.split() for line in Path("/proc/self/net/dev").read_text().splitlines()[2:])
    return {row[0].rstrip(":"): int(row[9]) for row in rows}


def train(chip: tuple[int, ...], mode: str, lab: Lab, steps: int, timeout_s: float, folder: Path) -> Any:
    """Train for so many steps; return all of them, and how many were not committed or what ended it."""
    os.environ |= lab.environment(chip)
    torch.set_num_threads(1)
    rank, n = lab.mesh.rank(chip), lab.mesh.n_chips
    (module, sgd), (inputs, targets) = make(), samples(n)
    own = slice(PER_CHIP * rank, PER_CHIP * (rank + 1))
    done: list[Step] = []
    refused = 0
    timeout = timedelta(seconds=timeout_s)
    if mode == "ddp":
        os.environ["MASTER_PORT"] = "29555"
        dist.init_process_group("cpu:meshmend", rank=rank, world_size=n, timeout=timeout)
        model: Any = torch.nn.parallel.DistributedDataParallel(module)
        optimizer: Any = sgd
        group: Any = dist.group.WORLD
    else:
        import socket

        import torchft
        from torchft.coordination import LighthouseServer

        where = lab.address(lab.mesh.chip(0))
        if rank == 0:
            server = LighthouseServer(
                bind=f"0.0.0.0:{LIGHTHOUSE}",
                min_replicas=n,
                join_timeout_ms=60000,
                quorum_tick_ms=20,
                heartbeat_timeout_ms=15000,
            )
            (folder / "lighthouse").touch()
        while not (folder / "lighthouse").exists():
            time.sleep(0.1)
        os.environ["TORCHFT_LIGHTHOUSE"] = f"http://{where}:{LIGHTHOUSE}"
        socket.gethostname = lambda: lab.address(chip)
        group = mmt.MeshProcessGroup(interface=INTERFACE, timeout=timeout)
        manager = mmt.Manager.of(group, module=module, sgd=sgd)
        model, optimizer = mmt.DistributedDataParallel(manager, module), torchft.Optimizer(manager, sgd)
    try:
        while len(done) < steps:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs[own]), targets[own])
            loss.backward()
            before = manager.current_step() if mode == "torchft" else 0
            optimizer.step()
            if mode == "torchft" and manager.current_step() == before:
                refused += 1
                continue
            done.append((time.time(), loss.item(), str(group.mesh), sent()))
            if rank == 0:
                (folder / "step").write_text(str(len(done)))
    except Exception as error:
        return done, f"after {time.time() - done[-1][0]:.1f} s: {type(error).__name__}: {error}"
    if mode == "torchft":
        manager.shutdown()
        time.sleep(2)
        if rank == 0:
            server.shutdown()
    else:
        dist.barrier()
    return done, refused


def alone(n_chips: int, steps: int) -> list[float]:
    """Return the losses of one process that trains on all samples."""
    (module, sgd), (inputs, targets) = make(), samples(n_chips)
    found = []
    for _ in range(steps):
        sgd.zero_grad()
        loss = torch.nn.functional.mse_loss(module(inputs), targets)
        loss.backward()
        sgd.step()
        found.append(loss.item())
    return found


def main() -> None:
    """Cut the cable after a third of the steps, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["ddp", "torchft"])
    parser.add_argument("--shape", default="3x3")
    parser.add_argument("--rate", default="40mbit")
    parser.add_argument("--cable", default="0,1-1,1")
    parser.add_argument("--renew", default="1", help="seconds until routes lead around the cable, or never")
    parser.add_argument("--slow", type=float, help="what the cable keeps of its rate: it is not cut")
    parser.add_argument("--mend", type=int, default=None, help="the step after which a slow cable has its rate again")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--timeout", type=float, default=20.0, help="of the group, in seconds")
    options = parser.parse_args()
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # imports a compiler, once and not in each process
    mesh, third = Mesh(options.shape), options.steps // 3
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"torch-cable-{os.getpid()}"  # noqa: S108  # of this process only
    folder.mkdir()
    with Lab.temporary(mesh, rate=options.rate) as lab, Chips(lab.enter) as chips:
        for chip in lab.namespaces:
            chips.start(chip, train, options.mode, lab, options.steps, options.timeout, folder)
        reached = folder / "step"

        def wait_for(step: int) -> None:
            while not reached.exists() or int(reached.read_text() or 0) < step:
                time.sleep(0.02)
                chips.poll()

        wait_for(third)
        cut_at, mended_at = time.time(), math.inf
        if options.slow is not None:
            lab.slow({options.cable: options.slow})
            if options.mend is not None:
                wait_for(options.mend)
                lab.slow({})
                mended_at = time.time()
        else:
            left = lab.cut(options.cable)
            if options.renew != "never":
                time.sleep(float(options.renew))
                left.renew()
        found = chips.results(timeout_s=600)
    show(mesh, options, found, cut_at, mended_at)


def show(mesh: Mesh, options: argparse.Namespace, found: dict[Any, Any], cut_at: float, mended_at: float) -> None:
    """Print when training went on, the losses, and what each interface sent before and after."""
    ended = {chip: how for chip, (_, how) in found.items()}
    what = f"cut, routes renewed after {options.renew}" if options.slow is None else f"at {options.slow} of its rate"
    print(f"{options.mode} on {mesh}, {options.cable} {what}: ends {ended}")
    steps = list(zip(*(done for done, _ in found.values()), strict=False))
    ends = [max(step[0] for step in row) for row in steps]
    gaps = [b - a for a, b in itertools.pairwise(ends)]
    first = next((number for number, at in enumerate(ends) if at > cut_at), len(ends) - 1)
    before = statistics.median(gaps[5 : first - 1])
    print(f"{len(steps)} steps on all chips; a step before: {before:.3f} s")
    stalled = max(range(first - 1, min(first + 40, len(gaps))), key=gaps.__getitem__)
    print(f"the longest stall: {gaps[stalled]:.2f} s, over {ends[stalled + 1] - cut_at:.2f} s after that")
    around = next((n for n, row in enumerate(steps) if ends[n] > cut_at and "cable" in row[0][2]), None)
    if around is not None:
        mended, mesh_then = ends[around] - cut_at, steps[around][0][2]
        if options.slow is not None:
            print(f"{around - first} steps not planned around it, each: {statistics.median(gaps[first:around]):.3f} s")
        print(f"planned around it from step {around + 1}, {mended:.2f} s later: {mesh_then}")
        last = next((n for n, at in enumerate(ends) if at > mended_at), len(gaps))
        print(f"a step after: {statistics.median(gaps[around + 1 : last]):.3f} s")
        whole = next((n for n in range(last, len(steps)) if "cable" not in steps[n][0][2]), None)
        if whole is not None:
            print(f"whole again from step {whole + 1}, {ends[whole] - mended_at:.2f} s after it was mended")
            print(f"a step then: {statistics.median(gaps[whole:]):.3f} s")
    losses = [sum(step[1] for step in row) / len(row) for row in steps]
    apart = max(abs(a - b) / b for a, b in zip(losses, alone(mesh.n_chips, len(losses)), strict=True))
    print(f"losses differ from those of one process by at most {apart:.1e} of their size")
    if around is None or len(steps) - around < 20:
        return
    chips = list(found)
    for name, a, b in (("before", 5, first - 1), ("after", around + 2, min(last, len(steps) - 1))):
        print(f"kB per step that each chip sent on each of its interfaces, {name}:")
        for number, chip in enumerate(chips):
            then, now = steps[a][number][3], steps[b][number][3]
            kb = {
                port: round((now[port] - then[port]) / (b - a) / 1000, 1)
                for port in then
                if port not in ("lo", INTERFACE)
            }
            print(f"  {chip}: {kb}")


if __name__ == "__main__":
    main()
