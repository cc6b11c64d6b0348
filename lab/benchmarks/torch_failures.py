"""The failure campaign: kill chips and boards of a job under torchft at random moments, and check its guarantees.

    python lab/benchmarks/torch_failures.py 4x4 --kills 50    as in docs/torch.md
    python lab/benchmarks/torch_failures.py 4x4 --kills 2     a quick look

After every kill the survivors must commit a step round the hole; then the killed chips come back and the mesh must be
whole again. At the end every step that any chip committed must have used each contribution of its members exactly
once, with the same weights on every chip that committed it, and the steps must have used each sample exactly once per
epoch.

The model is a vector of weights; each chip's contribution to a step is known beforehand, so that the sum of every
committed step can be checked against the chips that took part.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import hashlib
import json
import logging
import os
import random
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchft.coordination import LighthouseServer

from meshmend.errors import Coordinate, name_chip
from meshmend.launch.chips import Chips
from meshmend.planning import PlanCache, PlanFunction, plan
from meshmend.topology import Mesh, Region, all_placements
from meshmend.torch.manager import Manager
from meshmend.torch.options import LOOPBACK
from meshmend.torch.plans import Plans
from meshmend.torch.process_group import MeshProcessGroup
from meshmend.torch.sampling import StepSampler
from meshmend_lab.errors import LabError

HOST = "127.0.0.1"
INTERFACE = "lo"
LIGHTHOUSE: Coordinate = (-1,)
"""The lighthouse runs beside the chips, under a coordinate that no chip has."""

STAGES = ("detect", "quorum", "replan", "redo")


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
                configured_at=group.timings.configured_at,
                failed_at=group.timings.failed_at,
            )
        else:
            note("refused", step=step, why=str(manager.errored())[:200])
    os._exit(0)


@dataclass(frozen=True)
class ReplicaKill:
    """One SIGKILL: what it hit, when, and how long the survivors took to commit a step without it.

    The total is split into stages of the survivor that committed first: until it gave up its all-reduce (zero where
    the quorum detected the loss), had a new quorum, had formed the group and planned, and committed.
    """

    hole: Region
    moment: str
    total_s: float
    stages_s: dict[str, float]


@dataclass
class FailuresReport:
    """The results of a campaign. A broken guarantee raises, so a report means that all held."""

    mesh: str
    kills: list[ReplicaKill] = field(default_factory=list)
    committed_steps: int = 0
    commits: int = 0
    refused: int = 0

    def facts(self) -> dict[str, Any]:
        """Return the figures."""
        totals = [kill.total_s for kill in self.kills]
        return {
            "mesh": self.mesh,
            "kills": len(self.kills),
            "boards": sum(kill.hole.n_chips > 1 for kill in self.kills),
            "moments": {m: sum(kill.moment == m for kill in self.kills) for m in ("before", "inside", "after")},
            "committed_steps": self.committed_steps,
            "commits": self.commits,
            "refused": self.refused,
            "recovery_s": {"median": statistics.median(totals), "worst": max(totals)},
            "stages_s": {
                stage: {
                    "median": statistics.median(kill.stages_s[stage] for kill in self.kills),
                    "worst": max(kill.stages_s[stage] for kill in self.kills),
                }
                for stage in STAGES
            },
        }


def campaign(
    shape: str = "4x4",
    *,
    kills: int = 50,
    seed: int = 0,
    heartbeat_timeout_ms: int = 1000,
    patience_s: float = 60.0,
    on_kill: Callable[[ReplicaKill], None] = lambda _: None,
) -> FailuresReport:
    """Run the campaign and return its report; raise `LabError` if a guarantee is broken."""
    rng = random.Random(seed)  # noqa: S311  # moments and places, not secrets
    mesh = Mesh(shape)
    boards = all_placements(mesh.shape, (2, 2))
    chips = all_placements(mesh.shape, (1, 1), align=1)
    report = FailuresReport(str(mesh))
    with tempfile.TemporaryDirectory(prefix="meshmend-") as name, Chips() as running:
        folder = Path(name)
        watch = _Watch(folder, patience_s)
        address = folder / "lighthouse"
        running.start(LIGHTHOUSE, lighthouse, address, heartbeat_timeout_ms)
        watch.until(address.exists, "the lighthouse does not start")
        job = ReplicaJob(mesh.shape, address.read_text(), folder)
        job.plan_ahead([*boards, *chips])
        lives = dict.fromkeys((mesh.chip(rank) for rank in range(mesh.n_chips)), 0)
        for chip in lives:
            running.start(chip, train, job, 0)
        for _ in range(kills):
            watch.until(lambda: watch.committed_by(lives, mesh.n_chips), "the whole mesh does not commit")
            time.sleep(rng.random() * 0.5)
            hole = rng.choice(boards if rng.random() < 0.5 else chips)
            lost = [chip for chip in lives if not mesh.fail(hole).live[chip]]
            killed_at = time.time()
            running.kill(lost)
            survivors = {chip: life for chip, life in lives.items() if chip not in lost}
            for chip in lost:
                watch.read(chip, lives[chip])
            on_the_hole = functools.partial(watch.committed_by, survivors, len(survivors), after=killed_at)
            watch.until(on_the_hole, f"the survivors of {hole} do not commit")
            report.kills.append(_account(watch, hole, lost, lives, survivors, killed_at))
            on_kill(report.kills[-1])
            for chip in lost:
                lives[chip] += 1
                running.start(chip, train, job, lives[chip])
        watch.until(lambda: watch.committed_by(lives, mesh.n_chips), "the whole mesh does not commit in the end")
        (folder / "stop").touch()
        time.sleep(0.5)
        running.kill(list(running.alive))
        for chip, life in lives.items():
            watch.read(chip, life)
        by_step = _judge(watch, mesh, report)
        _judge_samples(watch, mesh, by_step, job.n_samples)
    return report


class _Watch:
    """Reads the chips' logs."""

    def __init__(self, folder: Path, patience_s: float) -> None:
        self._folder = folder
        self._patience_s = patience_s
        self._offsets: dict[tuple[Coordinate, int], int] = defaultdict(int)
        self.events: dict[tuple[Coordinate, int], list[dict[str, Any]]] = defaultdict(list)

    def read(self, chip: Coordinate, life: int) -> list[dict[str, Any]]:
        """Return everything that one incarnation of a chip has logged so far."""
        path = self._folder / f"{'-'.join(map(str, chip))}.{life}.log"
        key = (chip, life)
        if path.exists():
            with path.open("rb") as handle:
                handle.seek(self._offsets[key])
                # A chip may be killed in the middle of a line.
                whole, _, _ = handle.read().rpartition(b"\n")
            if whole:
                self._offsets[key] += len(whole) + 1
                self.events[key] += [json.loads(line) for line in whole.splitlines()]
        return self.events[key]

    def committed_by(self, lives: dict[Coordinate, int], members: int, *, after: float = 0.0) -> bool:
        """Return whether every chip's last commit had this many members and came after this moment."""
        for chip, life in lives.items():
            commit = next((e for e in reversed(self.read(chip, life)) if e["event"] == "commit"), None)
            if commit is None or commit["members"] != members or commit["t"] < after:
                return False
        return True

    def until(self, condition: Callable[[], bool], complaint: str) -> None:
        """Wait for a condition."""
        deadline = time.monotonic() + self._patience_s
        while not condition():
            if time.monotonic() > deadline:
                last = {name_chip(chip): events[-1] for (chip, _), events in self.events.items() if events}
                raise LabError(f"Within {self._patience_s:g} s {complaint}. Last log lines: {json.dumps(last)[:2000]}")
            time.sleep(0.02)


