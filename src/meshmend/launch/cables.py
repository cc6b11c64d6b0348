"""Dead and slow cables between hosts that still reach each other: who notices them, and what is told.

Each member asks the hosts of its neighbours, again and again, for an answer over their cable alone: it begins a TCP
connection whose packets may not be forwarded (a time to live of one). The kernel answers, if only to refuse, also for a
process that computes or has stopped; over a detour nothing answers. So what is noticed is the cable, and whether the
job stalls by it or crawls along a detour makes no difference. Only a cable that has answered before is accused: where
routers lie between neighbours, none is.

A member decides nothing alone. With news it sets a flag in the words that all members exchange before each call. Then
all of them tell all which of their cables are dead or slow, and plan around what any of them has told (`MeshGroup`).
Members agree on the plan itself before data moves, so that whoever got anything else ends with an error. That is
PyTorch, where members also find slow cables (`torch.slow`). The agents of `meshmend run` put a dead cable on the
quarantine list and start a round.
"""

from __future__ import annotations

import errno
import fcntl
import selectors
import socket
import struct
import threading
import time
import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from fractions import Fraction

from meshmend.errors import Coordinate
from meshmend.topology import Cable, name_cable, parse_cable_rate

PERIOD_S = 0.5
"""How often neighbours are asked."""
ANSWER_S = 0.7
"""How long an answer may take: queues in front of a busy link are long, and a late answer costs no more than a miss."""
MISSES = 3
"""Answers missed in a row that make a cable dead."""
ANSWERS = 10
"""Answers in a row that make it alive again: a loose plug is worse than a cable that is not used."""
PORT = 9
"""Discard: hardly anybody listens, and to be refused is an answer."""
TOLD_BYTES = 512
"""Of what a member tells: a host has few cables, and what does not fit is told when others work again."""
SIOCGIFADDR = 0x8915


class CableHealth:
    """What the answers over a chip's own cables say: a value that knows no sockets and no clock.

    >>> health = CableHealth((0, 0))
    >>> for answers in (True, False, False, False):
    ...     health.note({(0, 1): answers, (1, 0): True})
    >>> health.dead
    frozenset({((0, 0), (0, 1))})
    """

    def __init__(self, chip: Coordinate) -> None:
        self.chip = chip
        self.dead: frozenset[Cable] = frozenset()
        self.answering: frozenset[Cable] = frozenset()
        """Those that have answered once, and are not dead."""
        self._run: dict[Coordinate, int] = {}
        """Of neighbours that have answered once: answers in a row, or misses in a row as a number below zero."""

    def note(self, answered: Mapping[Coordinate, bool]) -> None:
        """Take in which neighbours have answered this time."""
        dead = set(self.dead)
        for neighbour, has_answered in answered.items():
            run = self._run.get(neighbour, 0)
            if has_answered:
                run = max(run, 0) + 1
            elif neighbour in self._run:
                run = min(run, 0) - 1
            else:
                continue
            self._run[neighbour] = run
            cable = (min(self.chip, neighbour), max(self.chip, neighbour))
            self.answering |= {cable}
            if run <= -MISSES:
                dead.add(cable)
            elif run >= ANSWERS:
                dead.discard(cable)
        self.dead = frozenset(dead)
        self.answering -= self.dead


