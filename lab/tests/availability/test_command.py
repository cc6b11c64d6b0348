"""`meshmend lab availability`."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest

import commandline
from meshmend.cost import predict
from meshmend.planning import plan
from meshmend.topology import Mesh
from meshmend_lab.availability import POLICIES, Assumptions
from meshmend_lab.availability.assumptions import BERT_PARAMETERS, DEFAULTS, TABLE
from pages import ROOT

run, facts_of = partial(commandline.run, "lab", "availability"), partial(commandline.run_json, "lab", "availability")
SMALL = ("8x8", "--days", "60", "--runs", "3", "--assume", "payload_bytes=1MB")


def test_people_see_every_policy() -> None:
    shown = run(*SMALL)
    for kind in POLICIES:
        assert kind.name in shown
    assert "±" in shown
    assert "64 chips, 60 days, 3 runs" in shown
    assert "planned in full" in shown
    assert "…" not in shown  # nothing is cut off in 80 columns


def test_programs_get_the_same_and_every_assumption() -> None:
    facts = facts_of(*SMALL)
    assert [one["policy"] for one in facts["policies"]] == [kind.name for kind in POLICIES]
    for one in facts["policies"]:
        total = one["goodput"]["mean"] + sum(loss["mean"] for loss in one["losses"].values())
        assert total == pytest.approx(1)
        assert one["goodput"]["half_width_95"] >= 0
    assumed = facts["assumptions"]
    assert assumed["host"] == "4x2"
    assert [level["name"] for level in assumed["levels"]] == ["host", "board", "chip"]
    assert assumed["payload_bytes"] == 1e6
    assert (assumed["cube"], assumed["slice_shape"], assumed["copies_s"]) == ("8x8", "4x4", None)
    assert assumed.keys() - {"levels"} == facts["sources"].keys()
    assert "Llama 3" in facts["sources"]["mtbf_host_h"]


QUICK = ("--days", "1", "--runs", "1", "--checks", "0")


def test_it_prices_what_a_job_runs() -> None:
    """Sums of four bytes per gradient, through XLA; what is given goes first."""
    facts = facts_of("4x4", *QUICK)
    assert facts["assumptions"]["payload_bytes"] == 4 * BERT_PARAMETERS
    assert facts["assumptions"]["hardware"]["name"] == "tpu-v3-xla"
    seconds = predict(plan(Mesh("4x4"), payload_bytes=1.336e9, hardware="tpu-v3-xla"), 1.336e9, "tpu-v3-xla").seconds
    assert facts["all_reduce_seconds"] == pytest.approx(seconds, rel=0.05)
    shown = " ".join(run("4x4", *QUICK).split())
    assert "the all-reduce of 1.336 GB (4 bytes per gradient, as a job sends them) takes" in shown
    assert "on tpu-v3-xla." in shown
    assert "the all-reduce of 1 MB takes" in " ".join(run("4x4", *QUICK, "--assume", "payload_bytes=1MB").split())
    assert facts_of("4x4", *QUICK, "--hardware", "tpu-v3")["assumptions"]["hardware"]["name"] == "tpu-v3"


def test_a_described_machine_brings_its_hardware_and_its_slow_cables(tmp_path: Path) -> None:
    rates = {f"{r},{c}-{r},{c + 1}": "1/2" for r in range(4) for c in range(3)}
    path = tmp_path / "mine.yaml"
    path.write_text(f"meshmend: 1\nshape: 4x4\nhardware: tpu-v6e\nfailed: ['0,3']\nrates: {json.dumps(rates)}")
    words = ["lab", "availability", "--machine", path, "--assume", "payload_bytes=100MB", *QUICK]
    found = commandline.run_json(*words)
    machine = Mesh("4x4", cable_rates=rates)  # a slow cable of a failed chip stays slow once the chip is repaired
    seconds = predict(plan(machine, payload_bytes=1e8, hardware="tpu-v6e-xla"), 1e8, "tpu-v6e-xla").seconds
    assert found["assumptions"]["hardware"]["name"] == "tpu-v6e-xla"
    assert found["cable_rates"] == rates
    assert found["all_reduce_seconds"] == pytest.approx(seconds, rel=0.05)
    other = commandline.run_json(*words, "--hardware", "tpu-v6e")
    assert other["assumptions"]["hardware"]["name"] == "tpu-v6e"


def test_every_assumption_can_be_given() -> None:
    words = """
        8x8 --days 30 --runs 1 --seed 7 --checks 0 --hardware tpu-v2 --cable-rate 0,0-0,1=1/2
        --assume host=2x4,board=none,mtbf_chip_h=inf,mtbf_board_h=9,mtbf_host_h=400,repair_host_h=9,repair_chip_h=8
        --assume repair_board_h=1,quick_repair_h=3,checkpoint_min=15,save_s=5,detect_s=6,restart_s=7,swap_s=8,replan_s=9
        --assume grow=failure,spares=1,price=4,cube=4x8,spare_cubes=3,ocs_s=11,slice_shape=2x4,elastic_s=12,replace_h=5
        --assume copies_s=13,crew_price=50,payload_bytes=2MB,compute_s=0.01
    """
    assert set(re.findall(r"(\w+)=", words.partition("--assume")[2])) == set(TABLE)
    facts = facts_of(*words.split())
    assumed = facts["assumptions"]
    assert {name: assumed[name] for name in ("host", "grow", "spares", "price", "crew_price", "compute_s")} == {
        "host": "2x4", "grow": "failure", "spares": 1, "price": 4, "crew_price": 50, "compute_s": 0.01,
    }  # fmt: skip
    seconds = ("save_s", "detect_s", "restart_s", "swap_s", "replan_s", "ocs_s", "elastic_s", "copies_s")
    assert [assumed[name] for name in seconds] == [5, 6, 7, 8, 9, 11, 12, 13]
    larger = ("cube", "spare_cubes", "slice_shape", "replace_h")
    assert [assumed[name] for name in larger] == ["4x8", 3, "2x4", 5]
    assert (assumed["checkpoint_min"], assumed["quick_repair_h"], assumed["payload_bytes"]) == (15, 3, 2e6)
    assert assumed["hardware"]["name"] == "tpu-v2"
    assert facts["cable_rates"] == {"0,0-0,1": "1/2"}
    assert [(level["name"], level["mtbf_h"], level["repair_h"]) for level in assumed["levels"]] == [
        ("host", 400, 9),
        ("chip", None, 8),
    ]
    assert facts["hours_between_failures"] == pytest.approx(50)


def test_the_table_of_assumptions_says_what_python_assumes() -> None:
    shown = run("--assumptions", width=120)
    rows = dict(re.findall(r"^(\w+) {2,}(.+?) {2,}", shown, re.M))
    assert list(rows) == ["assumption", *TABLE]
    assert (rows["restart_s"], rows["mtbf_host_h"], rows["copies_s"], rows["cube"]) == (
        "300 s", "19,000 h", "no copies", "64 chips",
    )  # fmt: skip
    assert all(about.what and about.source for about in TABLE.values())
    assert Assumptions.of("8x8") == Assumptions.of("8x8", **DEFAULTS)


def test_the_page_has_every_assumption() -> None:
    page = (ROOT / "docs" / "assumptions.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\w+)[`=]", page.partition("\n## ")[0])
    assert set(TABLE) <= set(named)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("restart=60", "There is no assumption 'restart'. Did you mean restart_s? Assumptions, with their defaults:"),
        ("restart=60", "repair_host_h (24 h), quick_repair_h (4 h)"),
        ("spares=two", "spares is 'two', expected a whole number."),
        ("save_s=5min", "save_s is '5min', expected a number, in s."),
        ("payload_bytes=5", "its unit is missing. Write bytes as 5B"),
        ("host=none", "'none' is not a shape"),
        ("price", "'price' is not a setting. Write its name and its value, as in name=value."),
        ("price=1,price=2", "sets price twice. Leave one of them out."),
    ],
)
def test_mistakes_in_an_assumption_teach(given: str, message: str) -> None:
    assert message in commandline.run_json("lab", "availability", "8x8", "--assume", given, code=1)["message"]
