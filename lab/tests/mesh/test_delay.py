"""Links with a delay: every packet has it at every hop, the rate still holds, and nothing is left behind."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from meshmend import Mesh
from meshmend.launch import Chips
from meshmend_lab.errors import LabError
from meshmend_lab.mesh import Lab, commands, journal
from meshmend_lab.mesh import delay as delays
from meshmend_lab.mesh.commands import Commands
from meshmend_lab.mesh.journal import Journal
from namespaces import namespaces, needs_lab, needs_netem, run, send
from pages import ROOT, read
from pages import run as run_block

DELAY, DELAY_S = "20ms", 0.02
LATE_S = 0.03
"""How late the fastest of ten echoes may be on a busy machine: less than a further hop would take."""
ECHOES = 10


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab.temporary(Mesh("2x3"), rate="20mbit", delay=DELAY, name="delayed") as made:
        yield made


def echo(chip: tuple[int, ...], lab: Lab, src: tuple[int, ...], dst: tuple[int, ...]) -> float:
    """Send one byte back and forth over TCP; src returns the seconds of the fastest round trip."""
    if chip == dst:
        with socket.create_server((lab.address(dst), 5000)) as server:
            server.settimeout(20)
            connection, _ = server.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while word := connection.recv(1):
                connection.sendall(word)
        return 0.0
    for _ in range(200):
        try:
            with socket.create_connection((lab.address(dst), 5000), timeout=20) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                took = []
                for _ in range(ECHOES):
                    started = time.monotonic()
                    connection.sendall(b".")
                    assert connection.recv(1) == b"."
                    took.append(time.monotonic() - started)
                return min(took)
        except ConnectionRefusedError:
            time.sleep(0.02)
    raise TimeoutError


def round_trip(lab: Lab, src: tuple[int, ...], dst: tuple[int, ...]) -> float:
    with Chips(lab.enter) as chips:
        for chip in (dst, src):
            chips.start(chip, echo, lab, src, dst)
        return float(chips.results(30)[src])


def shortest_send(lab: Lab, dst: tuple[int, int]) -> float:
    """Return the shorter time of two: a busy machine makes one longer, and none shorter."""
    return min(send(lab, (0, 0), dst, 2_000_000) for _ in range(2))


@needs_netem
@needs_lab
@pytest.mark.parametrize(("dst", "hops"), [((0, 1), 1), ((1, 0), 1), ((0, 2), 2), ((1, 2), 3)])
def test_a_packet_waits_at_every_hop(lab: Lab, dst: tuple[int, int], hops: int) -> None:
    took = round_trip(lab, (0, 0), dst)
    assert took >= 2 * hops * DELAY_S
    assert took < 2 * hops * DELAY_S + LATE_S


@needs_netem
@needs_lab
@pytest.mark.parametrize("dst", [(0, 1), (0, 2)])
def test_links_keep_their_rate(lab: Lab, dst: tuple[int, int]) -> None:
    assert 0.7 < shortest_send(lab, dst) < 1.6  # 16 Mbit over 20 Mbit/s, as without a delay


@needs_netem
@needs_lab
def test_routes_lead_round_a_hole_and_cut_chips_are_gone() -> None:
    with Lab.temporary(Mesh("3x3"), rate="100mbit", delay=DELAY, name="cut") as whole:
        assert 4 * DELAY_S <= round_trip(whole, (1, 0), (1, 2)) < 4 * DELAY_S + LATE_S
        left = whole.kill((1, 1))
        assert left.delay == DELAY
        assert 8 * DELAY_S <= round_trip(left, (1, 0), (1, 2)) < 8 * DELAY_S + LATE_S
        assert whole.namespace((1, 1)) not in namespaces()
        links = ["ip", "-o", "-n", left.namespace((1, 0)), "link"]
        assert "east" not in subprocess.run(links, capture_output=True, text=True, check=True).stdout
        assert Lab.find("cut") == left
    assert not {name for name in namespaces() if name.startswith("meshmend-cut")}


@needs_netem
@needs_lab
def test_an_all_reduce_over_delayed_links_is_exact(lab: Lab) -> None:
    pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")
    from meshmend_lab.bench.allreduce import measure

    results = measure(lab.mesh, 24_000, lab=lab, planners=["weave"], repeat=2)  # checks every sum
    assert [result.case for result in results] == ["gloo", "weave"]
    for result in results:
        assert result.seconds >= 3 * DELAY_S  # what a corner has must reach the opposite one


@needs_netem
@needs_lab
def test_the_command_line_says_the_delay_and_leaves_nothing() -> None:
    name = ["--name", "slowcli"]
    shown = json.loads(run("lab", "mesh", "up", "1x3", "--rate", "50mbit", "--delay", "5ms", *name, "--json"))
    try:
        assert shown["delay"] == "5ms"
        assert len(shown["namespaces"]) == 3
        assert "5ms one way, at every hop" in run("lab", "mesh", "show", *name)
        (found,) = [one for one in json.loads(run("lab", "mesh", "list", "--json"))["labs"] if one["name"] == "slowcli"]
        assert (found["condition"], found["delay"]) == ("up", "5ms")
        assert len(found["namespaces"]) == 4
        listed = run("lab", "mesh", "list")
        assert "5ms" in listed
        assert "4 of 4" in listed
        killed = json.loads(run("lab", "mesh", "kill", "0,2", *name, "--json"))
        assert (killed["chips"], killed["delay"]) == (2, "5ms")
    finally:
        run("lab", "mesh", "down", *name)
    assert not {name for name in namespaces() if name.startswith("meshmend-slowcli")}
    assert "slowcli" not in journal.journal_names()


@needs_lab
def test_a_kernel_without_netem_is_told_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delays, "_has_netem", lambda *_: False)
    with pytest.raises(LabError, match="This kernel has no netem or no bridges, which a delay of 1ms needs"):
        Lab.up(Mesh("1x2"), delay="1ms", name="without")
    assert not {name for name in namespaces() if name.startswith("meshmend-without")}
    assert "without" not in journal.journal_names()


@needs_netem
@needs_lab
def test_the_blocks_of_the_page_run(tmp_path: Path) -> None:
    blocks = [block for block in read(ROOT / "docs" / "lab.md") if block.by == "lab/tests/mesh/test_delay.py"]
    for block in blocks:
        run_block(replace(block, by=""), {"TMPDIR": str(tmp_path)})
    assert len(blocks) == 1


@needs_lab
def test_bridges_connect_the_cables_where_netem_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that there is about netem, on kernels without it: with a plain queue in its place, which has no delay."""
    really, asked = Commands.run, []

    def run(self: Commands, *words: str, lines: list[str] | None = None, check: bool = True) -> None:
        delaying = [line for line in lines or [] if "netem" in line]
        asked.extend(delaying)
        kept = None if lines is None else [line.replace("netem delay 20ms", "pfifo") for line in lines]
        really(self, *words, lines=kept, check=check)

    monkeypatch.setattr(delays, "_has_netem", lambda *_: True)
    monkeypatch.setattr(commands.Commands, "run", run)
    with Lab.temporary(Mesh("1x3"), rate="20mbit", delay=DELAY, name="bridged") as lab:
        ends = ["a0", "b0", "a1", "b1"]
        assert asked == [f"qdisc add dev {end} root netem delay 20ms limit 100000" for end in ends]
        assert 0.7 < shortest_send(lab, (0, 2)) < 1.6