class CableWatch:
    """Asks a chip's neighbours in a thread of its own. What it knows outlives the groups that it watches for."""

    def __init__(self, chip: Coordinate) -> None:
        self._health = CableHealth(chip)
        self.slow: dict[str, Fraction] = {}
        """The rates of the chip's slow cables, as parts of the fastest one's."""
        self._ended = threading.Event()

    @property
    def dead(self) -> frozenset[Cable]:
        """The chip's cables that do not answer any more."""
        return self._health.dead

    @property
    def answering(self) -> frozenset[Cable]:
        """The chip's cables that have answered, and are not dead."""
        return self._health.answering

    @property
    def rates(self) -> dict[str, Fraction]:
        """The rates of the chip's slow cables, 0 for dead ones."""
        return self.slow | {name_cable(cable): Fraction(0) for cable in self.dead}

    def learn(self, rates: Mapping[str, Fraction]) -> None:
        """Keep which cables of this chip are slow, of all that a group has measured."""
        own = ",".join(map(str, self._health.chip))
        before, self.slow = self.slow, {name: rate for name, rate in rates.items() if rate and own in name.split("-")}
        for name in sorted(self.slow.keys() - before.keys()):
            warnings.warn(
                f"Cable {name} has about {self.slow[name]} of the fastest cable's rate. Plans send less over it until "
                "it is faster. Look at both of its ends.",
                stacklevel=2,
            )

    def begin(self, own: str, addresses: Mapping[Coordinate, str], *, with_detour: bool = False) -> None:
        """Watch the cables to these neighbours; those without an address, or with this host's, have none.

        `with_detour`: a miss counts only where the neighbour answers over a detour, so that its host is alive.
        """
        self.end()
        wired = {chip: address for chip, address in addresses.items() if address not in ("", own)}
        if own and wired:
            self._ended = threading.Event()
            given = (wired, self._ended, with_detour)
            threading.Thread(target=self._ask, args=given, name="meshmend-cables", daemon=True).start()

    def end(self) -> None:
        """Watch no longer."""
        self._ended.set()

    def _ask(self, wired: Mapping[Coordinate, str], ended: threading.Event, with_detour: bool) -> None:
        while not ended.is_set():
            found, before = answering(wired.values()), self.dead
            missed = set(wired.values()) - found
            counted = found | (answering(missed, hops=64) if with_detour else missed)
            self._health.note({chip: address in found for chip, address in wired.items() if address in counted})
            for cable in sorted(self.dead - before):
                warnings.warn(
                    f"Cable {name_cable(cable)} does not answer any more. Plans avoid it until it has answered for a "
                    "while. Look at both of its ends.",
                    stacklevel=2,
                )
            ended.wait(PERIOD_S)


def answering(addresses: Iterable[str], hops: int = 1, port: int = PORT) -> set[str]:
    """Return which of these addresses answer over so many hops: over one, without any host between."""
    found: set[str] = set()
    with selectors.DefaultSelector() as waiting, ExitStack() as stack:
        for address in addresses:
            probe = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            probe.setblocking(False)
            probe.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, hops)
            # What fails at once has no way to the neighbour.
            if probe.connect_ex((address, port)) == errno.EINPROGRESS:
                waiting.register(probe, selectors.EVENT_WRITE, (address, probe))
        until = time.monotonic() + ANSWER_S
        # A thread that comes late still finds what the kernel has heard meanwhile.
        while waiting.get_map() and (ready := waiting.select(max(0.0, until - time.monotonic()))):
            for key, _ in ready:
                waiting.unregister(key.fileobj)
                address, probe = key.data
                if probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in (0, errno.ECONNREFUSED):
                    found.add(address)
    return found


def address_of(interface: str | None) -> str:
    """Return the IPv4 address of a network interface; nothing where it is not named or has none."""
    if not interface:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        try:
            found = fcntl.ioctl(handle, SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(found[20:24])


def tell(rates: Mapping[str, Fraction]) -> bytes:
    """Return the rates of cables as a member tells them to all others."""
    words: list[str] = []
    for name, rate in sorted(rates.items()):
        if len(";".join([*words, f"{name}={rate}"])) <= TOLD_BYTES:
            words.append(f"{name}={rate}")
    return ";".join(words).encode().ljust(TOLD_BYTES)


def told(words: Iterable[bytes]) -> dict[str, Fraction]:
    """Return the lowest rate of each cable that any member has told.

    >>> told([tell({"0,0-0,1": Fraction(1, 2)}), tell({"0,0-0,1": Fraction(0)})])
    {'0,0-0,1': Fraction(0, 1)}
    """
    found: dict[str, Fraction] = {}
    for name, rate in (parse_cable_rate(text) for word in words for text in word.decode().split(";") if text.strip()):
        found[name] = min(Fraction(rate), found.get(name, Fraction(1)))
    return found
