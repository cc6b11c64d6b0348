"""Which chip is lost: whoever gives up a call reports whom it waited for, in the store, and follows others' reports.

A chip that gives up closes its connections, so that the others give up as well. The chip that a survivor waited for is
therefore often a survivor, too. Survivors report; a chip that is dead or frozen does not. The way leads from report to
report, and the first chip without one is the lost chip.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch.distributed as dist

from meshmend.errors import Coordinate, name_chip
from meshmend.launch.cables import answering
from meshmend.topology import parse_chip

SILENCE_S = 1.0
"""How long to wait for a report. Survivors report within milliseconds of each other, on a busy machine within tenths
of a second."""
LIMIT_S = 3 * SILENCE_S
"""How long a search may take: a store whose process is frozen never answers."""
FRESH_S = 300.0
"""For how long a report counts: whoever goes on after it, in another group, may be lost later."""
STARTED = time.time()
"""Older reports do not count: torchrun starts all members again with the store of those before them."""


class Reports:
    """The reports of a job's chips, in a store that its groups share. `first` is the chip of the job's rank 0.

    A TCP store is kept by the process of rank 0, unless torchrun's agent keeps it. One that does not answer says that
    this process is lost, if its host answers.
    """

    def __init__(self, store: dist.Store, own: Coordinate, first: Coordinate | None) -> None:
        self._store = store
        self._own = own
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._kept = store if isinstance(store, dist.TCPStore) and is_kept else None
        self._keeper = None if self._kept is None else first
        self.known = ""
        """What else the last search has shown."""
        self._reported_at = -FRESH_S

    @classmethod
    def of(cls, group: object, chips: Mapping[int, Coordinate]) -> Reports | None:
        """Return the reports of a process group whose members are these chips; None where it has no store."""
        if not isinstance(group, dist.ProcessGroup) or group.rank() not in chips:
            return None
        try:
            store: dist.Store = group.get_group_store()
        except (AttributeError, RuntimeError):
            return None
        return cls(store, chips[group.rank()], chips.get(0) if group is dist.group.WORLD else None)

    def find(self, waited: Sequence[Coordinate]) -> Coordinate | None:
        """Report that this chip gave up waiting for these, the first of them first; return the lost chip.

        None where every chip on the way has reported: then a connection broke, and both of its ends are alive.
        """
        found: list[Coordinate | None] = []

        def search() -> None:
            with suppress(RuntimeError):  # the store's connection broke
                found.append(self._search(waited))

        thread = threading.Thread(target=search, name="meshmend-lost", daemon=True)
        thread.start()
        thread.join(LIMIT_S)
        if found and self._own == self._keeper:
            time.sleep(SILENCE_S)  # the others are still reading
        if found or self._keeper is None or self._keeper_answers():
            return found[0] if found else self._keeper
        self.known = f"; the store at chip {name_chip(self._keeper)} does not answer: its host or the way there is lost"
        return None

    def _keeper_answers(self) -> bool:
        """Return whether the host of the store's process answers, also where it cannot be asked (IPv6, say)."""
        assert self._kept is not None  # noqa: S101  # it has a keeper
        try:
            return bool(answering([self._kept.host], hops=64, port=self._kept.port))
        except OSError:
            return True

    def _search(self, waited: Sequence[Coordinate]) -> Coordinate | None:
        if time.time() - self._reported_at >= FRESH_S:  # what comes soon after a report follows from it
            self._reported_at = time.time()
            self._store.set(_key(self._own), ";".join([f"{self._reported_at:.3f}", *map(_name, waited)]))
        ahead, seen = list(waited), {self._own}
        while ahead:
            chip = ahead.pop(0)
            if chip in seen:
                continue
            seen.add(chip)
            report = self._report_of(chip)
            if report is None:
                return chip
            ahead = report + ahead
        return None

    def _report_of(self, chip: Coordinate) -> list[Coordinate] | None:
        """Return whom a chip waited for; None if it does not say so for a while.

        The store is asked less and less often: thousands of chips may ask it.
        """
        ends_at, pause_s = time.monotonic() + SILENCE_S, 0.01
        while True:
            if self._store.check([_key(chip)]):
                at, *names = self._store.get(_key(chip)).decode().split(";")
                if float(at) > max(STARTED, time.time() - FRESH_S):
                    return [parse_chip(name) for name in names]
            left_s = ends_at - time.monotonic()
            if left_s <= 0:
                return None
            time.sleep(min(pause_s, left_s))
            pause_s *= 2


def _name(chip: Coordinate) -> str:
    return ",".join(map(str, chip))


def _key(chip: Coordinate) -> str:
    return f"meshmend/gave up/{_name(chip)}"
