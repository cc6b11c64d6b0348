"""The account of a job's time, against jobs that are made up second by second."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launch.made_up_jobs import Event, lived_through
from meshmend.launch.goodput import CAUSES, MAX_MARKS, HostHistory, summarize
from meshmend.launch.timeline import MARK, STAGES, Timeline, condense, read_timeline, timeline_of
from meshmend.launch.watching import Watch
from timelines import read_account


@pytest.mark.parametrize("seed", range(30))
def test_every_second_of_a_job_is_accounted_for(seed: int) -> None:
    job = lived_through(seed)
    account = summarize([HostHistory(events) for events in job.events])
    assert account is not None
    assert account.training_s + sum(account.badput_s.values()) == pytest.approx(account.total_s, rel=1e-9)
    assert account.total_s == pytest.approx(sum(job.truth.values()), rel=1e-9)
    for cause in CAUSES:
        # A checkpoint or a wait for data among steps that are done again counts as either: here, as itself.
        if cause not in ("steps done again", "checkpoint", "data"):
            assert account.badput_s[cause] == pytest.approx(job.truth[cause], abs=1e-6), cause
    assert account.step == job.step
    assert len(account.recoveries) == job.round - 1
    assert all(sum(one.stages_s[stage] for stage in STAGES) == pytest.approx(one.total_s) for one in account.recoveries)


def test_goodput_is_the_share_of_steps_that_count() -> None:
    """By hand: 2 s to start, steps of 1 s; 10 done, 2 of them lost, a recovery of 3 s, 5 more."""
    first = [
        {"at": 0.0, "event": "process", "seconds": 1.0},
        {"at": 1.0, "event": "restore", "seconds": 0.5, "step": 0},
    ]
    steps = [{"at": 1.0 + n, "event": "step", "step": n, "round": 1} for n in range(1, 11)]
    again = [{"at": 12.0, "event": "process", "seconds": 1.0, "round": 2}]
    again += [{"at": 13.0, "event": "restore", "seconds": 0.5, "step": 8, "source": "memory"}]
    again += [{"at": 14.0 + n, "event": "step", "step": 8 + n, "round": 2} for n in range(5)]
    account = summarize([HostHistory([*first, *steps, {"at": 11.5, "event": "gave up"}, *again])])
    assert account is not None
    # Steps 2 to 8 (7 s), and after the recovery 9 to 13, of which the second and later ones take 1 s each.
    assert account.training_s == pytest.approx(7.0 + 3.0 + 1.0)
    assert account.badput_s["steps done again"] == pytest.approx(2.0)
    assert account.badput_s["detect"] == pytest.approx(0.5)
    assert account.badput_s["rendezvous"] == pytest.approx(0.5)
    assert account.total_s == pytest.approx(18.0)
    assert account.goodput == pytest.approx(11.0 / 18.0)
    (recovery,) = account.recoveries
    assert (recovery.step, recovery.resumed, recovery.source) == (10, 8, "memory")
    assert recovery.total_s == pytest.approx(3.0)


def test_time_in_which_a_job_waits_for_hosts_counts(tmp_path: Path) -> None:
    """By hand: steps of 1 s to 11 s; at 12 s too few hosts are left; 30 s later one is back, and trains after 2 s."""
    first: list[Event] = [{"at": 0.0, "event": "process", "seconds": 1.0, "round": 1}]
    first += [{"at": 1.0 + n, "event": "step", "step": n, "round": 1, "chips": 8} for n in range(1, 11)]
    first += [{"at": 12.0, "event": "below minimum", "text": "the job waits after step 10: it needs 2 hosts"}]
    waits = summarize([HostHistory(first)], until=20.0)
    assert waits is not None
    assert (waits.badput_s["waiting"], waits.badput_s["under way"]) == (8.0, 1.0)
    assert waits.goodput == pytest.approx(9.0 / 20.0)
    back = [{"at": 42.0, "event": "process", "seconds": 1.0, "round": 2}]
    back += [{"at": 44.0 + n, "event": "step", "step": 11 + n, "round": 2} for n in range(3)]
    account = summarize([HostHistory([*first, *back])])
    assert account is not None
    (recovery,) = account.recoveries
    assert recovery.stages_s["waiting"] == account.badput_s["waiting"] == 30.0
    assert recovery.stages_s["rendezvous"] == 1.0
    assert recovery.total_s == 33.0
    # While it waits, a watch that looks later sees lower goodput, and for what the job waits.
    now = time.time()
    timeline = Timeline(timeline_of(tmp_path, 0))
    for event in first:
        timeline.note(event.pop("event"), at=now - 20.0 + event.pop("at"), **event)
    timeline.flush()
    seen = Watch(tmp_path).snapshot()
    assert (seen.state, seen.waiting) == ("waiting", "the job waits after step 10: it needs 2 hosts")
    assert seen.waiting_s == pytest.approx(8.0, abs=2.0)
    assert seen.account is not None
    assert seen.account.badput_s["waiting"] == pytest.approx(seen.waiting_s, abs=0.5)


def test_quorums_of_a_job_whose_processes_go_on() -> None:
    """By hand, as torchft's chips write it: a loss, a refused step, and a chip that comes back."""

    def quorum(at: float, number: int, step: int, hosts: list[int], seconds: float = 0.5) -> list[Event]:
        """A quorum, then 0.25 s to connect and 0.25 s to plan."""
        facts = {"round": number, "step": step, "chips": len(hosts), "hosts": hosts}
        return [
            {"at": at, "event": "quorum", "seconds": seconds, "source": "in place", **facts},
            {"at": at + seconds, "event": "join", "seconds": 0.25, "round": number},
            {"at": at + seconds + 0.25, "event": "plan", "seconds": 0.25, "round": number},
        ]

    def steps(first_at: float, first: int, last: int, number: int) -> list[Event]:
        found = range(first, last + 1)
        return [{"at": first_at + n - first, "event": "step", "step": n, "round": number} for n in found]

    started = [{"at": 0.0, "event": "process", "seconds": 2.0}]
    stays = [
        *started,
        *quorum(3.0, 100, 0, [0, 1]),
        *steps(6.0, 1, 5, 100),  # to 10 s
        {"at": 11.5, "event": "gave up", "why": "lost"},
        {"at": 12.0, "event": "refused", "seconds": 2.0},  # too few take part
        *quorum(14.0, 200, 5, [0]),
        *steps(16.0, 6, 10, 200),  # to 20 s
        *quorum(20.5, 300, 10, [0, 1]),
        *steps(22.5, 11, 15, 300),  # to 26.5 s
        {"at": 27.0, "event": "refused", "seconds": 0.5},
        *steps(28.5, 16, 17, 300),
    ]
    # The other one dies at 10 s, and its second life speaks for the last round: it writes a moment later.
    back = [{"at": 17.0, "event": "process", "seconds": 2.0}, *quorum(19.0, 300, 0, [0, 1], seconds=2.0)]
    back += [{"at": 21.5, "event": "restore", "seconds": 0.5, "step": 10, "source": "peers"}]
    back += [dict(event, at=event["at"] + 0.001) for event in steps(22.5, 11, 15, 300)]
    back += [{"at": 27.0, "event": "refused", "seconds": 0.5}]
    back += [dict(event, at=event["at"] + 0.001) for event in steps(28.5, 16, 17, 300)]
    leaves = [*started, *quorum(3.0, 100, 0, [0, 1]), *steps(6.0, 1, 5, 100), *back]
    account = summarize([HostHistory(stays), HostHistory(leaves)])
    assert account is not None
    assert account.total_s == pytest.approx(29.501)
    assert account.training_s + sum(account.badput_s.values()) == pytest.approx(account.total_s)
    # Steps 2 to 5, 7 to 10 and 12 to 17; of the last ones, 0.5 s had to be done again.
    assert account.training_s == pytest.approx(4.0 + 4.0 + 7.0 - 0.5)
    assert account.badput_s["steps done again"] == pytest.approx(2.0 + 0.5)
    lost, joined = account.recoveries
    assert (lost.lost, lost.joined, lost.step, lost.resumed) == ((1,), (), 5, 5)
    assert lost.stages_s == pytest.approx(
        {"detect": 1.5, "rendezvous": 1.0, "waiting": 0.0, "start": 0.25, "plan": 0.25, "compile": 0.0, "restore": 0.0}
        | {"first step": 1.0, "steps done again": 2.0}
    )
    assert (joined.lost, joined.joined, joined.step, joined.resumed) == ((), (1,), 10, 10)
    assert joined.source == "peers"
    # What the chip did before the others' last step is nobody's badput.
    assert joined.stages_s["start"] == pytest.approx(0.25)
    assert joined.stages_s["rendezvous"] == pytest.approx(1.0)
    assert joined.stages_s["restore"] == pytest.approx(0.5)
    assert joined.total_s == pytest.approx(2.501)


