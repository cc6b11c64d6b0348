"""SimGrid, an independent simulator, is the oracle of `predict`, in lock-step and asynchronously."""

import subprocess
import sys

import numpy as np
import pytest

from meshmend.cost import Hardware, StepDemand, find_hardware, predict
from meshmend.cost.asynchronous import arrivals
from meshmend.cost.paths import TransferPaths
from meshmend.errors import MissingExtraError, ParameterError
from meshmend.planning import PLANNERS, Gather, Planner, RowPairs, Weave, make_planner, plan
from meshmend.schedule import Schedule
from meshmend.topology import Mesh
from meshmend_lab import simgrid
from meshmend_lab.errors import SimgridError
from meshmend_lab.simgrid import simulation

needs_simgrid = pytest.mark.skipif(
    not simgrid.is_available(), reason="no Python here can import simgrid: apt-get install python3-simgrid"
)

SMALL = (Mesh("4x4"), Mesh("4x6", failed=["2x2@0,2"]), Mesh("6x6", wrap=True), Mesh("8x8", failed=["2x2@2,2"]))
LARGE = (
    Mesh("6x10"),
    Mesh("8x12", failed=["4x2@2,4", "2x2@6,8"]),
    Mesh("12x8", failed=["2x4@4,2"]),
    Mesh("16x16"),
    Mesh("16x16", failed=["4x2@6,8"]),
)
BANDWIDTH, LATENCY, MIXED = (1e8, "ideal"), (1e4, "ethernet-10g"), (3e6, "tpu-v3")
HOPS = (1e6, Hardware("long hops", 1e9, step_latency_s=1e-6, hop_latency_s=2e-5))
CASES = [
    pytest.param(mesh, name, id=f"{name} on {mesh}", marks=[pytest.mark.slow] if mesh in LARGE else [])
    for mesh in SMALL + LARGE
    for name in PLANNERS
    if make_planner(name).unsupported_reason(mesh) is None
]


def check_agreement(schedule: Schedule, payload: float, hardware: str | Hardware) -> None:
    simulated = simgrid.simulate(schedule, payload, hardware)
    foreseen = StepDemand(schedule).step_seconds(payload, find_hardware(hardware))
    assert predict(schedule, payload, hardware).seconds == pytest.approx(simulated.sum(), rel=0.01)
    if (schedule.mesh.link(schedule.src, schedule.dst) >= 0).all():
        np.testing.assert_allclose(foreseen, simulated, rtol=1e-9)


@needs_simgrid
@pytest.mark.parametrize(("mesh", "planner"), CASES)
def test_every_planner_agrees(mesh: Mesh, planner: str) -> None:
    schedule = plan(mesh, planner, verify=False)
    for payload, hardware in (BANDWIDTH, LATENCY, MIXED, HOPS):
        check_agreement(schedule, payload, hardware)


