"""Cables with rates: what a mesh makes of them, and that files, the cache and the command line keep them."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshmend as mm
from commandline import run, run_json
from forged_plans import forge
from meshmend.errors import MeshError, ScheduleFileError
from meshmend.machines import read_machine
from meshmend.planning import PlanCache, Weave
from meshmend.schedule.serialize import to_text
from meshmend.topology import Region
from strategies import meshes

HALF = {"0,1-0,2": "1/2"}


def test_a_mesh_knows_the_rate_of_each_cable_and_link() -> None:
    rates: dict[Any, float | Fraction] = {"0,2-0,1": 0.5, ((1, 0), (2, 0)): Fraction(3, 4)}
    mesh = mm.Mesh("3x4", cable_rates=rates)
    assert dict(mesh.cable_rates) == {((0, 1), (0, 2)): Fraction(1, 2), ((1, 0), (2, 0)): Fraction(3, 4)}
    assert mesh.has_slow_cables
    assert mesh.is_full
    for cable, rate in zip(mesh.cables.tolist(), mesh.rates.tolist(), strict=True):
        ends = tuple(sorted(mesh.chip(end) for end in cable))
        assert rate == float(mesh.cable_rates.get((ends[0], ends[1]), Fraction(1)))
        assert mesh.link_rates[mesh.link(cable, cable[::-1])].tolist() == [rate, rate]
    assert repr(mesh) == "Mesh(3x4 with 2 slow cables: 12 chips)"
    assert str(mesh.fail((2, 3))) == "3x4 minus 1x1@2,3 with 2 slow cables"


def test_a_box_names_the_cables_within_it() -> None:
    column = {((row, 1), (row + 1, 1)): 0.5 for row in range(3)}
    assert mm.Mesh("4x4", cable_rates={"4x1@0,1": 0.5}) == mm.Mesh("4x4", cable_rates=column)
    assert mm.Mesh("4x4", cable_rates={Region((0, 1), (4, 1)): 0.5}) == mm.Mesh("4x4", cable_rates=column)
    ring = mm.Mesh("4x4", wrap=True, cable_rates={"4x1@0,1": 0.5})
    assert ((0, 1), (3, 1)) in ring.cable_rates
    assert len(ring.cable_rates) == 4


def test_equal_machines_are_equal_values() -> None:
    plain = mm.Mesh("3x4")
    assert mm.Mesh("3x4", cable_rates={"0,1-0,2": 1}) == plain
    assert mm.Mesh("3x4", cable_rates=HALF) != plain
    assert hash(mm.Mesh("3x4", cable_rates=HALF)) == hash(mm.Mesh("3x4", cable_rates={"0,2-0,1": 0.5}))
    # Rate 0 is a failed cable, a cable of a failed chip is gone, and what has failed has no rate.
    failed = mm.Mesh("3x4", failed_cables=["0,1-0,2"])
    assert mm.Mesh("3x4", cable_rates={"0,1-0,2": 0}) == failed
    assert mm.Mesh("3x4", failed_cables=["0,1-0,2"], cable_rates=HALF) == failed
    assert mm.Mesh("3x4", cable_rates=HALF).fail((0, 1)) == plain.fail((0, 1))
    assert mm.Mesh("3x4", cable_rates=HALF).fail((2, 3)).cable_rates == mm.Mesh("3x4", cable_rates=HALF).cable_rates


@given(meshes(), st.data())
def test_slow_cables_stay_slow_in_the_whole_machine(mesh: mm.Mesh, data: st.DataObject) -> None:
    """Whatever fails, at once or one after the other: the ends of a slow cable, or the cable itself."""
    plain = mm.Mesh(mesh.shape, wrap=mesh.wrap)
    cables = [(plain.chip(int(a)), plain.chip(int(b))) for a, b in plain.cables]
    rates = {min(c, c[::-1]): "1/2" for c in (data.draw(st.lists(st.sampled_from(cables))) if cables else [])}
    slow = mm.Mesh(mesh.shape, wrap=mesh.wrap, cable_rates=rates)
    holes, cut = mesh.holes, mesh.failed_cables
    at_once = mm.Mesh(mesh.shape, wrap=mesh.wrap, failed=holes, failed_cables=cut, cable_rates=rates)
    stepwise = slow.with_failures(failed_cables=cut)
    for hole in holes:
        stepwise = stepwise.fail(hole)
    for damaged in (at_once, stepwise):
        assert damaged.whole == slow
        assert damaged == mesh.with_failures(cable_rates=[(cable, "1/2") for cable in at_once.cable_rates])


def test_descriptions_keep_the_slow_cables_of_failed_chips(tmp_path: Path) -> None:
    """The slow cable of a failed chip stays slow with an intended machine."""
    described = {"meshmend": 1, "shape": "2x2", "hosts": {"one": "2x2@0,0"}}
    intended, found = tmp_path / "intended.json", tmp_path / "found.json"
    intended.write_text(json.dumps({**described, "rates": {"0,0-0,1": "1/2"}, "failed": ["0,0-0,1"]}), encoding="utf-8")
    found.write_text(json.dumps({**described, "failed": ["0,0"]}), encoding="utf-8")
    whole = mm.Mesh("2x2", cable_rates={"0,0-0,1": "1/2"})
    assert read_machine(found, intended=intended).mesh.whole == whole
    damaged = whole.fail("0,0")
    assert mm.bound(damaged.whole).units > mm.bound(mm.Mesh("2x2")).units, "which is what a comparison prices"


@given(st.floats(0.002, 1.0))
def test_any_float_is_read_as_a_fraction_close_by(rate: float) -> None:
    read = mm.Mesh("1x2", cable_rates={"0,0-0,1": rate}).rates[0]
    assert read == pytest.approx(rate, abs=1e-6 + 0.5 / 1000)


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"0,1-0,2": 2}, "a part of the link rate, from 0 to 1: got 2"),
        ({"0,1-0,2": -0.5}, "from 0 to 1: got -0.5"),
        ({"0,1-0,2": float("nan")}, "nan is not the rate of a cable"),
        ({"0,1-0,2": float("inf")}, "inf is not the rate of a cable"),
        ({"0,1-0,2": "half"}, "'half' is not the rate of a cable. Write a number from 0 to 1, as in 0.75 or 3/4"),
        ({"0,1-0,2": "1/0"}, "'1/0' is not the rate"),
        ({"0,1-0,2": None}, "None is not the rate"),
        ({"0,1-0,2": 1e-9}, "too slow to plan with: 1/1000 is the least"),
        ({"0,1-1,2": 0.5}, "No cable joins"),
        ({"1x1@0,0": 0.5}, "No cable lies within 1x1@0,0"),
        ({"0,1-0,2": 0.5, "0,2-0,1": 0.25}, "Cable 0,1-0,2 has two rates, 1/2 and 1/4"),
        ("0,1-0,2=1/2", "gives each slow cable its rate"),
    ],
)
def test_nonsense_is_refused(rates: Any, message: str) -> None:
    with pytest.raises(MeshError, match=message.replace("(", r"\(")):
        mm.Mesh("3x4", cable_rates=rates)


def test_files_keep_rates(tmp_path: Path) -> None:
    schedule = mm.plan(mm.Mesh("3x4", cable_rates=HALF), "weave", chunks=4)
    mm.save(schedule, tmp_path / "plan.npz")
    found = mm.load(tmp_path / "plan.npz")
    assert found == schedule
    assert found.mesh.cable_rates == schedule.mesh.cable_rates


def test_files_of_equal_cables_are_what_they_were() -> None:
    assert "cable_rates" not in to_text(mm.plan(mm.Mesh("2x2"), "hamiltonian"))


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        (["3x4@0,0=1/2"], "should name cables one by one"),
        ([0.5], "cable_rates in its header should be a list of str"),
        (["0,1-0,2=fast"], "is not the rate of a cable"),
    ],
)
def test_a_file_names_no_boxes_and_no_nonsense(tmp_path: Path, rates: list[Any], message: str) -> None:
    schedule = mm.plan(mm.Mesh("3x4", cable_rates=HALF), "weave", chunks=1)
    assert '"0,1-0,2=1/2"' in to_text(schedule)
    with pytest.raises(ScheduleFileError, match=message):
        mm.load(forge(tmp_path / "plan.npz", schedule, cable_rates=rates))


def test_the_cache_tells_rates_apart(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    meshes = [mm.Mesh("3x4", cable_rates=rates) for rates in ({}, HALF, {"0,1-0,2": 0.75})]
    assert len({cache.path(mesh, Weave()) for mesh in meshes}) == 3
    made = [mm.plan(mesh, "weave", chunks=4, cache=cache) for mesh in meshes]
    assert [mm.plan(mesh, "weave", chunks=4, cache=cache) for mesh in meshes] == made


def test_the_command_line_takes_rates() -> None:
    words = ["plan", "4x4", "--planner", "weave:chunks=8", "--hardware", "ideal", "--payload", "1GB"]
    plain, slow = run_json(*words), run_json(*words, "--cable-rate", "4x1@0,1=1/2")
    assert plain["cable_rates"] == {}
    assert slow["cable_rates"] == {f"{row},1-{row + 1},1": "1/2" for row in range(3)}
    assert slow["bound"] > plain["bound"]
    assert "0,4-0,5=1/2" in run(*words, "--cable-rate", "0,1-0,2", code=1)
