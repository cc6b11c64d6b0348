"""Updates: what a training step's exchange costs in each way that the optimizer's state can be kept.

A *replicated* update needs an all-reduce, after which every chip updates everything. A sharded one, in which every chip
keeps the optimizer's state of the chunks that it owns, needs either one all-reduce with a *fused update* or *two
phases*, a reduce-scatter and an all-gather with the same owners. What is fastest for an all-reduce is not what is
fastest for the two phases, so each way is priced by the plans that it would run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from meshmend.cost import DEFAULT_HARDWARE, Hardware, StepDemand, find_hardware
from meshmend.planning.auto import Candidates, candidates
from meshmend.planning.base import Planner
from meshmend.planning.derived import Derived
from meshmend.planning.gather import Gather
from meshmend.planning.weave import DEFAULT_BUDGET_S, Weave
from meshmend.schedule import Collective, Schedule
from meshmend.topology import Mesh


class UpdateWay(StrEnum):
    """How a training step exchanges gradients and weights."""

    FUSED = "fused"
    """One all-reduce with an update: owners update their chunks between the sum and its way back."""
    TWO_PHASES = "two-phases"
    """A reduce-scatter of gradients, the owners' update, an all-gather of weights."""
    REPLICATED = "replicated"
    """An all-reduce of gradients; every chip updates all weights and keeps all of the optimizer's state."""


@dataclass(frozen=True)
class UpdatePlan:
    """One way, its fastest plan or pair of plans, and how long they take together.

    `state_share` is the fraction of the optimizer's state at the chip that keeps most of it.
    """

    way: UpdateWay
    schedules: tuple[Schedule, ...]
    seconds: float
    state_share: float


def update_plans(
    mesh: Mesh,
    payload_bytes: float,
    hardware: str | Hardware = DEFAULT_HARDWARE,
    *,
    budget_s: float = DEFAULT_BUDGET_S,
) -> tuple[UpdatePlan, ...]:
    """Return every way of a weight update with its predicted time, fastest first; of equally fast ones, sharded first.

    `payload_bytes` are those of the gradients, and of the weights that come back. Times are the lock-step prediction of
    the exchange; the optimizer's arithmetic is not in them. The schedules are not proven yet: engines prove what they
    run. `budget_s` is as for `plan`, for each of two searches: with any owners, and with even ones.

    >>> for plan in update_plans(Mesh("4x4", failed=["2x2@0,0"]), 1e8, "tpu-v6e"):
    ...     print(plan.way, f"{plan.seconds * 1e6:.0f} µs", f"{plan.state_share:.2f} of the state")
    fused 881 µs 0.09 of the state
    replicated 881 µs 1.00 of the state
    two-phases 939 µs 0.08 of the state
    """
    chosen = find_hardware(hardware)
    weave = Weave(budget_s=budget_s)
    made: dict[tuple[Planner, Mesh], Schedule] = {}

    def fastest(collective: Collective) -> tuple[Planner, Schedule, float]:
        entered = [_sharing(planner, made) for planner in candidates(collective, weave)]
        choice = Candidates(mesh, entered).choose(payload_bytes, chosen)
        return choice.planner, choice.schedule, choice.seconds

    _, whole, whole_s = fastest(Collective.ALL_REDUCE)
    _, fused, fused_s = fastest(Collective.ALL_REDUCE_WITH_UPDATE)
    planner, scatter, scatter_s = fastest(Collective.REDUCE_SCATTER)
    # The all-gather of the same planner: it begins where the reduce-scatter ends, with the same owners.
    gather = _as_all_gather(planner).plan(mesh)
    gather_s = StepDemand(gather).seconds(payload_bytes, chosen)
    found = (
        UpdatePlan(UpdateWay.FUSED, (fused,), fused_s, _largest_share(fused)),
        UpdatePlan(UpdateWay.TWO_PHASES, (scatter, gather), scatter_s + gather_s, _largest_share(scatter)),
        UpdatePlan(UpdateWay.REPLICATED, (whole,), whole_s, 1.0),
    )
    return tuple(sorted(found, key=lambda plan: (plan.seconds, plan.state_share)))


def _sharing(planner: Planner, made: dict[tuple[Planner, Mesh], Schedule]) -> Planner:
    """Let all that is derived from one all-reduce take it from `made`."""
    return replace(planner, made=made) if isinstance(planner, Derived) else planner


def _as_all_gather(planner: Planner) -> Planner:
    if not isinstance(planner, Derived | Gather):
        raise AssertionError(f"{planner!r} does not plan reduce-scatters: this is a bug in meshmend")
    return replace(planner, collective=Collective.ALL_GATHER)


def _largest_share(schedule: Schedule) -> float:
    owned = np.bincount(schedule.template.owners)
    return float(owned.max() / owned.sum())
