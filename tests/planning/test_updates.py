"""What a weight update costs: each way priced by the plans that it runs, and those plans do what it needs."""

from __future__ import annotations

import numpy as np
import pytest

import meshmend as mm
import meshmend.numpy as mmn
from meshmend import Collective, Mesh, predict, verify
from meshmend.errors import PlanError
from meshmend.planning import PlanCache, UpdatePlan, UpdateWay, make_planner, update_plans

MESH = Mesh("4x6", failed=["2x2@0,2"])


def by_way(mesh: Mesh, payload_bytes: float, hardware: str) -> dict[UpdateWay, UpdatePlan]:
    found = update_plans(mesh, payload_bytes, hardware)
    assert [plan.seconds for plan in found] == sorted(plan.seconds for plan in found)
    return {plan.way: plan for plan in found}


@pytest.mark.parametrize("mesh", [MESH, Mesh("1x1"), Mesh("1x2"), Mesh("4x4")], ids=str)
@pytest.mark.parametrize(("payload_bytes", "hardware"), [(1e3, "tpu-v6e"), (1e8, "tpu-v6e")])
def test_every_way_costs_what_its_plans_are_predicted_to_take(mesh: Mesh, payload_bytes: float, hardware: str) -> None:
    ways = by_way(mesh, payload_bytes, hardware)
    assert set(ways) == set(UpdateWay)
    for plan in ways.values():
        for schedule in plan.schedules:
            verify(schedule)
        apart = sum(predict(schedule, payload_bytes, hardware).seconds for schedule in plan.schedules)
        assert plan.seconds == pytest.approx(apart, rel=1e-9)
        owned = np.bincount(plan.schedules[0].owners, minlength=mesh.n_chips)
        sharded = plan.way is not UpdateWay.REPLICATED
        assert plan.state_share == pytest.approx(owned.max() / owned.sum() if sharded else 1.0)
    # A fused update is an all-reduce too: a replicated update can have its plan.
    assert ways[UpdateWay.REPLICATED].seconds <= ways[UpdateWay.FUSED].seconds * 1.001


def test_each_way_is_what_plan_takes_for_its_collective() -> None:
    ways = by_way(MESH, 1e8, "tpu-v6e")
    asked = {UpdateWay.FUSED: Collective.ALL_REDUCE_WITH_UPDATE, UpdateWay.REPLICATED: Collective.ALL_REDUCE}
    for way, collective in asked.items():
        assert ways[way].schedules == (mm.plan(MESH, collective=collective, payload_bytes=1e8, hardware="tpu-v6e"),)
    scatter = mm.plan(MESH, collective="reduce-scatter", payload_bytes=1e8, hardware="tpu-v6e")
    assert ways[UpdateWay.TWO_PHASES].schedules[0] == scatter


@pytest.mark.parametrize("payload_bytes", [1e3, 1e8])
def test_the_two_phases_have_the_same_owners_and_give_the_sum(payload_bytes: float) -> None:
    scatter, gather = by_way(MESH, payload_bytes, "tpu-v6e")[UpdateWay.TWO_PHASES].schedules
    assert (scatter.collective, gather.collective) == (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
    payload = np.random.default_rng(1).integers(-99, 100, (MESH.n_chips, 1000))
    found = mmn.run(gather, mmn.run(scatter, payload))
    assert (found == payload.sum(axis=0)).all()


def test_on_long_payloads_two_phases_lose_what_weave_gains() -> None:
    ways = by_way(Mesh("8x8", failed=["2x2@2,2"]), 1e8, "tpu-v6e")
    # A corner has two links and must send, then receive, nearly everything: (1 − 1/60) M/b, whoever plans it.
    unit = 1e8 / predict(ways[UpdateWay.FUSED].schedules[0], 1e8, "tpu-v6e").hardware.link_bytes_per_s
    assert ways[UpdateWay.TWO_PHASES].seconds >= (1 - 1 / 60) * unit
    assert ways[UpdateWay.FUSED].seconds < 0.9 * unit


def test_survivors_apart_are_refused() -> None:
    with pytest.raises(PlanError, match="2 disconnected groups"):
        update_plans(Mesh("3x3", failed=["1x3@1,0"]), 1e6)


def test_what_is_shared_while_pricing_changes_no_name_in_the_cache(tmp_path: object) -> None:
    cache = PlanCache(str(tmp_path))
    planner = make_planner("weave", collective="all-gather", chunks=12)
    before = cache.path(MESH, planner)
    object.__setattr__(planner, "made", {})
    assert cache.path(MESH, planner) == before
