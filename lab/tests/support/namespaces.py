"""Whether this machine can have a lab of network namespaces, and what is in one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from typing import Any

import pytest
from typer.testing import CliRunner

from meshmend.cli import app
from meshmend.launch import Chips
from meshmend_lab.mesh import Lab


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
    with connect((lab.address(dst), 5000)) as connection:
        started = time.monotonic()
        connection.sendall(bytes(size))
        return time.monotonic() - started


def connect(address: tuple[str, int]) -> socket.socket:
    """Return a connection to what is about to listen there."""
    for _ in range(500):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(address, timeout=20)
        time.sleep(0.02)
    raise TimeoutError


def send(lab: Lab, src: tuple[int, ...], dst: tuple[int, ...], size: int) -> float:
    with Chips(lab.enter) as chips:
        for chip in (dst, src):
            chips.start(chip, exchange, lab, src, dst, size)
        return float(chips.results(30)[dst])


def run(*words: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, result.output
    return result.output


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


needs_netem = pytest.mark.skipif(not has_netem(), reason="this kernel has no netem, or this is not root")
