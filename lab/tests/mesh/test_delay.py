"""Links with a delay: every packet has it at every hop, the rate still holds, and nothing is left behind.

Each test runs with the kernel's netem where there is one, and always with the relay process, which needs none.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshmend import Mesh
from meshmend.launch import Chips
from meshmend_lab.errors import LabError
from meshmend_lab.mesh import Lab, commands, find_labs, journal, take_down
from meshmend_lab.mesh import delay as delays
from meshmend_lab.mesh.commands import Commands
from meshmend_lab.mesh.journal import Journal
from test_namespaces import namespaces, needs_lab, run, send

DELAY, DELAY_S = "20ms", 0.02
LATE_S = 0.03
"""How late the fastest of ten echoes may be on a busy machine: less than a further hop would take."""
ECHOES = 10


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as one:
        yield one


@pytest.fixture(scope="module", params=delays.DELAYERS)
def delayer(request: pytest.FixtureRequest, patch: pytest.MonkeyPatch) -> str:
    """What labs get their delay from during the tests that ask for it."""
    if request.param == "netem" and not has_netem():
        pytest.skip("this kernel has no netem")
    patch.setattr(delays, "_has_netem", lambda *_: request.param == "netem")
    return str(request.param)


def has_netem() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    probe = f"meshmend-can{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode:
        return False
    wait = "qdisc add dev lo root netem delay 1ms"
    can = subprocess.run(["tc", "-n", probe, *wait.split()], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return can.returncode == 0


@pytest.fixture(scope="module")
def lab(delayer: str) -> Iterator[Lab]:
    with Lab.temporary(Mesh("2x3"), rate="20mbit", delay=DELAY, name="delayed") as made:
        assert made.delayed_by == delayer
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


@needs_lab
@pytest.mark.parametrize(("dst", "hops"), [((0, 1), 1), ((1, 0), 1), ((0, 2), 2), ((1, 2), 3)])
def test_a_packet_waits_at_every_hop(lab: Lab, dst: tuple[int, int], hops: int) -> None:
    took = round_trip(lab, (0, 0), dst)
    assert took >= 2 * hops * DELAY_S
    assert took < 2 * hops * DELAY_S + LATE_S


@needs_lab
@pytest.mark.parametrize("dst", [(0, 1), (0, 2)])
def test_links_keep_their_rate(lab: Lab, dst: tuple[int, int]) -> None:
    took = send(lab, (0, 0), dst, 2_000_000)
    assert 0.7 < took < 1.6  # 16 Mbit over 20 Mbit/s, as without a delay


@needs_lab
def test_routes_lead_round_a_hole_and_cut_chips_are_gone(delayer: str) -> None:
    with Lab.temporary(Mesh("3x3"), rate="100mbit", delay=DELAY, name="cut") as whole:
        assert 4 * DELAY_S <= round_trip(whole, (1, 0), (1, 2)) < 4 * DELAY_S + LATE_S
        left = whole.kill((1, 1))
        assert (left.delay, left.delayed_by) == (DELAY, delayer)
        assert 8 * DELAY_S <= round_trip(left, (1, 0), (1, 2)) < 8 * DELAY_S + LATE_S
        assert whole.namespace((1, 1)) not in namespaces()
        links = ["ip", "-o", "-n", left.namespace((1, 0)), "link"]
        assert "east" not in subprocess.run(links, capture_output=True, text=True, check=True).stdout
        assert Lab.find("cut") == left
    assert not {name for name in namespaces() if name.startswith("meshmend-cut")}


@needs_lab
def test_an_all_reduce_over_delayed_links_is_exact(lab: Lab) -> None:
    pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")
    from meshmend_lab.bench.allreduce import measure

    results = measure(lab.mesh, 24_000, lab=lab, planners=["weave"], repeat=2)  # checks every sum
    assert [result.case for result in results] == ["gloo", "weave"]
    for result in results:
        assert result.seconds >= 3 * DELAY_S  # what a corner has must reach the opposite one


def ended(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return True
    return words[0] in "ZX"


@needs_lab
def test_the_command_line_says_the_delay_and_leaves_nothing(delayer: str) -> None:
    name = ["--name", "slowcli"]
    shown = json.loads(run("lab", "mesh", "up", "1x3", "--rate", "50mbit", "--delay", "5ms", *name, "--json"))
    relay = delays.find_relay("meshmend-slowcli-delay")
    try:
        assert (shown["delay"], shown["delayed_by"]) == ("5ms", delayer)
        assert len(shown["namespaces"]) == 3
        assert (relay is not None) == (delayer == "relay")
        assert "5ms one way, at every hop" in run("lab", "mesh", "show", *name)
        (found,) = [one for one in json.loads(run("lab", "mesh", "list", "--json"))["labs"] if one["name"] == "slowcli"]
        assert (found["condition"], found["delay"], found["delayed_by"]) == ("up", "5ms", delayer)
        assert len(found["namespaces"]) == 4
        listed = run("lab", "mesh", "list")
        assert f"5ms by {delayer}" in listed
        assert "4 of 4" in listed
        killed = json.loads(run("lab", "mesh", "kill", "0,2", *name, "--json"))
        assert (killed["chips"], killed["delay"], killed["delayed_by"]) == (2, "5ms", delayer)
    finally:
        run("lab", "mesh", "down", *name)
    assert not {name for name in namespaces() if name.startswith("meshmend-slowcli")}
    assert relay is None or ended(relay)
    assert "slowcli" not in journal.journal_names()


@needs_lab
def test_a_block_and_its_relay_go_with_their_process(tmp_path: Path) -> None:
    script = tmp_path / "make.py"
    script.write_text(
        "import time\n"
        "from meshmend import Mesh\n"
        "from meshmend_lab.mesh import Lab, delay\n"
        "delay._has_netem = lambda *_: False\n"
        "with Lab.temporary(Mesh('1x2'), delay='1ms', name='widow'):\n"
        "    print(delay.find_relay('meshmend-widow-delay'), flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        relay = int(parent.stdout.readline())
        assert not ended(relay)
        parent.kill()
    deadline = time.monotonic() + 10
    while "widow" in journal.journal_names() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ended(relay)
    assert not {name for name in namespaces() if name.startswith("meshmend-widow")}


@needs_lab
def test_the_relay_of_a_killed_build_is_ended_by_taking_it_down(tmp_path: Path) -> None:
    script = tmp_path / "make.py"
    script.write_text(
        "import os, signal\n"
        "from meshmend import Mesh\n"
        "from meshmend_lab.mesh import Lab, delay\n"
        "really, delay._has_netem = delay.connect, lambda *_: False\n"
        "def connect(*words):\n"
        "    really(*words)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "delay.connect = connect\n"
        "Lab.up(Mesh('1x2'), delay='1ms', name='halfway')\n"
    )
    assert subprocess.run([sys.executable, str(script)], check=False).returncode == -signal.SIGKILL
    relay = delays.find_relay("meshmend-halfway-delay")
    assert [one.condition for one in find_labs() if one.name == "halfway"] == ["half-built"]
    take_down("halfway")
    assert relay is not None
    assert ended(relay)
    assert not {name for name in namespaces() if name.startswith("meshmend-halfway")}


@pytest.fixture
def with_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delays, "_has_netem", lambda *_: False)


@needs_lab
def test_a_lab_without_its_relay_is_not_up(with_relay: None) -> None:
    Lab.up(Mesh("1x2"), delay="1ms", name="lost")
    try:
        relay = delays.find_relay("meshmend-lost-delay")
        assert relay is not None
        os.kill(relay, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while not ended(relay) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [one.condition for one in find_labs() if one.name == "lost"] == ["half-built"]
        with pytest.raises(LabError, match="carries no packets, because the process that delays them has ended"):
            Lab.find("lost")
    finally:
        take_down("lost")


@needs_lab
def test_only_a_relay_that_is_in_the_labs_namespace_is_ended(with_relay: None, tmp_path: Path) -> None:
    impostor = tmp_path / "relay.py"
    impostor.write_text("import time\ntime.sleep(600)\n")
    with (
        Lab.temporary(Mesh("1x2"), delay="1ms", name="twin") as lab,
        subprocess.Popen([sys.executable, "-I", "-S", str(impostor), lab.delay_namespace, "0.001"]) as other,
    ):
        try:
            lab.down()
            assert other.poll() is None
            assert delays.find_relay(lab.delay_namespace) == other.pid
        finally:
            other.kill()


@needs_lab
def test_a_relay_ends_by_itself_when_its_namespaces_are_removed_by_hand(with_relay: None) -> None:
    lab = Lab.up(Mesh("1x2"), delay="1ms", name="byhand")
    try:
        relay = delays.find_relay(lab.delay_namespace)
        assert relay is not None
        for name in (*lab.namespaces.values(), lab.delay_namespace):
            subprocess.run(["ip", "netns", "del", name], check=True)
        deadline = time.monotonic() + 10
        while not ended(relay) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert ended(relay)
    finally:
        lab.down()


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
        assert lab.delayed_by == "netem"
        assert delays.find_relay(lab.delay_namespace) is None
        ends = ["a0", "b0", "a1", "b1"]
        assert asked == [f"qdisc add dev {end} root netem delay 20ms limit 100000" for end in ends]
        assert 0.7 < send(lab, (0, 0), (0, 2), 2_000_000) < 1.6


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


def test_the_journal_keeps_delays_and_reads_journals_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "FOLDER", tmp_path)
    Journal("lab", Mesh("2x2"), "40mbit", delay="5ms", delayed_by="relay").write()
    found = Journal.read("lab")
    assert found is not None
    assert (found.delay, found.delayed_by) == ("5ms", "relay")
    path = tmp_path / "lab.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({key: facts[key] for key in facts if not key.startswith("delay")}))
    older = Journal.read("lab")
    assert older is not None
    assert (older.delay, older.delayed_by) == (None, None)
    for damage in ({"delay": "5ms; true"}, {"delay": 5}, {"delayed_by": "magic"}):
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