@needs_simgrid
@pytest.mark.parametrize("segments", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("orientation", ["rows", "columns"])
def test_pipelined_row_pairs_agree(segments: int, orientation: str) -> None:
    schedule = plan(Mesh("8x8", failed=["2x2@2,2"]), "row-pairs", segments=segments, orientation=orientation)
    for payload, hardware in (BANDWIDTH, LATENCY, MIXED, HOPS):
        check_agreement(schedule, payload, hardware)


@needs_simgrid
@pytest.mark.parametrize("payload", [4e3, pytest.param(64e3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", ["16x32", pytest.param("32x32", marks=pytest.mark.slow)])
def test_short_payloads_agree_at_full_size(shape: str, payload: float) -> None:
    schedule = plan(Mesh(shape, failed=["4x2@6,8"]), "latency", payload_bytes=payload, hardware="tpu-v4-xla")
    check_agreement(schedule, payload, "tpu-v4-xla")


@needs_simgrid
@pytest.mark.slow
@pytest.mark.parametrize("segments", [1, 2])
def test_row_pairs_agree_at_full_size_in_segments(segments: int) -> None:
    schedule = plan(Mesh("32x32", failed=["4x2@6,8"]), "row-pairs", segments=segments, verify=False)
    for payload, hardware in (BANDWIDTH, LATENCY, (1.34e9, "tpu-v3"), HOPS):
        check_agreement(schedule, payload, hardware)


@needs_simgrid
@pytest.mark.parametrize("planner", ["hamiltonian", "row-pairs"])
@pytest.mark.parametrize("links_at_once", [1, 2, 3])
def test_chips_that_drive_some_links_agree(planner: str, links_at_once: int) -> None:
    hardware = Hardware("narrow", 1e9, step_latency_s=1e-6, hop_latency_s=1e-6, links_at_once=links_at_once)
    schedule = plan(Mesh("8x8", failed=["2x2@2,2"]), planner, verify=False)
    for payload in (1e4, 1e8):
        check_agreement(schedule, payload, hardware)


LINE = Mesh("1x4")


def shared_link(sizes: tuple[int, int]) -> Schedule:
    """Two flows in one step that both cross the link from chip 1 to chip 2."""
    return Schedule(
        LINE,
        total_chunks=sum(sizes),
        step=[0, 0],
        src=[0, 1],
        dst=[2, 3],
        first_chunk=[0, sizes[0]],
        n_chunks=sizes,
        op=[0, 0],
        owners=[0] * sum(sizes),
    )


@needs_simgrid
@pytest.mark.parametrize("sizes", [(1, 1), (1, 3)])
def test_two_flows_on_a_link_take_turns(sizes: tuple[int, int]) -> None:
    schedule, payload, hardware = shared_link(sizes), 1e6 * sum(sizes), Hardware("own", 1e6, hop_latency_s=1e-3)
    simulated = float(simgrid.simulate(schedule, payload, hardware).sum())
    alone = max(sizes) + 2e-3
    assert simulated == pytest.approx(sum(sizes) + 2e-3, rel=1e-6)
    assert simulated > 1.2 * alone  # so that a model which ignores sharing is told apart by the next line
    assert predict(schedule, payload, hardware).seconds == pytest.approx(simulated, rel=0.01)


@needs_simgrid
def test_a_wrong_forecast_is_caught() -> None:
    schedule = RowPairs().plan(Mesh("4x4"))
    simulated = simgrid.simulate(schedule, 1e6, "ideal")
    assert predict(schedule, 1e6, Hardware("2 % slower", 0.98e9)).seconds != pytest.approx(simulated.sum(), rel=0.01)


@needs_simgrid
def test_nothing_to_send_is_refused() -> None:
    with pytest.raises(ParameterError, match="expected a positive number of bytes to simulate"):
        simgrid.simulate(shared_link((1, 1)), 0.0)


def test_without_simgrid_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "_interpreter", lambda: None)
    assert not simgrid.is_available()
    with pytest.raises(MissingExtraError, match="apt-get install python3-simgrid") as caught:
        simgrid.simulate(shared_link((1, 1)), 1.0)
    assert caught.value.missing == "SimGrid for Python"


def test_failures_of_the_simulator_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "_interpreter", lambda: sys.executable)
    if subprocess.run([sys.executable, "-c", "import simgrid"], capture_output=True, check=False).returncode == 0:
        pytest.skip("this Python has simgrid itself")
    with pytest.raises(SimgridError, match="No module named 'simgrid'"):
        simgrid.simulate(shared_link((1, 1)), 1.0)


@needs_simgrid
@pytest.mark.parametrize(
    ("mesh", "planner"),
    [
        (Mesh("4x4"), Weave(32, lag=4)),
        pytest.param(Mesh("8x8", failed=["2x2@2,2"]), Weave(100, lag=1), marks=pytest.mark.slow),
        pytest.param(Mesh("8x8", failed=["2x2@2,2"]), Weave(100), marks=pytest.mark.slow),
        pytest.param(Mesh("4x4x4", wrap=True), Weave(64, lag=7), marks=pytest.mark.slow),
        (Mesh("4x6", failed=["2x2@0,2"]), Weave(trees=4, chunks=4 * 3 * 10, lag=2)),
        (Mesh("4x6", failed=["2x2@0,2"]), Gather(20 * 4, lag=3)),
    ],
    ids=str,
)
def test_asynchronous_times_agree_transfer_by_transfer(mesh: Mesh, planner: Planner) -> None:
    schedule = planner.plan(mesh)
    for payload, hardware in ((1e6, "tpu-v6e"), (1e7, "tpu-v6e"), HOPS):
        chosen = find_hardware(hardware)
        simulated = simgrid.simulate_arrivals(schedule, payload, chosen)
        foreseen = arrivals(schedule, TransferPaths.of(schedule), payload, chosen)
        np.testing.assert_allclose(foreseen, simulated, rtol=1e-9)
        whole = predict(schedule, payload, hardware, mode="asynchronous").seconds
        assert whole == pytest.approx(simulated.max(), rel=1e-9)


def test_what_simgrid_cannot_follow_is_refused() -> None:
    with pytest.raises(ParameterError, match="transfers of one chunk between neighbours"):
        simgrid.simulate_arrivals(plan(Mesh("4x4"), "latency"), 1e6, "tpu-v6e")
