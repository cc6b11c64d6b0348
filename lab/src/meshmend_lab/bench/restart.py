"""The restart campaign: kill hosts of a JAX job at random moments, and check its guarantees.

Each run trains on 4 hosts, two by two, under the launcher. A host gets SIGKILL, agent and worker, and loses its memory;
the survivors must commit a step round the hole; then the host comes back empty, and the mesh must be whole again. In
some failures a second host dies while the survivors recover. The store may die, too: alone, and training must go on, or
with a host. At the end no step may be missing, every sample must be used once per epoch, no committed step may be lost
to one host's death, and the loss must be that of an undisturbed run.
"""

from __future__ import annotations

import json
import random
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from meshmend.errors import ParameterError
from meshmend.launch.goodput import HostHistory, gave_up_at
from meshmend.launch.hosts import Hosts
from meshmend.launch.local import LocalJob
from meshmend.launch.timeline import STAGES, Line, read_timeline, timeline_of
from meshmend.topology import name_shape, parse_shape
from meshmend_lab.bench.trainee import N_SAMPLES, TrainingJob
from meshmend_lab.errors import LabError

N_HOSTS = 4
PAIRS = ((0, 2), (1, 3))
"""Hosts that may die together: the other two are connected, and neither of the dead ones keeps the other's shards."""
STORE_AWAY_S = 3.0
"""How long a store that is killed is away, at most."""
STORE_PAUSE_S = 0.2
"""Pause after each step where the store is killed: a job that trains on must not be over before it is back."""
LOSS_TOLERANCE = 1e-3
"""Sums in another order round differently, and training propagates that; the measured effect is far below this."""

SECRET = secrets.token_hex(32)
"""Of all jobs here: what one has compiled and signed, the next one loads."""

SHARDS = ("update", "fsdp")
"""What a job may shard over its chips."""


@dataclass(frozen=True)
class HostKill:
    """Hosts to kill, one after the other; or the store, which is started again after a while; or both at once."""

    hosts: tuple[int, ...]
    apart_s: float = 0.0
    store_away_s: float | None = None
    """How long the store is away, None if it is not killed."""


@dataclass(frozen=True)
class Failure:
    """One failure: the hosts that died, and how long the survivors took to commit a step without them."""

    hosts: tuple[int, ...]
    """None if only the store died."""
    step: int
    source: str
    """Where the state was restored from: "memory" or "disk"; "" if training went on."""
    lost_steps: int
    """Committed steps that had to be repeated: none, unless the state came from disk."""
    total_s: float
    """From the last SIGKILL to the first step that all survivors have committed."""
    stages_s: dict[str, float]
    of_store: bool = False
    """Whether the store was killed, too."""


@dataclass
class RestartReport:
    """The results of a campaign. A broken guarantee raises, so a report means that all held."""

    failures: list[Failure] = field(default_factory=list)
    runs: int = 0
    steps: int = 0
    loss_difference: float = 0.0
    """Largest relative difference of a final loss from the undisturbed run's."""

    def facts(self) -> dict[str, Any]:
        """Return the figures."""
        of_hosts = [failure for failure in self.failures if failure.hosts]
        totals = [failure.total_s for failure in of_hosts]
        return {
            "runs": self.runs,
            "steps": self.steps,
            "failures": len(self.failures),
            "of_host_0": sum(0 in failure.hosts for failure in self.failures),
            "of_store": sum(failure.of_store for failure in self.failures),
            "of_store_and_host": sum(failure.of_store for failure in of_hosts),
            "during_recovery": sum(len(failure.hosts) > 1 for failure in self.failures),
            "sources": {s: sum(f.source == s for f in self.failures) for s in ("memory", "disk")},
            "lost_steps": sum(failure.lost_steps for failure in self.failures),
            "loss_difference": self.loss_difference,
            "recovery_s": {"median": statistics.median(totals), "worst": max(totals)},
            "stages_s": {
                stage: {
                    "median": statistics.median(f.stages_s[stage] for f in of_hosts),
                    "worst": max(f.stages_s[stage] for f in of_hosts),
                }
                for stage in STAGES
            },
        }


