"""Many simulated jobs: what they came to, and the shortest story of one that broke a promise."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from statistics import median, quantiles
from typing import Any

from meshmend_lab.simulation.job import Outcome, SimulatedJob
from meshmend_lab.simulation.plan import Plan, draw

AT_ONCE = 4
"""Seeds that a process takes at a time."""


@dataclass
class Campaign:
    """What the jobs of a campaign came to."""

    n_jobs: int = 0
    n_hosts: int = 0
    n_steps: int = 0
    n_events: int = 0
    simulated_s: float = 0.0
    n_splits: int = 0
    """Jobs in which two rounds trained, where a round needs no more than half of the hosts."""
    ends: Counter[str] = field(default_factory=Counter)
    n_faults: Counter[str] = field(default_factory=Counter)
    violations: dict[int, str] = field(default_factory=dict)
    """By seed."""
    recovered_s: list[float] = field(default_factory=list, repr=False)

    def add(self, outcome: Outcome) -> None:
        """Count a job."""
        self.n_jobs += 1
        self.n_hosts += outcome.n_hosts
        self.n_steps += outcome.steps
        self.n_events += outcome.n_events
        self.simulated_s += outcome.simulated_s
        self.n_splits += outcome.n_splits > 0
        self.n_faults += outcome.n_faults
        self.recovered_s += outcome.recovered_s
        if outcome.violation is not None:
            self.violations[outcome.seed] = str(outcome.violation)
        self.ends["none" if outcome.over is None else "finished" if outcome.over["ok"] else "failed"] += 1

    def facts(self) -> dict[str, Any]:
        """Return all of it, as JSON has it."""
        times = self.recovered_s
        cuts = quantiles(times, n=100) if len(times) > 1 else [*times, *times] * 50
        spread = {"median": median(times), "p90": cuts[89], "p99": cuts[98], "worst": max(times)} if times else {}
        return {
            "jobs": self.n_jobs,
            "hosts": self.n_hosts,
            "faults": self.n_faults.total(),
            "faults_by_kind": dict(self.n_faults.most_common()),
            "ends": dict(self.ends),
            "steps": self.n_steps,
            "events": self.n_events,
            "simulated_h": round(self.simulated_s / 3600, 1),
            "splits": self.n_splits,
            "recoveries": len(times),
            "recovery_s": {name: round(seconds, 2) for name, seconds in spread.items()},
            "violations": {str(seed): text for seed, text in sorted(self.violations.items())},
        }


def run(
    first: int, last: int, *, n_hosts: int | None = None, n_faults: int = 50, n_processes: int = 1
) -> Iterator[Outcome]:
    """Run the jobs of seeds `first` to `last` - 1, and yield what came of each, in order."""
    tasks = [(seed, n_hosts, n_faults) for seed in range(first, last)]
    if n_processes == 1:
        yield from map(_run_one, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(n_processes) as pool:
        yield from pool.imap(_run_one, tasks, chunksize=AT_ONCE)


def _run_one(task: tuple[int, int | None, int]) -> Outcome:
    seed, n_hosts, n_faults = task
    return SimulatedJob(draw(seed, n_hosts=n_hosts, n_faults=n_faults)).run()


def shrink(plan: Plan, within_s: float = 60.0) -> Plan:
    """Return the plan with as few of its faults as are needed to violate the same invariant."""
    found = SimulatedJob(plan).run().violation
    if found is None:
        return plan
    until, size = time.monotonic() + within_s, max(1, len(plan.faults) // 2)
    while size and time.monotonic() < until:
        at = 0
        while at < len(plan.faults) and time.monotonic() < until:
            fewer = replace(plan, faults=plan.faults[:at] + plan.faults[at + size :])
            violation = SimulatedJob(fewer).run().violation
            if violation is not None and violation.kind == found.kind:
                plan = fewer
            else:
                at += size
        size //= 2
    return plan


def replay(plan: Plan, show: Callable[[str], None]) -> Outcome:
    """Run a job again, and tell its story."""
    domains = f", in racks of {plan.domains.count(plan.domains[0])}" if plan.domains else ""
    show(f"seed {plan.seed}: {plan.n_hosts} hosts{domains}, a round needs {plan.least}, {len(plan.faults)} faults")
    outcome = SimulatedJob(plan, show).run()
    end = outcome.violation if outcome.violation is not None else f"the job is over: {outcome.over}"
    show(f"{'VIOLATED' if outcome.violation else 'END'}: {end}")
    return outcome
