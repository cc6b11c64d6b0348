"""The cost of agreeing on every call before data moves: an all-reduce with agreement and without.

    python lab/benchmarks/torch_agreement.py
    python lab/benchmarks/torch_agreement.py --shape 1x2 --payload 4000      a quick look

One process per chip, over loopback. Both are timed in turn, so that a busy machine slows both alike; medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from datetime import timedelta
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist

import meshmend.torch as mmt
from meshmend import Mesh, Schedule
from meshmend.launch.chips import Chips
from meshmend.launch.processes import free_port
from meshmend.torch.channel import Channel
from meshmend.torch.options import LOOPBACK
from meshmend.torch.plans import Plans

SHAPES = ("2x2", "4x4")
PAYLOADS = (4_000, 32_000_000)


def main() -> None:
    """Time every mesh with every payload, and print one line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=SHAPES, help="chips, as in 4x4")
    parser.add_argument("--payload", type=int, nargs="+", default=PAYLOADS, help="bytes")
    options = parser.parse_args()
    for shape in options.shape:
        for payload_bytes in options.payload:
            times = 100 if payload_bytes < 1_000_000 else 8
            mesh = Mesh(shape)
            schedule = Plans(hardware=LOOPBACK).get(mesh, payload_bytes)
            port = free_port("127.0.0.1")
            with Chips() as chips:
                for rank in range(mesh.n_chips):
                    chips.start(mesh.chip(rank), measure, schedule, rank, port, payload_bytes, times)
                found = chips.results(timeout_s=600)
            agreed, bare = (
                statistics.median(max(seconds[which][number] for seconds in found.values()) for number in range(times))
                for which in (True, False)
            )
            print(f"{shape} {payload_bytes:>11,} bytes: {agreed * 1e3:.1f} ms, {bare * 1e3:.1f} ms without agreement")


def measure(
    _: Any, schedule: Schedule, rank: int, port: int, payload_bytes: int, times: int
) -> dict[bool, list[float]]:
    """Return one chip's seconds, with agreement and without."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    group = dist.ProcessGroupGloo(store, rank, schedule.mesh.n_chips, timedelta(seconds=60))
    engine = mmt.Engine(schedule, rank, group)
    payload = torch.empty(payload_bytes // 4)
    agree = Channel.agree
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(times):
        for which, runs in seconds.items():
            Channel.agree = agree if which else _nothing  # type: ignore[method-assign]
            payload.fill_(1.0)
            group.barrier().wait()
            started = time.perf_counter()
            engine.all_reduce(payload)
            runs.append(time.perf_counter() - started)
    group.barrier().wait()
    # Rank 0 hosts the store, so the others leave first.
    time.sleep(0.2 if rank == 0 else 0)
    return seconds


def _nothing(*_: Any, **__: Any) -> None:
    """Skip the agreement."""


if __name__ == "__main__":
    main()
