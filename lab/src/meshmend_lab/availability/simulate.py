"""Simulate: the policies side by side, over independent runs.

Every run draws one history and simulates it under each policy, so the differences between policies are paired: all
have the same luck. Intervals are Student's t, over the runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from meshmend.errors import ParameterError
from meshmend_lab.availability.assumptions import Assumptions
from meshmend_lab.availability.history import draw
from meshmend_lab.availability.job import TimeSpent, simulate_run
from meshmend_lab.availability.policies import POLICIES, FaultTolerant, Policy, make_policies
from meshmend_lab.availability.throughput import Throughput, step_error

CONFIDENCE = 0.95
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Mean times between failures of a sweep, relative to the study's."""
SWEEP_RUNS = 5


@dataclass(frozen=True)
class Estimate:
    """A mean over runs, and half the width of its 95 % interval: infinite with one run."""

    mean: float
    half_width: float

    @classmethod
    def over(cls, values: Sequence[float]) -> Estimate:
        """Return the estimate from one value per run.

        >>> Estimate.over([1.0, 2.0, 3.0])
        Estimate(mean=2.0, half_width=2.484...)
        """
        mean = math.fsum(values) / len(values)
        if len(values) < 2:
            return cls(mean, math.inf)
        from scipy.special import stdtrit  # Student's quantile; importing scipy.stats would take a second

        spread = float(np.std(values, ddof=1)) / math.sqrt(len(values))
        return cls(mean, float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * spread)


@dataclass(frozen=True)
class Outcome:
    """The results of one policy. Fractions are of the hours of a machine that never fails and never saves.

    `goodput` is the work that was kept; it and `losses` (by cause) add up to 1. `utilisation` is the same work relative
    to all chips that are owned, spares included. `cost` is money per useful chip-hour, `price_h` money per hour. `gain`
    is the goodput above that of the first policy, run by run.
    """

    name: str
    price_h: float
    goodput: Estimate
    utilisation: Estimate
    cost: Estimate
    losses: dict[str, Estimate]
    interruptions_per_year: Estimate
    regrowths_per_year: Estimate
    gain: Estimate

    @property
    def downtime(self) -> float:
        """The fraction of the time without training."""
        return self.losses["waiting"].mean + self.losses["restarting"].mean


@dataclass(frozen=True)
class Check:
    """A state that was planned in full to check its estimate. `error` is the relative error of the step time."""

    mesh: str
    estimated_s: float
    exact_s: float
    error: float


@dataclass(frozen=True)
class Study:
    """The policies side by side, their assumptions, and the accuracy of the estimated states."""

    assumptions: Assumptions
    days: float
    runs: int
    seed: int
    all_reduce_s: float
    outcomes: tuple[Outcome, ...]
    checks: tuple[Check, ...]
    planned: int


LOSSES = ("waiting", "restarting", "lost work", "checkpoints", "fewer chips")
"""Causes of lost work, in the order of the report."""


def simulate(
    assumptions: Assumptions,
    *,
    days: float = 365.0,
    runs: int = 20,
    seed: int = 0,
    checks: int = 2,
    throughput: Throughput | None = None,
    kinds: Sequence[type[Policy]] = POLICIES,
    on_run: Callable[[int], None] | None = None,
) -> Study:
    """Simulate `runs` runs of `days` days under every policy. `checks` states are planned in full for comparison.

    `throughput` may be passed to share the results for a machine's states among several studies, and `kinds` to
    simulate only some.

    >>> study = simulate(Assumptions.of("8x8", payload_bytes=1e6), days=30, runs=2, checks=0)
    >>> [outcome.name for outcome in study.outcomes]
    ['quick repair', 'sub-mesh', 'hot spares', 'optical cubes', 'dynamic slices', 'elastic slices', 'fault-tolerant']
    """
    if not 0 < days < math.inf or runs < 1:
        raise ParameterError(f"A study needs at least one run of some days: got {runs} runs of {days} days.")
    hours = days * 24
    known = throughput or Throughput(assumptions)
    policies = make_policies(assumptions, known, kinds)
    spent: list[list[TimeSpent]] = [[] for _ in policies]
    for run in range(runs):
        failures = draw(assumptions, hours, seed, run)
        for policy, played in zip(policies, spent, strict=True):
            played.append(simulate_run(policy, failures, hours))
        if on_run is not None:
            on_run(run)
    first = [run.useful_h / hours for run in spent[0]]
    outcomes = tuple(_outcome(policy, played, hours, first) for policy, played in zip(policies, spent, strict=True))
    checked = [
        Check(str(mesh), estimated, exact, step_error(assumptions, estimated, exact))
        for policy in policies
        if isinstance(policy, FaultTolerant)
        for mesh, estimated, exact in policy.check(checks)
    ]
    whole = known.exact(assumptions.mesh)
    return Study(assumptions, days, runs, seed, whole, outcomes, tuple(checked), known.n_planned)


def sweep(study: Study, throughput: Throughput) -> list[tuple[float, Study]]:
    """Repeat a study for machines that fail more and less often, with fewer runs of the same length."""
    runs = min(study.runs, SWEEP_RUNS)

    def again(assumptions: Assumptions) -> Study:
        return simulate(assumptions, days=study.days, runs=runs, seed=study.seed, checks=0, throughput=throughput)

    return [(factor, again(study.assumptions.scaled(factor))) for factor in FACTORS]


def _outcome(policy: Policy, played: list[TimeSpent], hours: float, first: list[float]) -> Outcome:
    size = policy.assumptions.mesh.size
    goodput = [run.useful_h / hours for run in played]
    causes = {
        "waiting": [run.waiting_h for run in played],
        "restarting": [run.restarting_h for run in played],
        "lost work": [run.lost_h for run in played],
        "checkpoints": [run.saving_h for run in played],
        "fewer chips": [run.short_h for run in played],
    }
    return Outcome(
        policy.name,
        policy.price_h,
        goodput=Estimate.over(goodput),
        utilisation=Estimate.over([g * size / policy.owned_chips for g in goodput]),
        cost=Estimate.over([policy.price_h / (g * size) if g else math.inf for g in goodput]),
        losses={cause: Estimate.over([h / hours for h in causes[cause]]) for cause in LOSSES},
        interruptions_per_year=Estimate.over([run.interruptions * 8760 / hours for run in played]),
        regrowths_per_year=Estimate.over([run.regrowths * 8760 / hours for run in played]),
        gain=Estimate.over([g - f for g, f in zip(goodput, first, strict=True)]),
    )
