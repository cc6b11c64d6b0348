"""The quarantine list: what is kept, what expires, what the job may not add, and what a damaged file says."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path

import pytest

from meshmend.errors import QuarantineError
from meshmend.launch import Hosts
from meshmend.quarantine import BY_HAND, THE_JOB, QuarantineList, Suspect
from meshmend.quarantine.entries import cables_of, chips_of, limit

HOSTS = Hosts.of("8x8", "4x2")
CHIP = Suspect.chip((2, 3))


def test_what_is_added_is_there_until_it_expires(tmp_path: Path) -> None:
    clock = [1000.0]
    entries = QuarantineList(tmp_path, now=lambda: clock[0])
    assert entries.read() == ()
    made = entries.add(CHIP, why="flips bit 7", by=THE_JOB, for_s=60, step=400, verified=300, hosts=HOSTS)
    assert (made.since, made.until, made.step, made.verified) == (1000.0, 1060.0, 400, 300)
    assert QuarantineList(tmp_path, now=lambda: 1059.9).active() == (made,)
    clock[0] = 1060.0
    assert entries.active() == ()
    assert entries.read() == (made,)
    entries.add(Suspect.parse("host 1"), why="")
    assert [str(entry.suspect) for entry in entries.read()] == ["2,3", "host 1"]
    again = entries.add(CHIP, why="and again")
    assert [entry.suspect for entry in entries.active()] == [Suspect.parse("host 1"), CHIP]
    assert again.since == 1060.0


def test_a_second_entry_keeps_the_later_end_and_the_word_of_a_person(tmp_path: Path) -> None:
    clock = [1000.0]
    entries = QuarantineList(tmp_path, now=lambda: clock[0])
    entries.add(CHIP, why="seen", by=THE_JOB, for_s=500, hosts=HOSTS)
    clock[0] = 1100.0
    entries.add(CHIP, why="tested", for_s=100)
    entry = entries.add(CHIP, why="seen again", by=THE_JOB, for_s=10, hosts=HOSTS)
    assert entries.read() == (entry,)
    assert (entry.by, entry.why, entry.since, entry.until) == (BY_HAND, "tested", 1000.0, 1500.0)


def test_clearing(tmp_path: Path) -> None:
    entries = QuarantineList(tmp_path)
    for text in ("0,0", "0,1", "0,0-1,0"):
        entries.add(Suspect.parse(text), why="test")
    with pytest.raises(QuarantineError, match=r"7,7 is not in quarantine. .* lists: 0,0, 0,1, 0,0-1,0"):
        entries.clear([Suspect.parse("0,0"), Suspect.parse("7,7")])
    assert len(entries.active()) == 3
    assert [str(entry.suspect) for entry in entries.clear([Suspect.parse("0,1")])] == ["0,1"]
    assert chips_of(entries.active()) == [(0, 0)]
    assert cables_of(entries.active()) == [((0, 0), (1, 0))]
    assert len(entries.clear()) == 2
    assert entries.active() == ()


def test_a_full_list_forgets_what_ended_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshmend.quarantine.entries.MAX_ENTRIES", 3)
    entries = QuarantineList(tmp_path)
    for column in range(3):
        entries.add(Suspect.chip((0, column)), why="test")
    with pytest.raises(QuarantineError, match=r"is full: it has 3 entries\. Clear some of them"):
        entries.add(CHIP, why="test")
    entries.clear([Suspect.parse("0,1")])
    entries.clear([Suspect.parse("0,0")])
    entries.add(CHIP, why="test")
    assert {str(entry.suspect) for entry in entries.read()} == {"0,0", "0,2", "2,3"}


def test_a_campaign_of_false_alarms_ends_at_the_limit(tmp_path: Path) -> None:
    entries, rng = QuarantineList(tmp_path), random.Random(0)
    chips = [Suspect.chip((row, column)) for row in range(8) for column in range(8)]
    rng.shuffle(chips)
    assert limit(64, 8) == 8  # 64 / 16 is 4, a host has 8
    for chip in chips[:8]:
        entries.add(chip, why="false alarm", by=THE_JOB, hosts=HOSTS)
    for more in (*chips[8:12], Suspect.parse("host 3")):
        with pytest.raises(QuarantineError, match=f"wants to quarantine {more} .* left out 8 of 64 chips"):
            entries.add(more, why="false alarm", by=THE_JOB, hosts=HOSTS)
    assert [entry.suspect for entry in entries.active()] == chips[:8]
    entries.add(chips[0], why="again", by=THE_JOB, hosts=HOSTS)  # what is there already adds nothing
    # A person may, and what a person has confirmed no longer counts.
    entries.add(chips[0], why="tested")
    entries.add(chips[8], why="tested")
    entries.add(chips[9], why="one more", by=THE_JOB, hosts=HOSTS)
    with pytest.raises(QuarantineError, match="may leave out 8"):
        entries.add(chips[10], why="false alarm", by=THE_JOB, hosts=HOSTS)


def test_a_whole_host_fits(tmp_path: Path) -> None:
    entries = QuarantineList(tmp_path)
    entries.add(Suspect.parse("host 2"), why="all slow", by=THE_JOB, hosts=HOSTS)
    entries.add(Suspect.chip(HOSTS.chips(2)[3]), why="its chip", by=THE_JOB, hosts=HOSTS)
    with pytest.raises(QuarantineError, match="confirm it by hand"):
        entries.add(Suspect.chip((7, 7)), why="slow", by=THE_JOB, hosts=HOSTS)
    alone = QuarantineList(tmp_path / "alone")
    alone.add(CHIP, why="", by=THE_JOB, n_chips=20)
    with pytest.raises(QuarantineError, match="left out 1 of 20 chips by itself, and may leave out 1"):
        alone.add(Suspect.chip((0, 0)), why="", by=THE_JOB, n_chips=20)
    with pytest.raises(QuarantineError, match="give hosts or n_chips"):
        alone.add(CHIP, why="", by=THE_JOB)


def test_what_the_machine_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QuarantineError, match="There is no chip 8,8"):
        QuarantineList(tmp_path).add(Suspect.chip((8, 8)), why="", hosts=HOSTS)
    for seconds in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(QuarantineError, match="expected more than 0 s"):
            QuarantineList(tmp_path).add(CHIP, why="", for_s=seconds)


ENTRY = {"suspect": "2,3", "why": "", "by": "by hand", "since": 1, "until": 2, "step": 0, "verified": 0}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[" * 5000, "is not JSON"),
        ("[]", "no list of entries"),
        ('{"version": 2, "entries": []}', "its version is 2, expected 1"),
        (json.dumps({"version": 1, "entries": [1]}), "entry 0: it lacks"),
        (json.dumps({"version": 1, "entries": [{}]}), "entry 0: it lacks 'suspect'"),
        (json.dumps({"version": 1, "entries": [ENTRY, ENTRY | {"suspect": "x"}]}), "entry 1: 'x' is no suspect"),
        (
            json.dumps({"version": 1, "entries": [ENTRY | {"why": 1}]}),
            "entry 0: suspect, why and by are not short texts",
        ),
        (json.dumps({"version": 1, "entries": [ENTRY | {"until": "soon"}]}), "are not numbers"),
        (json.dumps({"version": 1, "entries": [ENTRY | {"until": 1e300}]}), "are not numbers"),
        (json.dumps({"version": 1, "entries": [ENTRY] * 10_001}), "10,001 entries"),
        (" " * (5 << 20), "bytes, expected at most"),
    ],
)
def test_a_damaged_list_is_never_an_empty_one(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "quarantine.json").write_text(text)
    entries = QuarantineList(tmp_path)
    for call in (entries.read, entries.active, entries.clear, lambda: entries.add(CHIP, why="")):
        with pytest.raises(QuarantineError, match=f"(?s)is damaged: .*{why}.*Repair it, or move it away"):
            call()
    assert (tmp_path / "quarantine.json").read_text() == text


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    def write(column: int) -> None:
        for row in range(10):
            QuarantineList(tmp_path).add(Suspect.chip((row, column)), why="")

    threads = [threading.Thread(target=write, args=(column,)) for column in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert chips_of(QuarantineList(tmp_path).active()) == [(row, column) for row in range(10) for column in range(4)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quarantine.json", "quarantine.json.lock"]
