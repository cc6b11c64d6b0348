"""Events on their way to the store: each once, whatever happens to it, and nobody waits for its disk."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch.made_up_jobs import lived_through
from launch.serving import Serving, joined
from meshmend.launch import delivery
from meshmend.launch.agent_log import AgentLog
from meshmend.launch.delivery import KEPT_BYTES, MAX_PENDING, Inbox, Outbox
from meshmend.launch.goodput import HostHistory, summarize
from meshmend.launch.membership import SILENT_S, Message
from meshmend.launch.timeline import EventFile, Line, Timeline, read_timeline, timeline_of
from waiting import until

NEWS = "saved"


class Wire:
    """Hosts and a store in one thread, with a clock of their own, and messages that may be lost."""

    def __init__(self, folder: Path, n_hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.n_hosts = 1000.0, n_hosts
        self.is_up = True
        self.n_batches = self._unanswered = 0
        monkeypatch.setattr(delivery, "time", SimpleNamespace(monotonic=lambda: self.now, time=time.time))
        self.inbox = self.store(folder)
        self.hosts = [Outbox(lambda message, host=host: self._send(host, message)) for host in range(n_hosts)]  # type: ignore[misc]

    def store(self, folder: Path) -> Inbox:
        self.inbox, self._unanswered = Inbox(folder, wake=lambda: None, log=lambda _: None), 0
        return self.inbox

    def _send(self, host: int, message: Message) -> bool:
        if self.is_up:
            self.n_batches += 1
            with self.inbox._changed:
                self._unanswered += host not in self.inbox._waiting
                self.inbox.put(host, host, message)
        return self.is_up

    def settle(self, lose: float = 0.0, chance: random.Random | None = None) -> None:
        """Let the store write and answer, until nothing is left to be said; some answers are lost."""
        while self._unanswered:
            if not self.inbox.answers:
                time.sleep(0.0001)
                continue
            self._unanswered -= 1
            host, answer = self.inbox.answers.popleft()
            assert isinstance(host, int)
            if chance is not None and chance.random() < lose:
                self.hosts[host].on_lost()  # the connection ended before it came
            else:
                self.hosts[host].on_have(answer)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for host in self.hosts:
            host.tick(self.n_hosts)

    def finish(self) -> None:
        while any(host._pending or host._have < host._number for host in self.hosts):
            self.tick(delivery.AGAIN_S + self.n_hosts)
            self.settle()


def line(number: int, event: str = NEWS, **facts: Any) -> Line:
    return {"at": float(number), "event": event, "number": number, **facts}


def numbers(path: Path) -> list[int]:
    return [event["number"] for event in read_timeline(path)]


@pytest.mark.parametrize("seed", range(4))
def test_every_event_arrives_once_and_in_order(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts, answers that are lost, and stores that are killed and come back to the same folder."""
    chance = random.Random(seed)
    wire, sent = Wire(tmp_path, 2, monkeypatch), [0, 0]
    for _ in range(120):
        for host in range(2):
            for _ in range(chance.randrange(4)):
                wire.hosts[host].add(line(sent[host]))
                sent[host] += 1
        wire.tick(chance.uniform(0.1, 1.5))
        if not wire.is_up:
            wire.store(tmp_path)
            wire.is_up = True
        elif chance.random() < 0.1:
            wire.inbox.close()  # what it had taken is written, and nobody hears of it
            wire.is_up = False
            for outbox in wire.hosts:
                outbox.on_lost()
        else:
            wire.settle(0.3, chance)
    if not wire.is_up:
        wire.store(tmp_path)
        wire.is_up = True
    wire.finish()
    assert sum(sent) > 200
    assert [numbers(timeline_of(tmp_path, host)) for host in range(2)] == [list(range(n)) for n in sent]


def test_half_a_batch_of_a_store_that_was_killed_is_not_doubled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire, path = Wire(tmp_path, 1, monkeypatch), timeline_of(tmp_path, 0)
    wire.hosts[0].add(line(0))
    wire.tick(1)
    wire.settle()
    for number in (1, 2, 3):
        wire.hosts[0].add(line(number))
    wire.is_up = False
    wire.tick(1)
    with path.open("a") as file:  # of the next batch, two lines and a half were written
        file.write(f"{json.dumps(line(1))}\n{json.dumps(line(2))}\n{json.dumps(line(3))[:20]}")
    wire.store(tmp_path)
    wire.is_up = True
    wire.finish()
    assert numbers(path) == [0, 1, 2, 3]