def test_who_asks_for_a_quorum_before_another_gives_up_has_a_detect_too() -> None:
    """The loss's step ends well for one of three: it asks at 11 s for the quorum that forms at 14 s."""

    def host(asked: float, furthest: float) -> HostHistory:
        facts = {"round": 200, "step": 5, "chips": 2, "hosts": [0, 1], "source": "in place"}
        return HostHistory(
            [
                {"at": 0.0, "event": "quorum", "seconds": 1.0, **facts, "round": 100, "chips": 3, "hosts": [0, 1, 2]},
                *({"at": 5.0 + n, "event": "step", "step": n, "round": 100} for n in range(1, 6)),  # to 10 s
                *([{"at": 12.0, "event": "gave up", "why": "lost"}] if asked > 12.0 else []),
                {"at": asked, "event": "quorum", "seconds": 14.0 - asked, **facts},
                {"at": 15.0, "event": "step", "step": 6, "round": 200},
                {"at": furthest, "event": "step", "step": 7, "round": 200},
            ]
        )

    for furthest in (16.1, 15.9):  # either of them speaks for the round
        account = summarize([host(11.0, furthest), host(12.5, 16.0)])
        assert account is not None
        (lost,) = account.recoveries
        spent = {stage: seconds for stage, seconds in lost.stages_s.items() if seconds}
        assert spent == pytest.approx({"detect": 2.0, "rendezvous": 2.0, "first step": 1.0})


