from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from checks import assert_all_reduces
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend import Collective, Mesh, plan
from meshmend.cost import Hardware, StepDemand, find_hardware
from meshmend.errors import ParameterError
from meshmend.planning import PLANNERS, Auto, PlanCache, Planner, RowPairs, Weave, make_planner
from meshmend.planning.auto import CHOICES, OTHERS, Candidates, candidates
from strategies import block_meshes, torn_meshes

HOLED = Mesh("8x8", failed=["2x2@2,2"])
PAYLOADS = [float(x) for x in np.logspace(3, 10, 3)]
MACHINES = ["ideal", "tpu-v3", "tpu-v3-xla", "ethernet-10g"]


def variants(mesh: Mesh, step_cost: float) -> list[Planner]:
    able = [kind() for kind in CHOICES if kind().unsupported_reason(mesh) is None]
    return [*able, *(variant for planner in able for variant in planner.variants(mesh, step_cost))]


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"planner": "weave"},
        {"planner": "weave", "payload_bytes": 1e6},
        {"planner": "hamiltonian", "neighbours_only": True},
        {"neighbours_only": True},
        {"mode": "asynchronous"},
        {"collective": "reduce-scatter"},
        {"planner": "weave", "payload_bytes": 1e6, "collective": "all-gather"},
    ],
    ids=str,
)
def test_planning_asks_each_planner_once(words: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it serves the mesh, which parameters are worth trying, and for its schedule."""
    asked: Counter[Any] = Counter()

    def counted(kind: type, question: str) -> None:
        whole = getattr(kind, question)

        def count(self: Any, *given: Any, **more: Any) -> Any:
            asked[(question, self, *given) if kind is not Candidates else question] += 1
            return whole(self, *given, **more)

        monkeypatch.setattr(kind, question, count)

    counted(Candidates, "__init__")
    for kind in (*CHOICES, *OTHERS):
        for question in ("_check", "_plan", "variants", "slack_variants"):
            counted(kind, question)
    plan(HOLED, budget_s=0.1, **words)
    assert asked.pop("__init__", 0) == (words.keys() != {"planner"} and words.get("planner") != "hamiltonian")
    # Row pairs try only those parameters with which they serve the mesh, so that they have asked themselves before.
    assert {key: n for key, n in asked.items() if n > 1 + isinstance(key[1], RowPairs)} == {}
    assert sum(key[0] == "_plan" for key in asked) >= 1


@given(
    st.one_of(block_meshes(max_blocks=4), torn_meshes()),
    st.sampled_from([1e-5, 1e-3, 1e-1]),
    st.sampled_from([None, 1, 2]),
)
@settings(max_examples=6)
def test_no_schedule_costs_less_than_its_floor(mesh: Mesh, step_cost: float, links_at_once: int | None) -> None:
    if not mesh.is_connected or mesh.n_chips > 60:
        return
    hardware = Hardware("any", 1e9, step_latency_s=step_cost, links_at_once=links_at_once)
    for variant in variants(mesh, step_cost):
        floor = variant.floor(mesh)
        demand = StepDemand(variant.plan(mesh))
        assert demand.schedule.n_steps >= floor.steps
        least = floor.link_load if links_at_once is None else max(floor.link_load, floor.chip_load / links_at_once)
        moving = demand.seconds(1e9, replace(hardware, step_latency_s=0.0))
        assert moving >= least * (1 - 1e-9), (variant, floor)


@pytest.mark.parametrize(
    ("mesh", "machines"),
    [
        pytest.param(Mesh("4x4"), MACHINES, marks=pytest.mark.slow),
        (Mesh("8x8", failed=["2x2@2,2"]), MACHINES[1:2]),
        pytest.param(Mesh("8x8", failed=["2x2@2,2"]), MACHINES, marks=pytest.mark.slow),
        pytest.param(Mesh("6x10", wrap=True), MACHINES, marks=pytest.mark.slow),
        (Mesh("4x4x4", failed=["1,1,1"]), MACHINES[2:3]),
        pytest.param(Mesh("4x4x4", failed=["1,1,1"]), MACHINES, marks=pytest.mark.slow),
        pytest.param(Mesh("7x5", failed=["2x1@3,2"], failed_cables=["0,0-0,1"]), MACHINES, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_auto_is_never_slower_than_any_planner_it_could_have_chosen(mesh: Mesh, machines: list[str]) -> None:
    field = Candidates(mesh, candidates(Collective.ALL_REDUCE))
    demands: dict[Planner, StepDemand] = {}
    for payload, hardware in product(PAYLOADS, map(find_hardware, machines)):
        choice = field.choose(payload, hardware)
        step_cost = (hardware.step_latency_s + hardware.hop_latency_s) * hardware.link_bytes_per_s / payload
        for variant in variants(mesh, step_cost):
            if variant not in demands:
                demands[variant] = StepDemand(variant.plan(mesh))
            assert choice.seconds <= demands[variant].seconds(payload, hardware) * (1 + 1e-9), (payload, variant)
        assert StepDemand(choice.schedule).seconds(payload, hardware) == choice.seconds
        assert choice.seconds == min(c.seconds for c in choice.considered if c.seconds is not None)


def test_what_auto_plans_is_proven_and_sums_exactly() -> None:
    for payload in (1e3, 1e6, 1e9):
        assert_all_reduces(plan(Mesh("6x6", failed=["2x2@2,2"]), payload_bytes=payload, hardware="tpu-v3"))


def test_the_table_lists_what_was_made_what_was_ruled_out_and_what_does_not_apply() -> None:
    choice = Auto(1e9, "tpu-v3").choose(Mesh("8x8", failed=["2x2@2,2"]))
    made = [c for c in choice.considered if c.seconds is not None]
    ruled_out = [c for c in choice.considered if c.seconds is None and c.unsupported_reason is None]
    assert made[0].planner == choice.planner
    assert [c.seconds for c in made] == sorted(c.seconds or 0 for c in made)
    assert ruled_out
    assert all((c.floor_seconds or 0) >= choice.seconds for c in ruled_out)
    assert [c.planner.name for c in choice.considered if c.unsupported_reason] == ["two-color"]


def test_one_link_at_a_time_wants_rings_and_all_at_once_wants_trees() -> None:
    mesh = Mesh("8x8", failed=["2x2@2,2"])
    assert Auto(1e9, "tpu-v3").choose(mesh).planner.name == "weave"
    assert Auto(1e9, "tpu-v3-xla").choose(mesh).planner.name == "hamiltonian"


def test_berts_gradients_go_faster_round_the_hole_than_any_ring_goes_on_the_full_machine() -> None:
    payload, hardware = 1.34e9, find_hardware("tpu-v3")
    holed = Auto(payload, "tpu-v3").choose(Mesh("16x32", failed=["4x2@6,8"]))
    full = Mesh("16x32")
    # A ring's steps all carry the same, so the 2(P−1) steps of the Hamiltonian ring need no schedule to be priced.
    rings = [2 * 511 * (hardware.hop_latency_s + payload / 1024 / hardware.link_bytes_per_s)]
    made = (plan(full, name, verify=False) for name in ("two-color", "row-pairs"))
    rings += [StepDemand(schedule).seconds(payload, hardware) for schedule in made]
    assert holed.seconds < 0.7 * min(rings)


def test_payloads_and_hardware_that_make_no_sense() -> None:
    with pytest.raises(ParameterError, match="payload_bytes is 0, expected a positive number"):
        plan(Mesh("3x3"), payload_bytes=0)
    with pytest.raises(ParameterError, match=r"There is no hardware 'tpu-v9'. Did you mean tpu-v4\? Presets: ideal"):
        plan(Mesh("3x3"), hardware="tpu-v9")


@pytest.mark.parametrize("name", [*(kind.name for kind in CHOICES), "auto"])
def test_every_planner_takes_a_payload_and_hardware_by_name(name: str) -> None:
    mesh = Mesh("8x8")
    schedule = plan(mesh, name, payload_bytes=1e9, hardware="tpu-v4")
    tried = variants(mesh, 1e-6 * 50e9 / 1e9)
    rivals = [variant for variant in tried if name in ("auto", variant.name)]
    seconds = [StepDemand(rival.plan(mesh)).seconds(1e9, find_hardware("tpu-v4")) for rival in rivals]
    assert StepDemand(schedule).seconds(1e9, find_hardware("tpu-v4")) == min(seconds)


def test_parameters_follow_the_payload_unless_they_are_given() -> None:
    mesh = Mesh("8x8", failed=["2x2@2,2"])
    short, long = (plan(mesh, "weave", payload_bytes=size).total_chunks for size in (1e3, 1e9))
    assert short < Weave().plan(mesh).total_chunks < long
    assert plan(mesh, "weave", payload_bytes=1e9, chunks=60).total_chunks == 60
    assert plan(mesh, "row-pairs", payload_bytes=1e9) != plan(mesh, "row-pairs", payload_bytes=1e9, segments=1)
    assert plan(mesh, "row-pairs", payload_bytes=1e9, segments=3) == RowPairs("rows", segments=3).plan(mesh)
    assert plan(mesh, "row-pairs", payload_bytes=1e9, orientation="columns").phases[0].name.startswith("yellow")


def test_keywords_are_never_ignored() -> None:
    with pytest.raises(
        ParameterError,
        match=r"Weave\(chunks=None, .*\) already has its parameters, so plan cannot set payload_bytes, bogus. "
        r"Set its parameters where it is made, or pass its name: plan\(mesh, 'weave', payload_bytes=…\)",
    ):
        plan(Mesh("4x4"), Weave(), payload_bytes=3, bogus=1)
    with pytest.raises(
        ParameterError,
        match="weave has no parameter 'bogus': it takes chunks, trees, owners, budget_s, lag, payload_bytes, hardware",
    ):
        plan(Mesh("4x4"), "weave", bogus=1)
    with pytest.raises(ParameterError, match="payload_bytes is -3, expected a positive number of bytes"):
        plan(Mesh("4x4"), "weave", payload_bytes=-3)


def test_the_cache_distinguishes_tuned_plans(tmp_path: str) -> None:
    cache, mesh = PlanCache(tmp_path), Mesh("4x4")
    asked = [
        make_planner(name, **parameters)
        for name in PLANNERS
        for parameters in ({}, {"payload_bytes": 1e3}, {"payload_bytes": 1e6}, {"hardware": "tpu-v4"})
    ]
    # Left out, auto's payload is 100 MB and its hardware tpu-v3, so that none of these are the same either.
    assert len({cache.path(mesh, planner) for planner in asked}) == len(asked)
    assert plan(mesh, "weave", payload_bytes=1e3, cache=cache) == plan(mesh, "weave", payload_bytes=1e3, cache=cache)
    assert len(cache) == 1
