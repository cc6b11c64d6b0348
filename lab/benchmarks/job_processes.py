"""A job of 4, 16 and 48 real processes on this machine: where a start and two recoveries spend their time.

    python lab/benchmarks/job_processes.py [HOSTS ...]

Each host is a process with one virtual chip. One host is killed, then two others at once; the rest resume from their
copies in memory. Gradients are small whole numbers, so that their sums are exact: after every step
the parameters must have the same bits as in the job of four, or the script fails. Nothing is compiled
ahead, and all processes share this machine's cores, so the times say how a phase grows, not what a cluster takes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS, FIRST_KILL, SECOND_KILL = 30, 8, 18
SHAPES = {4: "2x2", 16: "4x4", 48: "6x8"}
VICTIMS = {4: (1, (2, 3)), 16: (5, (9, 10)), 48: (19, (28, 36))}
"""By hosts: the one that is killed first, and the two that are killed together. A round needs half of four hosts: there
the first comes back before the others go."""
PATIENCE_S = 600.0
PHASES = ("detect", "rendezvous", "start", "plan", "compile", "restore", "first step")


def train(folder: str) -> None:
    """Be one process of the job."""
    import jax
    import numpy as np
    import optax

    import meshmend.jax as mmj
    from meshmend_lab.bench.trainee import exact_loss

    job = mmj.Job(folder, global_batch=96, compile_ahead=False, disk_every=0, memory_every=2)
    rng = np.random.default_rng(1)
    data = {"whole": rng.integers(-3, 4, (960, 16)).astype(np.float32)}
    weights = {
        name: (rng.integers(-8, 8, shape) / 32).astype(np.float32)
        for name, shape in {"w": (16, 32), "b": (32,)}.items()
    }
    for step in job.train(exact_loss, optax.adam(2.0**-7), weights, data, steps=STEPS, independent=False):
        found = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(step.params))
        if job.session.launch.process == 0:
            print(json.dumps({"step": step.number, "digest": hashlib.sha256(found).hexdigest()}), flush=True)
        # Slow enough to be killed in the middle.
        time.sleep(0.05)


class Watched:
    """What process 0 has printed of each step."""

    def __init__(self) -> None:
        self.digests: dict[int, str] = {}
        self.log: list[str] = []

    def on_line(self, host: int, line: str) -> None:
        self.log.append(f"{host} {line}")
        if line.startswith('{"step"'):
            found = json.loads(line)
            self.digests[found["step"]] = found["digest"]

    def on_event(self, event: dict[str, Any]) -> None:
        self.log.append(json.dumps(event))


def measure(n: int, folder: Path) -> tuple[list[tuple[str, dict[str, float]]], dict[int, str]]:
    """Run a job of `n` hosts; return the phases of its start and of both recoveries, and a digest after each step."""
    from meshmend.jax.data.exactly_once import check_positions
    from meshmend.launch.goodput import HostHistory, gave_up_at, rounds_of
    from meshmend.launch.hosts import Hosts
    from meshmend.launch.local import LocalJob
    from meshmend.launch.timeline import read_timeline, timeline_of

    watched, killed = Watched(), []
    first, both = VICTIMS[n]
    argv = [str(Path(__file__).resolve()), "--train", str(folder)]
    machine = Hosts.of(SHAPES[n], "1x1")
    with LocalJob(argv, machine, folder, least=2, on_line=watched.on_line, on_event=watched.on_event) as job:

        def until(step: int) -> None:
            began = time.monotonic()
            while max(watched.digests, default=0) < step:
                job.watch(0.05)
                if time.monotonic() - began > PATIENCE_S or not job.running:
                    sys.exit("\n".join([*watched.log[-40:], f"{n} hosts: the job never reached step {step}."]))

        job.start()
        until(FIRST_KILL)
        killed.append(job.kill(first))
        until(SECOND_KILL)
        if n - 1 - len(both) < 2:
            job.start(first)
            until(SECOND_KILL + 2)
        killed.append(max(job.kill(host) for host in both))
        if any(job.wait(PATIENCE_S).values()):
            sys.exit("\n".join([*watched.log[-40:], f"{n} hosts: the job has failed."]))
    histories = [HostHistory(read_timeline(timeline_of(folder, host))) for host in range(n)]
    gave_up, rounds = gave_up_at(histories), rounds_of(histories)
    if check_positions(folder, 960) != STEPS or sorted(watched.digests) != list(range(1, STEPS + 1)):
        sys.exit(f"{n} hosts: some steps were not done.")
    rows = [("start", rounds[0].stages_since(min(one.began for one in histories), []))]
    for name, at in zip(("one killed", "two killed"), killed, strict=True):
        its = next(one for one in rounds if one.marks[0][1] > at)
        if its.source != "memory":
            sys.exit(f"{n} hosts, {name}: resumed from {its.source}, expected memory.")
        rows.append((name, its.stages_since(at, gave_up)))
    return rows, watched.digests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hosts", nargs="*", type=int, help="numbers of hosts", metavar="HOSTS")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train(given.train)
        return
    wanted = given.hosts or list(SHAPES)
    if not SHAPES.keys() >= set(wanted):
        parser.error(f"HOSTS are some of {', '.join(map(str, SHAPES))}")
    print(f"| hosts | | {' | '.join(f'{phase}, s' for phase in PHASES)} | in all, s |")
    print(f"|--:|---{'|--:' * (len(PHASES) + 1)}|")
    expected: dict[int, str] = {}
    for n in wanted:
        with tempfile.TemporaryDirectory() as folder:
            rows, digests = measure(n, Path(folder) / "shared")
        for name, stages in rows:
            times = [*(stages.get(phase, 0.0) for phase in PHASES), sum(stages.values())]
            print(f"| {n} | {name} | {' | '.join(f'{one:.1f}' for one in times)} |", flush=True)
        expected = expected or digests
        if digests != expected:
            sys.exit(f"{n} hosts: the parameters differ from those of {wanted[0]} hosts.")
    print(f"The parameters have the same bits after each of {STEPS} steps, whatever the number of hosts.")


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
