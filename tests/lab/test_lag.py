"""Stragglers over real links: the engine's own times name a cable at half rate and a slow chip, and nobody else.

A chip computes by sleeping, so that the others of this machine do not slow it down. Links let bursts of 32 kB pass at
once, so each carries ten times as much per step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from lab.test_namespaces import needs_lab
from meshmend import Hardware, Mesh, plan
from meshmend.lab import Chips, Lab
from meshmend.lab.namespaces import INTERFACE
from meshmend.quarantine import Judge
from meshmend.schedule import Schedule

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")
import torch.distributed as dist  # noqa: E402

from meshmend.torch.engine import Engine  # noqa: E402
from meshmend.torch.private import gloo_backend  # noqa: E402
from meshmend.torch.queue_watch import EVERY, QueueWatch  # noqa: E402

TIMEOUT = timedelta(minutes=2)
LINKS = Hardware("links", 1e9, step_latency_s=5e-6, hop_latency_s=5e-6)
WITHIN = 50
COMPUTE_S = 0.05
Found = list[tuple[int, str]]


def join(chip: tuple[int, ...], lab: Lab) -> tuple[Any, Any]:
    """Connect to the other chips; return the store and the group."""
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    torch.set_num_threads(1)
    rank = lab.mesh.rank(chip)
    store = dist.TCPStore(lab.address((0, 0)), 29400, is_master=rank == 0, wait_for_workers=False, timeout=TIMEOUT)
    return store, gloo_backend(store, rank, lab.mesh.n_chips, timeout=TIMEOUT, interface=INTERFACE)


def leave(store: Any, rank: int, n_chips: int) -> None:
    """Whoever keeps the store leaves last."""
    store.set(f"done/{rank}", "")
    if rank == 0:
        store.wait([f"done/{other}" for other in range(n_chips)], TIMEOUT)


def train(
    chip: tuple[int, ...], lab: Lab, schedule: Schedule, n_bytes: int, n_steps: int, slow: Any, n_expected: int
) -> Found:
    """Compute, reduce, and watch, until as many are named as are expected; return who was, and at which step."""
    store, group = join(chip, lab)
    mesh, rank = schedule.mesh, lab.mesh.rank(chip)
    engine = Engine(schedule, rank, group, timeout=TIMEOUT)
    watch, judge, found = QueueWatch(engine.channel, mesh, engine.members), Judge(), []
    payload = torch.empty(n_bytes // 4)
    for step in range(n_steps):
        time.sleep(COMPUTE_S * (1.5 if chip == slow else 1.0))
        payload.fill_(float(rank + 1))
        engine.all_reduce(payload)
        assert bool((payload == mesh.n_chips * (mesh.n_chips + 1) / 2).all())
        signs = engine.in_turn(lambda _, deadline, step=step: watch.add(step, deadline))  # type: ignore[misc]
        found += [(step, str(verdict.suspect)) for verdict in judge.add(signs)]
        if n_expected and len(found) >= n_expected:
            break
    leave(store, rank, mesh.n_chips)
    return found


def run(
    shape: str,
    n_bytes: int,
    n_steps: int,
    *,
    half: str | None = None,
    slow: tuple[int, ...] | None = None,
    planner: str = "weave",
    n_expected: int = 0,
) -> Found:
    """Train on a lab whose chips do not know of a cable at half rate; return what all of them have found."""
    schedule = plan(Mesh(shape), planner, payload_bytes=n_bytes, hardware=LINKS)
    mesh = Mesh(shape, cable_rates={} if half is None else {half: "1/2"})
    with Lab.temporary(mesh, rate="40mbit", name=f"lag{os.getpid()}") as lab, Chips(lab.namespaces) as chips:
        for chip in lab.namespaces:
            chips.start(chip, train, lab, schedule, n_bytes, n_steps, slow, n_expected)
        found = list(chips.results(600).values())
    assert found == [found[0]] * mesh.n_chips
    told: Found = found[0]
    print(f"{shape}, {half} at half rate, {slow} slow, {n_steps} steps of {planner}: {told}")  # noqa: T201  # for docs
    return told


@needs_lab
def test_a_cable_at_half_rate_and_a_slow_chip_are_named_within_50_steps() -> None:
    found = run("3x3", 500_000, WITHIN, half="0,1-1,1", slow=(2, 1), n_expected=2)
    assert {name for _, name in found} == {"0,1-1,1", "2,1"}


@needs_lab
@pytest.mark.slow
@pytest.mark.parametrize("half", ["0,0-0,1", "0,1-0,2", "1,1-1,2", "2,3-3,3"])
def test_a_cable_of_a_larger_lab_is_named_within_50_steps(half: str) -> None:
    assert [name for _, name in run("4x4", 2_000_000, WITHIN, half=half)] == [half]


@needs_lab
@pytest.mark.slow
@pytest.mark.parametrize("slow", [(0, 0), (1, 2)])
def test_a_chip_of_a_larger_lab_is_named_within_50_steps(slow: tuple[int, int]) -> None:
    assert [name for _, name in run("4x4", 500_000, WITHIN, slow=slow)] == [",".join(map(str, slow))]


@needs_lab
@pytest.mark.slow
@pytest.mark.parametrize("planner", ["weave", "hamiltonian", "row-pairs", "two-color", "latency"])
@pytest.mark.parametrize("n_bytes", [40_000, 500_000])
def test_a_clean_lab_names_nobody(planner: str, n_bytes: int) -> None:
    assert run("4x4", n_bytes, 400, planner=planner) == []


def alternate(chip: tuple[int, ...], lab: Lab, schedule: Schedule, n_bytes: int, rounds: int) -> list[list[float]]:
    """Return the wall and CPU seconds of all-reduces without and with a watch, in turn, and those of its exchanges."""
    store, group = join(chip, lab)
    rank = lab.mesh.rank(chip)
    plain, timed = (Engine(schedule, rank, group, timeout=TIMEOUT) for _ in range(2))
    watch = QueueWatch(timed.channel, schedule.mesh, timed.members)
    payload, spent = torch.zeros(n_bytes // 4), list[list[float]]()

    def seconds(call: Callable[..., object], *args: Any) -> list[float]:
        wall, cpu = time.monotonic(), time.process_time()
        call(*args)
        return [time.monotonic() - wall, time.process_time() - cpu]

    def end(step: int) -> None:
        timed.in_turn(lambda _, deadline: watch.add(step, deadline))

    for step in range(rounds * EVERY):
        pair = (plain, timed) if step % 2 else (timed, plain)
        row = {engine: seconds(engine.all_reduce, payload) for engine in pair}
        watching = seconds(end, step)
        spent.append([*row[plain], *row[timed], *watching])
    leave(store, rank, schedule.mesh.n_chips)
    return spent


@needs_lab
@pytest.mark.slow
@pytest.mark.parametrize("n_bytes", [500_000, 2_000_000])
def test_watching_costs_little(n_bytes: int) -> None:
    """In CPU time, which other load on this machine inflates for both alike; the wall time is there to be read."""
    rounds = 12
    schedule = plan(Mesh("4x4"), "weave", payload_bytes=n_bytes, hardware=LINKS)
    with Lab.temporary(Mesh("4x4"), rate="40mbit", name=f"lag{os.getpid()}") as lab, Chips(lab.namespaces) as chips:
        for chip in lab.namespaces:
            chips.start(chip, alternate, lab, schedule, n_bytes, rounds)
        spent = np.array(list(chips.results(600).values()))[:, EVERY:]  # [chip, step, seconds], once warm
    plain_s, plain_cpu_s, timed_s, timed_cpu_s, _, exchange_cpu_s = spent.mean(axis=(0, 1))
    exchange_s = float(np.median(spent[:, EVERY - 1 :: EVERY, 4]))
    ratio, ratio_cpu = timed_s / plain_s, (timed_cpu_s + exchange_cpu_s) / plain_cpu_s
    told = f"{ratio:.3f} times as long when watched, with {ratio_cpu:.3f} times the CPU time"
    told += f" ({timed_cpu_s / plain_cpu_s:.3f} without the exchange)"
    print(f"{n_bytes:,} bytes: {plain_s:.3f} s, {told}; every 8th step {exchange_s:.3f} s more")  # noqa: T201  # for docs
    assert ratio_cpu < 1.2
