"""The backend against Gloo over real links: its collectives, and steps of FSDP2 and DDP, in the same processes.

    sudo python lab/benchmarks/torch_backend.py --lab 4x4 --fail 2x2@2,2 --payload 8MB     rate-limited links
    python lab/benchmarks/torch_backend.py --loopback 2x4 --payload 8MB                    this host's loopback

With --fail the whole mesh is timed first, then the survivors. The payload is what is reduced, what all shards together
are, and about what the weights of the model take.

Each live chip is a process, in a lab inside its own network namespace. The cases alternate, so that other load on
the machine affects both alike. All processes read the same clock, so a run lasts from the first chip's start to the
last chip's end.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from meshmend.cost.units import format_bytes, parse_bytes
from meshmend.errors import Coordinate
from meshmend.launch import Chips
from meshmend.launch.processes import free_port
from meshmend.topology import Mesh
from meshmend.torch import MeshOptions
from meshmend_lab.bench.allreduce import PORT, hardware_of, run_seconds
from meshmend_lab.errors import LabError
from meshmend_lab.mesh import Lab
from meshmend_lab.mesh.namespaces import INTERFACE

TIMEOUT = timedelta(minutes=10)
LAYERS, HEADS, TOKENS = 4, 2, 8
STEP, DDP_STEP = "FSDP2 step", "DDP step"
Spans = dict[tuple[str, str], list[tuple[float, float]]]


@dataclass(frozen=True)
class BackendTimes:
    """One collective, or a training step, on one mesh: the best run of each backend in seconds, and their ratio."""

    mesh: str
    chips: int
    case: str
    payload_bytes: int
    gloo_s: float
    meshmend_s: float
    gloo_median_s: float
    meshmend_median_s: float
    units: float | None
    """meshmend's best run in units of M/b, where links have a rate."""

    @property
    def ratio(self) -> float:
        """Seconds of meshmend over those of Gloo."""
        return self.meshmend_s / self.gloo_s

    def facts(self) -> dict[str, Any]:
        """Return the figures."""
        return {**vars(self), "ratio": self.ratio}


def compare_backends(
    mesh: Mesh, payload_bytes: int, *, lab: Lab | None = None, repeat: int = 3, patience_s: float = 1800.0
) -> list[BackendTimes]:
    """Time Gloo and meshmend on one mesh, in a lab or (without one) over loopback."""
    host = "127.0.0.1" if lab is None else lab.address(mesh.chip(0))
    where = f"tcp://{host}:{free_port('127.0.0.1') if lab is None else PORT}"
    with Chips(None if lab is None else lab.enter) as chips:
        for rank in range(mesh.n_chips):
            interface = "lo" if lab is None else INTERFACE
            options = MeshOptions(
                mesh.shape, mesh.chip(rank), wrap=mesh.wrap, hardware=hardware_of(lab), interface=interface
            )
            chips.start(mesh.chip(rank), _time_cases, mesh, options, payload_bytes, repeat, where)
        spans: list[Spans] = list(chips.results(patience_s).values())
    found = []
    unit_s = None if lab is None else payload_bytes / lab.rate_bytes_per_s
    for case in dict.fromkeys(case for case, _ in spans[0]):
        seconds = {name: run_seconds([span[case, name] for span in spans]) for name in ("gloo", "meshmend")}
        gloo_s, meshmend_s = min(seconds["gloo"]), min(seconds["meshmend"])
        found.append(
            BackendTimes(
                mesh=str(mesh),
                chips=mesh.n_chips,
                case=case,
                payload_bytes=payload_bytes,
                gloo_s=gloo_s,
                meshmend_s=meshmend_s,
                gloo_median_s=statistics.median(seconds["gloo"]),
                meshmend_median_s=statistics.median(seconds["meshmend"]),
                units=None if unit_s is None else meshmend_s / unit_s,
            )
        )
    return found


