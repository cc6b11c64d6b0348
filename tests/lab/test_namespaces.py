"""The lab with real namespaces: packets find their way, links keep their rate, nothing is left behind or touched."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshmend import Mesh
from meshmend.cli import app
from meshmend.errors import LabError
from meshmend.lab import Chips, Lab
from meshmend.lab.journal import journal_names
from pages import ROOT, run_in


def why_no_lab() -> str | None:
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "a lab needs root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "a lab needs iproute2"
    probe = f"meshmend-can{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode:
        return "this machine does not allow network namespaces"
    limit = "qdisc add dev lo root tbf rate 1mbit burst 16kb latency 50ms"
    can = subprocess.run(["tc", "-n", probe, *limit.split()], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return "this kernel has no tbf" if can.returncode else None


WHY_NOT = why_no_lab()
needs_lab = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "-json", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {entry["name"] for entry in json.loads(listed or "[]")}


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab.temporary(Mesh("3x3"), rate="20mbit", name="tests") as made:
        yield made


def exchange(chip: tuple[int, ...], lab: Lab, src: tuple[int, ...], dst: tuple[int, ...], size: int) -> float:
    """Send bytes from src to dst over TCP; both ends return the seconds it took."""
    if chip == dst:
        with socket.create_server((lab.address(dst), 5000)) as server:
            server.settimeout(20)
            connection, (peer, _) = server.accept()
            assert peer == lab.address(src)
            started, left = time.monotonic(), size
            while left:
                left -= len(connection.recv(min(left, 65536)))
            return time.monotonic() - started
    for _ in range(200):
        try:
            with socket.create_connection((lab.address(dst), 5000), timeout=20) as connection:
                started = time.monotonic()
                connection.sendall(bytes(size))
                return time.monotonic() - started
        except ConnectionRefusedError:
            time.sleep(0.02)
    raise TimeoutError


def send(lab: Lab, src: tuple[int, ...], dst: tuple[int, ...], size: int) -> float:
    with Chips(lab.namespaces) as chips:
        for chip in (dst, src):
            chips.start(chip, exchange, lab, src, dst, size)
        return float(chips.results(30)[dst])


@needs_lab
def test_links_keep_their_rate(lab: Lab) -> None:
    took = send(lab, (0, 0), (0, 1), 2_000_000)
    assert 0.7 < took < 1.6  # 16 Mbit over 20 Mbit/s


@needs_lab
def test_far_chips_reach_each_other_and_routes_lead_round_a_hole() -> None:
    with Lab.temporary(Mesh("3x3"), rate="100mbit", name="hole") as whole:
        assert send(whole, (1, 0), (1, 2), 1000) < 5
        left = whole.kill((1, 1))
        assert send(left, (1, 0), (1, 2), 1000) < 5
        assert send(left, (0, 0), (2, 2), 1000) < 5
        assert not namespaces() & {whole.namespace((1, 1))}
        assert Lab.find("hole").mesh == Mesh("3x3", failed=["1,1"])
        with pytest.raises(LabError, match="are not connected"):
            left.kill((0, 1), (1, 0))
    assert not {name for name in namespaces() if name.startswith("meshmend-hole")}


@needs_lab
def test_a_lab_touches_nothing_that_it_did_not_make(lab: Lab) -> None:
    other = "meshmend-other-x"
    subprocess.run(["ip", "netns", "add", other], check=True)
    try:
        with Lab.temporary(Mesh("1x2"), name="other"):
            pass
        assert other in namespaces()
        assert set(lab.namespaces.values()) <= namespaces()
    finally:
        subprocess.run(["ip", "netns", "del", other], check=True)
    root = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    assert not any(name in root for name in ("east", "west", "chip0"))


@needs_lab
def test_a_lab_goes_with_the_process_that_made_it(tmp_path: Path) -> None:
    script = tmp_path / "make.py"
    script.write_text(
        "import time\n"
        "from meshmend import Mesh\n"
        "from meshmend.lab import Lab\n"
        "with Lab.temporary(Mesh('2x2'), name='orphan'):\n"
        "    print('up', flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        assert {name for name in namespaces() if name.startswith("meshmend-orphan-")}
        parent.kill()
    deadline = time.monotonic() + 10
    while "orphan" in journal_names() and time.monotonic() < deadline:  # its journal goes last, after its namespaces
        time.sleep(0.05)
    with pytest.raises(LabError, match="No lab named orphan is up"):
        Lab.find("orphan")
    assert not {name for name in namespaces() if name.startswith("meshmend-orphan-")}


def run(*words: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, result.output
    return result.output


@needs_lab
def test_the_command_line_from_up_to_down(tmp_path: Path) -> None:
    name = ["--name", "cli"]
    shown = json.loads(run("lab", "up", "2x3", "--rate", "50mbit", *name, "--json"))
    try:
        assert shown["chips"] == 6
        assert shown["namespaces"][5] == {"chip": [1, 2], "namespace": "meshmend-cli-1-2", "address": "10.77.0.6"}
        assert "Lab 'cli' is up (made by process" in run("lab", "up", "2x3", *name, code=1)
        command = ["sh", "-c", f"echo $MESHMEND_CHIP $RANK $WORLD_SIZE $MASTER_ADDR > {tmp_path}/$RANK"]
        run("lab", "run", *name, "--", *command)
        assert (tmp_path / "5").read_text() == "1,2 5 6 10.77.0.1\n"
        run("lab", "run", *name, "--chip", "0,1", "--", "sh", "-c", "exit 3", code=1)
        assert "1x1@0,2" in json.loads(run("lab", "kill", "0,2", *name, "--json"))["failed"]
        assert "5 live of 6" in run("lab", "show", *name)
    finally:
        assert "down" in run("lab", "down", *name)
    assert "No lab named cli is up" in run("lab", "show", *name, code=1)


@needs_lab
def test_every_block_of_the_page_runs(tmp_path: Path) -> None:
    before = namespaces()
    run_in(tmp_path, ROOT / "docs" / "lab.md")
    assert namespaces() == before


@pytest.mark.parametrize(
    ("name", "rate", "message"),
    [
        ("Lab/..", "1mbit", "is not a valid name for a lab"),
        ("lab", "fast", "'fast' is not a rate"),
        ("l;x", "1mbit", "is not"),
        ("lab\n", "1mbit", "is not a valid name for a lab"),
        ("lab", "1\u0660mbit", "is not a rate"),
    ],
)
def test_names_and_rates_are_checked_before_anything_runs(name: str, rate: str, message: str) -> None:
    with pytest.raises(LabError, match=message):
        Lab.up(Mesh("2x2"), name=name, rate=rate)


@pytest.mark.skipif(shutil.which("ip") is None or shutil.which("tc") is None, reason="a lab needs iproute2")
def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match="needs root: run this command with sudo"):
        Lab.up(Mesh("2x2"), name="nobody")
