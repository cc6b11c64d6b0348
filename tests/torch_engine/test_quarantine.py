"""Quarantine under torchft: a chip that lies is found and left out, and the others go back; lists by hand count, too.

The weights at the end are held against NumPy in one process (`lying.expected`), which knows only how many chips took
part in each step: with all chips up to the last verified step, and without the liar from then on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")
pytest.importorskip("torchft", reason="torchft is not installed: pip install 'meshmend[torch]'")

from typer.testing import CliRunner

import meshmend.torch as mmt
from meshmend.cli import app
from meshmend.lab.chips import Chips
from meshmend.launch.timeline import read_timeline
from meshmend.launch.watching import Watch
from meshmend.quarantine import QuarantineList
from torch_engine.lying import Chip, Lying, LyingJob, at_step, expected, finish, start, train, until

LIAR = (0, 1)


def run(job: LyingJob) -> dict[Chip, dict[str, Any]]:
    with Chips() as chips:
        start(job, chips)
        return finish(job, chips)


def command(*words: str) -> None:
    done = CliRunner().invoke(app, ["quarantine", *words])
    assert done.exit_code == 0, done.output


def events_of(job: LyingJob, kind: str) -> list[dict[str, Any]]:
    paths = (job.shared / "timeline").iterdir()
    return [event for path in paths for event in read_timeline(path) if event["event"] == kind]


def check_end(job: LyingJob, found: dict[Chip, dict[str, Any]], members: list[int]) -> None:
    """Check that all chips but the liar end with the weights of steps with so many members."""
    steps = dict(enumerate(members, 1))
    for chip, end in found.items():
        if chip != LIAR:
            assert end["steps"] == steps, chip
            assert end["batches"] == sum(members)
            assert end["weights"] == expected(steps), chip


def check_left_out(job: LyingJob, found: dict[Chip, dict[str, Any]], kind: str, verified: int) -> None:
    """Check that the liar has left, is listed, and that everybody has written the same event about it."""
    assert "0,1 is in quarantine until" in found[LIAR]["left"]
    assert f"`meshmend quarantine clear {job.shared} '0,1'`" in found[LIAR]["left"]
    (entry,) = QuarantineList(job.shared).active()
    assert (str(entry.suspect), entry.by, entry.verified) == ("0,1", "the job", verified)
    assert entry.why.startswith(kind)
    events = events_of(job, "quarantined")
    assert {event["suspect"] for event in events} == {"0,1"}
    assert len({event["id"] for event in events}) == 1
    assert {event["host"] for event in events} == set(range(len(found)))  # one chip per host
    assert LIAR not in [tuple(chip) for event in events_of(job, "host lost") for chip in event["chips"]]
    assert list(Watch(job.shared).snapshot().quarantined) == ["0,1"]


def test_a_chip_whose_weights_are_wrong_is_left_out(tmp_path: Path) -> None:
    job = LyingJob("2x2", tmp_path, mmt.Checks(digests_every=3), (Lying(LIAR, "update", 4),), steps=8)
    found = run(job)
    check_end(job, found, [4] * 3 + [3] * 5)
    check_left_out(job, found, "digest", verified=3)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["update", "gradient"])
@pytest.mark.parametrize("shape", ["3x3", "4x4"])
def test_a_chip_that_lies_from_a_step_on(shape: str, how: str, tmp_path: Path) -> None:
    checks = mmt.Checks(digests_every=4, recompute_every=4)
    job = LyingJob(shape, tmp_path, checks, (Lying(LIAR, how, 6),), steps=13)
    found = run(job)
    check_end(job, found, [len(found)] * 4 + [len(found) - 1] * 9)
    check_left_out(job, found, "digest" if how == "update" else "recompute", verified=4)
    assert all(end["verified"] == 12 for chip, end in found.items() if chip != LIAR)


@pytest.mark.slow
def test_one_flipped_bit_costs_no_chip(tmp_path: Path) -> None:
    job = LyingJob("3x3", tmp_path, mmt.Checks(digests_every=3), (Lying(LIAR, "once", 4),), steps=8)
    found = run(job)
    steps = dict.fromkeys(range(1, 9), 9)
    for chip, end in found.items():
        assert end["steps"] == steps, chip
        assert end["weights"] == expected(steps), chip
        (back,) = [event["why"] for event in end["events"] if "go back" in event["why"]]
        assert "All chips go back to the state of step 3, the last verified one: 0,1: module.w, elements 0 to" in back
    assert QuarantineList(job.shared).active() == ()


@pytest.mark.slow
def test_a_member_that_did_not_hear_of_it_goes_back_as_well(tmp_path: Path) -> None:
    # It is at step 6 when the others are back at step 3: torchft would give its state to all of them.
    liars = (Lying(LIAR, "once", 4), Lying((1, 1), "deaf", 6))
    job = LyingJob("3x3", tmp_path, mmt.Checks(digests_every=3), liars, steps=8)
    found = run(job)
    steps = dict.fromkeys(range(1, 9), 9)
    for chip, end in found.items():
        assert end["weights"] == expected(steps), chip
        assert end["batches"] == 8 * 9
        told = " ".join(event["why"] for event in end["events"])
        assert ("All chips go back to the state of step 3" in told) == (chip != (1, 1))
        assert "Some members of the new quorum have gone back" in told
    assert QuarantineList(job.shared).active() == ()


@pytest.mark.slow
def test_a_chip_that_has_just_joined_goes_back_as_well(tmp_path: Path) -> None:
    checks = mmt.Checks(digests_every=20)
    job = LyingJob("3x3", tmp_path, checks, (Lying(LIAR, "update", 24),), steps=50, pause_s=0.15)
    with Chips() as chips:
        start(job, chips)
        until(lambda: at_step(job, 8) >= 24, 120)
        chips.kill([(2, 2)])
        (job.folder / "at-8").unlink()
        chips.start((2, 2), train, job, 1)
        found = finish(job, chips, 200)
    steps = found[0, 0]["steps"]
    assert [steps[step] for step in range(1, 21)] == [9] * 20
    assert [steps[step] for step in range(21, 51)] == [8] * 30
    for chip, end in found.items():
        if chip != LIAR:
            assert end["weights"] == expected(steps), chip
    check_left_out(job, found, "digest", verified=20)
    assert any("go back to the state of step 20" in event["why"] for event in found[2, 2]["events"])


@pytest.mark.slow
def test_a_program_that_is_not_deterministic_is_no_fault_of_chips(tmp_path: Path) -> None:
    noisy = tuple(Lying(chip, "noise", 0) for chip in ((0, 0), (1, 0), (1, 1)))
    job = LyingJob("2x2", tmp_path, mmt.Checks(digests_every=2, recompute_every=4), noisy, steps=9)
    found = run(job)
    for end in found.values():
        assert end["weights"] == expected(dict.fromkeys(range(1, 10), 4))
        (event,) = end["events"]
        assert "chips do not find the same twice, so the program is not deterministic" in event["why"]
        assert end["verified"] == 8
    assert QuarantineList(job.shared).active() == ()


@pytest.mark.slow
def test_past_the_limit_all_stop_and_ask(tmp_path: Path) -> None:
    liars = (Lying(LIAR, "gradient", 2), Lying((2, 2), "gradient", 6))
    job = LyingJob("3x3", tmp_path, mmt.Checks(digests_every=4, recompute_every=2), liars, steps=20)
    found = run(job)
    (entry,) = QuarantineList(job.shared).active()
    assert str(entry.suspect) == "0,1"
    for chip, end in found.items():
        if chip != LIAR:
            assert "The job wants to quarantine 2,2" in end["left"], chip
            assert "may leave out 1" in end["left"]


@pytest.mark.slow
def test_by_hand_and_back(tmp_path: Path) -> None:
    job = LyingJob("3x3", tmp_path, None, steps=1000, pause_s=0.05)
    with Chips() as chips:
        start(job, chips)
        until(lambda: at_step(job, 0) >= 3)
        command("add", str(job.shared), "0,1", "--why", "a smell of smoke")
        command("add", str(job.shared), "1,0-2,0", "--why", "a loose plug")
        left: dict[Chip, Any] = {}

        def has_ended() -> bool:
            left.update(chips.poll())
            return LIAR in left

        until(has_ended)
        assert "0,1 is in quarantine until" in left[LIAR]["left"]
        assert "because of a smell of smoke" in left[LIAR]["left"]
        here = at_step(job, 0)
        until(lambda: at_step(job, 0) >= here + 5)
        # It cannot come back yet: the lighthouse does not hear of it, and nobody waits for it.
        left.clear()
        chips.start(LIAR, train, job, 1)
        until(has_ended)
        assert "because of a smell of smoke" in left[LIAR]["refused"]
        command("clear", str(job.shared), "0,1")
        chips.start(LIAR, train, job, 2)
        until(lambda: at_step(job, 1) > here + 5)
        (job.folder / "stop").touch()
        found = finish(job, chips)
    steps = found[0, 0]["steps"]
    assert sorted(set(steps.values())) == [8, 9]
    changes = [n for n, before in zip(steps.values(), [0, *steps.values()], strict=False) if n != before]
    assert changes == [9, 8, 9]  # with the chip, without it, and with it again
    assert found[0, 0]["weights"] == expected(steps)
    assert {end["weights"] for end in found.values()} == {found[0, 0]["weights"]}
    assert {end["cables"] for end in found.values()} == {(((1, 0), (2, 0)),)}
    events = {event["suspect"]: event["id"] for event in events_of(job, "quarantined")}
    assert sorted(events) == ["0,1", "1,0-2,0"]
