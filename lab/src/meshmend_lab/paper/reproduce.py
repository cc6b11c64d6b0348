"""Reproduce: the paper's tables 1 and 2 beside ours.

The paper gives the fraction of a step that the all-reduce takes, not its time, and neither the rate nor the latency
that its engine reached. With the length of a step (see `paper`) the *full-mesh* column gives four all-reduce times; the
link rate and the step latency are fitted to these, and to nothing else. The holed column is then a prediction:
`row-pairs` on the holed mesh, on the same fitted hardware.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmend.cost.hardware import PRESETS, Hardware
from meshmend.cost.step_demand import StepDemand
from meshmend.planning import RowPairs
from meshmend.topology import Mesh
from meshmend_lab.paper.published import (
    BYTES_PER_GRADIENT,
    BYTES_SOURCE,
    CASES,
    HOLE,
    HOLE_SOURCE,
    OTHER_SIZE_SOURCE,
    WORKLOADS,
    Case,
)

SEGMENTS = (1, 2, 4)
"""Numbers of segments that are tried, each by rows and by columns; more only adds steps on these meshes."""

FABRIC = PRESETS["tpu-v3"]


@dataclass(frozen=True)
class Timed:
    """The best `row-pairs` schedule for a payload: its time, and the parameters that gave it."""

    seconds: float
    orientation: str
    segments: int
    steps: int


@dataclass(frozen=True)
class CaseResult:
    """A case of the paper, and our figures for it.

    `implied_s` is the full-mesh all-reduce that the paper's figures imply; `residual` how far our fitted one is
    from it. `compute_s` is the rest of the step, the same with and without the hole.
    """

    case: Case
    payload_bytes: float
    step_s: float
    implied_s: float
    compute_s: float
    full: Timed
    holed: Timed

    @property
    def residual(self) -> float:
        """Fitted over implied full-mesh time, minus 1."""
        return self.full.seconds / self.implied_s - 1

    @property
    def overhead(self) -> float:
        """Our all-reduce's fraction of a step on the full mesh."""
        return self.full.seconds / (self.compute_s + self.full.seconds)

    @property
    def overhead_holed(self) -> float:
        """Our all-reduce's fraction of a step on the holed mesh: a prediction."""
        return self.holed.seconds / (self.compute_s + self.holed.seconds)

    @property
    def ratio(self) -> float:
        """Ratio of our all-reduce time with the hole to that without."""
        return self.holed.seconds / self.full.seconds

    @property
    def efficiency(self) -> float:
        """Ratio of the work per chip and second with the hole to that without; the batch per chip is the same."""
        return (self.compute_s + self.full.seconds) / (self.compute_s + self.holed.seconds)

    @property
    def minutes_holed(self) -> float:
        """Table 1's full-mesh time, scaled by our efficiency and by the number of remaining chips."""
        return self.case.minutes / self.efficiency * self.case.chips / self.case.chips_holed


@dataclass(frozen=True)
class Reproduction:
    """All four cases, the hardware that was fitted, and every input with its source."""

    hardware: Hardware
    outcomes: tuple[CaseResult, ...]
    inputs: tuple[tuple[str, str, str], ...]


def reproduce(
    *,
    resnet_compute_s: float | None = None,
    bert_compute_s: float | None = None,
    segments: Sequence[int] = SEGMENTS,
    on_plan: Callable[[str], None] | None = None,
) -> Reproduction:
    """Fit to the paper's full-mesh columns, predict its holed ones.

    `resnet_compute_s` and `bert_compute_s` replace the published step times where a better figure for the compute
    part of a step on 1024 chips (32 images, 8 sequences per chip) is known: from the TPU compiler, say.
    """
    given = {"ResNet-50": resnet_compute_s, "BERT": bert_compute_s}
    plans: dict[tuple[str, tuple[str, ...]], list[tuple[RowPairs, StepDemand]]] = {}
    for shape in dict.fromkeys(case.shape for case in CASES):
        for fail in ((), (HOLE,)):
            plans[shape, fail] = _profiles(Mesh(shape, failed=fail), segments, on_plan)
    steps = {case.name: _step_seconds(case, given[case.model]) for case in CASES}

    def best(case: Case, fail: tuple[str, ...], hardware: Hardware) -> Timed:
        payload = WORKLOADS[case.model].parameters * BYTES_PER_GRADIENT
        timed = [
            Timed(demand.seconds(payload, hardware), planner.orientation, planner.segments, demand.schedule.n_steps)
            for planner, demand in plans[case.shape, fail]
        ]
        return min(timed, key=lambda t: t.seconds)

    hardware = _fit(
        lambda hardware: [best(case, (), hardware).seconds for case in CASES],
        [case.overhead * steps[case.name] for case in CASES],
    )
    outcomes = tuple(
        CaseResult(
            case=case,
            payload_bytes=WORKLOADS[case.model].parameters * BYTES_PER_GRADIENT,
            step_s=steps[case.name],
            implied_s=case.overhead * steps[case.name],
            compute_s=(1 - case.overhead) * steps[case.name],
            full=best(case, (), hardware),
            holed=best(case, (HOLE,), hardware),
        )
        for case in CASES
    )
    return Reproduction(hardware, outcomes, _inputs(given))