@pytest.mark.parametrize("seed", range(5))
def test_condensed_timelines_give_the_same_account(seed: int) -> None:
    job = lived_through(seed, most_lost=0)  # within a line steps count as equally long, which matters for lost ones
    histories = [HostHistory(events) for events in job.events]
    short = [list(condense(events)) for events in job.events]
    whole, condensed = summarize(histories), summarize([HostHistory(events) for events in short])
    assert whole is not None
    assert condensed is not None
    assert sum(map(len, short)) < 0.4 * sum(map(len, job.events))
    assert condensed.total_s == pytest.approx(whole.total_s)
    assert condensed.badput_s == pytest.approx(whole.badput_s)
    assert condensed.goodput == pytest.approx(whole.goodput)
    assert condensed.step == whole.step


def test_a_million_steps_stay_small(tmp_path: Path) -> None:
    """The same code with a hundredth of the bytes and of the steps: 10,000 steps in 480 KB."""
    path = tmp_path / "host-0.jsonl"
    timeline = Timeline(path, max_bytes=480_000, host=0, round=1)
    timeline.note("process", at=0.0, seconds=1.0)
    for number in range(1, 10_001):
        timeline.note("step", at=float(number), step=number, loss=0.5, chips=16, examples=512, waited_s=0.001)
        timeline.note("kept", at=float(number), step=number, bytes=123456)
        if number % 1000 == 0:
            timeline.flush()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 480_000
    account = read_account([path])
    assert account is not None
    assert account.step == 10_000
    assert account.total_s == pytest.approx(10_000.0)
    assert account.training_s == pytest.approx(9_999.0 - 9.999, rel=1e-3)
    assert len(timeline.events) <= 10_000
    assert len(HostHistory(read_timeline(path)).rounds[0].marks) <= MAX_MARKS


