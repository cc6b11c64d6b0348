"""Hosts wired to each other: what LLDP says becomes a machine, and printed routes join all pairs of it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import commandline
from meshmend import Mesh
from meshmend.errors import MachineError
from meshmend.machines import read_machine
from pages import ROOT

SHAPE = (2, 3)
NAMES = ["node-c", "node-a", "node-f", "node-b", "node-e", "node-d"]
"""Hosts by their place, in row-major order: no order that a name gives."""
PORTS = ["enp1s0", "enp2s0f0", "enp2s0f1", "eno7"]
RECORDED = ROOT / "tests" / "machines" / "lldp_recorded.json"
"""What lldpcli of lldpd 1.0.16 printed on a host with two cables to another, in network namespaces."""


def address(host: str) -> str:
    return f"10.99.1.{sorted(NAMES).index(host) + 1}"


def wires() -> dict[tuple[str, str], str]:
    """Return the interface of each host towards each neighbour, as somebody may have plugged the cables in."""
    draw = random.Random(4)
    left = {host: iter(draw.sample(PORTS, len(PORTS))) for host in NAMES}
    mesh, found = Mesh(SHAPE), {}
    for a, b in mesh.cables.tolist():
        one, other = NAMES[a], NAMES[b]
        found[one, other], found[other, one] = next(left[one]), next(left[other])
    return found


def neighbours(host: str, cables: dict[tuple[str, str], str]) -> str:
    """Return what lldpcli says on a host, in the form of the recorded file."""
    (row,) = json.loads(RECORDED.read_text(encoding="utf-8"))["lldp"][0]["interface"][:1]
    rows = []
    for (here, there), port in cables.items():
        if here == host:
            chassis = {**row["chassis"][0], "name": [{"value": there}], "mgmt-ip": [{"value": address(there)}]}
            rows.append({**row, "name": port, "chassis": [chassis]})
    return json.dumps({"lldp": [{"interface": rows}]})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "neighbours"
    found.mkdir()
    for host in NAMES:
        (found / f"{host}.json").write_text(neighbours(host, wires()), encoding="utf-8")
    shape = {"meshmend": 1, "shape": "2x3", "hardware": "ethernet-10g"}
    (tmp_path / "shape.json").write_text(json.dumps(shape), encoding="utf-8")
    return found


def described(folder: Path, name: str = "wired", intended: str = "shape") -> Path:
    """Run the command that makes the machine file; return the file."""
    file, whole = folder.parent / f"{name}.json", folder.parent / f"{intended}.json"
    out = commandline.run("machine", file, "--lldp", folder, "--intended", whole, width=200)
    assert f"next: meshmend plan --machine {file}" in out
    return file


def route(host: str, file: Path) -> list[str]:
    return commandline.run("machine", file, "--routes", host, width=200).splitlines()


def ways(file: Path) -> dict[tuple[str, str], tuple[str, str]]:
    """Return, by host and destination, the next host and the interface that the printed routes lead to."""
    host_at = {address(host): host for host in NAMES}
    found = {}
    for host in NAMES:
        for line in route(host, file)[1:]:
            way = re.fullmatch(r"ip route replace (\S+)/32 via (\S+) dev (\S+) onlink src (\S+)", line)
            assert way is not None, line
            assert way[4] == address(host)
            found[host, host_at[way[1]]] = host_at[way[2]], way[3]
    return found


def test_the_file_has_every_host_at_its_place_with_its_address_and_ports(folder: Path) -> None:
    machine = read_machine(described(folder))
    assert (machine.mesh, machine.hardware) == (Mesh(SHAPE), "ethernet-10g")
    places = {machine.chips[at].name: at for at in machine.chips}
    assert sorted(places) == sorted(NAMES)
    for a, b in itertools.permutations(NAMES, 2):
        near = sum(abs(x - y) for x, y in zip(places[a], places[b], strict=True)) == 1
        assert near == ((a, b) in wires())
        assert machine.chips[places[a]].ports.get(b) == wires().get((a, b))
        assert machine.chips[places[a]].address == address(a)


def test_printed_routes_lead_from_every_host_to_every_other_over_cables(folder: Path) -> None:
    on = ways(described(folder))
    assert len(on) == 30
    for source, destination in itertools.permutations(NAMES, 2):
        at, hops = source, 0
        while at != destination:
            following, port = on[at, destination]
            assert wires()[at, following] == port
            at, hops = following, hops + 1
        places = [divmod(NAMES.index(host), SHAPE[1]) for host in (source, destination)]
        assert hops == sum(abs(x - y) for x, y in zip(*places, strict=True)), "no way is shorter"


def test_routes_avoid_a_cable_that_one_end_no_longer_sees(folder: Path) -> None:
    described(folder)  # while it is whole
    whole = wires()
    dead = ("node-c", "node-a")
    left = {ends: port for ends, port in whole.items() if ends != dead}
    (folder / "node-c.json").write_text(neighbours("node-c", left), encoding="utf-8")
    file = described(folder, "today", intended="wired")
    machine = read_machine(file)
    assert machine.mesh.n_cables == 6
    on = ways(file)
    assert on["node-c", "node-a"][0] == "node-b"
    assert not {(at, following) for (at, _), (following, _) in on.items()} & {dead, dead[::-1]}
    out = commandline.run("machine", folder, "--intended", folder.parent / "wired.json", width=200)
    assert f"node-a sees node-c on {whole['node-a', 'node-c']}, which sees nothing of it: not used." in out


def test_what_lldpcli_has_printed_is_read(tmp_path: Path) -> None:
    for host, other, end in (("node-a", "node-b", "ea"), ("node-b", "node-a", "wb")):
        text = RECORDED.read_text(encoding="utf-8").replace('"node-b"', f'"{other}"').replace('"ea', f'"{end}')
        (tmp_path / f"{host}.json").write_text(text, encoding="utf-8")
    machine = read_machine(tmp_path, shape="1x2")
    assert machine.mesh.n_chips == 2
    assert [dict(chip.ports) for _, chip in sorted(machine.chips.items())] == [{"node-b": "ea"}, {"node-a": "wb"}]


HOSTILE = {
    "a host": ('"node-a"', '"a; reboot"', "expected the name of a host"),
    "an interface": ('"name": "e', '"name": "$(reboot) e', "expected an interface"),
    "an address": ('"10.99.', '"$(id).', "expected an IPv4 address"),
    "another format": ('"chassis": [', '"chassis": [], "x": [', "lldpcli show neighbors -f json0"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_could_be_a_command_is_refused(what: str, folder: Path) -> None:
    old, new, words = HOSTILE[what]
    for path in folder.iterdir():
        path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    with pytest.raises(MachineError, match=re.escape(words)):
        read_machine(folder)


def test_what_is_missing_is_told(folder: Path, tmp_path: Path) -> None:
    empty, bare = tmp_path / "empty", tmp_path / "bare.json"
    empty.mkdir()
    with pytest.raises(MachineError, match=r"expected a file HOST\.json for each host, as `lldpcli show neighbors"):
        read_machine(empty)
    bare.write_text('{"meshmend": 1, "shape": "1x2", "chips": {"a": [0, 0], "b": [0, 1]}}', encoding="utf-8")
    assert "routes need a live host, and each host's address" in commandline.run(
        "machine", bare, "--routes", "a", code=1, width=200
    )
    assert "no chip is named 'node-x'" in commandline.run(
        "machine", described(folder), "--routes", "node-x", code=1, width=200
    )


def sh(*words: str, check: bool = True) -> str:
    return subprocess.run(words, check=check, capture_output=True, text=True).stdout


def why_no_hosts() -> str:
    if not sys.platform.startswith("linux") or os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need Linux, root and iproute2"
    probe = f"meshmend-wired{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return "this machine does not allow network namespaces" if made.returncode else ""


WHY_NO_HOSTS = why_no_hosts()
WHY_NO_LLDPD = "" if shutil.which("lldpd") and shutil.which("lldpcli") else "lldpd is not installed: apt install lldpd"


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    """Six namespaces with cables between them, an address each, and no routes; by host, the namespace."""
    found = {host: f"meshmend-{os.getpid()}-{host}" for host in NAMES}
    with contextlib.ExitStack() as stack:
        for host, namespace in found.items():
            sh("ip", "netns", "add", namespace)
            stack.callback(sh, "ip", "netns", "del", namespace, check=False)
            for line in ("link set lo up", "link add mesh0 type bridge", "link set mesh0 up"):
                sh("ip", "-n", namespace, *line.split())
            sh("ip", "-n", namespace, "address", "add", f"{address(host)}/32", "dev", "mesh0")
        for (a, b), port in wires().items():
            if a < b:
                ends = (port, "netns", found[a], "type", "veth", "peer", "name", wires()[b, a], "netns", found[b])
                sh("ip", "link", "add", *ends)
                for host, end in ((a, port), (b, wires()[b, a])):
                    sh("ip", "-n", found[host], "link", "set", end, "up")
        yield found


REACH = """
import socket, sys
for address in sys.argv[1:]:
    with socket.socket() as probe:
        probe.settimeout(5)
        try:
            probe.connect((address, 9))
        except ConnectionRefusedError:
            print(address)
