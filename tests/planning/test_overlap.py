"""Plans that run beside computing: priced by what still shows, against an oracle that follows every transfer."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from meshmend import Mesh, plan
from meshmend.cost import Hardware, StepDemand, find_hardware
from meshmend.cost.overlap import MAX_UNROLLED, exposed_seconds
from meshmend.errors import ParameterError
from meshmend.planning.auto import Auto, Tuned
from meshmend.planning.base import Planner
from meshmend.planning.gather import Gather
from meshmend.planning.weave import Weave
from meshmend.schedule import Collective, Schedule

HOLED = Mesh("4x4", failed=["2x2@0,0"])
ODD = Mesh("5x5", failed=["2,2"])
PAYLOAD = 5e6
XLA = "tpu-v5p-xla"
BESIDE = (1e-5, 5e-5, 1e-2)
"""Less than it takes, about as much, and more."""


def shows(schedule: Schedule, hardware: Hardware, beside: float) -> float:
    """Step by step: the core starts it, the busiest link moves its chunks, and the latter may hide. Neighbours only."""
    chunk_s = PAYLOAD / schedule.total_chunks / hardware.link_bytes_per_s
    steps: dict[int, Counter[tuple[int, int]]] = {}
    for step, src, dst, n in zip(
        schedule.step.tolist(), schedule.src.tolist(), schedule.dst.tolist(), schedule.n_chunks.tolist(), strict=True
    ):
        assert sum(a != b for a, b in zip(schedule.mesh.coords[src], schedule.mesh.coords[dst], strict=True)) == 1
        steps.setdefault(step, Counter())[src, dst] += n
    starting = len(steps) * hardware.step_latency_s
    moving = sum(hardware.hop_latency_s + max(links.values()) * chunk_s for links in steps.values())
    return starting + (max(0.0, moving - beside) if schedule.n_steps <= MAX_UNROLLED else moving)


@cache
def every(kind: str, mesh: Mesh) -> tuple[Schedule, ...]:
    """All numbers of chunks, from one to about what is best for the payload without computing beside it."""
    made = (Weave(chunks=n) if kind == "weave" else Gather(chunks=n) for n in range(1, 25))
    return tuple(planner.plan(mesh) for planner in made)


@pytest.mark.parametrize(("kind", "mesh"), [("weave", HOLED), ("gather", HOLED), ("gather", ODD)], ids=str)
def test_the_chunks_that_are_chosen_show_as_little_as_any(kind: str, mesh: Mesh) -> None:
    """Of all numbers of chunks up to 24: what is chosen is within a tenth of the best, or of a microsecond."""
    hardware = find_hardware(XLA)
    planner: Planner = Weave() if kind == "weave" else Gather()
    taken = []
    for beside in BESIDE:
        choice = Tuned(planner, payload_bytes=PAYLOAD, hardware=XLA, overlap_s=beside).choose(mesh)
        assert choice.seconds == pytest.approx(shows(choice.schedule, hardware, beside), rel=1e-9)
        best = min(shows(one, hardware, beside) for one in every(kind, mesh))
        assert choice.seconds <= 1.1 * best + 1e-6, (beside, choice.schedule)
        taken.append(choice.schedule)
    assert taken[-1].n_steps < taken[0].n_steps, "where everything hides, only steps count"
    assert taken[-1].n_steps == min(one.n_steps for one in every(kind, mesh))


@pytest.mark.parametrize("collective", [Collective.ALL_REDUCE, Collective.ALL_GATHER])
def test_auto_takes_the_one_of_which_least_shows(collective: Collective) -> None:
    """None that was ruled out by its floor would have been better."""
    mesh, hardware = HOLED, find_hardware(XLA)
    demands: dict[Planner, StepDemand] = {}
    for beside in BESIDE:
        auto = Auto(PAYLOAD, XLA, collective=collective, overlap_s=beside)
        choice, found = auto.choose(mesh), auto.candidates_for(mesh)
        for variant in found.variants(PAYLOAD, hardware, beside):
            if variant not in demands:
                demands[variant] = StepDemand(variant.plan(mesh))
            assert choice.seconds <= exposed_seconds(demands[variant], PAYLOAD, hardware, beside) * (1 + 1e-9), variant


def test_many_steps_are_not_written_out_and_hide_nothing() -> None:
    hardware = find_hardware(XLA)
    short, long = (plan(HOLED, "gather", collective="all-gather", chunks=n, verify=False) for n in (12, 240))
    assert short.n_steps <= MAX_UNROLLED < long.n_steps
    assert exposed_seconds(StepDemand(long), PAYLOAD, hardware, 1.0) == StepDemand(long).seconds(PAYLOAD, hardware)
    assert exposed_seconds(StepDemand(short), PAYLOAD, hardware, 1.0) == short.n_steps * hardware.step_latency_s


def test_plan_takes_it_by_name_and_refuses_what_makes_no_sense() -> None:
    few, many = (plan(HOLED, "weave", payload_bytes=1e8, overlap_s=hide, verify=False) for hide in (1.0, 0.0))
    assert few.n_steps < many.n_steps
    assert plan(HOLED, payload_bytes=1e8, overlap_s=1.0, verify=False).n_steps <= few.n_steps
    with pytest.raises(ParameterError, match=r"overlap_s is -1, expected seconds of computing, 0 or more"):
        plan(HOLED, overlap_s=-1)
    with pytest.raises(ParameterError, match=r"overlap_s is True, expected seconds"):
        Auto(PAYLOAD, XLA, overlap_s=True)
