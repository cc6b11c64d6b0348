"""A planner's parameters in its name: the same as keywords, wherever a name is taken."""

from __future__ import annotations

from typing import Any

import pytest

from meshmend.cost import PRESETS
from meshmend.errors import ParameterError
from meshmend.planning import StepDemands, Workload, make_planner, plan
from meshmend.planning.proven import split_planner
from meshmend.schedule import Collective
from meshmend.topology import Mesh

HOLED = Mesh("4x8", failed=["2x2@0,2"])


@pytest.mark.parametrize(
    ("text", "name", "parameters"),
    [
        ("row-pairs", "row-pairs", {}),
        ("row-pairs:segments=2,orientation=columns", "row-pairs", {"segments": 2, "orientation": "columns"}),
        ("weave:chunks=16,trees=4,lag=1,owners=any", "weave", {"chunks": 16, "trees": 4, "lag": 1, "owners": "any"}),
        ("weave:budget_s=0.5", "weave", {"budget_s": 0.5}),
        ("latency:halvings=1, parts=2", "latency", {"halvings": 1, "parts": 2}),
        ("gather:lag=2", "gather", {"lag": 2}),
        ("auto:owners=even,budget_s=60", "auto", {"owners": "even", "budget_s": 60}),
    ],
)
def test_a_name_with_parameters_is_that_planner(text: str, name: str, parameters: dict[str, Any]) -> None:
    assert split_planner(text) == (name, parameters)
    collective = Collective.ALL_GATHER if name == "gather" else None
    assert make_planner(text, collective=collective) == make_planner(name, collective=collective, **parameters)
    target: dict[str, Any] = {"payload_bytes": 1e6, "hardware": "tpu-v3", "collective": collective}
    assert make_planner(text, **target) == make_planner(name, **target, **parameters)


def test_it_makes_that_plan() -> None:
    made = plan(HOLED, "row-pairs:segments=2")
    assert made == plan(HOLED, "row-pairs", segments=2)
    assert made.total_chunks == 2 * plan(HOLED, "row-pairs").total_chunks
    assert plan(HOLED, "weave:chunks=8", chunks=4).total_chunks == 8  # the name counts first


@pytest.mark.parametrize("collective", [Collective.ALL_REDUCE, Collective.ALL_GATHER])
def test_a_step_is_planned_by_the_name_and_its_parameters(collective: Collective) -> None:
    def planned(planner: str, budget_s: float) -> object:
        demands = StepDemands(Workload(2e5, collective), PRESETS["tpu-v6e-xla"], planner=planner)
        found = demands.plan(HOLED, cache=None, budget_s=budget_s)
        return found.scalars, found.schedule, found.scatter, found.gather

    assert planned("auto:budget_s=0.5", 10.0) == planned("auto", 0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wave:chunks=2", r"There is no planner 'wave'\. Did you mean weave\? Planners: hamiltonian"),
        ("weave:lag=1,trees", r"'trees' is not a setting\. Write its name and its value"),
        ("weave:tree=2", r"weave has no parameter 'tree': it takes chunks, trees, owners.* Did you mean trees\?"),
        ("weave:chunks=1e3", r"chunks is 1000\.0, expected a whole number"),
        ("weave:chunks=", r"'chunks=' is not a setting"),
        ("weave:lag=1,lag=2", r"sets lag twice"),
        ("auto:hardware=tpu-v3", r"hardware is no part of a planner's name: give it beside the name"),
        ("weave:chunks", r"There is no planner 'weave:chunks'\. Did you mean weave\?"),
    ],
)
def test_mistakes_teach(text: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        make_planner(text)
