"""One chip of a training job under torchft, as a process that logs what it does.

Shared by the failure campaign and its tests. The model is a vector of weights; each chip's contribution to a step is
known beforehand, so that the sum of every committed step can be checked against the chips that took part.
"""

from __future__ import annotations

import faulthandler
import functools
import hashlib
import json
import logging
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchft.coordination import LighthouseServer

from meshmend.errors import Coordinate
from meshmend.planning import PlanCache, PlanFunction, plan
from meshmend.topology import Mesh, Region
from meshmend.torch.manager import Manager
from meshmend.torch.place import LOOPBACK
from meshmend.torch.plans import Plans
from meshmend.torch.process_group import MeshProcessGroup
from meshmend.torch.sampling import StepSampler

HOST = "127.0.0.1"
INTERFACE = "lo"


@dataclass(frozen=True)
class ReplicaJob:
    """What every chip of a job receives."""

    shape: tuple[int, ...]
    lighthouse: str
    folder: Path
    payload_elements: int = 200_000
    n_buckets: int = 2
    n_samples: int = 997
    batch_size: int = 3
    timeout_s: float = 10.0
    pause_s: float = 0.0

    @property
    def plan(self) -> PlanFunction:
        """What plans, and keeps its plans where all chips find them."""
        return functools.partial(plan, cache=PlanCache(self.folder / "plans"))

    def plan_ahead(self, holes: Sequence[Region]) -> None:
        """Plan for the whole machine and for each hole, as an operator does before the job starts."""
        bucket_bytes = -(-self.payload_elements // self.n_buckets) * torch.float64.itemsize
        mesh, plans = Mesh(self.shape), Plans(self.plan, hardware=LOOPBACK)
        for payload_bytes in (1, bucket_bytes):  # chips that have reduced nothing yet plan for one byte
            plans.get(mesh, payload_bytes)
        plans.prepare(mesh, holes, bucket_bytes)


def lighthouse(_: Any, address_file: Path, heartbeat_timeout_ms: int) -> None:
    """Serve torchft's lighthouse until killed; write its address to a file."""
    divert(address_file.with_suffix(".err"))
    server = LighthouseServer(
        bind=f"{HOST}:0",
        min_replicas=1,
        # Long: the others must wait for a chip that is slow but alive, or it continues with diverging weights.
        join_timeout_ms=60_000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=heartbeat_timeout_ms,
    )
    port = server.address().rsplit(":", 1)[1]
    partial = address_file.with_suffix(".part")
    partial.write_text(f"http://{HOST}:{port}")
    partial.rename(address_file)
    while True:
        time.sleep(60)


def divert(path: Path) -> None:
    """Redirect torchft's own logging to a file; it writes to the descriptor, bypassing Python."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 2)
    os.close(handle)
    faulthandler.register(signal.SIGUSR1)


def train(chip: Coordinate, job: ReplicaJob, life: int) -> None:
    """Train until killed, or until the file `stop` appears in the job's folder.

    Bucket b of chip i holds, at every element e with e ≡ i (mod number of chips), the value 1 and elsewhere 0: the sum
    is 1 exactly where a live chip contributed once, 2 where one did twice.
    """
    logging.disable(logging.CRITICAL)
    divert(job.folder / f"{'-'.join(map(str, chip))}.{life}.err")
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    torch.set_num_threads(1)
    mesh = Mesh(job.shape)
    name = "-".join(map(str, chip))
    log = (job.folder / f"{name}.{life}.log").open("w", buffering=1)

    def note(event: str, **facts: Any) -> None:
        log.write(json.dumps({"t": time.time(), "event": event, **facts}) + "\n")

    timeout = timedelta(seconds=job.timeout_s)
    group = MeshProcessGroup(job.shape, chip, plan=job.plan, timeout=timeout, interface=INTERFACE)
    weights = {"w": torch.zeros(job.payload_elements, dtype=torch.float64)}
    manager = Manager(
        pg=group,
        load_state_dict=weights.update,
        state_dict=lambda: dict(weights),
        min_replica_size=1,
        lighthouse_addr=job.lighthouse,
    )
    sampler = StepSampler(manager, job.n_samples, job.batch_size)
    own = torch.zeros(job.payload_elements, dtype=torch.float64)
    own[mesh.rank(chip) :: mesh.n_chips] = 1
    note("up")
    while not (job.folder / "stop").exists():
        note("quorum")
        manager.start_quorum()
        step, members = manager.current_step(), manager.num_participants()
        time.sleep(job.pause_s)
        attempt = group.timings.formed_ms
        note("reduce", step=step, attempt=attempt, samples=sampler.indices().tolist())
        gradient = own * (step + 1)
        works = [manager.allreduce(part, reduce_op=dist.ReduceOp.SUM) for part in gradient.chunk(job.n_buckets)]
        for work in works:
            work.wait()
        note("reduced")
        if manager.should_commit():
            weights["w"] += gradient
            counts = (gradient / (step + 1)).reshape(-1)[: mesh.n_chips * (len(gradient) // mesh.n_chips)]
            counts = counts.reshape(-1, mesh.n_chips)
            same = bool((counts == counts[0]).all())
            note(
                "commit",
                step=step,
                attempt=attempt,
                members=members,
                live=[mesh.rank(group.mesh.chip(r)) for r in range(group.mesh.n_chips)],
                counts=counts[0].tolist() if same else None,
                weights=hashlib.sha256(weights["w"].numpy().tobytes()).hexdigest()[:16],
                configure_s=group.timings.configure_s,
                exchange_s=group.timings.exchange_s,
                connect_s=group.timings.connect_s,
                plan_s=group.timings.plan_s,
                configured_at=group.timings.configured_at,
                failed_at=group.timings.failed_at,
            )
        else:
            note("refused", step=step, why=str(manager.errored())[:200])
    os._exit(0)
