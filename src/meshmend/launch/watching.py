"""A job as it runs, read from the shared folder: what `meshmend watch` shows, and what metrics are made of."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from meshmend.errors import LaunchError
from meshmend.launch.goodput import Attempt, HostBook, TimeAccount, settle
from meshmend.launch.story import Tail
from meshmend.launch.timeline import Event, read_before

NAMES = re.compile(r"host-(\w+)\.jsonl")
STATES = ("starting", "training", "recovering", "waiting", "stalled", "over")
"""Waiting is for hosts: fewer are left than the job needs."""
QUIET_STEPS = 10
"""A job that has committed nothing for so many times its median step is stalled."""


class Watch:
    """A job's hosts, followed by their timelines. Its memory does not grow with the number of steps.

    `heard` is called with each event that is read.
    """

    def __init__(self, folder: str | Path, heard: Callable[[Event], None] = lambda _: None) -> None:
        self.folder = Path(folder)
        self._heard = heard
        if not self.folder.is_dir():
            raise LaunchError(f"There is no folder {self.folder}. Give the job's shared folder, as in --shared.")
        self.books: dict[str, HostBook] = {}
        self._tails: dict[str, Tail] = {}

    def read(self) -> None:
        """Read what has been written since the last time, also by hosts that are new."""
        inner = self.folder / "timeline"
        for path in sorted((inner if inner.is_dir() else self.folder).glob("host-*.jsonl")):
            found = NAMES.fullmatch(path.name)
            if found is not None and found[1] not in self.books:
                self.books[found[1]] = HostBook()
                self._add(found[1], read_before(path))
                self._tails[found[1]] = Tail(path, remember=False)
        for name, tail in self._tails.items():
            self._add(name, tail.read())

    def _add(self, name: str, events: list[Event]) -> None:
        for event in events:
            self.books[name].add(event)
            self._heard(event)

    def account(self, until: float | None = None) -> TimeAccount | None:
        """Return where the time went so far; None before the first step."""
        account = settle(list(self.books.values()), until)
        lost = {host for one in self._newest for host in one.lost}
        if account is None or not lost.intersection(account.hosts):
            return account
        # Lost since the last step: nobody has started without them yet.
        left = tuple(host for host in account.hosts if host not in lost)
        chips = account.chips * len(left) // len(account.hosts)
        return replace(account, hosts=left, chips=chips)

    @property
    def latest(self) -> dict[str, Attempt]:
        """The last attempt of each host."""
        return {name: book.attempts[-1] for name, book in self.books.items() if book.attempts}

    @property
    def _newest(self) -> list[Attempt]:
        """The hosts' parts of the newest attempt."""
        latest = self.latest.values()
        return [one for one in latest if one.number == max(other.number for other in latest)]

    def state(self, account: TimeAccount | None) -> str:
        """Return what the job with this account does now: one of `STATES`."""
        if account is None:
            return "starting"
        latest = list(self.latest.values())
        if any(one.over for one in latest):
            return "over"
        last = max(one.marks[-1][1] for one in latest if one.marks) if any(one.marks for one in latest) else 0.0
        if any(one.is_short and one.ended > max(last, *(each.started for each in latest)) for one in latest):
            return "waiting"
        if any((one.gave_up or 0.0) > last or one.started > last for one in latest):
            return "recovering"
        return "stalled" if time.time() - last > max(QUIET_STEPS * account.step_s, 1.0) else "training"

    def look(self) -> Look:
        """Read what is new, and return the job as it is now."""
        self.read()
        account, latest = self.account(), self.latest
        return Look(
            folder=str(self.folder),
            state=self.state(account),
            account=account,
            started=tuple(latest),
            losses=next((tuple(one.losses) for one in latest.values() if one.losses), ()),
            copies={name: one.kept for name, one in latest.items()},
            checkpoint=max((one.saved for one in latest.values()), default=0),
        )


@dataclass(frozen=True)
class Look:
    """A job at one moment: what `meshmend watch` shows, and what a job serves to those who watch it from elsewhere."""

    folder: str
    state: str
    account: TimeAccount | None
    """None before the first step."""
    started: tuple[str, ...]
    """Hosts that have started, ever."""
    losses: tuple[float, ...]
    """Of the last steps."""
    copies: dict[str, int]
    """By host, the last step of which it has a copy in memory."""
    checkpoint: int
    """The last one on disk."""

    def facts(self) -> dict[str, Any]:
        """Return everything as JSON can write it; `read_look` reads it."""
        account = {} if self.account is None else asdict(self.account) | self.account.facts()
        own = {name: value for name, value in vars(self).items() if name != "account"}
        return own | account
