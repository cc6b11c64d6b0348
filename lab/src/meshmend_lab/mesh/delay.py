"""Links with a delay: each cable leads through one more namespace of the lab, in which every frame waits.

A cable is then two veth pairs, whose far ends lie in the delay namespace. The rate is kept at the chips' ends, as
without a delay, so that a frame first takes its time on the link and then waits. The far ends of a cable are connected
by a bridge, with the kernel's netem on each.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from meshmend_lab.errors import LabError
from meshmend_lab.mesh.commands import Commands

DELAY = re.compile(r"([1-9]\d{0,5})(us|ms|s)", re.ASCII)
MAX_DELAY_S = 1.0
SUFFIX = "delay"
"""Of the delay namespace's name, where those of chips have their coordinates."""
FRAMES = 100_000
"""How many frames netem holds per link; by default it drops all beyond 1,000."""


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


def connect(commands: Commands, namespace: str, n_cables: int, delay: str, mtu: int) -> None:
    """Connect the far ends of every cable with this delay; raise `LabError` where the kernel cannot."""
    pairs = [far_ends(cable) for cable in range(n_cables)]
    commands.ip(*(f"link set {end} up" for pair in pairs for end in pair), namespace=namespace)
    if not _has_netem(commands, namespace):
        raise LabError(
            f"This kernel has no netem or no bridges, which a delay of {delay} needs. Load sch_netem and bridge with "
            f"modprobe, or leave the delay out."
        )
    waits = [f"qdisc add dev {end} root netem delay {delay} limit {FRAMES}" for pair in pairs for end in pair]
    commands.run("tc", "-n", namespace, "-batch", "-", lines=waits)
    bridges = [f"link add cable{cable} up mtu {mtu} type bridge" for cable in range(n_cables)]
    joins = [f"link set {end} master cable{cable}" for cable, pair in enumerate(pairs) for end in pair]
    commands.ip(*bridges, *joins, namespace=namespace)


def _has_netem(commands: Commands, namespace: str) -> bool:
    """Whether this kernel has netem and bridges: tried on what nothing else uses."""
    try:
        commands.run("tc", "-n", namespace, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
        commands.ip("link add probe type bridge", "link del probe", namespace=namespace)
    except LabError:
        return False
    return True
