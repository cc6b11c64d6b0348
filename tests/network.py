"""What the network of this machine can do, and who listens where, by the kernel's own account."""

from __future__ import annotations

import contextlib
import socket
import struct
from pathlib import Path

LISTENS = "0A"
"""The state of a socket that listens, in /proc/net/tcp."""


def has_ipv6() -> bool:
    """Whether this machine has an IPv6 loopback address."""
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.bind(("::1", 0))
    except OSError:
        return False
    return True


def listening() -> set[tuple[str, int]]:
    """Return the addresses and ports at which this process listens for TCP connections; IPv4 as IPv4 in any case."""
    mine = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            mine.add(str(descriptor.readlink()))
    found = set()
    for file, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/self/net/{file}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and f"socket:[{words[9]}]" in mine:
                # The kernel prints an address as numbers of four bytes, each in the machine's order.
                address, port = words[1].split(":")
                numbers = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
                host = socket.inet_ntop(family, struct.pack(f"={len(numbers)}I", *numbers))
                found.add((host.removeprefix("::ffff:"), int(port, 16)))
    return found