def test_a_store_with_another_folder_hears_how_the_round_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(tmp_path / "old", 1, monkeypatch)
    start = [line(0, "round"), line(1, "process"), line(2, "fabric", hosts=[0]), line(3, "restore")]
    for event in start:
        wire.hosts[0].add(event)
    for number in range(4, 1500):
        wire.hosts[0].add(line(number, note=random.Random(number).randbytes(200).hex()))
        wire.tick(1)
        wire.settle()
    wire.settle()
    sizes = [len(batch.lines) for batch in wire.hosts[0]._batches]
    assert sum(sizes) <= KEPT_BYTES
    wire.store(tmp_path / "new")
    wire.hosts[0].on_lost()
    wire.hosts[0].add(line(1500))
    wire.finish()
    found = numbers(timeline_of(tmp_path / "new", 0))
    assert found[:4] == [0, 1, 2, 3]
    assert found[5:] == list(range(found[5], 1501))
    assert len(found) > 100


def test_a_full_disk_costs_no_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wire, append, is_full = Wire(tmp_path, 2, monkeypatch), EventFile.append, [True]

    def appends(self: EventFile, text: bytes) -> None:
        if is_full[0]:
            raise OSError(28, "No space left on device")
        append(self, text)

    monkeypatch.setattr(EventFile, "append", appends)
    said: list[str] = []
    wire.inbox._log = said.append
    for number in range(50):
        for host in wire.hosts:
            host.add(line(number))
        wire.tick(1)
        wire.settle()
    (complaint,) = said
    assert "cannot be written" in complaint
    assert "No space left" in complaint
    assert wire.n_batches <= 2 * (1 + 50 / delivery.AGAIN_S), "they do not try again all the time"
    is_full[0] = False
    wire.finish()
    assert [numbers(timeline_of(tmp_path, host)) for host in range(2)] == [list(range(50))] * 2


def test_while_there_is_no_store_steps_are_condensed_and_what_is_too_much_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Wire(tmp_path, 1, monkeypatch)
    wire.is_up = False
    (host,) = wire.hosts
    host.add({"at": 0.0, "event": "process", "round": 1})
    for number in range(1, 100_001):
        host.add({"at": float(number), "event": "step", "step": number, "round": 1, "waited_s": 0.001})
    assert len(host._pending) <= 2 * MAX_PENDING
    wire.is_up = True
    wire.finish()
    events = read_timeline(timeline_of(tmp_path, 0))
    assert sum(event.get("waited_s", 0.0) for event in events) == pytest.approx(100.0)
    assert [(event["event"], event["step"]) for event in events[1:3]] == [("step", 1), ("steps", 1001)]
    account = summarize([HostHistory(events)])
    assert account is not None
    assert account.step == 100_000
    assert account.badput_s["data"] == pytest.approx(99.999)
    # What cannot be condensed goes at last, the oldest first, and the file says so.
    wire.is_up = False
    for number in range(10 * MAX_PENDING):
        host.add(line(number))
    wire.is_up = True
    wire.finish()
    new = read_timeline(timeline_of(tmp_path, 0))[len(events) :]
    kept = [event["number"] for event in new if event["event"] == NEWS]
    assert kept == list(range(kept[0], 10 * MAX_PENDING))
    assert sum(event.get("count", 0) for event in new) == kept[0]


