"""Addresses with ports: read and written in one way, whatever the family, against the standard library's own reader."""

from __future__ import annotations

import ipaddress
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.errors import LaunchError, RestartError
from meshmend.launch.addresses import family_of, join_address, listen, split_address
from meshmend.launch.environment import Launch, check_address, find_store
from meshmend.launch.processes import free_port, wait_for_server
from network import has_ipv6

needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
PORTS = st.integers(0, 65535)


@given(st.ip_addresses().map(str) | st.from_regex(r"[a-z][a-z0-9.-]{0,20}", fullmatch=True), PORTS)
def test_what_is_written_is_read_back_here_and_by_urllib(host: str, port: int) -> None:
    text = join_address(host, port)
    assert split_address(text) == (host, port)
    read = urlsplit(f"//{text}")
    assert (read.hostname, read.port) == (host, port)


@given(st.ip_addresses(v=6), PORTS)
def test_an_ipv6_address_without_brackets_has_no_port(address: ipaddress.IPv6Address, port: int) -> None:
    for text in (str(address), address.exploded, f"[{address}]"):
        assert split_address(text, port) == (text.strip("[]"), port)


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ("fd00::7", "[fd00::7]:29400"),
        ("[fd00::7]", "[fd00::7]:29400"),
        ("[fd00::7]:5000", "[fd00::7]:5000"),
        ("::1", "[::1]:29400"),
        ("10.0.0.7", "10.0.0.7:29400"),
        ("node7:0", "node7:0"),
    ],
)
def test_the_store_is_found_at_either_kind_of_address(given_: str, expected: str) -> None:
    assert find_store(given_, {}) == check_address(given_, "--listen") == expected


@pytest.mark.parametrize(
    "text",
    ["", ":5000", "node7:", "node7:-1", "node7:65536", "node7:٣", "[node7]:5", "[]:5", "a:b:5", "[::1", "::1]:5"],
)
def test_what_is_no_address_is_refused_with_both_forms(text: str) -> None:
    with pytest.raises(LaunchError, match=r"--store is .*write it as 10\.0\.0\.7:29400 or \[fd00::7\]:29400"):
        check_address(text, "--store")
    with pytest.raises(ValueError, match="no address with a port"):
        split_address(text)


@pytest.mark.parametrize("coordinator", ["[::1]:5000", "node7:5000", ""])
def test_a_coordinator_may_have_either_kind_of_address(coordinator: str) -> None:
    assert Launch(coordinator, 2, 0).coordinator == coordinator


@pytest.mark.parametrize("coordinator", ["::1:5000", "node7", "node7:0", "[::1]"])
def test_a_coordinator_needs_a_port(coordinator: str) -> None:
    with pytest.raises(RestartError, match="expected an address and a port from 1 to 65535"):
        Launch(coordinator, 2, 0)


@needs_ipv6
def test_a_free_port_is_free_for_both_families() -> None:
    port = free_port()
    with listen("127.0.0.1", port) as first, listen("::1", port) as second:
        assert (first.family, second.family) == (socket.AF_INET, socket.AF_INET6)
    assert family_of("localhost") == socket.AF_INET, "of a name that has both, the one that everybody has"


@needs_ipv6
def test_the_command_serves_an_ipv6_address(tmp_path: Path) -> None:
    where = join_address("::1", free_port("::1"))
    command = [sys.executable, "-m", "meshmend", "store", "--listen", where]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as store:
        try:
            wait_for_server(where, 20)
            socket.create_connection(split_address(where), timeout=5).close()
            assert store.stdout is not None
            said = next((line for line in store.stdout if "listens" in line), "")
        finally:
            store.terminate()  # SIGINT is ignored in what a shell has put into the background
    assert said.endswith(f"the store of job listens on {where}\n"), said
