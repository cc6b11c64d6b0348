"""What a host's agent writes down of its job: messages of the store in, lines of the timeline out."""

from __future__ import annotations

import ast
import time
from pathlib import Path
from typing import Any

import pytest

from meshmend.launch.agent_log import WRITERS, AgentLog
from meshmend.launch.events import BELOW_MINIMUM, KINDS, LOST, QUARANTINED, RECOVERED, Event, fields_of, read_event
from meshmend.launch.goodput import HostHistory
from meshmend.launch.member import Assignment
from meshmend.launch.timeline import Timeline, read_timeline
from pages import ROOT
from timelines import check_fields, names_of

MACHINE = "4x4 in hosts of 2x2"


class Agents:
    """The agents of a job's hosts, and what their workers write."""

    def __init__(self, folder: Path, n_hosts: int = 4, machine: str = MACHINE) -> None:
        self.paths = [folder / f"host-{host}.jsonl" for host in range(n_hosts)]
        self.logs = [
            AgentLog(Timeline(path, job="night", host=host), hosts=(2, n_hosts), machine=machine)
            for host, path in enumerate(self.paths)
        ]
        self.number = 0

    def start(self, *hosts: int, cut_off: tuple[int, ...] = ()) -> None:
        self.number += 1
        for process, host in enumerate(hosts):
            self.logs[host].start_round(
                Assignment(self.number, f"name{self.number}", hosts, process, "a:1", cut_off, self.number - 1)
            )

    def train(self, *hosts: int, step: int, at: float) -> None:
        for host in hosts:
            worker = Timeline(self.paths[host], job="night", round=self.number, host=host)
            worker.note("step", at=at, step=step)
            worker.flush()

    def on_message(self, *hosts: int, **message: Any) -> None:
        for host in hosts:
            self.logs[host].on_message({"number": self.number, **message})

    def events(self, host: int, *kinds: str) -> list[dict[str, Any]]:
        self.logs[host].close()
        lines = read_timeline(self.paths[host])
        check_fields(lines)
        return [line for line in lines if line["event"] in kinds]


def test_a_lost_host_and_the_recovery_are_written_by_every_survivor(tmp_path: Path) -> None:
    agents, now = Agents(tmp_path), time.time()
    agents.start(0, 1, 2, 3)
    agents.train(0, 1, 2, 3, step=40, at=now + 1)
    agents.on_message(0, 2, 3, type="stop", lost=1, why="host 1 is lost: its connection to the store broke")
    agents.start(0, 2, 3)
    agents.train(0, 2, 3, step=40, at=now + 24.5)
    agents.train(0, 2, 3, step=41, at=now + 25.0)
    said = []
    for host in (0, 2, 3):
        lost, recovered = agents.events(host, LOST, RECOVERED)
        assert {name: lost[name] for name in ("job", "round", "host", "step", "lost")} == {
            "job": "night",
            "round": 1,
            "host": host,
            "step": 40,
            "lost": [1],
        }
        assert lost["chips"] == [[0, 2], [0, 3], [1, 2], [1, 3]]
        assert (recovered["at"], recovered["seconds"]) == (now + 1, pytest.approx(23.5))
        assert (recovered["step"], recovered["round"]) == (40, 2)
        assert (recovered["hosts"], recovered["lost"], recovered["joined"]) == ([0, 2, 3], [1], [])
        said.append((lost["id"], lost["text"], recovered["id"], recovered["text"]))
    assert len(set(said)) == 1
    assert said[0] == (
        "name1/host lost 1",
        "night: host 1 is lost: its connection to the store broke (after step 40, 4 chips)",
        "name2/recovered",
        "night: training again on hosts 0, 2, 3: step 40 is done, 23.5 s after step 40",
    )


def test_hosts_that_die_at_once_are_all_lost(tmp_path: Path) -> None:
    """The store names the first of them; the others are missing in the next round, or when it cannot start."""
    agents = Agents(tmp_path)
    agents.start(0, 1, 2, 3)
    now = time.time()
    agents.train(0, 1, 2, 3, step=5, at=now)
    agents.on_message(0, 2, type="stop", lost=3, why="host 3 is lost: its connection to the store broke")
    agents.start(0, 2)
    agents.on_message(0, type="stop", lost=2, why="host 2 is lost: not heard from for 10 s")
    agents.on_message(0, type="short", hosts=[0], least=2)
    lost = agents.events(0, LOST)
    assert [event["lost"] for event in lost] == [[3], [1], [2]]
    assert len({event["id"] for event in lost}) == 3
    (short,) = agents.events(0, BELOW_MINIMUM)
    assert (short["hosts"], short["least"], short["step"]) == ([0], 2, 5)
    assert short["text"] == "night: the job waits after step 5: it needs 2 hosts, and has host 0"
    assert agents.events(0, RECOVERED) == []
    # The time that the job has waited is part of its recovery, and so are both losses.
    agents.start(0, 3)
    agents.train(0, 3, step=6, at=now + 600)
    (recovered,) = agents.events(0, RECOVERED)
    assert recovered["seconds"] == pytest.approx(600)
    assert (recovered["lost"], recovered["joined"]) == ([1, 2], [])