"""


def reached(hosts: dict[str, str], file: Path) -> int:
    """Set the printed routes; return how many pairs of hosts reach each other."""
    for host, namespace in hosts.items():
        for line in route(host, file):
            sh("ip", "netns", "exec", namespace, *line.split())
    count = 0
    for host, namespace in hosts.items():
        others = [address(other) for other in NAMES if other != host]
        said = sh("ip", "netns", "exec", namespace, sys.executable, "-c", REACH, *others)
        count += len(set(said.split()) & set(others))
    return count


@pytest.mark.skipif(bool(WHY_NO_HOSTS), reason=WHY_NO_HOSTS)
def test_kernels_with_the_printed_routes_reach_all_30_pairs(folder: Path, hosts: dict[str, str]) -> None:
    assert reached(hosts, described(folder)) == 30


@pytest.mark.skipif(bool(WHY_NO_HOSTS or WHY_NO_LLDPD), reason=WHY_NO_HOSTS or WHY_NO_LLDPD)
def test_lldpd_finds_the_wiring_and_notices_a_dead_cable(tmp_path: Path, hosts: dict[str, str]) -> None:
    folder = tmp_path / "neighbours"
    folder.mkdir()
    (tmp_path / "shape.json").write_text('{"meshmend": 1, "shape": "2x3"}', encoding="utf-8")

    def control(host: str, *words: str) -> str:
        return sh("lldpcli", "-u", f"{sockets}/{host}.socket", *words, check=False)

    def seen(host: str) -> set[tuple[str, str]]:
        """Return the neighbours and the interfaces that a host's lldpd has, and keep what it says."""
        said = control(host, "show", "neighbors", "-f", "json0")
        (folder / f"{host}.json").write_text(said, encoding="utf-8")
        rows: list[Any] = json.loads(said or "{}").get("lldp", [{}])[0].get("interface", [])
        named = [row for row in rows if "name" in row["chassis"][0]]
        return {(row["chassis"][0]["name"][0]["value"], row["name"]) for row in named}

    with contextlib.ExitStack() as stack:
        # lldpd gives up root, and pytest's folders are root's alone.
        sockets = stack.enter_context(tempfile.TemporaryDirectory(prefix="meshmend-lldp-"))
        Path(sockets).chmod(0o755)
        for host, namespace in hosts.items():
            daemon = f"hostname {host}; exec lldpd -d -u {sockets}/{host}.socket -I 'en*' -m '10.99.1.*'"
            words = ["unshare", "-u", "ip", "netns", "exec", namespace, "sh", "-c", daemon]
            process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        wanted = {host: {(b, port) for (a, b), port in wires().items() if a == host} for host in NAMES}
        deadline = time.monotonic() + 90
        while {host: seen(host) for host in NAMES} != wanted:
            assert time.monotonic() < deadline, "LLDP has not found all cables"
            time.sleep(1)
        assert reached(hosts, described(folder)) == 30
        a, b = "node-c", "node-a"
        sh("ip", "-n", hosts[a], "link", "set", wires()[a, b], "down")
        cut = time.monotonic()
        while any(other in (a, b) for host in (a, b) for other, _ in seen(host)):
            assert time.monotonic() - cut < 3, "a dead cable is known within three seconds"
            time.sleep(0.02)
        for host in NAMES:
            seen(host)
        today = described(folder, "today", intended="wired")
        assert read_machine(today).mesh.n_cables == 6
        assert reached(hosts, today) == 30
