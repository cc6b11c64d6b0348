"""The lab with real namespaces: packets find their way, links keep their rate, nothing is left behind or touched."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshmend import Mesh
from meshmend.launch import Chips
from meshmend_lab.errors import LabError
from meshmend_lab.mesh import Lab
from meshmend_lab.mesh.journal import journal_names
from namespaces import connect, namespaces, needs_lab, run, send
from pages import ROOT, run_in

SO_TIMESTAMPNS = 35
HEADERS = 42
"""Bytes of a datagram's Ethernet, IP and UDP headers."""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab.temporary(Mesh("3x3"), rate="20mbit", name="tests") as made:
        yield made


def flow(chip: tuple[int, ...], lab: Lab, size: int) -> float:
    """Send bytes from (0, 0) to (0, 1) over TCP; the receiver returns its rate after the first fifth of them."""
    address = (lab.address((0, 1)), 5000)
    if chip == (0, 0):
        connect(address).sendall(bytes(size))
        return 0.0
    with socket.create_server(address) as server:
        server.settimeout(20)
        connection, _ = server.accept()
        left, marks = size, []
        while left:
            left -= len(connection.recv(2**16))
            marks.append((left, time.monotonic()))
    (before, began), (_, ended) = next(mark for mark in marks if mark[0] <= 0.8 * size), marks[-1]
    return before / (ended - began)


def datagrams(chip: tuple[int, ...], lab: Lab) -> list[tuple[int, float]]:
    """Send 50 kB in datagrams over an idle link; the receiver returns their sizes, and when the kernel had them."""
    address, n = (lab.address((0, 1)), 5001), 50
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        if chip == (0, 0):
            connect((lab.address((0, 1)), 5000)).close()  # the other is ready, and the two know each other's addresses
            time.sleep(0.5)
            for _ in range(n):
                end.sendto(bytes(1000 - HEADERS), address)
            return []
        end.bind(address)
        end.settimeout(20)
        end.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        with socket.create_server((lab.address((0, 1)), 5000)) as server:
            server.accept()
        arrived = []
        for _ in range(n):
            data, [(_, _, stamp)], _, _ = end.recvmsg(2**16, 64)
            seconds, nanoseconds = struct.unpack("qq", stamp)
            arrived.append((len(data) + HEADERS, seconds + nanoseconds / 1e9))
        return arrived


@needs_lab
@pytest.mark.parametrize("rate", ["8mbit", "40mbit", "100mbit"])
def test_a_single_flow_reaches_the_rate_of_its_link(rate: str) -> None:
    """Within 3 %, of which headers are 0.7: the bucket is large enough. The best of five."""
    with Lab.temporary(Mesh("1x2"), rate=rate, name="flow") as lab:
        reached: list[float] = []
        while len(reached) < 5 and max(reached, default=0.0) < 0.97:
            with Chips(lab.enter) as chips:
                for chip in ((0, 1), (0, 0)):
                    chips.start(chip, flow, lab, round(lab.rate_bytes_per_s))
                reached.append(chips.results(60)[0, 1] / lab.rate_bytes_per_s)
    assert 0.97 < max(reached) < 1.0, reached


@needs_lab
@pytest.mark.parametrize("rate", ["8mbit", "40mbit"])
def test_an_idle_link_lets_no_more_than_10_kb_through_at_once(rate: str) -> None:
    with Lab.temporary(Mesh("1x2"), rate=rate, name="idle") as lab:
        at_once: list[float] = []
        while len(at_once) < 5 and not 9_000 < (at_once or [0.0])[-1] <= 10_000:  # a frame fits, and little more
            with Chips(lab.enter) as chips:
                for chip in ((0, 1), (0, 0)):
                    chips.start(chip, datagrams, lab)
                arrived = chips.results(60)[0, 1]
            sent = itertools.accumulate(size for size, _ in arrived)
            beyond = (n - lab.rate_bytes_per_s * (at - arrived[0][1]) for n, (_, at) in zip(sent, arrived, strict=True))
            at_once.append(max(beyond))
    assert 9_000 < at_once[-1] <= 10_000, at_once


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
        "from meshmend_lab.mesh import Lab\n"
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


@needs_lab
def test_the_command_line_from_up_to_down(tmp_path: Path) -> None:
    name = ["--name", "cli"]
    shown = json.loads(run("lab", "mesh", "up", "2x3", "--rate", "50mbit", *name, "--json"))
    try:
        assert shown["chips"] == 6
        assert shown["namespaces"][5] == {"chip": [1, 2], "namespace": "meshmend-cli-1-2", "address": "10.77.0.6"}
        assert "Lab 'cli' is up (made by process" in run("lab", "mesh", "up", "2x3", *name, code=1)
        command = ["sh", "-c", f"echo $MESHMEND_CHIP $RANK $WORLD_SIZE $MASTER_ADDR > {tmp_path}/$RANK"]
        run("lab", "mesh", "run", *name, "--", *command)
        assert (tmp_path / "5").read_text() == "1,2 5 6 10.77.0.1\n"
        run("lab", "mesh", "run", *name, "--chip", "0,1", "--", "sh", "-c", "exit 3", code=1)
        assert "1x1@0,2" in json.loads(run("lab", "mesh", "kill", "0,2", *name, "--json"))["failed"]
        assert "5 live of 6" in run("lab", "mesh", "show", *name)
    finally:
        assert "down" in run("lab", "mesh", "down", *name)
    assert "No lab named cli is up" in run("lab", "mesh", "show", *name, code=1)


@pytest.mark.slow
@needs_lab
def test_every_block_of_the_page_runs(tmp_path: Path) -> None:
    run_in(tmp_path, ROOT / "docs" / "lab.md")
    assert "lab" not in journal_names()
    # Other tests have labs of their own at the same time.
    assert not {name for name in namespaces() if name.startswith(("meshmend-lab-", f"meshmend-tmp{os.getpid()}"))}


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
