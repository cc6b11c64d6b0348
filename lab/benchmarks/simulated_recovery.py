"""Recoveries of the simulator beside those of real processes, for the same fault and as many hosts.

    python lab/benchmarks/simulated_recovery.py [--failures 20] [--jobs 200]

Four hosts train; one is killed at a random moment and loses its memory. The real ones are those of
`meshmend lab bench restart`. The simulator runs the product's decisions, and draws how long the parts take that it does
not run: once as in its campaigns, where they are to differ widely, and once with the medians of the real stages, so
that what is left are decisions, messages and waiting. Fails if the second median is not within a factor of two.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from statistics import median, quantiles

from meshmend_lab.bench.restart import N_HOSTS, campaign
from meshmend_lab.simulation.job import SimulatedJob
from meshmend_lab.simulation.plan import Fault, Plan, draw

LIMIT = 2.0
MEAN_WORKER, MEAN_COMPILE = 0.6, 1 / 15 + 0.5
"""Of what a plan's `worker_s` and `compile_s` say, how much is drawn in the mean."""


def one_kill(seed: int) -> Plan:
    """Return a job in which one host dies once, with its memory, while all train."""
    rng = Random(f"kill {seed}")  # noqa: S311
    fault = Fault(
        60.0 + rng.uniform(0.0, 20.0),
        "host restarted without its memory",
        (rng.randrange(N_HOSTS),),
        60.0,
        rng.random(),
    )
    return replace(
        draw(seed, n_hosts=N_HOSTS), least=1, machine="", domains=(), faults=(fault,), max_restarts=100, memory_every=1,
        is_checked=False, last_moments=0.0, total=10**6,
    )  # fmt: skip


def as_measured(plan: Plan, stages_s: dict[str, float]) -> Plan:
    """Return the same job on a machine whose parts take as long as the real ones in the median."""
    return replace(
        plan, latency_s=0.0005, step_s=0.05, fork_s=0.05, slow_s=0.05, write_s=0.05, read_s=stages_s["restore"] / 2,
        worker_s=(stages_s["start"] + stages_s["plan"]) / MEAN_WORKER,
        compile_s=(stages_s["compile"] + stages_s["first step"]) / MEAN_COMPILE,
    )  # fmt: skip


def simulated(plans: Sequence[Plan]) -> list[float]:
    """Return how long the first recovery of each job took."""
    outcomes = [SimulatedJob(plan).run() for plan in plans]
    if broken := [str(outcome.violation) for outcome in outcomes if outcome.violation]:
        raise SystemExit(f"A simulated job has broken a promise: {broken[0]}")
    return [outcome.recovered_s[0] for outcome in outcomes if outcome.recovered_s]


def row(name: str, times: Sequence[float], of: float) -> str:
    """Return a row of the table."""
    cells = [f"{len(times)}", *(f"{one:.1f}" for one in (min(times), median(times), quantiles(times, n=10)[-1]))]
    return f"| {name} | {' | '.join(cells)} | {max(times):.1f} | {median(times) / of:.2f} |"


def main() -> None:
    """Print both distributions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--failures", type=int, default=20, metavar="N", help="of real jobs")
    parser.add_argument("--jobs", type=int, default=200, metavar="N", help="that are simulated")
    given = parser.parse_args()
    report = campaign(given.failures, host="2x2", second=False)
    real = [failure.total_s for failure in report.failures]
    stages_s = {stage: about["median"] for stage, about in report.facts()["stages_s"].items()}
    print("real stages, s:", ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in stages_s.items()))
    plans = [one_kill(seed) for seed in range(given.jobs)]
    drawn, measured = simulated(plans), simulated([as_measured(plan, stages_s) for plan in plans])
    print("| recoveries | jobs | least, s | median, s | 90 % within, s | most, s | median / real median |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    print(row("real", real, median(real)))
    print(row("simulated, parts as drawn in campaigns", drawn, median(real)))
    print(row("simulated, parts as measured", measured, median(real)))
    ratio = median(measured) / median(real)
    if not 1 / LIMIT <= ratio <= LIMIT:
        raise SystemExit(f"The simulated median is {ratio:.2f} of the real one, expected within a factor of {LIMIT:g}.")


if __name__ == "__main__":
    main()