@pytest.mark.parametrize("n_hosts", [4, 2240])
def test_an_account_is_the_same_from_what_the_store_has(
    n_hosts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where steps come condensed, because so many hosts send."""
    job = lived_through(3)
    wire = Wire(tmp_path, job.n_hosts, monkeypatch)
    wire.n_hosts = n_hosts
    for host, events in enumerate(job.events):
        for event in events:
            wire.hosts[host].add(event)
            wire.hosts[host].tick(n_hosts)
            wire.now += 0.3
        wire.settle()
    wire.finish()
    expected = summarize([HostHistory(events) for events in job.events])
    files = [read_timeline(timeline_of(tmp_path, host)) for host in range(job.n_hosts)]
    found = summarize([HostHistory(events) for events in files])
    assert expected is not None
    assert found is not None
    assert (found.step, found.chips, found.hosts, found.loss) == (
        expected.step,
        expected.chips,
        expected.hosts,
        expected.loss,
    )
    assert found.total_s == pytest.approx(expected.total_s)
    assert found.badput_s == pytest.approx(expected.badput_s, rel=0.02, abs=0.5)
    assert found.goodput == pytest.approx(expected.goodput, abs=0.01)
    assert len(found.recoveries) == len(expected.recoveries)


@pytest.mark.parametrize("n_hosts", [pytest.param(200, marks=pytest.mark.slow), 2240])
def test_many_hosts_send_a_hundred_batches_a_second(
    n_hosts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each does a step a second, for a minute; the first of them is news."""
    wire, seconds = Wire(tmp_path, n_hosts, monkeypatch), 60
    arrived = Counter[int]()
    for second in range(seconds):
        before = wire.n_batches
        for number, host in enumerate(wire.hosts):
            wire.now = 1000.0 + second + number / n_hosts
            host.add({"at": wire.now, "event": "step", "step": second + 1, "round": 1, "waited_s": 0.5, "loss": 1.0})
            host.tick(n_hosts)
        wire.settle()
        arrived[second] = wire.n_batches - before
    wire.settle()
    assert arrived[0] == n_hosts
    steady = sum(arrived.values()) - n_hosts
    assert 0.5 < steady / seconds / delivery.BATCHES_PER_S <= 1.05
    written = sum(path.stat().st_size for path in (tmp_path / "timeline").iterdir())
    assert written / seconds < 50_000
    wire.now += n_hosts
    wire.tick(0)
    wire.settle()
    history = HostHistory(read_timeline(timeline_of(tmp_path, n_hosts // 2)))
    assert history.rounds[-1].last == seconds
    assert history.rounds[-1].data_s == pytest.approx(0.5 * (seconds - 1))


def agent(serving: Serving, host: int, folder: Path) -> tuple[Any, AgentLog, Timeline]:
    """Return a host's membership, its log, and the timeline of its worker."""
    path = folder / f"memory-{host}" / f"host-{host}.jsonl"
    log = AgentLog(Timeline(path, job="job", host=host), hosts=(1, 2))
    member = serving.member(host)
    member._on_message = log.on_message
    log.deliver(member.send)
    return member, log, Timeline(path, job="job", host=host)


def test_two_hosts_of_a_store_that_is_killed_paused_and_back(tmp_path: Path) -> None:
    """Workers write all the time; a host that is frozen meanwhile sends its events when it is back."""
    store = tmp_path / "store"
    with Serving(folder=store) as serving:
        (first, log, worker), (second, other_log, other) = (agent(serving, host, tmp_path) for host in (0, 1))
        joined(first, second)
        for number in range(10):
            worker.note(NEWS, number=number)
            other.note(NEWS, number=number)
        until(lambda: timeline_of(store, 0).exists() and len(numbers(timeline_of(store, 0))) == 10)
        with serving.paused(1.0):
            worker.note(NEWS, number=10)
        serving.stop()
        worker.note(NEWS, number=11)
        other.note(NEWS, number=10)
        with Serving(port=serving.port, folder=store) as again:
            again.wait_for("joined: 2 of 2")
            with other_log._lock:  # its agent is frozen
                other.note(NEWS, number=11)
                worker.note(NEWS, number=12)
                until(lambda: len(numbers(timeline_of(store, 0))) == 13)
                assert 11 not in numbers(timeline_of(store, 1))
            log.close()
            other_log.close()
            assert numbers(timeline_of(store, 0)) == list(range(13))
            assert numbers(timeline_of(store, 1)) == list(range(12))
            assert again.lines


def test_a_disk_of_the_store_that_hangs_holds_up_no_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    back = threading.Event()
    append = EventFile.append
    store = tmp_path / "store"

    def appends(self: EventFile, text: bytes) -> None:
        if store in self.path.parents:
            back.wait(60)
        append(self, text)

    monkeypatch.setattr(EventFile, "append", appends)
    with Serving(folder=store) as serving:
        (first, log, worker), (second, _, other) = (agent(serving, host, tmp_path) for host in (0, 1))
        joined(first, second)
        for timeline in (worker, other):
            timeline.note(NEWS, number=0)
        until(lambda: bool(serving.store._events._waiting))
        died_at = time.monotonic()
        second.close()
        stopped = first.wait_stopped(10)
        assert time.monotonic() - died_at < SILENT_S / 2
        assert stopped is not None
        assert joined(first)[0].hosts == (0,)
        back.set()
        log.close()
        assert numbers(timeline_of(store, 0)) == [0]


def test_a_store_counts_rounds_on_from_what_is_in_its_folder(tmp_path: Path) -> None:
    yesterday = Timeline(timeline_of(tmp_path, 3), job="yesterday", round=7, host=3)
    yesterday.note("step", step=900)
    yesterday.flush()
    with Serving(folder=tmp_path) as serving:
        assert [one.number for one in joined(serving.member(0), serving.member(1))] == [8, 8]
