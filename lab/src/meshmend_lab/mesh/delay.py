"""Links with a delay: each cable leads through one more namespace of the lab, in which every frame waits.

A cable is then two veth pairs, whose far ends lie in the delay namespace. The rate is kept at the chips' ends, as
without a delay, so that a frame first takes its time on the link and then waits. The far ends of a cable are connected
by a bridge, with the kernel's netem on each; or, where the kernel has no netem, by the process of `relay.py`, which
gives the same delay and takes more of a core.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from meshmend_lab.errors import LabError
from meshmend_lab.mesh import relay
from meshmend_lab.mesh.commands import NETNS, Commands

DELAY = re.compile(r"([1-9]\d{0,5})(us|ms|s)", re.ASCII)
MAX_DELAY_S = 1.0
SUFFIX = "delay"
"""Of the delay namespace's name, where those of chips have their coordinates."""
FRAMES = 100_000
"""How many frames netem holds per link; by default it drops all beyond 1,000."""
END_S = 10.0
"""How long a relay that has been killed may take to end."""

Delayer = Literal["netem", "relay"]
DELAYERS: tuple[Delayer, ...] = ("netem", "relay")


def delay_seconds(delay: str | None) -> float:
    """Return a delay in seconds, 0 for none; raise `LabError` unless it is written as tc writes times.

    >>> delay_seconds("5ms"), delay_seconds("100us"), delay_seconds(None)
    (0.005, 0.0001, 0.0)
    """
    if delay is None:
        return 0.0
    match = DELAY.fullmatch(delay)
    if match is None:
        raise LabError(
            f"{delay!r} is not a delay. Write it as tc does, a whole number and its unit: 5ms, 100us; "
            f"for links without a delay, leave it out."
        )
    seconds = int(match[1]) / {"us": 1_000_000, "ms": 1_000, "s": 1}[match[2]]
    if seconds > MAX_DELAY_S:
        raise LabError(f"A delay of {delay} is too long: a link of a lab has up to {MAX_DELAY_S:g}s, one way.")
    return seconds


def far_ends(cable: int) -> tuple[str, str]:
    """Return the names of a cable's two interfaces in the delay namespace."""
    return f"a{cable}", f"b{cable}"


def split(cables: Sequence[tuple[str, str]], place: str) -> list[tuple[str, str]]:
    """Return two pairs for every cable: each of its ends, with a far end in that place.

    >>> split([("east netns x", "west netns y")], "netns d")
    [('east netns x', 'a0 netns d'), ('west netns y', 'b0 netns d')]
    """
    return [
        (end, f"{far} {place}")
        for cable, ends in enumerate(cables)
        for end, far in zip(ends, far_ends(cable), strict=True)
    ]


def connect(commands: Commands, namespace: str, n_cables: int, delay: str, mtu: int) -> Delayer:
    """Connect the far ends of every cable with this delay, and return what it comes from."""
    pairs = [far_ends(cable) for cable in range(n_cables)]
    commands.ip(*(f"link set {end} up" for pair in pairs for end in pair), namespace=namespace)
    if not _has_netem(commands, namespace):
        words = (sys.executable, "-I", "-S", relay.__file__, namespace, f"{delay_seconds(delay):g}")
        commands.run("ip", "netns", "exec", namespace, *words)
        return "relay"
    waits = [f"qdisc add dev {end} root netem delay {delay} limit {FRAMES}" for pair in pairs for end in pair]
    commands.run("tc", "-n", namespace, "-batch", "-", lines=waits)
    bridges = [f"link add cable{cable} up mtu {mtu} type bridge" for cable in range(n_cables)]
    joins = [f"link set {end} master cable{cable}" for cable, pair in enumerate(pairs) for end in pair]
    commands.ip(*bridges, *joins, namespace=namespace)
    return "netem"


def _has_netem(commands: Commands, namespace: str) -> bool:
    """Whether this kernel has netem and bridges: tried on what nothing else uses."""
    try:
        commands.run("tc", "-n", namespace, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
        commands.ip("link add probe type bridge", "link del probe", namespace=namespace)
    except LabError:
        return False
    return True


def find_relay(namespace: str) -> int | None:
    """Return the id of the process that delays the frames of a namespace, None if none runs."""
    return next(_relays(namespace), None)


def stop_relay(namespace: str) -> None:
    """End the process that delays the frames of a namespace, if there is one, and no other process."""
    for pid in _relays(namespace):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            process = os.pidfd_open(pid)
            stack.callback(os.close, process)
            # From here on an id that becomes another process's does no harm. Anybody can start a process with those
            # words, but only the lab starts one in that namespace.
            where = Path("/proc", str(pid))
            if _is_relay(where, namespace) and (where / "ns/net").samefile(NETNS / namespace):
                signal.pidfd_send_signal(process, signal.SIGKILL)
                end = select.poll()
                end.register(process, select.POLLIN)
                if not end.poll(1000 * END_S):
                    raise LabError(f"Process {pid}, which delays the frames of {namespace}, does not end.")


def _relays(namespace: str) -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").glob("[0-9]*") if _is_relay(path, namespace))


def _is_relay(process: Path, namespace: str) -> bool:
    """Whether a process in /proc was started as the relay of a namespace, whichever installation it is of."""
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return len(words) == 7 and Path(os.fsdecode(words[3])).name == "relay.py" and os.fsdecode(words[4]) == namespace
