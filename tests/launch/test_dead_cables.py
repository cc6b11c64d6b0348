"""Dead cables under `meshmend run`: what an agent accuses, and what it puts on the job's quarantine list."""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from meshmend import Mesh
from meshmend.launch import cables, host
from meshmend.launch.cables import CableWatch
from meshmend.launch.host import HostDescription
from meshmend.launch.hosts import Hosts
from meshmend.quarantine import QuarantineList, Suspect
from meshmend.topology import Cable

CABLE: Cable = ((0, 0), (0, 1))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.005)


class Wires:
    """In place of the network: who answers over a cable alone, and who over any way."""

    def __init__(self) -> None:
        self.direct, self.reached = {"a", "b"}, {"a", "b"}
        self.n_asked = 0

    def answering(self, addresses: Iterable[str], hops: int = 1) -> set[str]:
        self.n_asked += hops == 1
        return set(addresses) & (self.direct if hops == 1 else self.reached)


@pytest.mark.parametrize("with_detour", [False, True])
def test_a_dead_host_is_no_dead_cable_where_a_detour_is_asked_for(
    with_detour: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wires = Wires()
    monkeypatch.setattr(cables, "answering", wires.answering)
    monkeypatch.setattr(cables, "PERIOD_S", 0.001)
    watch = CableWatch((0, 0))

    def asked_again() -> None:
        so_far = wires.n_asked
        until(lambda: wires.n_asked > so_far + cables.ANSWERS + 2)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        watch.begin("own", {(0, 1): "a", (1, 0): "b", (2, 2): "", (3, 3): "own"}, with_detour=with_detour)
        asked_again()
        assert watch.dead == set()
        wires.direct, wires.reached = {"b"}, {"b"}  # the host of a is gone
        asked_again()
        assert watch.dead == (set() if with_detour else {CABLE})
        wires.reached = {"a", "b"}  # it is back, and its cable is not
        until(lambda: watch.dead == {CABLE})
        wires.direct = {"a", "b"}
        until(lambda: watch.dead == set())
        watch.end()
        until(lambda: not any(one.name == "meshmend-cables" for one in threading.enumerate()))


def test_processes_of_one_host_have_no_cables() -> None:
    watch = CableWatch((0, 0))
    watch.begin("127.0.0.1", {(0, 1): "127.0.0.1"})
    assert not any(one.name == "meshmend-cables" for one in threading.enumerate())


class Known:
    """A watch that knows what a test says."""

    made: list[Known] = []  # noqa: RUF012  # emptied by each test

    def __init__(self, chip: tuple[int, ...]) -> None:
        self.chip, self.dead = chip, frozenset[Cable]()
        self.made.append(self)

    def begin(self, own: str, addresses: Any, *, with_detour: bool) -> None:
        self.own, self.addresses, self.with_detour = own, addresses, with_detour


def described(folder: Path, number: int, tile: str = "1x1") -> HostDescription:
    mesh = Mesh("2x2")
    chips = {f"host{rank}": {"at": list(mesh.chip(rank)), "address": f"10.0.0.{rank + 1}"} for rank in range(4)}
    (folder / "machine.json").write_text(json.dumps({"meshmend": 1, "shape": "2x2", "chips": chips}))
    environment = {"MESHMEND_SHARED": str(folder), "MESHMEND_MACHINE": str(folder / "machine.json")}
    machine = str(Hosts.of("2x2", tile))
    return HostDescription([], "", number, (1, 4), "job", machine=machine, environment=environment)


def test_both_ends_notice_and_one_of_them_lists_the_cable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "CableWatch", Known)
    Known.made = []
    ends = [host._watch_cables(described(tmp_path, number)) for number in (0, 1)]
    first, second = Known.made
    assert (first.chip, first.own, first.with_detour) == ((0, 0), "10.0.0.1", True)
    assert first.addresses == {(0, 1): "10.0.0.2", (1, 0): "10.0.0.3"}
    entries = QuarantineList(tmp_path)
    assert [ask() for ask in ends] == ["", ""]
    first.dead = second.dead = frozenset({CABLE})
    assert [ask() for ask in (*ends, *ends)] == ["0,0-0,1", "", "", ""]
    (entry,) = entries.active()
    assert (entry.suspect, entry.by) == (Suspect(CABLE), "the job")
    # Cleared by hand, it stays in use until it answers and dies again.
    entries.clear()
    assert [ask() for ask in ends] == ["", ""]
    first.dead = frozenset()
    assert ends[0]() == ""
    first.dead = frozenset({CABLE})
    assert ends[0]() == "0,0-0,1"


def test_a_list_that_cannot_be_written_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "CableWatch", Known)
    Known.made = []
    ask = host._watch_cables(described(tmp_path, 0))
    Known.made[0].dead = frozenset({CABLE})
    (tmp_path / "quarantine.json").write_text("torn")
    assert ask() == ""
    (tmp_path / "quarantine.json").unlink()
    assert ask() == "0,0-0,1"


def test_hosts_of_several_chips_are_not_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "CableWatch", Known)
    Known.made = []
    assert host._watch_cables(described(tmp_path, 0, "1x2"))() == ""
    assert Known.made == []
