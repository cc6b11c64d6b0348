"""Latency: few steps, exact sums, on whatever survives; and what auto makes of it."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import time

import numpy as np
import pytest
from checks import assert_serves
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend import Mesh, PlanError, plan, predict, verify
from meshmend.cost import StepDemand, find_hardware
from meshmend.errors import ParameterError, ScheduleError
from meshmend.planning import Auto, Latency
from meshmend.planning.latency.sites import _splits, lay_out
from meshmend.schedule.split import all_gather_of, reduce_scatter_of
from strategies import meshes

HOLED = Mesh("16x32", failed=["4x2@6,8"])
LARGE = Mesh("32x32", failed=["4x2@6,8"])
XLA = "tpu-v4-xla"


@settings(max_examples=60, deadline=None)
@given(meshes(max_side=5, connected=True), st.integers(0, 6), st.sampled_from([1, 2]))
def test_sums_are_exact_on_any_survivors(mesh: Mesh, halvings: int, parts: int) -> None:
    schedule = Latency(halvings, parts).plan(mesh)
    assert_serves(schedule)
    levels = mesh.n_chips.bit_length() - 1
    folds = 2 * (mesh.n_chips != 2**levels)
    assert schedule.n_steps == levels + min(halvings, levels) + folds


@given(meshes(max_side=6, connected=True))
@settings(max_examples=40, deadline=None)
def test_every_chip_has_a_site_or_is_folded_into_one(mesh: Mesh) -> None:
    sites = lay_out(mesh)
    assert sites.n <= mesh.n_chips < 2 * sites.n
    everybody = np.concatenate([sites.chips, sites.folded[sites.folded >= 0]])
    assert sorted(everybody.tolist()) == list(range(mesh.n_chips))


def test_eight_axes_take_no_longer_than_two() -> None:
    """All ways to share the powers of two among the axes are tried: as many as there are, not 12⁸."""
    assert [list(_splits(m, n)) for m in range(5) for n in range(1, 5)] == [
        [p for p in itertools.product(range(m + 1), repeat=n) if sum(p) == m] for m in range(5) for n in range(1, 5)
    ]
    mesh = Mesh("3x3x2x2x2x2x2x2", failed=["0,0,0,0,0,0,0,0"])
    started = time.process_time()
    schedule = Latency().plan(mesh)
    assert time.process_time() - started < 20, "it took minutes; one quiet core needs about a second"
    assert_serves(schedule)
    assert len(list(_splits(11, 8))) == math.comb(18, 7)


@pytest.mark.parametrize(("mesh", "limits"), [(HOLED, (90, 110)), (LARGE, (105, 130))], ids=str)
def test_short_payloads_on_the_papers_meshes(mesh: Mesh, limits: tuple[int, int]) -> None:
    for payload, microseconds in zip((4e3, 64e3), limits, strict=True):
        schedule = plan(mesh, "latency", payload_bytes=payload, hardware=XLA)
        assert predict(schedule, payload, XLA).seconds <= microseconds * 1e-6
        few = plan(mesh, "weave", payload_bytes=payload, hardware=XLA, verify=False)
        assert predict(schedule, payload, XLA).seconds < 0.65 * predict(few, payload, XLA).seconds


def test_steps_and_hops_on_a_full_mesh_are_what_a_butterfly_has() -> None:
    # 1 + 2 + 4 hops along each axis, and three steps for each.
    seconds = StepDemand(Latency().plan(Mesh("8x8"))).seconds(1e-9, find_hardware(XLA))
    assert seconds == pytest.approx(6 * 2e-6 + 14 * 1e-6)


@pytest.mark.parametrize(
    ("mesh", "hops"),
    [
        (Mesh("1x16", wrap=True), 1 + 1 + 3 + 5),
        (Mesh("8x8", wrap=True), 2 * (1 + 1 + 3)),
        (Mesh("4x8", wrap=(False, True)), 1 + 2 + 1 + 1 + 3),
        (Mesh("4x4x4", wrap=True), 3 * (1 + 1)),
    ],
    ids=str,
)
def test_tori_take_the_distances_of_swing(mesh: Mesh, hops: int) -> None:
    schedule = Latency().plan(mesh)
    assert_serves(schedule)
    levels = mesh.n_chips.bit_length() - 1
    assert schedule.n_steps == levels
    assert StepDemand(schedule).seconds(1e-9, find_hardware(XLA)) == pytest.approx(levels * 2e-6 + hops * 1e-6)


def test_auto_takes_it_for_short_payloads_and_trees_for_long_ones() -> None:
    mesh = Mesh("8x8", failed=["2x2@2,2"])
    assert Auto(4e3, XLA).choose(mesh).planner.name == "latency"
    assert Auto(1e8, XLA).choose(mesh).planner.name == "weave"


def test_auto_leaves_it_where_slow_cables_make_it_slower() -> None:
    # Its plan is that of equal cables: every exchange along a row crosses the slow columns, whole payloads at a tenth.
    equal = Mesh("8x8", failed=["2x2@2,2"])
    slow = Mesh("8x8", failed=["2x2@2,2"], cable_rates={"8x2@0,3": "1/10"})
    payload = 64e3
    blind = Latency(1, 2)
    assert blind.plan(slow).src.tolist() == blind.plan(equal).src.tolist()
    assert predict(blind.plan(slow), payload, XLA).seconds > 2 * predict(blind.plan(equal), payload, XLA).seconds
    assert Auto(payload, XLA).choose(equal).planner.name == "latency"
    taken = Auto(payload, XLA).choose(slow)
    assert taken.planner.name == "weave"
    own = plan(slow, "latency", payload_bytes=payload, hardware=XLA)
    assert predict(taken.schedule, payload, XLA).seconds < predict(own, payload, XLA).seconds


def test_between_neighbours_only_another_is_taken() -> None:
    mesh = Mesh("4x6", failed=["2x2@0,2"])
    with pytest.raises(
        PlanError, match=r"latency cannot plan .* sends to chips that are not neighbours. Plan with weave"
    ):
        plan(mesh, "latency", neighbours_only=True)
    taken = plan(mesh, payload_bytes=4e3, hardware=XLA, neighbours_only=True)
    assert not taken.planner.startswith("latency")
    assert (mesh.link(taken.src, taken.dst) >= 0).all()


def test_it_has_no_halves_and_says_so() -> None:
    schedule = Latency(halvings=2).plan(Mesh("4x4"))
    with pytest.raises(ScheduleError, match="latency's all-reduce has no all-gather in it: its chips exchange partial"):
        all_gather_of(schedule)
    verify(reduce_scatter_of(schedule))  # every chip has more than it must
    for collective in ("all-gather", "reduce-scatter"):
        with pytest.raises(PlanError, match=r"no chip is the first where a chunk .* Use 'gather', which plans one"):
            plan(Mesh("4x4"), "latency", collective=collective)


def test_too_many_chips_are_refused_at_once() -> None:
    with pytest.raises(
        PlanError, match=r"latency cannot plan for 1x5000: it serves at most 2,048 chips, and 5,000 surv"
    ):
        plan(Mesh("1x5000"), "latency")


def test_parameters_that_make_no_sense() -> None:
    with pytest.raises(ParameterError, match="parts is 3, expected 1 or 2"):
        Latency(parts=3)
    with pytest.raises(ParameterError, match="halvings is -1, expected a whole number"):
        Latency(halvings=-1)


@pytest.mark.parametrize("shape", ["1x2", "2x2", "4x8", "2x4x4"])
def test_a_full_mesh_of_a_power_of_two_has_a_chip_at_every_site(shape: str) -> None:
    mesh = Mesh(shape)
    sites = lay_out(mesh)
    assert sorted(sites.chips.tolist()) == list(range(mesh.n_chips))
    assert (sites.folded == -1).all()
    for bit in sites.bits:
        for site in range(sites.n):
            here, there = (mesh.coords[sites.chips[s]] for s in (site, site ^ (1 << bit.number)))
            apart = [0] * mesh.n_axes
            apart[bit.axis] = int(bit.reach)
            assert abs(here - there).tolist() == apart


def test_such_a_mesh_is_laid_out_without_scipys_optimizer() -> None:
    lines = "import sys; from meshmend import Mesh; from meshmend.planning.latency.sites import lay_out"
    check = "lay_out(Mesh('4x4')); assert 'scipy.optimize' not in sys.modules"
    subprocess.run([sys.executable, "-c", f"{lines}; {check}"], check=True, timeout=60)
