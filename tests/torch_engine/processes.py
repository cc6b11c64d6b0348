"""What the tests with processes share: a Gloo group over loopback, one forked process per chip."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import meshmend.torch as mmt
from meshmend import Mesh, plan
from meshmend.launch.chips import Chips

os.environ["GLOO_SOCKET_IFNAME"] = "lo"

remembered = lru_cache(None)(partial(plan, hardware="gloo-loopback"))
"""What groups may plan with: plans that are made before the forks are made once for all processes."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def gloo(mesh: Mesh, chip: tuple[int, ...], port: int) -> Any:
    torch.set_num_threads(1)
    rank = mesh.rank(chip)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    return dist.ProcessGroupGloo(store, rank, mesh.n_chips, timedelta(seconds=30))


def with_store(
    members: list[tuple[int, ...]], main: Callable[..., Any], timeout_s: float = 60
) -> dict[tuple[int, ...], Any]:
    """Run `main(chip, number, address)` in a process for each member; the first one keeps the store for all.

    The process of the tests itself must stay without threads, as it is forked again for the next test.
    """
    port = free_port()

    def body(chip: tuple[int, ...], number: int) -> Any:
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, is_master=number == 0, wait_for_workers=False)
        # Nobody begins before everybody has reached the store: what is tested has shorter timeouts than a slow start.
        store.set(f"here/{number}", "")
        store.wait([f"here/{other}" for other in range(len(members))], timedelta(seconds=timeout_s))
        result = main(members[number], number, f"127.0.0.1:{port}/test")
        store.set(f"done/{number}", "")
        if number == 0:
            store.wait([f"done/{other}" for other in range(len(members))], timedelta(seconds=timeout_s))
        return result

    with Chips() as chips:
        for number in range(len(members)):
            chips.start((number,), body, number)
        return {members[number]: result for (number,), result in chips.results(timeout_s).items()}


def on_every_chip(mesh: Mesh, main: Callable[..., Any], *args: Any, timeout_s: float = 120) -> dict[Any, Any]:
    """Run `main(chip, mesh, group, *args)` in a process for each live chip; return what each returned."""
    port = free_port()

    def body(chip: tuple[int, ...]) -> Any:
        group = gloo(mesh, chip, port)
        result = main(chip, mesh, group, *args)
        # Whoever keeps the store leaves last.
        group.barrier().wait()
        return result

    with Chips() as chips:
        for rank in range(mesh.n_chips):
            chips.start(mesh.chip(rank), body)
        return chips.results(timeout_s)


def _measured(chip: tuple[int, ...], mesh: Mesh, place: str, interface: str, file: Path) -> Any:
    torch.set_num_threads(1)
    options = mmt.MeshOptions(mesh.shape, chip, interface=interface)
    rank = mesh.rank(chip)
    dist.init_process_group(
        "cpu:meshmend", init_method=place, rank=rank, world_size=mesh.n_chips, timeout=timedelta(seconds=120),
        pg_options=options,
    )  # fmt: skip
    world = dist.group.WORLD
    assert isinstance(world, mmt.MeshBackend)
    before = world.hardware
    found = mmt.measure(file=file)
    total = torch.full((1000,), float(rank))
    dist.all_reduce(total)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    model(torch.ones(1, 8)).sum().backward()
    dist.barrier()
    return before, found, world.hardware, total.unique().tolist()


def measure_together(mesh: Mesh, place: str, interface: str, file: Path, enter: Any = None) -> list[Any]:
    """Measure in a process for each chip, and write a file; return the hardware before, what was found, what is planned
    for then, and a sum of ranks."""
    with Chips(enter) as chips:
        for rank in range(mesh.n_chips):
            chips.start(mesh.chip(rank), _measured, mesh, place, interface, file)
        return list(chips.results(180).values())
