"""What doctor says of a network: its own view of files and names, and of real cables in network namespaces."""

from __future__ import annotations

import json
import socket
import sys
from importlib import import_module
from pathlib import Path

import pytest

import commandline
import test_lldp as wiring
from meshmend.doctor import Finding
from test_lldp import NAMES, folder, hosts

__all__ = ["folder", "hosts"]
network = import_module("meshmend.doctor.network")
PORTS = {other: port for (host, other), port in wiring.wires().items() if host == "node-c"}
"""Of the host in the corner: towards node-a and node-b."""


@pytest.fixture
def healthy(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be node-c, with everything as it should be; return the folder of what its kernel says."""
    monkeypatch.setenv("MESHMEND_MACHINE", str(wiring.described(folder)))
    monkeypatch.setenv("MESHMEND_CHIP", "node-c")
    monkeypatch.setattr(socket, "gethostname", lambda: "node-c")
    monkeypatch.setattr(socket, "gethostbyname", lambda _: wiring.address("node-c"))
    for port in PORTS.values():
        (tmp_path / port).mkdir()
        (tmp_path / port / "speed").write_text("10000\n")
        (tmp_path / port / "carrier").write_text("1\n")
    (tmp_path / "forwarding").write_text("1\n")
    monkeypatch.setattr(network, "PORTS", tmp_path)
    monkeypatch.setattr(network, "FORWARDING", tmp_path / "forwarding")
    return tmp_path


def seen() -> dict[str, Finding]:
    return {finding.name: finding for finding in network.look_at_network()}


def test_a_healthy_wired_host(healthy: Path) -> None:
    assert {name: one.status for name, one in seen().items()} == {
        "host name": "works",
        "forwarding": "works",
        f"{PORTS['node-a']} to node-a": "works",
        f"{PORTS['node-b']} to node-b": "works",
    }


def test_each_fault_is_named_and_nothing_else(healthy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> dict[str, str]:
        return {name: one.detail for name, one in seen().items() if one.status == "broken"}

    port = PORTS["node-a"]
    (healthy / port / "speed").write_text("1000\n")
    assert broken() == {f"{port} to node-a": "1000 Mbit/s, nominal 10000"}
    (healthy / port / "speed").write_text("5000\n")  # half: not far below
    assert broken() == {}
    (healthy / port / "speed").write_text("-1\n")  # as virtio says
    assert broken() == {}
    (healthy / port / "carrier").write_text("0\n")
    assert broken() == {f"{port} to node-a": "no signal"}
    (healthy / port / "carrier").write_text("1\n")
    (healthy / "forwarding").write_text("0\n")
    assert list(broken()) == ["forwarding"]
    advice = seen()["forwarding"].advice
    assert advice is not None
    assert advice.endswith("wired.json --routes node-c | sudo sh -e")
    (healthy / "forwarding").write_text("1\n")
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    assert broken() == {"host name": "node-c resolves to 127.0.1.1: JAX on CPUs tells other hosts to connect there"}
    assert f"{wiring.address('node-c')} node-c" in (seen()["host name"].advice or "")


def test_on_one_machine_a_loopback_name_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHMEND_MACHINE", raising=False)
    for found in ("127.0.0.1", "127.0.1.1"):
        monkeypatch.setattr(socket, "gethostbyname", lambda _, found=found: found)
        assert [(one.name, one.status) for one in network.look_at_network()] == [("host name", "absent")]

    def nobody(_: str) -> str:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", nobody)
    assert "resolves to nothing" in seen()["host name"].detail


def test_a_machine_that_cannot_be_read_is_a_finding(healthy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHMEND_CHIP", "node-x")
    (finding,) = [one for one in network.look_at_network() if one.name == "machine"]
    assert finding.status == "broken"
    assert "no chip is named 'node-x'" in finding.detail


LOOK = """
import dataclasses, json, socket
from meshmend.doctor.network import look_at_network
socket.gethostbyname = lambda name: "10.99.1.1"
print(json.dumps({one.name: one.detail for one in look_at_network() if one.status != "works"}))
"""


@pytest.mark.skipif(bool(wiring.WHY_NO_HOSTS), reason=wiring.WHY_NO_HOSTS)
def test_real_hosts_with_cables(folder: Path, hosts: dict[str, str]) -> None:
    file = wiring.described(folder)

    def look(host: str) -> dict[str, str]:
        words = [f"MESHMEND_MACHINE={file}", f"MESHMEND_CHIP={host}", sys.executable, "-c", LOOK]
        found: dict[str, str] = json.loads(wiring.sh("ip", "netns", "exec", hosts[host], "env", *words))
        return found

    off = {"forwarding": "off: hosts behind this one cannot reach each other"}
    assert look("node-c") == off
    for host in NAMES:
        for line in wiring.route(host, file):
            wiring.sh("ip", "netns", "exec", hosts[host], *line.split())
    assert look("node-c") == {}
    wiring.sh("ip", "-n", hosts["node-c"], "link", "set", PORTS["node-a"], "down")
    assert look("node-c") == {f"{PORTS['node-a']} to node-a": "no signal"}
    back = wiring.wires()["node-a", "node-c"]
    assert look("node-a") == {f"{back} to node-c": "no signal"}
    # A veth says 10 Gbit/s: far below the links of such hardware.
    text = json.loads(file.read_text(encoding="utf-8")) | {"hardware": "tpu-v4"}
    file.write_text(json.dumps(text), encoding="utf-8")
    assert all("Mbit/s, nominal" in detail for detail in look("node-b").values())
    assert len(look("node-b")) == sum(a == "node-b" for a, _ in wiring.wires())


def test_the_command_shows_it(healthy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examination = import_module("meshmend.doctor.examine")
    monkeypatch.setattr(examination, "TRIALS", ())
    monkeypatch.setattr(examination, "is_installed", lambda _: False)
    (healthy / "forwarding").write_text("0\n")
    out = commandline.run("doctor", code=1, width=200)
    assert "✗ forwarding" in out
