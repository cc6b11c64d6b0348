"""Measure a process group: what the start of a collective, a step, a message and a byte cost through the engine.

A few loops are timed on the group's own connections: neighbours exchange messages, short and long ones, along one lane
of the mesh and along all of them, and each step waits for the step before it. Hardware is fitted to their times
(`meshmend.cost.fitting`). Members of one machine share its cores: there what all of them send together costs time, and
the fit says whether bytes do, too (loopback), or whether links carry them (a lab). One member fits, and the group's
store keeps the result: all members plan for the same numbers, to the last bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from meshmend.cost import Hardware
from meshmend.cost.fitting import CORES, FittedCosts, TimedLoop, fit_loops
from meshmend.cost.hardware import hardware_facts, parse_hardware, write_hardware
from meshmend.cost.step_demand import ADDED
from meshmend.errors import ParameterError
from meshmend.schedule import Op, Schedule
from meshmend.topology import Mesh
from meshmend.torch.backend import MeshBackend
from meshmend.torch.mesh_group import MeshGroup
from meshmend.torch.slow import Lane, lanes_of

SHORT, LONG, LONGEST = 2**8, 2**16, 2**22
"""Bytes of a message: so few that bytes do not count; and at first, and at most, so many that they do."""
COUNTS = 4.0
"""Messages are long enough when a step of them takes so many times as long as one of short messages."""
FEW_STEPS, SOME_STEPS, MOST_STEPS = 2, 10, 400
TARGET_S = 0.1
"""What a loop of many steps takes, about."""
REPEAT = 3


def measure(*, file: str | Path | None = None) -> Hardware:
    """Return the hardware of the default group, of the meshmend backend, as its members show it; all of them call it.

    From then on the group plans for it, and so do all groups that are made of it. Call it before any collective of
    theirs, as in `init_process_group("cpu:meshmend")`, then `measure()`. With `file`, rank 0 also writes what it found
    there: `hardware=file` takes it wherever a preset's name is taken, as in `MeshProcessGroup(…, hardware=file)`.
    """
    world = dist.group.WORLD
    if not isinstance(world, MeshBackend) or world.mesh_group is None or world.mesh is None:
        what = "a group of one, or one that forms no mesh" if isinstance(world, MeshBackend) else repr(world)
        raise ParameterError(
            f"measure needs a default group of the meshmend backend whose members form a mesh, got {what}. Call "
            'init_process_group("cpu:meshmend") first.'
        )
    mesh, members = world.mesh, world.mesh_group
    hosts, loops = _run_loops(mesh, members)
    key = f"hardware/{world.count_measurement()}"
    store = world.get_group_store()
    if world.rank() == 0:
        found = fit(loops, mesh, n_hosts=hosts, is_loopback=world.options.is_loopback)
        store.set(key, json.dumps(hardware_facts(found)))
        if file is not None:
            write_hardware(found, file, _facts(mesh, hosts, loops))
    store.wait([key], members.timeout)
    world.plan_for(parse_hardware(json.loads(store.get(key)), "What rank 0 has measured"))
    return world.hardware


def fit(loops: Sequence[TimedLoop], mesh: Mesh, *, n_hosts: int, is_loopback: bool) -> Hardware:
    """Return the hardware whose times are closest, in proportion, to those of the loops."""
    lanes, how = max(loop.lanes for loop in loops), f"measured between {mesh.n_chips} processes"
    if n_hosts > 1:
        alone = [replace(loop, messages=None) for loop in loops]
        return _hardware(fit_loops(alone, range(1, lanes + 1)), lanes, f"{how} on {n_hosts} hosts", None)
    cores = len(os.sched_getaffinity(0))
    shared = [replace(loop, messages=(loop.messages or 0.0) / cores) for loop in loops]
    # Either the cores limit what all send together, as on loopback, or each link what it carries, as in a lab.
    widths = [CORES] if is_loopback else [CORES, lanes]
    return _hardware(fit_loops(shared, widths), lanes, f"{how} of one machine", cores)


def _hardware(costs: FittedCosts, lanes: int, how: str, cores: int | None) -> Hardware:
    is_switched = costs.width == CORES
    return Hardware(
        "Gloo, measured",
        # What a loop receives it adds: a core does more for it than for what is received in place.
        link_bytes_per_s=(ADDED if is_switched else 1.0) / costs.byte_s,
        step_latency_s=costs.step_s,
        links_at_once=None if is_switched or costs.width == lanes else costs.width,
        start_s=costs.start_s,
        message_s=costs.message_s,
        is_switched=is_switched,
        shared_cores=cores,
        sources=tuple((name, how) for name in ("link_bytes_per_s", "step_latency_s", "message_s", "start_s")),
    )


def _run_loops(mesh: Mesh, members: MeshGroup) -> tuple[int, list[TimedLoop]]:
    """Return the number of hosts, and the times of loops that all members run."""
    lanes = lanes_of(mesh, thirds=False) or lanes_of(mesh)
    hosts = len(set(members.exchange("hosts", _host())))

    def timed(n_lanes: int, message_bytes: int, steps: int) -> TimedLoop:
        used = lanes[:n_lanes]
        own = min(members.time_run(_loop(mesh, used, steps), message_bytes * 2 * n_lanes) for _ in range(REPEAT))
        told = members.exchange("seconds", struct.pack("<d", own))
        seconds = max(struct.unpack("<d", word)[0] for word in told)
        return TimedLoop(steps, n_lanes, message_bytes, seconds, float(2 * sum(map(len, used))))

    def pair(n_lanes: int, message_bytes: int) -> tuple[float, list[TimedLoop]]:
        """Time few steps and many; return what a step takes, and the loops."""
        few, some = timed(n_lanes, message_bytes, FEW_STEPS), timed(n_lanes, message_bytes, SOME_STEPS)
        each = max((some.seconds - few.seconds) / (SOME_STEPS - FEW_STEPS), 1e-6)
        if some.seconds < TARGET_S:
            some = timed(n_lanes, message_bytes, int(np.clip(TARGET_S / each, SOME_STEPS, MOST_STEPS)))
        return each, [few, some]

    timed(1, SHORT, FEW_STEPS)  # makes connections and buffers
    found: list[TimedLoop] = []
    for n_lanes in sorted({1, len(lanes)}):
        short_s, loops = pair(n_lanes, SHORT)
        found += loops
        long = LONG
        long_s, loops = pair(n_lanes, long)
        while long < LONGEST and long_s < COUNTS * short_s:
            long *= 4
            long_s, loops = pair(n_lanes, long)
        found.append(_longer(*loops))
    return hosts, found


def _longer(few: TimedLoop, many: TimedLoop) -> TimedLoop:
    """Return what many steps took longer than few.

    Of long messages only this tells the rate: a link that was idle sends its first bytes faster than it goes on (a
    bucket of tokens, buffers), so that a loop of two steps would find it too fast.
    """
    return replace(many, steps=many.steps - few.steps, seconds=max(many.seconds - few.seconds, 1e-6), starts=0)


def _loop(mesh: Mesh, lanes: Sequence[Lane], steps: int) -> Schedule:
    """Return so many steps in which the pairs of each lane exchange chunks; each sends what it received before."""
    rows = []
    for step in range(steps):
        for number, lane in enumerate(lanes):
            for a, b in lane:
                # Of two chunks one goes there and the other comes back: nobody sends what the same step writes.
                rows += [(step, a, b, 2 * number + step % 2), (step, b, a, 2 * number + (step + 1) % 2)]
    step_of, src, dst, chunk = np.array(rows, dtype=np.int64).T
    return Schedule(
        mesh,
        total_chunks=2 * len(lanes),
        step=step_of,
        src=src,
        dst=dst,
        first_chunk=chunk,
        op=int(Op.REDUCE),
        phase_names=("exchange",),
        owners=np.zeros(2 * len(lanes), dtype=np.int64),
        planner="measure",
    )


def _host() -> bytes:
    """Return what tells this process's host from others: its name, and when it was started."""
    booted = Path("/proc/sys/kernel/random/boot_id")
    words = socket.gethostname() + (booted.read_text(encoding="utf-8") if booted.exists() else "")
    return hashlib.sha256(words.encode()).digest()


def _facts(mesh: Mesh, n_hosts: int, loops: Sequence[TimedLoop]) -> dict[str, Any]:
    """Return what a measurement was made of and on, for its file."""
    return {
        "versions": {"torch": str(torch.__version__)},
        "platform": "cpu",
        "mesh": str(mesh),
        "chips": mesh.n_chips,
        "hosts": n_hosts,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "loops": [vars(loop) for loop in loops],
    }
