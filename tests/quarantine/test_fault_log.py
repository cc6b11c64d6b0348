"""The fault log outlives processes, what several of them see counts once, and a damaged log is not an empty one."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from meshmend.errors import QuarantineError
from meshmend.launch import Hosts
from meshmend.quarantine import (
    THE_JOB,
    FaultLog,
    LogEntry,
    Observation,
    QuarantineList,
    Suspect,
    enforce,
    report,
    untrusted,
)
from meshmend.quarantine import fault_log as log_module

HOSTS = Hosts.of("8x8", "4x2")
A, B, C = (Suspect.chip((0, n)) for n in range(3))
DAY_S = 86400.0


def digest(chip: Suspect, step: int, chunk: int = 0) -> Observation:
    return Observation("digest", (chip,), step, f"chunk {chunk} differs", {"chunk": chunk, "agree": 63, "differ": 1})


def recompute(step: int, *suspects: Suspect) -> Observation:
    return Observation("recompute", suspects, step)


class Job:
    """A job's shared folder, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.time = folder, 1e9
        self.log = FaultLog(folder, now=self.now)
        self.list = QuarantineList(folder, now=self.now)

    def now(self) -> float:
        return self.time

    def report(self, *observations: Observation, attempt: int = 1, verified: int = 0) -> list[str]:
        self.time += 1
        made = report(self.folder, observations, attempt=attempt, verified=verified, hosts=HOSTS, now=self.now)
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
    assert job.log.read() == ()
    observations = [recompute(7, A, B), Observation("digest", (A,), 9, "±1 ulp", {"chunk": 3, "agree": 2.5})]
    job.log.add(observations[:1], attempt=1, verified=5)
    job.time += 0.25
    job.log.add([], attempt=9, verified=9)
    job.log.add(observations[1:], attempt=2, verified=6)
    assert job.log.read() == (LogEntry(observations[0], 1, 5, 1e9), LogEntry(observations[1], 2, 6, 1e9 + 0.25))
    assert FaultLog(job.folder).read() == job.log.read()
    assert sorted(path.name for path in job.folder.iterdir()) == ["fault_log.jsonl", "fault_log.jsonl.lock"]
    for attempt, verified in ((-1, 0), (0, -1), (1 << 53, 0)):
        with pytest.raises(QuarantineError, match="expected numbers from 0"):
            job.log.add(observations, attempt=attempt, verified=verified)


@pytest.mark.parametrize("observation", [digest(A, 400), recompute(400, A)], ids=lambda observation: observation.kind)
def test_the_same_observation_of_four_processes_counts_once_and_after_a_restart_twice(
    job: Job, observation: Observation
) -> None:
    for _ in range(4):
        assert job.report(observation, attempt=1, verified=380) == []
    assert len(job.log.read()) == 1
    assert job.start() == []
    assert job.report(observation, attempt=2, verified=380) == ["0,0"]
    for _ in range(3):
        assert job.report(observation, attempt=2, verified=380) == []
    (entry,) = job.list.active()
    assert (entry.by, entry.step, entry.verified) == (THE_JOB, 400, 380)
    assert entry.why.count(f"{observation.kind} at step 400 of attempt") == 2
    assert untrusted(job.log) == [(1, 380), (2, 380)]


def test_processes_that_describe_one_thing_differently_have_still_seen_one(job: Job) -> None:
    for process in range(4):
        seen = Observation("recompute", (A,), 400, f"as process {process} has seen it", {"chunk": process})
        assert job.report(seen) == []
    assert len(job.log.read()) == 4
    assert job.report(recompute(401, A)) == ["0,0"]


def test_a_verdict_that_was_not_listed_any_more_is_listed_at_the_next_start(job: Job) -> None:
    """The process may end between the two files."""
    job.log.add([recompute(7, A)], attempt=1, verified=5)
    job.log.add([recompute(8, A)], attempt=2, verified=6)
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
    # A person does not believe it, and clears the observations of a chip that the list does not have.
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


@pytest.mark.parametrize("ending", ["expires", "cleared", "all cleared"])
def test_old_observations_do_not_bring_a_suspect_back_and_new_ones_do(job: Job, ending: str) -> None:
    job.report(digest(A, 400), attempt=1, verified=380)
    assert job.report(digest(A, 400), attempt=2, verified=380) == ["0,0"]
    assert job.report(digest(A, 400, 5), attempt=2, verified=380) == []  # another process, later
    if ending == "expires":
        job.time += 8 * DAY_S
        assert job.start() == []
        job.list.add(B, why="by hand")
    else:
        job.list.clear([A] if ending == "cleared" else None)
    assert "0,0" not in job.listed()
    assert job.start() == []
    assert job.report(digest(A, 500), attempt=3, verified=480) == []
    assert untrusted(job.log) == [(1, 380), (2, 380), (3, 480)]  # what is wrong does not become right
    assert job.report(digest(A, 500), attempt=4, verified=480) == ["0,0"]