def _account(
    watch: _Watch,
    hole: Region,
    lost: Iterable[Coordinate],
    lives: dict[Coordinate, int],
    survivors: dict[Coordinate, int],
    killed_at: float,
) -> ReplicaKill:
    """Split the time from the kill to the first commit round the hole."""
    n = len(survivors)
    commits = [
        event
        for chip, life in survivors.items()
        for event in watch.events[chip, life]
        if event["event"] == "commit" and event["members"] == n and event["t"] > killed_at
    ]
    first = min(commits, key=lambda event: float(event["t"]))
    formed_at = max(first["configured_at"] - first["configure_s"], killed_at)
    given_up_at = first["failed_at"] if killed_at < first["failed_at"] < formed_at else killed_at
    stages = {
        "detect": given_up_at - killed_at,
        "quorum": formed_at - given_up_at,
        "replan": first["configured_at"] - formed_at,
        "redo": first["t"] - first["configured_at"],
    }
    # What a lost chip was doing follows from its last log line.
    last = [watch.events[chip, lives[chip]][-1]["event"] for chip in lost if watch.events[chip, lives[chip]]]
    if "reduce" in last:
        moment = "inside"
    elif "reduced" in last:
        moment = "after"
    else:
        moment = "before"
    return ReplicaKill(hole, moment, first["t"] - killed_at, stages)


