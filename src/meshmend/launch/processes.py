"""Processes that never outlive the one that started them, and ports for them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import time
from pathlib import Path

from meshmend.launch.addresses import listen, split_address

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """End this process when its parent dies; at once if its parent is no longer `parent`."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def children(pid: int) -> list[int]:
    """Return all descendants of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *children(child)]
    return found


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants as a power cut would, by SIGKILL."""
    # It is stopped first, so that it cannot react to the death of its children before it is killed too.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    for each in (*children(pid), pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def wait_for_server(address: str, timeout_s: float) -> None:
    """Return when something accepts connections there, or after the time limit, which the next to connect reports.

    A client of gRPC that comes first waits for a second before it tries again, and a restart with it.
    """
    where, until = split_address(address), time.monotonic() + timeout_s
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(where, timeout=1.0):
            return
        time.sleep(0.02)


def free_port(address: str = "") -> int:
    """Return a port that is currently free at an address, by default at all of this machine's, IPv6 included."""
    with listen(address or ("::" if socket.has_dualstack_ipv6() else ""), 0) as one:
        return int(one.getsockname()[1])


def raise_file_limit() -> None:
    """Allow this process as many descriptors as its hard limit does: the usual soft limit is 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