def campaign(
    failures: int = 20,
    *,
    host: str = "4x2",
    shard: str = "update",
    seed: int = 0,
    per_run: int = 5,
    aided: bool = True,
    second: bool = True,
    store: bool = False,
    steps_per_failure: int = 30,
    patience_s: float = 120.0,
    on_failure: Callable[[Failure], None] = lambda _: None,
) -> RestartReport:
    """Run the campaign and return its report; raise `LabError` if a guarantee is broken.

    `host` is the tile of chips that a host drives. `shard` says what is sharded over the chips: the weight update, or
    the parameters, too ("fsdp"). With `aided=False`, jobs restart from disk only, and plan and
    compile again: the baseline. With `second`, another host dies in every fourth failure while the survivors
    recover. With `store`, every third failure is of the store alone, and every third of a host and the store at once.
    """
    if shard not in SHARDS:
        raise ParameterError(f"shard is {shard!r}, expected {' or '.join(map(repr, SHARDS))}.")
    rng = random.Random(seed)  # noqa: S311  # moments and places, not secrets
    report = RestartReport()
    shape = name_shape([2 * n for n in parse_shape(host)])
    # Left behind if a guarantee is broken, for its logs.
    folder = Path(tempfile.mkdtemp(prefix="meshmend-restart-"))
    left, number = failures, 0
    while left > 0:
        count = min(per_run, left)
        steps = (count + 1) * steps_per_failure
        job = TrainingJob(
            str(folder / f"run-{number}"),
            shape=shape,
            host=host,
            planner="auto",
            shard=shard,
            steps=steps,
            caches=str(folder),
            pause_on_hole_s=1.0,
        )
        if store:
            job = replace(job, pause_s=STORE_PAUSE_S)
        if not aided:
            job = replace(job, memory=False, plans=False, compile_cache=False, ahead=False, disk_every=5)
        run = Run(job, patience_s)
        undisturbed = Run(replace(job, folder=str(folder / f"undisturbed-{steps}")), patience_s)
        if not Path(undisturbed.job.folder).exists():
            undisturbed.go([], rng)
        # Failures are numbered across the campaign: host 0 dies in the first, a second host in every fourth.
        kills = []
        for i in range(failures - left, failures - left + count):
            both = rng.choice(PAIRS) if second and i % 4 == 3 else (0 if i == 0 else rng.randrange(N_HOSTS),)
            kill = HostKill(tuple(rng.sample(both, len(both))), rng.uniform(0.5, 8.0))
            if store and i % 3:
                kill = HostKill(kill.hosts[:1] if i % 3 == 2 else (), store_away_s=rng.uniform(0.0, STORE_AWAY_S))
            kills.append(kill)
        report.failures += run.go(kills, rng, on_failure)
        difference = abs(run.final_loss() / undisturbed.final_loss() - 1)
        if difference > LOSS_TOLERANCE:
            raise LabError(f"Run {number} ends with another loss than the undisturbed run: {difference:.1e} apart.")
        report.loss_difference = max(report.loss_difference, difference)
        report.runs += 1
        report.steps += steps
        left -= count
        number += 1
    shutil.rmtree(folder)
    return report