def _time_cases(
    chip: Coordinate, mesh: Mesh, options: MeshOptions, payload_bytes: int, repeat: int, where: str
) -> Spans:
    """Run every case in turn on one chip; return when each run began and ended."""
    os.environ["GLOO_SOCKET_IFNAME"] = options.interface or ""
    torch.set_num_threads(1)
    rank, n = mesh.rank(chip), mesh.n_chips
    dist.init_process_group(
        "cpu:meshmend", init_method=where, rank=rank, world_size=n, timeout=TIMEOUT, pg_options=options
    )
    groups = {"gloo": dist.new_group(range(n), backend="gloo", timeout=TIMEOUT), "meshmend": dist.group.WORLD}
    # Ones, so that every sum is known: a fast wrong result does not count.
    per_chip = max(1, payload_bytes // 4 // n)
    whole, shard = torch.empty(n * per_chip), torch.empty(per_chip)
    cases: dict[tuple[str, str], tuple[Callable[[], Any], torch.Tensor | None, float]] = {}
    shards = list(whole.split(per_chip))
    for name, group in groups.items():
        cases["all-reduce", name] = partial(dist.all_reduce, whole, group=group), whole, float(n)
        cases["reduce-scatter", name] = partial(dist.reduce_scatter, shard, shards, group=group), shard, float(n)
        cases["all-gather", name] = partial(dist.all_gather, shards, shard, group=group), whole, 1.0
        cases[STEP, name] = _training_step(payload_bytes, group, is_sharded=True), None, 0.0
        cases[DDP_STEP, name] = _training_step(payload_bytes, group, is_sharded=False), None, 0.0
    n_cases = len(cases) // len(groups)
    spans: Spans = {key: [] for key in sorted(cases, key=lambda key: list(cases).index(key) % n_cases)}
    for run in range(repeat + 1):
        for key, runs in spans.items():
            whole.fill_(1.0)
            shard.fill_(1.0)
            dist.barrier()
            started = time.monotonic()
            call, result, wanted = cases[key]
            call()
            if run:  # the first makes plans and buffers, on both
                runs.append((started, time.monotonic()))
            if result is not None and not bool((result == wanted).all()):
                raise LabError(f"The {key[0]} of {key[1]} is wrong on {mesh}.")
    dist.barrier()
    # Rank 0 hosts the store, so the others leave first.
    time.sleep(0.2 if rank == 0 else 0)
    return spans


def _training_step(payload_bytes: int, group: dist.ProcessGroup, *, is_sharded: bool) -> Callable[[], None]:
    """Return a step of a transformer over a group, sharded or with DDP; its weights take about that many bytes."""
    torch.manual_seed(0)
    # A layer whose hidden part is four times as wide has about twelve times width² weights.
    width = max(HEADS, round(math.sqrt(payload_bytes / 4 / LAYERS / 12) / HEADS) * HEADS)
    layers = [nn.TransformerEncoderLayer(width, HEADS, 4 * width, dropout=0.0, batch_first=True) for _ in range(LAYERS)]
    model: nn.Module = nn.Sequential(*layers)
    if is_sharded:
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(1, TOKENS, width)

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Time all meshes and payloads, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--lab", metavar="SHAPE", help="make a lab of this shape for the run; needs root")
    where.add_argument("--loopback", metavar="SHAPE", help="no lab: processes on this host's loopback")
    parser.add_argument("--fail", metavar="REGION", action="append", default=[], help="failed chips, as in 2x2@2,2")
    parser.add_argument("--rate", default="40mbit", help="rate of a link of the lab, as tc writes it")
    parser.add_argument("--payload", metavar="BYTES", action="append", help="as in 8MB, the default; repeatable")
    parser.add_argument("--repeat", type=int, default=3, help="runs per case; the best counts")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    whole = Mesh(options.lab or options.loopback)
    meshes = [whole, *([whole.fail(*options.fail)] if options.fail else [])]
    sizes = [round(parse_bytes(text)) for text in options.payload or ["8MB"]]
    with Lab.temporary(whole, rate=options.rate) if options.lab else nullcontext() as lab:
        results: list[BackendTimes] = []
        for mesh in meshes:
            left = lab if lab is None or mesh == whole else lab.kill(*mesh.holes)
            for size in sizes:
                results += compare_backends(mesh, size, lab=left, repeat=options.repeat)
    if options.json:
        rate = options.rate if options.lab else None
        print(json.dumps({"rate": rate, "results": [result.facts() for result in results]}))
        return
    print(f"{'mesh':24}{'payload':>10}  {'case':16}{'Gloo, s':>10}{'meshmend, s':>13}{'M/b':>8}{'× Gloo':>8}")
    for one in results:
        units = "–" if one.units is None else f"{one.units:.3f}"
        print(
            f"{one.mesh:24}{format_bytes(one.payload_bytes):>10}  {one.case:16}{one.gloo_s:10.3f}{one.meshmend_s:13.3f}"
            f"{units:>8}{one.ratio:8.2f}"
        )


if __name__ == "__main__":
    main()