@pytest.mark.parametrize(
    ("delay", "message"),
    [
        ("slow", "'slow' is not a delay. Write it as tc does, a whole number and its unit: 5ms, 100us"),
        ("5", "'5' is not a delay"),
        ("0ms", "for links without a delay, leave it out"),
        ("-1ms", "is not a delay"),
        ("5ms loss 10%", "is not a delay"),
        ("1\u0660ms", "is not a delay"),
        ("5ms\n", "is not a delay"),
        ("2s", "A delay of 2s is too long: a link of a lab has up to 1s"),
        ("999999ms", "is too long"),
    ],
)
def test_a_bad_delay_is_refused_before_anything_runs(delay: str, message: str) -> None:
    with pytest.raises(LabError, match=message):
        Lab.up(Mesh("2x2"), delay=delay, name="never")
    assert "never" not in journal.journal_names()


def test_the_journal_keeps_delays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "FOLDER", tmp_path)
    Journal("lab", Mesh("2x2"), "40mbit", delay="5ms").write()
    found = Journal.read("lab")
    assert found is not None
    assert found.delay == "5ms"
    path = tmp_path / "lab.json"
    facts = json.loads(path.read_text())
    for damage in ({"delay": "5ms; true"}, {"delay": 5}):
        path.write_text(json.dumps(facts | damage))
        with pytest.raises(LabError, match="is damaged"):
            Journal.read("lab")


def test_plans_are_made_for_the_delay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshmend.cost import find_hardware
    from meshmend.machines import read_machine

    monkeypatch.setattr(journal, "FOLDER", tmp_path)
    lab = Lab("lab", Mesh("2x2"), "8mbit", delay="5ms")
    assert lab.hardware.hop_latency_s == 0.005
    assert dict(lab.hardware.sources)["hop_latency_s"] == "5ms one way, for which each link holds every frame"
    assert "8mbit, 5ms" in lab.hardware.name
    lab.describe()
    machine = read_machine(lab.environment((0, 0))["MESHMEND_MACHINE"])
    assert machine.hardware is not None
    assert find_hardware(machine.hardware) == lab.hardware
    assert Lab("lab", Mesh("2x2"), "8mbit").hardware.hop_latency_s == 0
