"""The sign book: signs outlive processes, processes that see the same count once, a damaged book is no empty one."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from meshmend.errors import QuarantineError
from meshmend.launch import Hosts
from meshmend.quarantine import (
    THE_JOB,
    Noted,
    QuarantineList,
    Sign,
    SignBook,
    Suspect,
    enforce,
    report,
    untrusted,
)
from meshmend.quarantine import book as book_module
from meshmend.quarantine.judge import judge

HOSTS = Hosts.of("8x8", "4x2")
A, B, C = (Suspect.chip((0, n)) for n in range(3))
AB, AC = Suspect.parse("0,0-0,1"), Suspect.parse("0,0-1,0")
DAY_S = 86400.0


def digest(chip: Suspect, step: int, chunk: int = 0) -> Sign:
    return Sign("digest", (chip,), step, f"chunk {chunk} differs", {"chunk": chunk, "agree": 63, "differ": 1})


def recompute(step: int, *suspects: Suspect) -> Sign:
    return Sign("recompute", suspects, step)


def lag(chip: Suspect, step: int = 100) -> Sign:
    return Sign("lag", (chip,), step, "", {"steps": 30})


class Job:
    """A job's shared folder, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.time = folder, 1e9
        self.book = SignBook(folder, now=self.now)
        self.list = QuarantineList(folder, now=self.now)

    def now(self) -> float:
        return self.time

    def report(self, *signs: Sign, attempt: int = 1, verified: int = 0) -> list[str]:
        self.time += 1
        made = report(self.folder, signs, attempt=attempt, verified=verified, hosts=HOSTS, now=self.now)
        return [str(entry.suspect) for entry in made]

    def start(self) -> list[str]:
        self.time += 1
        return [str(entry.suspect) for entry in enforce(self.folder, hosts=HOSTS, now=self.now)]

    def listed(self) -> list[str]:
        return [str(entry.suspect) for entry in self.list.active()]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_what_is_noted_is_read(job: Job) -> None:
    assert job.book.read() == ()
    signs = [recompute(7, A, AB, B), Sign("digest", (A,), 9, "±1 ulp", {"chunk": 3, "agree": 2.5})]
    job.book.add(signs[:1], attempt=1, verified=5)
    job.time += 0.25
    job.book.add([], attempt=9, verified=9)
    job.book.add(signs[1:], attempt=2, verified=6)
    assert job.book.read() == (Noted(signs[0], 1, 5, 1e9), Noted(signs[1], 2, 6, 1e9 + 0.25))
    assert SignBook(job.folder).read() == job.book.read()
    assert sorted(path.name for path in job.folder.iterdir()) == ["signs.jsonl", "signs.jsonl.lock"]
    for attempt, verified in ((-1, 0), (0, -1), (1 << 53, 0)):
        with pytest.raises(QuarantineError, match="expected numbers from 0"):
            job.book.add(signs, attempt=attempt, verified=verified)


@pytest.mark.parametrize("sign", [digest(A, 400), recompute(400, A)], ids=lambda sign: sign.kind)
def test_the_same_sign_of_four_processes_counts_once_and_after_a_restart_twice(job: Job, sign: Sign) -> None:
    for _ in range(4):
        assert job.report(sign, attempt=1, verified=380) == []
    assert len(job.book.read()) == 1
    assert job.start() == []
    assert job.report(sign, attempt=2, verified=380) == ["0,0"]
    for _ in range(3):
        assert job.report(sign, attempt=2, verified=380) == []
    (entry,) = job.list.active()
    assert (entry.by, entry.step, entry.verified) == (THE_JOB, 400, 380)
    assert entry.why.count(f"{sign.kind} at step 400 of attempt") == 2
    assert untrusted(job.book) == [(1, 380), (2, 380)]


def test_processes_that_describe_one_thing_differently_have_still_seen_one(job: Job) -> None:
    for process in range(4):
        seen = Sign("recompute", (A,), 400, f"as process {process} has seen it", {"chunk": process})
        assert job.report(seen) == []
    assert len(job.book.read()) == 4
    assert job.report(recompute(401, A)) == ["0,0"]


def test_slowness_leaves_states_trusted(job: Job) -> None:
    assert job.report(lag(A), attempt=3, verified=80) == ["0,0"]
    assert untrusted(job.book) == []
    job.report(recompute(101, B, C), attempt=3, verified=90)
    assert untrusted(job.book) == [(3, 90)]


