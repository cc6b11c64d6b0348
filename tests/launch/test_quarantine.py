"""What those who watch a job see of its quarantine list: on the terminal, in metrics, in the timelines' events."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from launch.made_up_jobs import lived_through, write
from launch.observations import signs_against
from meshmend.cli.watch import view
from meshmend.errors import QuarantineError
from meshmend.launch import Hosts, Timeline
from meshmend.launch.events import note_quarantined
from meshmend.launch.metrics import JobMetrics
from meshmend.launch.watching import Watch
from meshmend.quarantine import THE_JOB, QuarantineList, Suspect, report

pytest.importorskip("prometheus_client")
HOSTS = Hosts.of("4x4", "2x2")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job of four hosts of which one is lost, and its list: a chip, a cable and a host."""
    made = lived_through(0)
    for events in made.events:
        for event in events:
            if event["event"] == "fabric":
                event |= {"machine": str(HOSTS), "hosts": [0, 2, 3]}
    write(made, tmp_path)
    entries = QuarantineList(tmp_path)
    entries.add(
        Suspect.parse("0,1"), why="digest at step 4: \x1b[2Jchunk 3", by=THE_JOB, step=4, verified=2, hosts=HOSTS
    )
    entries.add(Suspect.parse("2,0-2,1"), why="half rate")
    entries.add(Suspect.parse("host 3"), why="hot")
    return tmp_path


def seen(folder: Path) -> str:
    screen = Console(file=io.StringIO(), width=160, force_terminal=False)
    screen.print(view(Watch(folder).snapshot(), "shared"))
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_the_terminal_shows_who_is_left_out_and_why(job: Path) -> None:
    text = seen(job)
    rows = [line.split("   ")[0].split() for line in text.splitlines() if line.startswith(("● ", "✗ ", "Q "))]
    assert rows == [["●", "Q", "✗", "✗"], ["●", "●", "✗", "✗"], ["●", "●", "Q", "Q"], ["●", "●", "Q", "Q"]]
    assert r"quarantine 0,1 the job: digest at step 4: \x1b[2Jchunk 3" in text
    assert "quarantine 2,0-2,1 by hand: half rate" in text
    assert "quarantine host 3 by hand: hot" in text


def test_many_are_summed_up_and_a_damaged_list_is_said(job: Path) -> None:
    for column in range(4):
        QuarantineList(job).add(Suspect.chip((2, column)), why="test")
    QuarantineList(job).add(Suspect.parse("host 99"), why="of another machine")
    assert f"and 2 more: meshmend quarantine list {job}" in seen(job)
    (job / "quarantine.json").write_text("{")
    assert "quarantine.json is damaged" in seen(job).replace("\n", "")
    assert "Q" not in "".join(line for line in seen(job).splitlines() if line.startswith("●"))


def gauges(folder: Path) -> dict[str, float]:
    found = [sample for metric in JobMetrics(folder).collect() for sample in metric.samples]
    start = "meshmend_quarantine"
    return {sample.name.removeprefix(start): sample.value for sample in found if sample.name.startswith(start)}


def test_metrics_count_chips_and_cables(job: Path) -> None:
    assert gauges(job) == {"d_chips": 5, "d_cables": 1, "d_by_job": 1, "_refused": 0}  # one, and four of a host
    QuarantineList(job).add(Suspect.parse("0,1"), why="it is")
    assert gauges(job)["d_by_job"] == 0  # confirmed by hand
    QuarantineList(job).clear()
    assert gauges(job) == {"d_chips": 0, "d_cables": 0, "d_by_job": 0, "_refused": 0}
    (job / "quarantine.json").write_text("{")
    assert gauges(job) == {}


def test_metrics_say_that_the_limit_has_stopped_the_job(job: Path) -> None:
    """Of 16 chips in hosts of four the job may leave out four, and it has left out one."""
    for number, name in enumerate(["0,0", "1,0", "1,1"]):
        report(job, signs_against(name, number), attempt=1, verified=0, hosts=HOSTS)
        assert gauges(job) == {"d_chips": 6 + number, "d_cables": 1, "d_by_job": 2 + number, "_refused": 0}
    with pytest.raises(QuarantineError, match="may leave out 4"):
        report(job, signs_against("2,0", 3), attempt=1, verified=0, hosts=HOSTS)
    assert gauges(job) == {"d_chips": 8, "d_cables": 1, "d_by_job": 4, "_refused": 1}
    QuarantineList(job).clear([Suspect.parse("2,0")])
    assert gauges(job)["_refused"] == 0
    (job / "fault_log.jsonl").write_text("{\n")
    assert gauges(job) == {"d_chips": 8, "d_cables": 1, "d_by_job": 4}


def test_the_event_is_the_same_whoever_writes_it(job: Path) -> None:
    chip, cable, host = QuarantineList(job).active()
    events = []
    for number in range(2):
        timeline = Timeline(None, job="slurm-4711", host=number)
        for entry in (chip, cable, host):
            note_quarantined(timeline, entry, HOSTS)
        events.append([{**event, "at": 0, "host": 0} for event in timeline.events])
    assert events[0] == events[1]
    first, second, third = events[0]
    assert (first["event"], first["hosts"], first["chips"], first["step"]) == ("quarantined", [0], [[0, 1]], 4)
    assert first["text"].startswith("slurm-4711: chip 0,1 is quarantined until ")
    assert first["text"].endswith("; the state of step 2 is the last that is known to be good")
    assert " by the job: digest at step 4" in first["text"]
    assert (second["hosts"], second["chips"]) == ([], [])
    assert "cable 2,0-2,1 is quarantined until" in second["text"]
    assert (third["hosts"], third["chips"]) == ([3], [[2, 2], [2, 3], [3, 2], [3, 3]])
    assert third["text"].split(" by ")[1] == "hand: hot"
    assert len({event["id"] for event in events[0]}) == 3
