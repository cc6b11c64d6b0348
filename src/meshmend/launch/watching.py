"""A job as it runs, read from the shared folder: what `meshmend watch` shows, and what metrics are made of."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from meshmend.errors import LaunchError
from meshmend.launch.goodput import Attempt, HostBook, TimeAccount, settle
from meshmend.launch.story import Tail
from meshmend.launch.timeline import read_before

NAMES = re.compile(r"host-(\w+)\.jsonl")
STATES = ("starting", "training", "recovering", "stalled", "over")
QUIET_STEPS = 10
"""A job that has committed nothing for so many times its median step is stalled."""


class Watch:
    """A job's hosts, followed by their timelines. Its memory does not grow with the number of steps."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
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
                self.books[found[1]] = HostBook(read_before(path))
                self._tails[found[1]] = Tail(path, remember=False)
        for name, tail in self._tails.items():
            for event in tail.read():
                self.books[name].add(event)

    def account(self, until: float | None = None) -> TimeAccount | None:
        """Return where the time went so far; None before the first step."""
        return settle(list(self.books.values()), until)

    @property
    def latest(self) -> dict[str, Attempt]:
        """The last attempt of each host."""
        return {name: book.attempts[-1] for name, book in self.books.items() if book.attempts}

    def state(self, account: TimeAccount | None) -> str:
        """Return what the job with this account does now: one of `STATES`."""
        if account is None:
            return "starting"
        latest = list(self.latest.values())
        if any(one.over for one in latest):
            return "over"
        last = max(one.marks[-1][1] for one in latest if one.marks) if any(one.marks for one in latest) else 0.0
        if any((one.gave_up or 0.0) > last or one.started > last for one in latest):
            return "recovering"
        return "stalled" if time.time() - last > max(QUIET_STEPS * account.step_s, 1.0) else "training"

    def facts(self) -> dict[str, Any]:
        """Return everything as JSON can write it."""
        account = self.account()
        return {
            "folder": str(self.folder),
            "state": self.state(account),
            **({} if account is None else account.facts()),
            "copies": {name: one.kept for name, one in self.latest.items()},
            "checkpoint": max((one.saved for one in self.latest.values()), default=0),
        }