def test_a_verdict_that_was_not_listed_any_more_is_listed_at_the_next_start(job: Job) -> None:
    """The process may end between the two files."""
    job.book.add([recompute(7, A)], attempt=1, verified=5)
    job.book.add([recompute(8, A)], attempt=2, verified=6)
    assert job.listed() == []
    assert job.start() == ["0,0"]
    assert job.start() == []
    (entry,) = job.list.active()
    assert entry.verified == 6


def test_past_the_limit_every_start_stops_until_somebody_decides(job: Job) -> None:
    chips = [Suspect.chip((row, column)) for row in range(3) for column in range(4)]
    for number, chip in enumerate(chips[:8]):
        assert job.report(recompute(1, chip), recompute(2, chip), attempt=number) == [str(chip)]
    for _ in range(2):
        with pytest.raises(QuarantineError, match=r"wants to quarantine 2,0 .*may leave out 8"):
            job.report(recompute(1, chips[8]), recompute(2, chips[8]), attempt=9)
        with pytest.raises(QuarantineError, match=r"wants to quarantine 2,0 .*may leave out 8"):
            job.start()
    # A person does not believe it, and clears the signs of a chip that the list does not have.
    assert job.list.clear([chips[8]]) == ()
    assert job.start() == []
    with pytest.raises(QuarantineError, match="2,0 is not in quarantine"):
        job.list.clear([chips[8]])
    # Of the next one a person is certain.
    with pytest.raises(QuarantineError, match="wants to quarantine 2,1"):
        job.report(recompute(1, chips[9]), recompute(2, chips[9]), attempt=10)
    job.list.add(chips[9], why="tested")
    assert job.start() == []
    # Or there is room again.
    with pytest.raises(QuarantineError, match="wants to quarantine 2,2"):
        job.report(recompute(1, chips[10]), recompute(2, chips[10]), attempt=11)
    job.list.clear([chips[0]])
    assert job.start() == ["2,2"]


@pytest.mark.parametrize("ending", ["expires", "expires and is dropped", "cleared", "all cleared"])
def test_old_signs_do_not_bring_a_suspect_back_and_new_ones_do(job: Job, ending: str) -> None:
    job.report(digest(A, 400), attempt=1, verified=380)
    assert job.report(digest(A, 400), attempt=2, verified=380) == ["0,0"]
    assert job.report(digest(A, 400, 5), attempt=2, verified=380) == []  # another process, later
    if ending.startswith("expires"):
        job.time += 8 * DAY_S
        if ending.endswith("dropped"):
            assert job.start() == []
            job.list.add(B, why="by hand")
    else:
        job.list.clear([A] if ending == "cleared" else None)
    assert "0,0" not in job.listed()
    assert job.start() == []
    assert job.report(digest(A, 500), attempt=3, verified=480) == []
    assert untrusted(job.book) == [(1, 380), (2, 380), (3, 480)]  # what is wrong does not become right
    assert job.report(digest(A, 500), attempt=4, verified=480) == ["0,0"]


def test_who_is_left_out_explains_its_signs(job: Job) -> None:
    """B was named with A, and once more since: that is one observation against B, whatever its name."""
    for a, b, ab in ((A, B, AB), (B, A, AB)):
        folder = job.folder / str(a)
        folder.mkdir()
        here = Job(folder)
        assert here.report(recompute(1, a, ab, b)) == []
        assert here.report(recompute(2, a, Suspect.parse("0,0-7,0" if a == A else "0,1-7,1"))) == [str(a)]
        assert here.report(recompute(3, b, C), attempt=2) == []
        assert here.report(recompute(4, b), attempt=3) == [str(b)]


def test_a_chip_is_found_although_its_cable_was_named_first(job: Job) -> None:
    assert job.report(recompute(1, A, AB, B)) == []
    assert job.report(recompute(2, A, AB, B), attempt=2) == ["0,0-0,1"]
    assert job.report(recompute(3, A, AC, Suspect.chip((1, 0))), attempt=3) == ["0,0"]
    assert job.start() == []


