"""Plans, fault logs and quarantine lists that an earlier version has written: this one reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

import meshmend as mm
from golden.make import FOLDER, unpack
from meshmend.launch import Hosts
from meshmend.quarantine import THE_JOB, FaultLog, Observation, QuarantineList, Suspect, enforce, untrusted


@pytest.mark.parametrize(("name", "repeats"), [("plan", False), ("plan-repeated", True)])
def test_a_plan_of_an_earlier_version_is_read_and_proven(name: str, repeats: bool, tmp_path: Path) -> None:
    schedule = mm.load(FOLDER / f"{name}.npz")
    assert (schedule.repeats > 1) == repeats
    assert schedule.mesh == mm.Mesh("4x4", failed=["2x2@0,2"])
    assert mm.verify(schedule).chips == 12
    mm.save(schedule, tmp_path / "again.npz")
    assert mm.load(tmp_path / "again.npz") == schedule


def test_a_fault_log_of_an_earlier_version_counts(tmp_path: Path) -> None:
    """Its two observations are those of golden/make.py, and the verdict on them is listed already."""
    unpack("quarantine", tmp_path)
    suspect = Suspect.parse("2,3")
    seen = [(noted.observation, noted.attempt, noted.verified, noted.at) for noted in FaultLog(tmp_path).read()]
    facts = ("chunk 5 differs", {"chunk": 5, "agree": 63, "differ": 1})
    expected = [(Observation("digest", (suspect,), step, *facts), step) for step in (400, 460)]
    assert seen == [(one, 1 + (step > 400), step - 20, 1e9 + step) for one, step in expected]
    assert untrusted(FaultLog(tmp_path)) == [(1, 380), (2, 440)]
    (entry,) = QuarantineList(tmp_path, now=lambda: 1e9 + 500).active()
    assert (entry.suspect, entry.by, entry.step, entry.verified) == (suspect, THE_JOB, 460, 440)
    assert enforce(tmp_path, hosts=Hosts.of("8x8", "4x2"), now=lambda: 1e9 + 500) == ()
