"""What staging costs: all-reduces of a device's tensors against those of the CPU's, which take turns.

    python lab/benchmarks/torch_staging.py
    python lab/benchmarks/torch_staging.py --shape 1x2 --payload 4000 --repeat 3      a quick look

One process per chip, over loopback. The device is the fake one of the tests: host memory, with a thread per stream that
copies. So its copies take cores from the engine, which a real device's do not, and PCIe's rate is not in these times.
Medians of the slowest chip; the last column copies a payload as a whole, before and after all messages.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist

import meshmend.torch as mmt
from meshmend import Mesh, Schedule
from meshmend.launch.chips import Chips
from meshmend.launch.processes import free_port
from meshmend.torch import staging
from meshmend.torch.options import LOOPBACK
from meshmend.torch.plans import Plans
from torch_engine.accelerator import Accelerator, build

PAYLOADS = (1_000_000, 16_000_000, 64_000_000)
WHOLE = 2**40
"""Bytes of a piece that no payload exceeds."""


def main() -> None:
    """Time every payload, and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="2x2", help="chips, as in 4x4")
    parser.add_argument("--payload", type=int, nargs="+", default=PAYLOADS, help="bytes")
    parser.add_argument("--repeat", type=int, default=15, help="all-reduces of each kind")
    options = parser.parse_args()
    mesh, library = Mesh(options.shape), build()
    print(f"{'payload':>12}  {'CPU, ms':>9}  {'device':>9}  {'ratio':>6}  {'in one piece':>13}")
    for payload_bytes in options.payload:
        schedule = Plans(hardware=LOOPBACK).get(mesh, payload_bytes)
        port = free_port("127.0.0.1")
        with Chips() as chips:
            for rank in range(mesh.n_chips):
                words = (schedule, rank, port, payload_bytes, options.repeat, library)
                chips.start(mesh.chip(rank), measure, *words)
            found = chips.results(timeout_s=1800)
        cpu, device, whole = (
            statistics.median(max(s[kind][i] for s in found.values()) for i in range(options.repeat))
            for kind in ("cpu", "device", "whole")
        )
        figures = f"{cpu * 1e3:9.1f}  {device * 1e3:9.1f}  {device / cpu:6.2f}  {whole * 1e3:13.1f}"
        print(f"{payload_bytes:12,}  {figures}", flush=True)


def measure(
    _: Any, schedule: Schedule, rank: int, port: int, payload_bytes: int, repeat: int, library: Path
) -> dict[str, list[float]]:
    """Return one chip's seconds of each kind; the first of each is not counted."""
    torch.set_num_threads(1)
    device = Accelerator(library)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    group = dist.ProcessGroupGloo(store, rank, schedule.mesh.n_chips, timedelta(seconds=300))
    engine = mmt.Engine(schedule, rank, group)
    piece_bytes = staging.PIECE_BYTES
    payloads = {"cpu": torch.empty(payload_bytes // 4), "device": torch.empty(payload_bytes // 4, device="fake")}
    payloads["whole"] = payloads["device"]
    seconds: dict[str, list[float]] = {kind: [] for kind in payloads}
    for _number in range(repeat + 1):
        for kind, payload in payloads.items():
            staging.PIECE_BYTES = WHOLE if kind == "whole" else piece_bytes
            payload.fill_(1.0)
            group.barrier().wait()
            started = time.perf_counter()
            engine.all_reduce(payload)
            device.synchronize()
            seconds[kind].append(time.perf_counter() - started)
    if payloads["device"].cpu().unique().tolist() != [schedule.mesh.n_chips]:
        raise SystemExit("The sum on the device is wrong.")
    group.barrier().wait()
    return {kind: found[1:] for kind, found in seconds.items()}


if __name__ == "__main__":
    main()
