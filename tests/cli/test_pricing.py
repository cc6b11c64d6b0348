"""What `meshmend plan` and `meshmend compare` say of time."""

import re

import pytest

from commandline import run, run_json
from meshmend.cost import bound, predict
from meshmend.planning import PLANNERS, make_planner, plan
from meshmend.topology import Mesh

HOLED = ("8x8", "--fail", "2x2@2,2", "--payload", "1MB")


def test_plan_says_what_the_library_says() -> None:
    facts = run_json("plan", *HOLED, "--planner", "row-pairs:segments=2", "--hardware", "tpu-v3")
    mesh = Mesh("8x8", failed=["2x2@2,2"])
    forecast = predict(plan(mesh, "row-pairs", segments=2), 1e6, "tpu-v3")
    assert facts["seconds"] == forecast.seconds
    assert facts["bound_seconds"] == pytest.approx(bound(mesh).units * 1e6 / 82e9)
    assert facts["ratio_to_bound"] == pytest.approx(facts["seconds"] / facts["bound_seconds"])
    assert sum(facts["by_phase"].values()) == pytest.approx(facts["seconds"])
    assert sum(facts["gap"].values()) == pytest.approx(facts["seconds"])
    assert facts["gap"]["latency"] == forecast.gap.latency > 0
    assert facts["busiest_link_load"] == max(link["load"] for link in facts["busiest_links"])
    assert facts["hardware"]["sources"]["link_bytes_per_s"].startswith("656 Gbit/s")


def test_own_hardware_on_the_command_line() -> None:
    facts = run_json(
        *("plan", "1x2", "--payload", "5MB", "--planner", "two-color"),
        *("--hardware", "ideal:link_bytes_per_s=40mbit,step_latency_s=5us,hop_latency_s=1us"),
    )
    # Two chips, one cable: half of the payload each way and back, in two steps (and two that move nothing).
    assert facts["hardware"]["link_bytes_per_s"] == 5e6
    assert facts["seconds"] >= 1 + facts["steps"] * 6e-6 - 1e-12


def test_asynchronous_mode() -> None:
    arguments = ("plan", *HOLED, "--planner", "row-pairs")
    lock_step, free = run_json(*arguments), run_json(*arguments, "--mode", "asynchronous")
    assert (lock_step["mode"], free["mode"]) == ("lock-step", "asynchronous")
    assert free["seconds"] < lock_step["seconds"]


def test_tables_for_people() -> None:
    shown = run("plan", *HOLED, "--planner", "row-pairs", "--hardware", "tpu-v3")
    assert "× the bound" in shown
    assert "yellow forwards to blue" in shown
    shown = run("plan", *HOLED[:3], "--payload", "1GB", "--hardware", "tpu-v3")
    assert re.search(r"considered +time", shown)
    assert re.search(r"weave, chunks \d+.* +taken", shown)
    assert "ruled out" in shown
    shown = run("compare", *HOLED, "--hardware", "tpu-v3")
    assert "holed / full" in shown
    assert "it needs every row and every column intact" in shown


def test_compare_has_every_planner_on_both_meshes() -> None:
    facts = run_json("compare", *HOLED, "--hardware", "tpu-v3")
    assert facts["mesh"]["failed"] == ["2x2@2,2"]
    assert facts["full_mesh"]["failed"] == []
    for part, mesh in ((facts["mesh"], Mesh("8x8", failed=["2x2@2,2"])), (facts["full_mesh"], Mesh("8x8"))):
        assert [entry["planner"] for entry in part["planners"]] == list(PLANNERS)
        for entry in part["planners"]:
            if entry["unsupported_reason"] is None:
                assert entry["ratio_to_bound"] >= 1
                assert entry["seconds"] == pytest.approx(entry["ratio_to_bound"] * part["bound_seconds"])
            else:
                assert make_planner(entry["planner"]).unsupported_reason(mesh) == entry["unsupported_reason"]


def test_compare_on_a_full_mesh_has_no_second_mesh() -> None:
    facts = run_json("compare", "4x4", "--payload", "1MB")
    assert facts["full_mesh"] is None
    assert "holed" not in run("compare", "4x4", "--payload", "1MB")