# The larger bound has room for all steps of the longer test: a condensed file that is full drops its oldest lines.
@pytest.mark.parametrize(("kills", "max_bytes"), [(8, 30_000), pytest.param(50, 150_000, marks=pytest.mark.slow)])
def test_a_killed_writer_loses_no_more_than_its_last_record(kills: int, max_bytes: int, tmp_path: Path) -> None:
    """Processes that write as fast as they can, with files that are full every few hundred lines, are killed."""
    path = tmp_path / "host-0.jsonl"
    code = (
        "import sys; from meshmend.launch.timeline import Timeline\n"
        f"timeline = Timeline(sys.argv[1], max_bytes={max_bytes})\n"
        "for n in range(int(sys.argv[2]) + 1, 10**9):\n"
        "    timeline.note('step', step=n); timeline.flush(); print(n, flush=True)\n"
    )
    last, chance = 0, random.Random(3)
    for _ in range(kills):
        process = subprocess.Popen([sys.executable, "-c", code, str(path), str(last)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        said = [int(process.stdout.readline()) for _ in range(chance.randint(200, 600))]
        time.sleep(chance.random() * 0.02)  # also inside a line, or while the file is condensed
        process.send_signal(signal.SIGKILL)
        said += map(int, process.communicate()[0].split())
        covered: list[int] = []
        for event in read_timeline(path):
            covered += range(int(event.get("first") or event["step"]), event["step"] + 1)
        assert covered == list(range(1, covered[-1] + 1))
        assert covered[-1] - said[-1] in (0, 1)  # a line may be written though its writer had no time to say so
        last = covered[-1]
    assert MARK in path.read_text()[:100]


def test_lines_that_are_no_events_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "host-0.jsonl"
    lines = ["nonsense", json.dumps([1]), json.dumps({"at": 1.0, "event": "process"}), '{"at": 2.0, "eve']
    path.write_text("\n".join(lines))
    assert [event["event"] for event in read_timeline(path)] == ["process"]
    assert read_account([path]) is None  # started, but no step yet
    assert read_account([tmp_path / "missing.jsonl"]) is None


def test_two_writers_of_one_timeline_lose_nothing_when_it_is_full(tmp_path: Path) -> None:
    """A host's agent and its worker write to the same file, and may find it full at the same moment."""
    path, marks = tmp_path / "host-0.jsonl", 100
    writer = (
        "import sys; from meshmend.launch.timeline import Timeline\n"
        "timeline = Timeline(sys.argv[1], max_bytes=500_000, host=0)\n"
        f"for n in range({marks}):\n"
        "    timeline.note('mark', writer=sys.argv[2], number=n)\n"
        "    for step in range(60): timeline.note('kept', step=step, writer=sys.argv[2], more='x' * 40)\n"
        "    timeline.flush()\n"
    )
    command = [sys.executable, "-c", writer, str(path)]
    writers = [subprocess.Popen([*command, name], stderr=subprocess.PIPE, text=True) for name in "ab"]
    assert [one.communicate(timeout=120)[1] for one in writers] == ["", ""], "nothing is warned of"
    assert MARK in path.read_text()[:100], "it was full"
    found = [(event["writer"], event["number"]) for event in read_timeline(path) if event["event"] == "mark"]
    assert sorted(found) == [(name, number) for name in "ab" for number in range(marks)]


def test_the_last_checkpoint_is_known_in_rounds_that_have_made_none() -> None:
    """Until the state is restored from what the round before knew; then from what was found on disk."""
    history = HostHistory()
    told: list[tuple[dict[str, Any], int]] = [
        ({"event": "process"}, 0),
        ({"event": "restore", "step": 0, "source": "start", "saved": 0}, 0),
        ({"event": "saved", "step": 100}, 100),
        ({"event": "saved", "step": 200}, 200),
        ({"event": "process"}, 200),
        ({"event": "restore", "step": 150, "source": "memory", "saved": 100}, 100),  # it went back, before step 200
        ({"event": "process"}, 100),
        ({"event": "restore", "step": 160, "source": "memory"}, 100),  # without a disk, nothing is said of it
    ]
    for at, (event, expected) in enumerate(told):
        history.add({"at": float(at), "round": 1, **event})
        assert history.rounds[-1].saved == expected, event
    assert [one.saved_at for one in history.rounds] == [3.0, 5.0, 5.0]
