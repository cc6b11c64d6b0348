"""`meshmend quarantine`."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

import commandline
from meshmend.launch import Timeline
from meshmend.quarantine import THE_JOB, FaultLog, Observation, QuarantineList, Suspect, enforce

run, run_json = partial(commandline.run, "quarantine"), partial(commandline.run_json, "quarantine")


def test_adding_listing_and_clearing(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert "Nothing is in quarantine in" in run("list", folder)
    made = run_json("add", folder, "2,3", "2,4-2,3", "host 1", "--for", "12h", "--why", "smells [bold]burnt")
    assert [entry["suspect"] for entry in made["entries"]] == ["2,3", "2,3-2,4", "host 1"]
    for entry in made["entries"]:
        assert entry["until"] - entry["since"] == pytest.approx(12 * 3600)
        assert (entry["by"], entry["why"], entry["expired"]) == ("by hand", "smells [bold]burnt", False)
    listed = run_json("list", folder)
    assert listed["entries"] == made["entries"]
    assert [entry["kind"] for entry in listed["entries"]] == ["chip", "cable", "host"]
    text = run("list", folder)
    assert "smells [bold]burnt" in text
    assert "11 h 59 min" in text or "12 h 0 min" in text
    assert [entry["suspect"] for entry in run_json("clear", folder, "2,3")["cleared"]] == ["2,3"]
    assert "Cleared: 2,3-2,4, host 1. It counts from the next start" in run("clear", folder, "--all")
    assert run_json("list", folder)["entries"] == []
    assert "Nothing was in quarantine" in run("clear", folder, "--all")


def test_observations_against_a_chip_that_is_not_listed_are_cleared(tmp_path: Path) -> None:
    observations = [Observation("recompute", (Suspect.parse("2,3"),), step) for step in (1, 2)]
    FaultLog(tmp_path).add(observations, attempt=1, verified=0)
    assert "Cleared: 2,3 (of observations)." in run("clear", str(tmp_path), "2,3")
    assert enforce(tmp_path, n_chips=64) == ()
    assert "2,3 is not in quarantine" in run("clear", str(tmp_path), "2,3", code=1)


def test_what_has_expired_is_shown_when_asked_for(tmp_path: Path) -> None:
    past = QuarantineList(tmp_path, now=lambda: time.time() - 100)
    past.add(Suspect.parse("0,0"), why="old", by=THE_JOB, for_s=50, verified=16, n_chips=16)
    assert run_json("list", str(tmp_path))["entries"] == []
    assert [entry["expired"] for entry in run_json("list", str(tmp_path), "--all")["entries"]] == [True]
    text = run("list", str(tmp_path), "--all")
    assert "expired" in text
    assert "step 16" in text


def test_the_machine_of_the_job_is_known(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline" / "host-0.jsonl")
    timeline.note("fabric", chips=64, hosts=[0], machine="8x8 in hosts of 4x2")
    timeline.flush()
    assert "There is no chip 8,0" in run("add", str(tmp_path), "7,7", "8,0", code=1)
    assert "the machine has hosts 0 to 7" in run("add", str(tmp_path), "host 8", code=1)
    assert run_json("list", str(tmp_path))["entries"] == []  # all of them or none
    assert "2,3" in run("add", str(tmp_path), "2,3")
