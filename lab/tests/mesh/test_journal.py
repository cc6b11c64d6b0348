"""Labs that go wrong: killed while they are built, left behind, damaged, asked for twice. There is always a way out."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshmend import Mesh
from meshmend.cli import app
from meshmend_lab.errors import LabError
from meshmend_lab.mesh import Lab, find_labs, journal, namespaces, take_down, take_down_all
from meshmend_lab.mesh.commands import NETNS, listed_namespaces
from meshmend_lab.mesh.journal import Journal

PAIR = Mesh("1x2")


@dataclass(frozen=True)
class Sandbox:
    """Labs of this test alone: a prefix and a folder of their own, so that no other lab on the machine is seen."""

    prefix: str
    folder: Path

    def run(self, body: str, check: bool = False) -> subprocess.CompletedProcess[str]:
        """Run a script that makes labs in this sandbox."""
        return subprocess.run([sys.executable, "-c", self.script(body)], capture_output=True, text=True, check=check)

    def script(self, body: str) -> str:
        return (
            "import os, pathlib, signal, subprocess, time\n"
            "from meshmend import Mesh\n"
            "from meshmend_lab.mesh import Lab, commands, journal, namespaces\n"
            f"namespaces.PREFIX, journal.FOLDER = {self.prefix!r}, pathlib.Path({str(self.folder)!r})\n"
        ) + textwrap.dedent(body)

    def add(self, name: str) -> None:
        subprocess.run(["ip", "netns", "add", self.prefix + name], check=True)

    @property
    def left(self) -> list[str]:
        """Everything that is there, namespaces and files."""
        return listed_namespaces(self.prefix) + sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("a lab needs root and iproute2")
    made = Sandbox(f"mmtest{os.getpid()}-", tmp_path / "journals")
    made.folder.mkdir()
    monkeypatch.setattr(namespaces, "PREFIX", made.prefix)
    monkeypatch.setattr(journal, "FOLDER", made.folder)
    try:
        made.add("can-0")
    except subprocess.CalledProcessError:
        pytest.skip("this machine does not allow network namespaces")
    subprocess.run(["ip", "netns", "del", f"{made.prefix}can-0"], check=True)
    yield made
    for name in listed_namespaces(made.prefix):
        subprocess.run(["ip", "netns", "del", name], check=True)


def run(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["lab", "mesh", *words])
    assert result.exit_code == code, result.output
    return result.output


def test_asking_for_a_name_that_is_up_leaves_that_lab_alone(sandbox: Sandbox) -> None:
    lab = Lab.up(PAIR, name="victim")
    before = sandbox.left
    told = rf"Lab 'victim' is up \(made by process {os.getpid()}\): `meshmend lab mesh down victim` removes it"
    with pytest.raises(LabError, match=told), Lab.temporary(PAIR, name="victim"):
        raise AssertionError("two labs of one name")
    with pytest.raises(LabError, match=told):
        Lab.up(PAIR, name="victim")
    assert sandbox.left == before == [*lab.namespaces.values(), "victim", "victim.json"]
    lab.down()
    assert sandbox.left == []


def test_a_lab_takes_down_only_itself(sandbox: Sandbox) -> None:
    first = Lab.up(PAIR, name="same")
    take_down("same")
    second = Lab.up(PAIR, name="same")
    first.down()
    assert sandbox.left == [*second.namespaces.values(), "same", "same.json"]
    with pytest.raises(LabError, match="Lab 'same' has been removed meanwhile"):
        first.kill((0, 0))
    second.down()
    assert sandbox.left == []


KILLED = """
count = 0
def run(self, *words, lines=None, check=True, really=commands.Commands.run):
    global count
    count += 1
    if count == {at}:
        os.kill(os.getpid(), signal.SIGKILL)
    really(self, *words, lines=lines, check=check)
