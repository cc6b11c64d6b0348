"""All-reduce times over real links: Gloo's own, and every plan's, on the same mesh in the same run.

Each live chip is a process, in a lab inside its own network namespace. The cases alternate, so that other load on
the machine affects all of them alike. All processes read the same clock, so a run lasts from the first chip's
start to the last chip's end.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshmend.cost import Hardware, bound, find_hardware
from meshmend.errors import Coordinate, PlanError, name_chip
from meshmend.launch import Chips
from meshmend.launch.processes import free_port
from meshmend.planning import PLANNERS, Auto, plan
from meshmend.schedule import Schedule
from meshmend.topology import Mesh
from meshmend.torch.engine import Engine
from meshmend.torch.options import LOOPBACK
from meshmend.torch.plans import mode_for
from meshmend.torch.private import gloo_backend
from meshmend_lab.errors import LabError
from meshmend_lab.mesh import Lab
from meshmend_lab.mesh.namespaces import INTERFACE

GLOO = "gloo"
PROCESS_GROUP = "process group"
"""`MeshProcessGroup` with the plan that it chooses itself: over loopback, where its overhead is visible."""
WITHOUT_SLACK = "auto, no slack"
"""The plan that is fastest where everybody waits for the end of each step."""
PORT = 29400
TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Result:
    """One case on one mesh: the best run in seconds, in units of M/b, and in ratios.

    `to_best` is its median over the smallest of any planner's: short runs are lucky at times.
    """

    mesh: str
    chips: int
    case: str
    payload_bytes: int
    seconds: float
    median_s: float
    units: float | None
    to_bound: float | None
    to_gloo: float
    to_best: float | None = None

    def facts(self) -> dict[str, Any]:
        """Return the figures."""
        return dict(vars(self))


def hardware_of(lab: Lab | None) -> Hardware:
    """Return what plans are made for: the lab, or processes of this machine."""
    return find_hardware(LOOPBACK) if lab is None else lab.hardware


def applicable(
    mesh: Mesh, payload_bytes: int, hardware: Hardware, names: Sequence[str] | None = None
) -> dict[str, Schedule]:
    """Return the proven plan of every planner that serves a mesh, with parameters that suit payload and hardware.

    The last is that of "auto", which process groups run by default; over links that have a latency, what it would be
    without slack comes before it.
    """
    schedules = {}
    mode = mode_for(hardware)
    runs_auto = names is None or Auto.name in names
    if runs_auto and hardware.hop_latency_s and mode == "asynchronous":
        schedules[WITHOUT_SLACK] = plan(mesh, Auto.name, payload_bytes=payload_bytes, hardware=hardware)
    for name in names or PLANNERS:
        try:
            schedules[name] = plan(mesh, name, payload_bytes=payload_bytes, hardware=hardware, mode=mode)
        except PlanError:
            if names:
                raise
    return schedules


def measure(
    mesh: Mesh,
    payload_bytes: int,
    *,
    lab: Lab | None = None,
    planners: Sequence[str] | None = None,
    repeat: int = 3,
    patience_s: float = 900.0,
) -> list[Result]:
    """Time Gloo and the planners on one mesh, in a lab or (without one) over loopback."""
    hardware = hardware_of(lab)
    schedules = applicable(mesh, payload_bytes, hardware, planners)
    # What "auto" takes is another planner's plan, mostly: it is timed once, and both have the same times.
    first = {case: next(one for one in schedules if schedules[one] == schedules[case]) for case in schedules}
    timed = {case: schedules[case] for case in dict.fromkeys(first.values())}
    port = PORT if lab is not None else free_port("127.0.0.1")
    with Chips(None if lab is None else lab.enter) as chips:
        for rank in range(mesh.n_chips):
            host = "127.0.0.1" if lab is None else lab.address(mesh.chip(0))
            interface = "lo" if lab is None else INTERFACE
            meeting = f"{host}:{port}"
            whole = lab is None and planners is None and importlib.util.find_spec("torchft") is not None
            chips.start(mesh.chip(rank), _time_cases, mesh, timed, payload_bytes, repeat, meeting, interface, whole)
        spans = list(chips.results(patience_s).values())
    cases = list(dict.fromkeys([GLOO, *schedules, *spans[0]]))
    seconds = {case: run_seconds([span[first.get(case, case)] for span in spans]) for case in cases}
    medians = {case: statistics.median(seconds[case]) for case in cases}
    fastest = min((medians[case] for case in schedules), default=None)
    unit_s = None if lab is None else payload_bytes / lab.rate_bytes_per_s
    results = []
    for case in cases:
        best = min(seconds[case])
        units = None if unit_s is None else best / unit_s
        results.append(
            Result(
                mesh=str(mesh),
                chips=mesh.n_chips,
                case=case,
                payload_bytes=payload_bytes,
                seconds=best,
                median_s=medians[case],
                units=units,
                to_bound=None if units is None else units / bound(mesh).units,
                to_gloo=best / min(seconds[GLOO]),
                to_best=None if fastest is None else medians[case] / fastest,
            )
        )
    return results


def run_seconds(spans: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """Return how long each run of a case lasted, from the first chip's start to the last chip's end.

    >>> run_seconds([[(0.0, 2.0), (5.0, 6.0)], [(0.5, 2.5), (5.0, 5.5)]])
    [2.5, 1.0]
    """
    return [max(end for _, end in run) - min(start for start, _ in run) for run in zip(*spans, strict=True)]


def _time_cases(
    chip: Coordinate,
    mesh: Mesh,
    schedules: dict[str, Schedule],
    payload_bytes: int,
    repeat: int,
    meeting: str,
    interface: str,
    process_group: bool,
) -> dict[str, list[tuple[float, float]]]:
    """Run every case in turn on one chip; return when each run began and ended."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    torch.set_num_threads(1)
    rank = mesh.rank(chip)
    host, _, port = meeting.partition(":")
    store = dist.TCPStore(host, int(port), is_master=rank == 0, wait_for_workers=False, timeout=TIMEOUT)
    group = gloo_backend(store, rank, mesh.n_chips, timeout=TIMEOUT, interface=interface)
    ways: dict[str, Callable[[torch.Tensor], Any]] = {GLOO: lambda payload: group.allreduce([payload]).wait()}
    for name, schedule in schedules.items():
        engine = Engine(schedule, rank, group, timeout=TIMEOUT)
        ways[name] = engine.all_reduce
    if process_group:
        from meshmend.torch.process_group import MeshProcessGroup

        ours = MeshProcessGroup(mesh.shape, chip, wrap=mesh.wrap, interface=interface, timeout=TIMEOUT)
        ours.configure(f"{meeting}/process-group", name_chip(chip), rank, mesh.n_chips)
        ways[PROCESS_GROUP] = lambda payload: ours.allreduce([payload], dist.ReduceOp.SUM).wait()
    # Ones, so that every sum is known: a fast wrong result does not count.
    payload = torch.empty(payload_bytes // 4)
    spans: dict[str, list[tuple[float, float]]] = {case: [] for case in ways}
    for _ in range(repeat):
        for case, runs in spans.items():
            payload.fill_(1.0)
            group.barrier().wait()
            started = time.monotonic()
            ways[case](payload)
            runs.append((started, time.monotonic()))
            if not bool((payload == mesh.n_chips).all()):
                raise LabError(f"{case} gave a wrong sum on {mesh}.")
    group.barrier().wait()
    # Rank 0 hosts the store, so the others leave first.
    time.sleep(0.2 if rank == 0 else 0)
    return spans