def _profiles(
    mesh: Mesh, segments: Sequence[int], on_plan: Callable[[str], None] | None
) -> list[tuple[RowPairs, StepDemand]]:
    found = []
    for orientation in ("rows", "columns"):
        for count in segments:
            planner = RowPairs(orientation=orientation, segments=count)
            if on_plan is not None:
                on_plan(f"row-pairs by {orientation}, {count} segment{'s' * (count > 1)}, on {mesh}")
            found.append((planner, StepDemand(planner.plan(mesh))))
    return found


def _step_seconds(case: Case, compute_s: float | None) -> float:
    """Return how long a step of this case takes: published on 1024 chips, scaled by table 1 elsewhere."""
    largest = next(c for c in CASES if c.model == case.model and c.chips == 1024)
    step = WORKLOADS[case.model].step_s if compute_s is None else compute_s / (1 - largest.overhead)
    return step * case.minutes / largest.minutes


def _fit(times: Callable[[Hardware], list[float]], wanted: list[float]) -> Hardware:
    """Fit the link rate, up to the line rate, and the step latency, by least squares of the logarithms."""
    from scipy.optimize import least_squares

    def hardware(x: NDArray[np.float64]) -> Hardware:
        return Hardware("fitted", math.exp(x[0]), math.exp(x[1]), FABRIC.hop_latency_s)

    def residuals(x: NDArray[np.float64], /) -> list[float]:
        return [math.log(ours / theirs) for ours, theirs in zip(times(hardware(x)), wanted, strict=True)]

    low, high = (math.log(1e9), math.log(1e-8)), (math.log(FABRIC.link_bytes_per_s), math.log(1e-3))
    # The best schedule changes with the hardware, so the residuals have kinks: start from several points.
    starts = [(math.log(rate), math.log(latency)) for rate in (40e9, 70e9) for latency in (1e-6, 1e-5)]
    found = [least_squares(residuals, start, bounds=(low, high), diff_step=[1e-3, 1e-3]) for start in starts]
    return hardware(min(found, key=lambda result: float(result.cost)).x)


def _inputs(given: dict[str, float | None]) -> tuple[tuple[str, str, str], ...]:
    rows = [
        ("overheads, times", "tables 1 and 2", "Kumar and Jouppi, 2020"),
        ("hole", HOLE, HOLE_SOURCE),
        ("bytes per gradient", str(BYTES_PER_GRADIENT), BYTES_SOURCE),
    ]
    for name, workload in WORKLOADS.items():
        rows.append((f"{name}: parameters", f"{workload.parameters / 1e6:g} M", workload.parameters_source))
        compute = given[name]
        if compute is None:
            rows.append((f"{name}: step on 1024 chips", f"{workload.step_s * 1e3:.1f} ms", workload.step_source))
        else:
            rows.append((f"{name}: compute on 1024 chips", f"{compute * 1e3:.1f} ms", "given by the caller"))
    rows += [
        ("step on 512 chips", "scaled", OTHER_SIZE_SOURCE),
        ("hop latency", f"{FABRIC.hop_latency_s * 1e6:g} µs", dict(FABRIC.sources)["hop_latency_s"]),
        ("link rate, at most", f"{FABRIC.link_bytes_per_s / 1e9:g} GB/s", dict(FABRIC.sources)["link_bytes_per_s"]),
    ]
    return tuple(rows)
