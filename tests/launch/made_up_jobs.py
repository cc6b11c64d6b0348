"""Jobs whose lives are made up second by second, and the files that they leave."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from meshmend.launch.goodput import CAUSES
from meshmend.launch.metrics import JobMetrics

Event = dict[str, Any]


class MadeUpJob:
    """A job whose every second is known: what each was spent on, and what its hosts would have written."""

    def __init__(self, seed: int, n_hosts: int = 4) -> None:
        self.random = random.Random(seed)
        self.n_hosts = n_hosts
        self.truth = dict.fromkeys((*CAUSES, "training"), 0.0)
        self.events: list[list[Event]] = [[] for _ in range(n_hosts)]
        self.now = 1_000_000.0
        self.step = 0
        self.round = 0

    def spend(self, cause: str, longest_s: float = 5.0) -> float:
        seconds = self.random.uniform(0.01, longest_s)
        self.truth[cause] += seconds
        self.now += seconds
        return seconds

    def say(self, hosts: list[int], event: str, **facts: Any) -> None:
        for host in hosts:
            self.events[host].append({"at": self.now, "event": event, "host": host, **facts})

    def train(self, hosts: list[int], steps: int, lose: int) -> None:
        """Start on some hosts and do some steps, of which the last `lose` will have to be done again."""
        self.round += 1
        for event in ("process", "join", "fabric"):
            at = self.now
            seconds = self.spend("start")
            facts = {"chips": 4 * len(hosts), "hosts": hosts} if event == "fabric" else {}
            for host in hosts:
                self.events[host].append({"at": at, "event": event, "seconds": seconds, **facts})
        for event in ("plan", "compile", "restore"):
            at = self.now
            seconds = self.spend(event)
            facts = {"step": self.step, "source": "memory"} if event == "restore" else {}
            for host in hosts:
                self.events[host].append({"at": at, "event": event, "seconds": seconds, "round": self.round, **facts})
        resumed = self.step
        for number in range(resumed + 1, resumed + steps + 1):
            if number == resumed + 1:
                self.spend("first step")
                waited = 0.0
            else:
                waited = self.spend("data", 0.1)
                if number % 7 == 0:
                    at = self.now
                    seconds = self.spend("checkpoint", 1.0)
                    for host in hosts:
                        self.events[host].append({"at": at, "event": "checkpoint", "seconds": seconds})
                if number > resumed + steps - lose:
                    self.truth["data"] -= waited
                    self.truth["steps done again"] += waited
                    waited = 0.0
                self.spend("training" if number <= resumed + steps - lose else "steps done again")
            self.say(hosts, "step", step=number, loss=1 / number, round=self.round, waited_s=waited)
            self.say(hosts, "kept", step=number, round=self.round)
        self.step = resumed + steps - lose


def lived_through(seed: int, most_lost: int = 3) -> MadeUpJob:
    job = MadeUpJob(seed)
    everybody = list(range(job.n_hosts))
    for _ in range(job.random.randint(1, 5)):
        steps = job.random.randint(8, 40)
        hosts = sorted(job.random.sample(everybody, job.random.randint(2, job.n_hosts)))
        job.train(hosts, steps, job.random.randint(0, most_lost))
        job.spend("detect")
        job.say(hosts[1:], "gave up", why="lost a peer")  # the first one is dead
        job.spend("rendezvous")
    job.train(everybody, 20, 0)
    return job


def write(job: MadeUpJob, folder: Path) -> list[Path]:
    """Write a job's timelines, as its hosts would."""
    paths = [folder / "timeline" / f"host-{host}.jsonl" for host in range(job.n_hosts)]
    for path, events in zip(paths, job.events, strict=True):
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return paths


def everything(folder: Path) -> list[Any]:
    """Return the metrics of a job that has all of them."""
    job = lived_through(0)
    for events in job.events:
        events.append({"at": job.now, "event": "saved", "step": 1})
        events.append({"at": job.now, "event": "round", "least": 2, "most": 4})
    write(job, folder)
    return list(JobMetrics(folder).collect())