def _judge(watch: _Watch, mesh: Mesh, report: FailuresReport) -> dict[int, dict[str, Any]]:
    """Check every commit of every chip against the guarantees; return one commit of each step."""
    by_step: dict[int, list[tuple[Coordinate, dict[str, Any]]]] = defaultdict(list)
    for (chip, _), events in watch.events.items():
        for event in events:
            if event["event"] == "commit":
                by_step[event["step"]].append((chip, event))
            report.refused += event["event"] == "refused"
    for step, commits in sorted(by_step.items()):
        wanted = [float(rank in commits[0][1]["live"]) for rank in range(mesh.n_chips)]
        for chip, event in commits:
            if event["counts"] != wanted or event["members"] != sum(wanted):
                raise LabError(
                    f"Chip {name_chip(chip)} committed step {step} with contributions {event['counts']}, "
                    f"expected each of {event['live']} exactly once."
                )
            if event["weights"] != commits[0][1]["weights"]:
                raise LabError(
                    f"Chips {name_chip(chip)} and {name_chip(commits[0][0])} have different weights after step {step}."
                )
        report.commits += len(commits)
    if sorted(by_step) != list(range(len(by_step))):
        raise LabError(f"Committed steps have gaps: {sorted(by_step)[:20]} …")
    report.committed_steps = len(by_step)
    return {step: commits[0][1] for step, commits in sorted(by_step.items())}


def _judge_samples(watch: _Watch, mesh: Mesh, commits: dict[int, dict[str, Any]], n_samples: int) -> None:
    """Count the samples of all committed steps: none may be used again before all others have been used as often."""
    tries: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(dict)
    for (chip, _), events in watch.events.items():
        for event in events:
            if event["event"] == "reduce":
                tries[event["step"], event["attempt"]][mesh.rank(chip)] = event["samples"]
    used = dict.fromkeys(range(n_samples), 0)
    for step, commit in commits.items():
        tried = tries[step, commit["attempt"]]
        for rank in commit["live"]:
            for sample in tried[rank]:
                used[sample] += 1
        if max(used.values()) - min(used.values()) > 1:
            often = max(used, key=lambda sample: used[sample])
            raise LabError(
                f"After step {step} sample {often} has been used {used[often]} times and others {min(used.values())} "
                f"times, expected each sample once per epoch."
            )


def main() -> None:
    """Run the campaign, and print what it found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shape", nargs="?", default="4x4", help="chips along each axis")
    parser.add_argument("--kills", type=int, default=50, help="how many times to kill a chip or a board")
    parser.add_argument("--seed", type=int, default=0, help="random seed: which chips, and when")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()

    def show(kill: ReplicaKill) -> None:
        if not options.json:
            stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in kill.stages_s.items())
            print(f"killed {kill.hole} {kill.moment} an all-reduce: committed after {kill.total_s:.2f} s ({stages})")

    facts = campaign(options.shape, kills=options.kills, seed=options.seed, on_kill=show).facts()
    if options.json:
        print(json.dumps(facts))
        return
    moments = ", ".join(f"{count} {moment}" for moment, count in facts["moments"].items())
    print(f"{facts['kills']} kills ({facts['boards']} of them boards): {moments} an all-reduce")
    print(f"{facts['committed_steps']} steps, {facts['commits']} commits by chips, {facts['refused']} refused by chips")
    for stage, figures in {"first step round the hole": facts["recovery_s"], **facts["stages_s"]}.items():
        print(f"{stage:26}median {figures['median']:.2f} s, worst {figures['worst']:.2f} s")
    print("every contribution exactly once, the same weights on every chip, each sample once per epoch")


if __name__ == "__main__":
    main()