def test_hosts_that_are_cut_off_or_come_back_are_not_lost(tmp_path: Path) -> None:
    agents, now = Agents(tmp_path, machine="1x8 in hosts of 1x2"), time.time()
    agents.start(0, 1, 2, 3)
    agents.train(0, 1, 2, 3, step=3, at=now + 1)
    agents.on_message(0, 2, 3, type="stop", lost=1, why="host 1 is lost: its connection to the store broke")
    agents.start(2, 3, cut_off=(0,))
    assert [event["lost"] for event in agents.events(2, LOST)] == [[1]]
    agents.train(2, 3, step=4, at=time.time() + 1)
    agents.logs[2].look()
    agents.on_message(2, 3, type="stop", lost=None, why="host 1 has joined")
    agents.start(0, 1, 2, 3)
    agents.train(0, 1, 2, 3, step=5, at=time.time() + 2)
    assert [event["lost"] for event in agents.events(2, LOST)] == [[1]]
    assert [event["joined"] for event in agents.events(2, RECOVERED)] == [[], [0, 1]]
    assert agents.events(0, RECOVERED) == []  # it was not there in between


def test_an_earlier_job_in_the_folder_does_not_count(tmp_path: Path) -> None:
    yesterday = Timeline(tmp_path / "host-0.jsonl", job="yesterday", round=7, host=0)
    yesterday.note("step", step=900)
    yesterday.flush()
    agents = Agents(tmp_path, 2, machine="")
    agents.start(0, 1)
    agents.on_message(0, type="stop", lost=1, why="host 1 is lost: its connection to the store broke")
    (lost,) = agents.events(0, LOST)
    assert (lost["step"], lost["chips"]) == (0, [])


def test_the_loss_of_many_is_written_by_a_few(tmp_path: Path) -> None:
    """Ten of forty hosts are lost, the first ones, and come back: every event is written, but not by everybody."""
    agents, now = Agents(tmp_path, 40, machine=""), time.time()
    agents.start(*range(40))
    agents.train(*range(40), step=3, at=now + 1)
    agents.on_message(*range(10, 40), type="stop", lost=0, why="hosts 0-9 are lost: not heard from for 10 s")
    agents.start(*range(10, 40))
    agents.train(*range(10, 40), step=4, at=time.time() + 1)
    lost = [event for host in range(10, 40) for event in agents.events(host, LOST)]
    assert {tuple(event["lost"]) for event in lost} == {(host,) for host in range(10)}
    assert len(lost) == 10 * WRITERS
    assert len({event["id"] for event in lost}) == 10
    for log in agents.logs:
        log.look()
    agents.on_message(*range(10, 40), type="stop", lost=None, why="hosts 0-9 have joined")
    agents.start(*range(40))
    agents.train(*range(40), step=5, at=time.time() + 2)
    recovered = [event for host in range(40) for event in agents.events(host, RECOVERED)]
    assert [len(event["joined"]) for event in recovered].count(10) == WRITERS
    assert [len(event["lost"]) for event in recovered].count(10) == WRITERS
    assert len({event["id"] for event in recovered}) == 2


def written() -> list[tuple[str, set[str], str]]:
    """Return each event that a source file writes by its name: its kind, the fields that are named, and where."""
    found = []
    for path in sorted((ROOT / "src/meshmend").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(attr="note" | "timed"), args=[ast.Constant(value=str(kind)), *_]):
                    names = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
                    found.append((kind, names, f"{path.name}:{node.lineno}"))
    return found


def test_every_event_that_is_written_is_in_the_set_and_no_other() -> None:
    found = written()
    assert len(found) > 40
    for kind, names, where in found:
        assert kind in KINDS, where
        assert names <= names_of(kind), (where, names - names_of(kind))
    by_condensing, by_note_alert = {"steps", "left out"}, {LOST, RECOVERED, BELOW_MINIMUM, QUARANTINED}
    assert {kind for kind, _, _ in found} | by_condensing | by_note_alert == set(KINDS)


@pytest.mark.parametrize("kind", [*KINDS, "unheard of"])
def test_a_field_that_is_not_of_its_type_is_as_if_it_was_not_there(kind: str) -> None:
    read, _ = KINDS.get(kind, (Event, ""))
    good: dict[type, Any] = {int: 7, float: 7.5, str: "seven", list: [7]}
    line: dict[str, Any] = {"event": kind, "at": 1.5, "another": 3}
    fields = {name: types for name, types in fields_of(read).items() if name not in line}
    for name, types in fields.items():
        line[name] = good[types[0]]
    whole = read_event(line)
    assert {name: getattr(whole, name) for name in fields} == {name: line[name] for name in fields}
    HostHistory([line])
    for name, types in fields.items():
        for wrong in list[Any](({}, [], "x", 1.5, 2)):
            if not isinstance(wrong, types):
                spoilt = {**line, name: wrong}
                without = {other: value for other, value in line.items() if other != name}
                assert read_event(spoilt) == read_event(without)
                HostHistory([spoilt])