def test_the_judge_without_a_list_is_as_it_was() -> None:
    signs = [recompute(1, A, AB, B), recompute(2, A, AB, B), recompute(3, A, AC, Suspect.chip((1, 0)))]
    assert [verdict.suspect for verdict in judge(signs)] == [A]
    assert [verdict.suspect for verdict in judge(signs, [A])] == []
    assert [verdict.suspect for verdict in judge(signs[:2], [AC])] == [AB]


def test_the_newest_signs_are_kept(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book_module, "MAX_SIGNS", 5)
    for step in range(8):
        job.book.add([recompute(step, A)], attempt=1, verified=0)
    assert [noted.sign.step for noted in job.book.read()] == [3, 4, 5, 6, 7]
    size = job.book.path.stat().st_size
    monkeypatch.setattr(book_module, "MAX_BYTES", size - 1)
    with pytest.raises(QuarantineError, match=f"it has {size} bytes, expected at most {size - 1}"):
        job.book.read()
    monkeypatch.setattr(book_module, "MAX_BYTES", size)
    job.book.add([recompute(8, A, B, C)], attempt=1, verified=0)
    assert [noted.sign.step for noted in job.book.read()] == [5, 6, 7, 8]


@pytest.mark.parametrize("cut", [1, 2, 40, -1])
def test_what_a_killed_process_left_of_a_line_is_cut(job: Job, cut: int) -> None:
    job.report(recompute(1, A), attempt=1, verified=0)
    whole = job.book.path.read_bytes()
    job.book.path.write_bytes(whole + whole[:cut])
    assert len(job.book.read()) == 1
    assert job.report(recompute(1, A), attempt=2, verified=0) == ["0,0"]
    assert [noted.attempt for noted in job.book.read()] == [1, 2]
    assert all(json.loads(line) for line in job.book.path.read_text().splitlines())


LINE = json.loads(Noted(recompute(1, A), 1, 0, 5.0).to_json())


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("", "line 2: it is not JSON"),
        ("{", "line 2: it is not JSON"),
        ("[" * 5000, "line 2: it is not JSON"),
        ("[]", "line 2: it does not have exactly attempt, verified, at"),
        (json.dumps(LINE | {"more": 1}), "line 2: it does not have exactly"),
        (json.dumps(LINE | {"attempt": -1}), "line 2: attempt and verified are not whole numbers"),
        (json.dumps(LINE | {"verified": 1.5}), "line 2: attempt and verified are not whole numbers"),
        (json.dumps(LINE | {"verified": True}), "line 2: attempt and verified are not whole numbers"),
        (json.dumps(LINE | {"at": 1e300}), "line 2: at is not a time"),
        (json.dumps(LINE | {"settled": 1}), "line 2: at is not a time, or settled"),
        (json.dumps(LINE | {"sign": {}}), "line 2: This is no sign of a fault"),
        (json.dumps(LINE | {"sign": LINE["sign"] | {"suspects": ["x"]}}), "line 2: 'x' is no suspect"),
        ("\n" * 10_000, "10,002 signs"),
        (" " * (33 << 20), "bytes, expected at most"),
    ],
)
def test_a_damaged_book_is_never_an_empty_one(line: str, why: str, job: Job) -> None:
    text = json.dumps(LINE) + "\n" + line + "\n"
    job.book.path.write_text(text)
    for call in (
        job.book.read,
        job.book.suspects,
        job.book.settle,
        job.list.clear,
        job.start,
        lambda: untrusted(job.book),
        lambda: job.report(recompute(3, A)),
    ):
        with pytest.raises(QuarantineError, match=f"(?s)signs.jsonl is damaged: .*{why}.*Repair it.*or move it away"):
            call()
    assert job.book.path.read_text() == text
    job.list.add(A, why="a person may still leave out a chip")
    assert job.listed() == ["0,0"]


def test_writers_at_the_same_time_lose_nothing(job: Job) -> None:
    def write(column: int) -> None:
        for step in range(10):
            SignBook(job.folder).add([recompute(step, Suspect.chip((0, column)))], attempt=1, verified=0)

    threads = [threading.Thread(target=write, args=(column,)) for column in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = {(noted.sign.step, str(noted.sign.suspects[0])) for noted in job.book.read()}
    assert seen == {(step, f"0,{column}") for step in range(10) for column in range(4)}
    assert len(job.book.read()) == 40
