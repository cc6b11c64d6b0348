"""Forecasts over cables of different rates, against SimGrid."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshmend import plan
from meshmend.cost import Hardware, StepDemand, find_hardware, predict
from meshmend.planning import PLANNERS
from meshmend.topology import Mesh
from meshmend_lab import simgrid as judge

SLOW = (
    Mesh("4x4", cable_rates={"1,1-1,2": "1/2", "4x1@0,3": "3/4"}),
    Mesh("8x8", failed=["2x2@2,2"], cable_rates={"8x1@0,5": "1/4"}),
)


@pytest.mark.skipif(
    not judge.is_available(), reason="no Python here can import simgrid: apt-get install python3-simgrid"
)
@pytest.mark.parametrize(
    ("mesh", "planner"),
    [
        pytest.param(mesh, name, id=f"{name} on {mesh}")
        for mesh in SLOW
        for name in ("hamiltonian", "two-color", "row-pairs", "weave")
        if PLANNERS[name]().unsupported_reason(mesh) is None
    ],
)
def test_simgrid_agrees(mesh: Mesh, planner: str) -> None:
    parameters: dict[str, Any] = {"chunks": 16} if planner == "weave" else {}
    schedule = plan(mesh, planner, verify=False, **parameters)
    hops = Hardware("long hops", 1e9, step_latency_s=1e-6, hop_latency_s=2e-5)
    for payload, hardware in ((1e8, "ideal"), (3e6, "tpu-v3"), (1e6, hops)):
        simulated = judge.simulate(schedule, payload, hardware)
        assert predict(schedule, payload, hardware).seconds == pytest.approx(simulated.sum(), rel=0.01)
        if (mesh.link(schedule.src, schedule.dst) >= 0).all():
            foreseen = StepDemand(schedule).step_seconds(payload, find_hardware(hardware))
            np.testing.assert_allclose(foreseen, simulated, rtol=1e-9)
