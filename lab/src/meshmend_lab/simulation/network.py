"""Connections between hosts and the store: ordered in each direction, as TCP is, late, cut off, or reset."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from meshmend_lab.simulation.kernel import Actor, Queue

Message = dict[str, Any]
EOF: Message = {"type": "end of file"}
BEAT: Message = {"type": "beat"}
TO_STORE, TO_HOST = 0, 1
LONGEST_LATENCY_S = 1.5


class Network:
    """The network between hosts and the store, and who is switched off."""

    def __init__(self, queue: Queue, latency_s: float) -> None:
        self.queue = queue
        self.latency_s = latency_s
        self.wires: list[Wire] = []
        self.n_wires = 0
        self.cuts: Counter[tuple[int, int]] = Counter()
        """Partitions, by host and direction."""
        self.apart: Counter[int] = Counter()
        """Partitions of a host from all others, which cannot train with it then."""
        self.off: set[int] = set()
        """Hosts without power: whoever sends to them hears nothing."""
        self.store_is_off = False

    def delay(self) -> float:
        """Return how long a message takes: now and then a lost packet is sent again."""
        random = self.queue.rng.random
        return min(self.latency_s, LONGEST_LATENCY_S) * (0.2 + random()) + (random() * 0.4 if random() < 0.01 else 0.0)

    def is_cut(self, host: int) -> bool:
        """Whether a host's messages do not pass in some direction."""
        return bool(self.cuts[host, TO_STORE] or self.cuts[host, TO_HOST])

    def cut(self, host: int, ways: tuple[int, ...], seconds: float) -> None:
        """Cut a host off from the store in these directions for a while."""
        for way in ways:
            self.cuts[host, way] += 1
            self.queue.at(self.queue.now + seconds, None, self.heal, host, way)

    def heal(self, host: int, way: int) -> None:
        """End one partition: what was held back arrives."""
        if self.cuts[host, way]:
            self.cuts[host, way] -= 1
        if not self.cuts[host, way]:
            for wire in self.wires:
                if wire.number == host:
                    wire.flush(way)

    def rejoin(self, host: int) -> None:
        """End one partition of a host from the others."""
        self.apart[host] = max(0, self.apart[host] - 1)

    def speed_up(self, factor: float) -> None:
        """End a time of late messages."""
        self.latency_s /= factor

    def heal_all(self) -> None:
        """End all partitions."""
        self.apart.clear()
        for (host, way), n in list(self.cuts.items()):
            for _ in range(n):
                self.heal(host, way)


class Wire:
    """One connection. Each end is an actor with what it does when a message has arrived."""

    def __init__(
        self,
        network: Network,
        number: int,
        store: tuple[Actor, Callable[..., None]],
        host: tuple[Actor, Callable[..., None]],
    ) -> None:
        self.network = network
        self.number = number
        self.ends = (store, host)
        """Who receives, by direction."""
        self.is_open = [True, True]
        """By end: whether it has closed, or was told that the other has."""
        self.is_lost = False
        """A middlebox has forgotten it: nothing arrives any more, and nobody is told."""
        self._last_at = [0.0, 0.0]
        self._held: tuple[deque[Message], deque[Message]] = (deque(), deque())
        network.n_wires += 1
        self._serial = network.n_wires
        network.wires.append(self)

    def __hash__(self) -> int:
        return self._serial  # sets of connections are gone through in the same order on every run

    def __eq__(self, other: object) -> bool:
        return self is other

    def send(self, way: int, message: Message) -> bool:
        """Send a message; return whether this end could."""
        if not self.is_open[1 - way]:
            return False
        self._transmit(way, message)
        return True

    def beat(self) -> None:
        """Send a heartbeat to the store: without an event of its own where nothing is under way before it."""
        network, (store, receive) = self.network, self.ends[TO_STORE]
        if not self.is_open[1]:
            return
        is_clear = self._last_at[TO_STORE] <= network.queue.now and self.is_open[TO_STORE] and not store.is_dead
        if is_clear and not self.is_lost and not self._held[TO_STORE] and not network.cuts[self.number, TO_STORE]:
            receive(self, BEAT)
        else:
            self._transmit(TO_STORE, BEAT)

    def close(self, end: int, *, quietly: bool = False) -> None:
        """Close one end; `quietly` if its machine is off, so that the other end is not told."""
        if self.is_open[end]:
            self.is_open[end] = False
            if quietly:
                self._held[1 - end].clear()
            else:
                self._transmit(1 - end, EOF)
        if not any(self.is_open) and not any(self._held):
            self.network.wires = [wire for wire in self.network.wires if wire is not self]

    def reset(self) -> None:
        """Break the connection in the middle: each end hears of it."""
        for way in (TO_STORE, TO_HOST):
            self._transmit(way, EOF)

    def flush(self, way: int) -> None:
        """Deliver what was held back."""
        held = list(self._held[way])
        self._held[way].clear()
        for message in held:
            self._transmit(way, message)

    def _transmit(self, way: int, message: Message) -> None:
        if self.is_lost:
            return
        network = self.network
        if self._held[way] or network.cuts[self.number, way]:
            self._held[way].append(message)
            return
        self._last_at[way] = at = max(self._last_at[way], network.queue.now + network.delay())
        network.queue.at(at, None, self._deliver, way, message)

    def _deliver(self, way: int, message: Message) -> None:
        actor, receive = self.ends[way]
        is_off = self.network.store_is_off if way == TO_STORE else self.number in self.network.off
        if actor.is_dead or not self.is_open[way]:
            if not is_off and message is not EOF and self.is_open[1 - way]:
                self._transmit(1 - way, EOF)  # the kernel there knows no such connection: a reset
            return
        if not self.is_lost:
            receive(self, message)