class Run:
    """One job from start to end, and what was observed."""

    def __init__(self, job: TrainingJob, patience_s: float = 120.0) -> None:
        self.job = job
        self.folder = Path(job.folder)
        self.patience_s = patience_s

    def go(
        self, kills: Sequence[HostKill], rng: random.Random, on_failure: Callable[[Failure], None] = lambda _: None
    ) -> list[Failure]:
        """Run the job through kills, each in its own range of steps, and check its guarantees."""
        found = []
        command = ["-m", "meshmend_lab.bench.trainee", str(self.job.write())]
        with self.hosts(command) as hosts:
            hosts.start()
            stretch = self.job.steps // (len(kills) + 1)
            for i, kill in enumerate(kills):
                at_step = i * stretch + rng.randrange(stretch // 4, stretch)
                self._until(partial(self._whole_since, at_step), f"step {at_step} on all hosts", hosts)
                time.sleep(rng.random() * 0.3)
                found.append(self._fail(hosts, kill) if kill.hosts else self._lose_store(hosts, kill))
                on_failure(found[-1])
                if kill.hosts:
                    hosts.start(*kill.hosts)
            # A step of many virtual chips on few cores takes a second.
            statuses = hosts.wait(self.patience_s * (1 + len(kills)) + self.job.steps)
            if any(statuses.values()):
                raise LabError(f"Hosts ended with {statuses}; see {self.folder}/host-*.log.")
        self._check()
        return found

    def hosts(self, command: Sequence[str]) -> Any:
        """Return the job's hosts, each with a log. What returns another kind of hosts is tested the same way."""

        def log(host: int, line: str) -> None:
            with (self.folder / f"host-{host}.log").open("a") as file:
                file.write(f"{time.time():.2f} {line}\n")

        machine = Hosts.of(self.job.shape, self.job.host)
        return LocalJob(
            command,
            machine,
            self.folder / "launcher",
            least=2,
            max_restarts=5,
            secret=SECRET,
            on_line=log,
            on_event=lambda event: log(event["host"], json.dumps(event)),
        )

    def _lose_store(self, hosts: Any, kill: HostKill) -> Failure:
        """Kill the store alone and start it again: the hosts must go on as if nothing had happened."""
        round_, killed_at = self._round(), time.time()
        hosts.kill_store()
        step = self._committed(round_) + 2  # begun since
        self._until(partial(self._whole_since, step), f"step {step} without a store", hosts)
        seconds = time.time() - killed_at
        hosts.watch(max(0.0, (kill.store_away_s or 0.0) - seconds))
        hosts.start_store()
        step = self._committed(round_) + 2
        self._until(partial(self._whole_since, step), f"step {step} with a new store", hosts)
        if self._round() != round_:
            raise LabError(f"The loss of the store ended round {round_}; see {self.folder}/host-*.log.")
        return Failure((), step, "", 0, seconds, dict.fromkeys(STAGES, 0.0), of_store=True)

    def _fail(self, hosts: Any, kill: HostKill) -> Failure:
        before, victims = self._round(), kill.hosts
        if kill.store_away_s is not None:
            hosts.kill_store()
        for i, victim in enumerate(victims):
            if i:
                time.sleep(kill.apart_s)
            killed_at = hosts.kill(victim)
            shutil.rmtree(self.folder / "memory" / f"host-{victim}", ignore_errors=True)
        if kill.store_away_s is not None:
            time.sleep(kill.store_away_s)
            hosts.start_store()
        survivors = set(range(N_HOSTS)) - set(victims)
        self._until(lambda: self._first_commit(survivors, before), f"a step without hosts {victims}", hosts)
        commit = self._first_commit(survivors, before)
        assert commit is not None  # noqa: S101  # it was waited for
        round_, step, at, last = commit
        resumed = next(e for e in self.events(last) if e["event"] == "restore" and e.get("round") == round_)
        committed = max(self._committed(a) for a in range(1, round_)) if round_ > 1 else 0
        if resumed["source"] == "memory" and resumed["step"] < committed:
            raise LabError(f"Step {committed} was committed, but the job went back to {resumed['step']}.")
        histories = [HostHistory(self.events(host)) for host in survivors]
        (its,) = [one for one in HostHistory(self.events(last)).rounds if one.number == round_]
        return Failure(
            hosts=victims,
            step=step,
            source=resumed["source"],
            lost_steps=max(0, committed - resumed["step"]),
            total_s=at - killed_at,
            stages_s=its.stages_since(killed_at, gave_up_at(histories), until=at),  # at the host that committed last
            of_store=kill.store_away_s is not None,
        )

    def events(self, host: int) -> list[Line]:
        """Return a host's timeline."""
        return read_timeline(timeline_of(self.folder, host))

    def digests(self) -> dict[int, str]:
        """Return a digest of the parameters after each step (of an exact job), from the round that counts."""
        found: dict[int, tuple[int, str]] = {}
        for host in range(N_HOSTS):
            for event in self.events(host):
                if event["event"] == "step":
                    mine = (event["round"], event["digest"])
                    found[event["step"]] = max(found.get(event["step"], mine), mine)
        return {step: digest for step, (_, digest) in sorted(found.items())}

    def final_loss(self) -> float:
        """Return the loss of the last step, the mean over its last few, which differ by batch."""
        losses = {e["step"]: e["loss"] for h in range(N_HOSTS) for e in self.events(h) if e["event"] == "step"}
        return float(statistics.mean(losses[step] for step in sorted(losses)[-5:]))

    def _kept(self, round_: int) -> dict[int, dict[int, float]]:
        """Return when each host of a round had each step: kept in memory, or just computed where nothing is kept."""
        sign = "kept" if self.job.memory else "step"
        found: dict[int, dict[int, float]] = {}
        for host in range(N_HOSTS):
            mine = [e for e in self.events(host) if e.get("round") == round_]
            if mine:
                found[host] = {e["step"]: e["at"] for e in mine if e["event"] == sign}
        return found

    def _committed(self, round_: int) -> int:
        kept = self._kept(round_)
        common = set.intersection(*(set(steps) for steps in kept.values())) if kept else set()
        return max(common, default=0)

    def _round(self) -> int:
        return max((e.get("round", 0) for host in range(N_HOSTS) for e in self.events(host)), default=0)

    def _whole_since(self, step: int) -> bool:
        kept = self._kept(self._round())
        return len(kept) == N_HOSTS and all(max(steps, default=0) >= step for steps in kept.values())

    def _first_commit(self, survivors: set[int], after: int) -> tuple[int, int, float, int] | None:
        """Return the first step committed by just the survivors: (round, step, when, by which host last)."""
        for round_ in range(after + 1, self._round() + 1):
            kept = self._kept(round_)
            if set(kept) == survivors and all(kept.values()):
                step = max(min(steps) for steps in kept.values())
                if all(step in steps for steps in kept.values()):
                    last = max(kept, key=lambda host: kept[host][step])
                    return round_, step, kept[last][step], last
        return None

    def _until(self, condition: Callable[[], Any], what: str, hosts: Any) -> None:
        until = time.monotonic() + self.patience_s
        while not condition():
            hosts.watch(0.1)
            if time.monotonic() > until or not hosts.running:
                raise LabError(f"The job never reached {what}; see {self.folder}/host-*.log.")

    def _check(self) -> None:
        from meshmend.jax.data.exactly_once import check_positions

        steps = check_positions(self.folder, N_SAMPLES)
        if steps != self.job.steps:
            raise LabError(f"The job has done {steps} steps, expected {self.job.steps}.")