commands.Commands.run = run
"""


@pytest.mark.parametrize(("at", "made"), [(1, 0), (9, 4)])
def test_a_killed_build_is_listed_and_can_be_taken_down(sandbox: Sandbox, at: int, made: int) -> None:
    done = sandbox.run(KILLED.format(at=at) + "Lab.up(Mesh('2x2'), name='half')")
    assert done.returncode == -9, done.stderr
    (found,) = find_labs()
    assert (found.name, found.condition, len(found.namespaces)) == ("half", "half-built", made)
    assert (found.mesh, found.rate) == (Mesh("2x2"), "40mbit")
    told = r"half-built \(process \d+ ended .*`meshmend lab mesh down half` removes it"
    with pytest.raises(LabError, match=told):
        Lab.find("half")
    with pytest.raises(LabError, match=told):
        Lab.up(PAIR, name="half")
    assert json.loads(run("list", "--json"))["labs"][0]["condition"] == "half-built"
    assert "half-built" in run("list")
    assert run("down", "half") == "The lab half is down.\n"
    assert sandbox.left == []


@pytest.mark.parametrize("at", [1, 13])
def test_a_killed_block_is_taken_down_by_its_watcher(sandbox: Sandbox, at: int) -> None:
    done = sandbox.run(KILLED.format(at=at) + "with Lab.temporary(Mesh('1x2'), name='block'): pass")
    assert done.returncode == -9, done.stderr
    deadline = time.monotonic() + 30
    while sandbox.left and time.monotonic() < deadline:
        time.sleep(0.02)
    assert sandbox.left == []


def test_taking_down_waits_for_the_command_that_a_killed_build_left_behind(sandbox: Sandbox) -> None:
    body = """
    def run(self, *words, lines=None, check=True):
        late = f"sleep 0.7; ip netns add {namespaces.PREFIX}late-0-1"
        subprocess.Popen(["sh", "-c", late], pass_fds=[self._lock])
        os.kill(os.getpid(), signal.SIGKILL)
    commands.Commands.run = run
    Lab.up(Mesh('1x2'), name='late')
    """
    assert sandbox.run(body).returncode == -9
    take_down("late")
    assert sandbox.left == []
    time.sleep(1)
    assert sandbox.left == []


def test_a_lab_that_is_being_built_is_left_to_its_builder(sandbox: Sandbox) -> None:
    Journal("busy", PAIR, "40mbit").claim()  # by this process, which lives
    sandbox.add("other-0-0")
    assert [lab.condition for lab in find_labs()] == ["being built", "orphaned"]
    told = f"Lab 'busy' is being built by process {os.getpid()}: wait for it, or end that process first"
    assert told in run("down", "busy", code=1)
    assert f"1 of 2 labs are down. {told}" in run("down", "--all", code=1)
    assert sandbox.left == ["busy.json"]


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b'{"shape":[1',
        b"{}",
        b"[]",
        b"\xff\xfe",
        b'{"shape":[1,2],"wrap":[false,false],"failed":[],"failed_cables":[],"rate":"\xc3\xa9"}',
        b"[" * 100_000,
        b" " * (journal.MAX_BYTES + 5),
    ],
)
def test_a_damaged_journal_is_reported_in_one_line_and_taken_down(sandbox: Sandbox, damage: bytes) -> None:
    sandbox.add("bad-0-0")
    (sandbox.folder / "bad.json").write_bytes(damage)
    for words in (["show", "bad"], ["up", "1x2", "--name", "bad"], ["kill", "0,0", "--name", "bad"]):
        shown = run(*words, code=1)
        assert "is damaged" in shown
        assert shown.endswith("Remove what is left of the lab: meshmend lab mesh down bad\n")
        assert shown.count("\n") == 1
    assert [lab.condition for lab in find_labs()] == ["damaged"]
    run("down", "bad")
    assert sandbox.left == []


def test_namespaces_without_a_journal_are_orphans(sandbox: Sandbox) -> None:
    sandbox.add("lost-0-0")
    (NETNS / f"{sandbox.prefix}lost-0-1").touch()  # as `ip` leaves it if it is killed
    assert [(lab.name, lab.condition, len(lab.namespaces)) for lab in find_labs()] == [("lost", "orphaned", 2)]
    assert "but it has no journal: `meshmend lab mesh down lost` removes it" in run(
        "up", "1x2", "--name", "lost", code=1
    )
    assert sandbox.left == [f"{sandbox.prefix}lost-0-0", f"{sandbox.prefix}lost-0-1"]
    run("down", "--name", "lost")
    assert sandbox.left == []
    assert "No lab named lost is up" in run("down", "lost", code=1)


def test_all_takes_down_whatever_has_the_prefix_and_nothing_else(sandbox: Sandbox) -> None:
    foreign = sandbox.prefix.rstrip("-") + "x"
    subprocess.run(["ip", "netns", "add", foreign], check=True)
    try:
        Lab.up(PAIR, name="whole")
        sandbox.add("probe123")
        sandbox.add("odd-name-x")
        (sandbox.folder / "bad.json").write_text("no journal")
        (sandbox.folder / ".whole.0123.part").touch()
        assert {lab.name: lab.condition for lab in find_labs()} == {
            "whole": "up",
            "probe123": "orphaned",
            "odd-name-x": "orphaned",
            "bad": "damaged",
        }
        with pytest.raises(LabError, match="is not a valid name for a lab"):
            take_down("odd-name-x")
        assert len(take_down_all()) == 4
        assert sandbox.left == []
        assert run("down", "--all") == "No lab was up.\n"
        assert run("list").startswith("No lab is up.")
        assert foreign in listed_namespaces(foreign)
    finally:
        subprocess.run(["ip", "netns", "del", foreign], check=True)


def test_an_interrupted_kill_of_chips_is_no_whole_lab(sandbox: Sandbox) -> None:
    body = KILLED.format(at=3) + "count = -100; lab = Lab.up(Mesh('2x2'), name='cut'); count = 0; lab.kill((0, 0))"
    assert sandbox.run(body).returncode == -9
    (found,) = find_labs()
    assert (found.condition, found.mesh, len(found.namespaces)) == ("half-built", Mesh("2x2", failed=["0,0"]), 3)
    take_down("cut")
    assert sandbox.left == []


def test_too_large_a_lab_is_refused_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "FOLDER", tmp_path / "journals")
    for shape, chips in (("20x21", "420"), ("256x256", "65,536")):
        assert f"A lab of {shape} has {chips} chips; the limit is 400" in run("up", shape, "--name", "big", code=1)
    assert not (tmp_path / "journals").exists()
    last = Lab("big", Mesh("20x20"), "1mbit").address((19, 19))
    assert last == "10.77.1.150"  # 400 chips, 250 to each third number


@pytest.mark.parametrize("where", ["file", "folder"])
def test_a_journal_that_cannot_be_written_is_reported(
    sandbox: Sandbox, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "file":
        (sandbox.folder.parent / "file").touch()
        monkeypatch.setattr(journal, "FOLDER", sandbox.folder.parent / "file")
        assert "for journals cannot be created" in run("up", "1x2", "--name", "nowhere", code=1)
    else:
        (sandbox.folder / "nowhere.json").mkdir()
        assert "is damaged (" in run("up", "1x2", "--name", "nowhere", code=1)
        assert "nowhere.json cannot be removed: Is a directory" in run("down", "nowhere", code=1)
    assert listed_namespaces(sandbox.prefix) == []
