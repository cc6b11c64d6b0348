"""Where Gloo listens, and the line that says what to do where nobody would reach it."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from meshmend.errors import VersionError
from meshmend.jax.session.gloo import listen_where_reached
from meshmend.launch.environment import Launch

LACKS = VersionError("Gloo at a given address", "jax", "99.0", ["jaxlib:_jax.make_gloo_tcp_collectives"], "0.10.2")
ADDRESSES = {"node7": "127.0.1.1", "node8": "10.0.0.8", "10.0.0.7": "10.0.0.7", "::1": "::1", "127.0.0.1": "127.0.0.1"}


class Machine:
    """A machine with a name, where Gloo's address can be set or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, coordinator: str, fails: Exception | None) -> None:
        self.set_to: list[str] = []

        def use(address: str) -> None:
            if fails is not None:
                raise fails
            self.set_to.append(address)

        def resolve(name: str, *_: Any, **__: Any) -> list[Any]:
            if name not in ADDRESSES:
                raise socket.gaierror("Name or service not known")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ADDRESSES[name], 0))]

        monkeypatch.setattr("meshmend.jax.session.gloo.use_gloo_at", use)
        monkeypatch.setattr("meshmend.jax.session.gloo.coordinator_address", lambda: coordinator)
        monkeypatch.setattr("socket.gethostname", lambda: name)
        monkeypatch.setattr("socket.getaddrinfo", resolve)


@pytest.mark.parametrize(
    ("name", "coordinator", "address", "fails", "line"),
    [
        ("node7", "10.0.0.5:80", "10.0.0.7", None, ""),
        ("node8", "127.0.0.1:80", "127.0.0.1", None, ""),
        ("node7", "[::1]:80", "::1", None, ""),
        # It cannot be set, and the machine's name leads elsewhere, or nowhere, or to where the job stays.
        ("node8", "10.0.0.5:80", "10.0.0.7", LACKS, ""),
        ("unknown", "10.0.0.5:80", "10.0.0.7", LACKS, ""),
        ("node7", "127.0.0.1:80", "127.0.0.1", LACKS, ""),
        # By hand: whatever JAX does, and only where that cannot work a line.
        ("node8", "10.0.0.5:80", "", None, ""),
        ("node7", "localhost:80", "", None, ""),
        (
            "node7",
            "10.0.0.5:80",
            "",
            None,
            "Let node7 stand for the address under which the other hosts reach this one",
        ),
        ("node7", "10.0.0.5:80", "10.0.0.7", LACKS, "jax 99.0, which lacks jaxlib:_jax.make_gloo_tcp_collectives"),
        ("node7", "10.0.0.5:80", "10.0.0.7", TypeError("hostname?"), "(hostname?). Let node7 stand for 10.0.0.7 in"),
        ("node7", "10.0.0.5:80", "10.0.0.7", RuntimeError("bind\nmore"), "(bind). Let node7 stand for 10.0.0.7 in"),
        # --address is a name that means loopback here, and something else everywhere else.
        ("node8", "node7:80", "node7", None, "node7 resolves to 127.0.1.1 here, and Gloo listens there"),
    ],
)
def test_a_line_is_written_only_where_no_other_host_would_reach_this_one(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    coordinator: str,
    address: str,
    fails: Exception | None,
    line: str,
) -> None:
    machine = Machine(monkeypatch, name, coordinator, fails)
    listen_where_reached(Launch(coordinator, 2, 1, address=address))
    written = capsys.readouterr().err
    assert machine.set_to == ([address] if address and fails is None else [])
    assert line in written
    assert written.count("\n") == (line != "")
    assert not written or ("No other host reaches this one" in written and "in /etc/hosts" in written)


def test_a_process_without_others_needs_no_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Machine(monkeypatch, "node7", "10.0.0.7:80", LACKS)
    listen_where_reached(Launch("10.0.0.7:80", 1, 0, address="10.0.0.7"))
    assert capsys.readouterr().err == ""
