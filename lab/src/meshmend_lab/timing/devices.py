"""All-reduce times on JAX devices: `psum`, every planner, and what a job takes, measured beside predicted.

    python -m meshmend_lab.timing.devices --shape 4x4 --payload 4kB
    meshmend run --local 4x6 --host 2x2 -m meshmend_lab.timing.devices --payload 4kB --payload 200kB

`meshmend lab bench jax` runs it in a process with as many virtual devices as the mesh has chips. Under a
launcher each process has its host's devices, all of them measure together, and process 0 prints the table.

Every planner is tuned for the payload and for hardware that is given or was measured just before, as a job's plan is.
Cases alternate, so that other load on the machine affects all of them alike, and a fast wrong sum does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from numpy.typing import NDArray

import meshmend.jax as mmj
from meshmend.buckets import own_folder
from meshmend.cost import StepDemand
from meshmend.cost.hardware import hardware_facts
from meshmend.errors import MeshmendError, ParameterError, PlanError
from meshmend.jax.engine.fabric import Fabric
from meshmend.jax.engine.program import Program
from meshmend.jax.session import Session, initialize, initialize_alone
from meshmend.jax.session.hardware import with_hardware
from meshmend.jax.session.session import RECOVERY_BUDGET_S
from meshmend.jax.session.single_process import is_launched
from meshmend.jax.train.plan import hardware_of
from meshmend.planning import PlanCache, plan
from meshmend.planning.auto import CHOICES
from meshmend.schedule import Schedule
from meshmend_lab.errors import LabError
from meshmend_lab.timing.report import JOB, PSUM, as_text, compare, read_payload


@dataclass(frozen=True)
class JaxTiming:
    """One case: the best and the median run, and what was predicted. `psum` is not ours to predict."""

    case: str
    payload_bytes: int
    seconds: float
    median_s: float
    planner: str | None = None
    steps: int | None = None
    chunks: int | None = None
    predicted_s: float | None = None
    error: float | None = None
    """How far the prediction is from the best run, as a fraction of that run; below zero if it is too short."""


def measure(
    session: Session, payloads: Sequence[int], *, folder: Path, planners: Sequence[str] | None = None, repeat: int = 3
) -> dict[str, Any]:
    """Time all cases for each payload on a session's fabric, for its hardware; return the figures on every process.

    `folder` keeps the plans; where there are several processes they share it. Call it on each of them.
    """
    fabric = session.fabric
    timings = [
        timing
        for payload_bytes in payloads
        for timing in _measure_payload(session, payload_bytes, folder, planners, repeat)
    ]
    return {
        "mesh": str(fabric.mesh),
        "chips": fabric.n_chips,
        "processes": session.launch.n_processes,
        "device_kind": str(fabric.jax_mesh.devices.flat[0].device_kind),
        "jax": jax.__version__,
        **hardware_facts(hardware_of(fabric)),
        **compare([asdict(timing) for timing in timings]),
    }


def _measure_payload(
    session: Session, payload_bytes: int, folder: Path, planners: Sequence[str] | None, repeat: int
) -> list[JaxTiming]:
    fabric, n_values = session.fabric, payload_bytes // 4
    params = jax.ShapeDtypeStruct((n_values,), np.float32)
    job = session.agree_on_plan(lambda cache: mmj.plan(fabric, params, cache=cache, budget_s=RECOVERY_BUDGET_S), folder)
    tuned = _tune(session, payload_bytes, planners, PlanCache(folder))
    assert job.schedule is not None  # noqa: S101  # only FSDP has none
    schedules = {**tuned, JOB: job.schedule}
    programs = {name: mmj.install(schedule, fabric) for name, schedule in tuned.items()}
    # A job's plan is often one of these, and the same program is not timed twice.
    same = next((name for name, schedule in tuned.items() if schedule == job.schedule), JOB)
    if same == JOB:
        programs[JOB] = mmj.install(job.schedule, fabric, scalars=job.scalars)
    took = _time(session, programs, n_values, repeat)
    cores = fabric.jax_mesh.shape[fabric.core_axis] if fabric.core_axis else 1
    found = [JaxTiming(PSUM, payload_bytes, min(took[PSUM]), statistics.median(took[PSUM]))]
    for name, schedule in schedules.items():
        seconds = took[same if name == JOB else name]
        best, predicted = min(seconds), StepDemand(schedule).seconds(payload_bytes / cores, hardware_of(fabric))
        found.append(
            JaxTiming(
                name,
                payload_bytes,
                best,
                statistics.median(seconds),
                planner=schedule.planner,
                steps=schedule.n_steps,
                chunks=schedule.total_chunks,
                predicted_s=predicted,
                error=predicted / best - 1,
            )
        )
    return found


def _tune(
    session: Session, payload_bytes: int, planners: Sequence[str] | None, cache: PlanCache
) -> dict[str, Schedule]:
    """Return the plan of each planner that serves the mesh; process 0 makes them, and the others find them."""
    hardware = hardware_of(session.fabric)
    found = {}
    if session.launch.process != 0:
        session.coordination.wait_for_all()
    for name in planners or [kind.name for kind in CHOICES]:
        try:
            found[name] = plan(session.fabric.mesh, name, payload_bytes=payload_bytes, hardware=hardware, cache=cache)
        except PlanError:
            if planners:
                raise
    if session.launch.process == 0:
        session.coordination.wait_for_all()
    return found


def _time(session: Session, programs: dict[str, Program], n_values: int, repeat: int) -> dict[str, list[float]]:
    """Return how long each run of each case took, on the process that took longest; raise if a sum is wrong."""
    fabric = session.fabric
    by_device = fabric.sharding(fabric.axes)
    n_devices = int(fabric.jax_mesh.devices.size)

    def row(index: Any) -> NDArray[np.float32]:
        return contribution(index[0].start or 0, n_values)[None]

    held = jax.make_array_from_callback((n_devices, n_values), by_device, row)

    def compiled(collective: Callable[..., Any], *specs: Any) -> Callable[..., jax.Array]:
        mapped = jax.shard_map(
            collective,
            mesh=fabric.jax_mesh,
            in_specs=(by_device.spec, *specs),
            out_specs=by_device.spec,
            check_vma=False,
        )
        return jax.jit(mapped, compiler_options=fabric.compiler_options or None)

    runs: dict[str, Callable[[], jax.Array]] = {
        PSUM: partial(compiled(lambda x: lax.psum(x, fabric.axes)), held),
        **{name: partial(compiled(mmj.all_reduce, one.spec), held, one) for name, one in programs.items()},
    }
    expected = sum(contribution(rank, n_values) for rank in range(n_devices))
    for name, run in runs.items():
        for shard in run().addressable_shards:
            if not np.array_equal(np.asarray(shard.data)[0], expected):
                raise LabError(f"{name} gave a wrong sum on {fabric.mesh}, {shard.device}.")
    spans: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeat):
        for name, run in runs.items():
            session.coordination.wait_for_all()
            started = time.perf_counter()
            jax.block_until_ready(run())
            spans[name].append(time.perf_counter() - started)
    everybody = session.coordination.exchange(spans)
    return {name: [max(run) for run in zip(*(one[name] for one in everybody), strict=True)] for name in spans}


def contribution(rank: int, n_values: int) -> NDArray[np.float32]:
    """Return what a device adds: small whole numbers, so that a sum in any order is exact.

    >>> contribution(1, 4).tolist()
    [-3.0, 2.0, -6.0, -1.0]
    """
    return ((np.arange(n_values, dtype=np.int32) * 5 + 3 * rank) % 13 - 6).astype(np.float32)


def main(words: Sequence[str]) -> None:
    """Measure, and print the table; or, with --json, one line with the figures."""
    parser = argparse.ArgumentParser(prog="python -m meshmend_lab.timing.devices", description=__doc__)
    parser.add_argument("--shape", help="the mesh that devices without coordinates form")
    parser.add_argument("--fail", action="append", default=[], help="a hole, as in 2x2@0,0")
    parser.add_argument("--payload", action="append", required=True, help="bytes per device, as in 4MB")
    parser.add_argument("--planner", action="append", help="only these")
    parser.add_argument("--repeat", type=int, default=3, help="runs per case; the best counts")
    parser.add_argument("--hardware", help="a preset or a file; by default the devices are measured")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(words)
    launched = is_launched()
    if launched and (given.shape or given.fail):
        raise ParameterError("Under a launcher the hosts say which chips there are: leave out --shape and --fail.")
    payloads = [read_payload(text) for text in given.payload]
    with tempfile.TemporaryDirectory(prefix="meshmend-timing-") as own:
        shared = os.environ.get("MESHMEND_SHARED") if launched else None
        folder = own_folder(shared or own)
        joined = initialize() if launched else initialize_alone(_own_fabric(given.shape, given.fail))
        with joined as session:
            known = with_hardware(session, folder / "hardware", given.hardware, measures=True)
            found = measure(known, payloads, folder=folder / "plans", planners=given.planner, repeat=given.repeat)
            if session.launch.process == 0:
                sys.stdout.write((json.dumps(found) if given.json else as_text(found)) + "\n")
                sys.stdout.flush()


def _own_fabric(shape: str | None, holes: list[str]) -> Fabric:
    """Return the fabric of this process's devices: those of a TPU know where they are, others form `shape`."""
    return mmj.discover(failed=holes or None) if shape is None else mmj.discover(shape=shape, failed=holes, wrap=False)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except MeshmendError as error:
        sys.exit(f"{error}")