def test_who_is_left_out_explains_its_observations(job: Job) -> None:
    """B was named with A, and once more since: that is one observation against B."""
    assert job.report(recompute(1, A, B)) == []
    assert job.report(recompute(2, A, C)) == ["0,0"]
    assert job.report(recompute(3, B, Suspect.chip((0, 3))), attempt=2) == []
    assert job.report(recompute(4, B), attempt=3) == ["0,1"]
    assert job.start() == []


def test_the_newest_observations_are_kept(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "MAX_OBSERVATIONS", 5)
    for step in range(8):
        job.log.add([recompute(step, A)], attempt=1, verified=0)
    assert [noted.observation.step for noted in job.log.read()] == [3, 4, 5, 6, 7]
    size = job.log.path.stat().st_size
    monkeypatch.setattr(log_module, "MAX_BYTES", size - 1)
    with pytest.raises(QuarantineError, match=f"it has {size} bytes, expected at most {size - 1}"):
        job.log.read()
    monkeypatch.setattr(log_module, "MAX_BYTES", size)
    job.log.add([recompute(8, A, B, C)], attempt=1, verified=0)
    assert [noted.observation.step for noted in job.log.read()] == [5, 6, 7, 8]


LINE = json.loads(LogEntry(recompute(1, A), 1, 0, 5.0).to_json())


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("", "line 2: it is not JSON"),
        ("{", "line 2: it is not JSON"),
        ("[" * 5000, "line 2: it is not JSON"),
        ("[]", "line 2: it does not have exactly attempt, verified, at and"),
        (json.dumps(LINE | {"more": 1}), "line 2: it does not have exactly"),
        (json.dumps(LINE | {"attempt": -1}), "line 2: attempt and verified are not whole numbers"),
        (json.dumps(LINE | {"verified": 1.5}), "line 2: attempt and verified are not whole numbers"),
        (json.dumps(LINE | {"verified": True}), "line 2: attempt and verified are not whole numbers"),
        (json.dumps(LINE | {"at": 1e300}), "line 2: at is not a time"),
        (json.dumps(LINE | {"observation": {}}), "line 2: This is no observation of a fault"),
        (json.dumps(LINE | {"observation": LINE["observation"] | {"suspects": ["x"]}}), "line 2: 'x' is no suspect"),
        ("\n" * 10_000, "10,002 observations"),
        (" " * (33 << 20), "bytes, expected at most"),
    ],
)
def test_a_damaged_log_is_never_an_empty_one(line: str, why: str, job: Job) -> None:
    text = json.dumps(LINE) + "\n" + line + "\n"
    job.log.path.write_text(text)
    for call in (
        job.log.read,
        job.list.clear,
        job.start,
        lambda: untrusted(job.log),
        lambda: job.report(recompute(3, A)),
    ):
        with pytest.raises(
            QuarantineError, match=f"(?s)fault_log.jsonl is damaged: .*{why}.*Repair it.*or move it away"
        ):
            call()
    assert job.log.path.read_text() == text
    job.list.add(A, why="a person may still leave out a chip")
    assert job.listed() == ["0,0"]


def test_writers_at_the_same_time_lose_nothing(job: Job) -> None:
    def write(column: int) -> None:
        for step in range(10):
            FaultLog(job.folder).add([recompute(step, Suspect.chip((0, column)))], attempt=1, verified=0)

    threads = [threading.Thread(target=write, args=(column,)) for column in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = {(noted.observation.step, str(noted.observation.suspects[0])) for noted in job.log.read()}
    assert seen == {(step, f"0,{column}") for step in range(10) for column in range(4)}
    assert len(job.log.read()) == 40


@pytest.mark.parametrize("behind_s", [-3600.0, 3600.0], ids=["an hour ahead", "an hour behind"])
def test_hosts_whose_clocks_differ_come_to_one_list(behind_s: float, tmp_path: Path) -> None:
    """Two observations, each noted by a host with its own clock; a third host, and the next start, see the same."""
    mine, other = Job(tmp_path), Job(tmp_path)
    other.time -= behind_s
    assert mine.report(digest(A, 400)) == []
    assert other.report(digest(A, 460), attempt=2) == [str(A)]
    for each in (mine, other):
        assert each.listed() == [str(A)]
        assert each.start() == []
    assert untrusted(mine.log) == [(1, 0), (2, 0)]


@pytest.mark.parametrize("ahead_s", [-3600.0, 0.0, 3600.0])
def test_what_is_cleared_is_what_was_noted_whatever_the_clock_says(ahead_s: float, tmp_path: Path) -> None:
    job, operator = Job(tmp_path), Job(tmp_path)
    operator.time += ahead_s
    job.report(digest(A, 400))
    job.report(digest(A, 460), attempt=2)
    job.time += 10.0
    operator.list.clear()
    assert operator.listed() == []
    assert job.start() == []
    job.time += 10.0
    assert job.report(digest(A, 500), attempt=3) == []
    assert job.report(digest(A, 560), attempt=4) == [str(A)]
