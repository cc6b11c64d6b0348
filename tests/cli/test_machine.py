"""`meshmend machine`, and `--machine` in the commands that plan."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import commandline
from commandline import run_json
from descriptions import OWN, SAMPLES


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(OWN, encoding="utf-8")
    return path


run = partial(commandline.run, width=200)


def test_it_shows_what_is_missing_and_whom_to_call(mine: Path) -> None:
    out = run("machine", mine)
    assert "4x8 wrapped on axis 1 minus 1x1@0,3, 2x2@2,0, 1 cable with 1 slow cable" in out
    assert "(0,3) tray1.chip3 on node0" in out
    assert "0,0-0,1 at 1/2" in out
    assert f"next: meshmend plan --machine {mine} --payload 100MB --hardware tpu-v3" in out


def test_json_has_the_same_facts(mine: Path) -> None:
    facts = run_json("machine", mine)
    assert (facts["mesh"], facts["chips"], facts["call"]) == ("4x8", 27, ["node0"])
    assert facts["cable_rates"] == {"0,0-0,1": "1/2"}
    assert {"at": [0, 3], "name": "tray1.chip3", "host": "node0"} in facts["failed_chips"]


def test_plan_takes_the_machine_and_more_holes(mine: Path) -> None:
    facts = run_json("plan", "--machine", mine, "--fail", "0,7", "--planner", "weave:chunks=8")
    assert facts["chips"] == 26
    assert facts["verified"]
    run("plan", "4x8", "--machine", mine, code=1)
    run("plan", "4x8", "--intended", mine, code=1)
    run("plan", code=2)


def test_an_ambiguous_machine_is_settled_by_its_shape_or_by_what_was_intended(tmp_path: Path) -> None:
    text = SAMPLES["t3000"].without(chips=[6, 7]).text
    hurt, whole = tmp_path / "hurt.yaml", tmp_path / "whole.yaml"
    hurt.write_text(text.replace("n300", "unknown"), encoding="utf-8")
    whole.write_text(SAMPLES["t3000"].text, encoding="utf-8")
    assert "The layout is ambiguous" in run("machine", hurt, code=1)
    assert "chip 6" in run("machine", hurt, "--intended", whole)
    run("plan", "--machine", hurt, "--intended", whole, "--planner", "weave:chunks=8")


T3000 = 'meshmend: 1\nhardware: tenstorrent-t3000\nshape: 2x4\nfailed: ["0,3"]\nrates: {"1,1-1,2": 1/2}'
"""A described machine whose links have less than a third of the rate of the default's."""


@pytest.mark.parametrize("command", ["plan", pytest.param("compare", marks=pytest.mark.slow)])
def test_a_machine_brings_its_hardware(command: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(T3000, encoding="utf-8")

    def facts(*words: str) -> tuple[str, float]:
        found = run_json(command, "--machine", path, "--payload", "100MB", *words)
        if command == "compare":
            assert found["full_mesh"]["cable_rates"] == {"1,1-1,2": "1/2"}, "nothing failed, and as slow"
        seconds = found["bound_seconds"] if command == "plan" else found["mesh"]["bound_seconds"]
        return found["hardware"]["name"], seconds

    # 25 GB/s per link against 82: a bound is a number of bytes over the rate.
    name, seconds = facts()
    assert name == "tenstorrent-t3000"
    assert facts("--hardware", "tenstorrent-t3000") == (name, seconds)
    said, other = facts("--hardware", "tpu-v3")
    assert said == "tpu-v3"
    assert seconds / other == pytest.approx(82 / 25)
