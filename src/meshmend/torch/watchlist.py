"""The job's quarantine list as one chip under torchft sees it: at its start, and again at each step if it has changed.

There is no process 0 here that reads the list for all. Whether a chip is left out is its own affair: it leaves, and the
next quorum forms without it. What concerns all members, the cables, they exchange when they form a group
(`process_group`), and what any of them knows counts.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path

from meshmend.errors import Coordinate, QuarantineError, name_chip
from meshmend.launch.events import note_quarantined
from meshmend.launch.hosts import Hosts
from meshmend.launch.timeline import Timeline
from meshmend.quarantine import Quarantined, QuarantineList
from meshmend.quarantine.entries import cables_of, chips_of
from meshmend.topology import Cable, Mesh


class Watchlist:
    """What the list in a folder says of this chip, and of cables. Each entry becomes an event, once."""

    def __init__(self, shared: str | Path, whole: Mesh, chip: Coordinate, hosts: Hosts, timeline: Timeline) -> None:
        self.folder = Path(shared)
        self._whole, self._chip = whole, chip
        self._hosts, self._timeline = hosts, timeline
        self._list = QuarantineList(shared)
        self._entries: tuple[Quarantined, ...] = ()
        self._seen: set[tuple[str, float]] = set()
        self._version: tuple[int, ...] = ()

    def read(self) -> None:
        """Read the list; raise `QuarantineError` if it is damaged or that of another machine."""
        self._version = self._now()
        entries = self._list.read()
        for entry in entries:
            entry.suspect.check(self._whole.shape, len(self._hosts), self._whole.wrap)
        self._take(entries)

    def look(self) -> None:
        """Read the list if it has changed. A job that trains does not stop for a list that cannot be read."""
        try:
            if self._now() != self._version:
                self.read()
        except (QuarantineError, OSError) as error:
            warnings.warn(f"What was known before of chips in quarantine still counts: {error}", stacklevel=2)

    @property
    def active(self) -> tuple[Quarantined, ...]:
        """The entries that have not expired."""
        now = time.time()
        return tuple(entry for entry in self._entries if entry.until > now)

    @property
    def own(self) -> Quarantined | None:
        """The entry that leaves out this chip, None if there is none."""
        return next((entry for entry in self.active if self._chip in entry.suspect.chips(self._hosts)), None)

    @property
    def cables(self) -> frozenset[Cable]:
        """The cables in quarantine."""
        return frozenset(cables_of(self.active))

    @property
    def chips(self) -> list[Coordinate]:
        """The chips in quarantine."""
        return chips_of(self.active, self._hosts)

    def refusal(self, entry: Quarantined) -> QuarantineError:
        """Return the error of this chip, which is in quarantine."""
        until = time.strftime("%Y-%m-%d %H:%M", time.gmtime(entry.until))
        return QuarantineError(
            f"Chip {name_chip(self._chip)} leaves the job: {entry.suspect} is in quarantine until {until} UTC, "
            f"{entry.by if entry.by.startswith('by') else 'by ' + entry.by}, because of {entry.why[:500]}. The others "
            f"train without it. When it is repaired, clear it with `meshmend quarantine clear {self.folder} "
            f"{str(entry.suspect)!r}`, and start this process again."
        )

    def _take(self, entries: tuple[Quarantined, ...]) -> None:
        self._entries = entries
        for entry in self.active:
            if (str(entry.suspect), entry.since) not in self._seen:
                self._seen.add((str(entry.suspect), entry.since))
                note_quarantined(self._timeline, entry, self._hosts)

    def _now(self) -> tuple[int, ...]:
        """Return what changes whenever the file does: it is replaced as a whole."""
        try:
            found = self._list.path.stat()
        except FileNotFoundError:
            return ()
        return found.st_ino, found.st_mtime_ns, found.st_size
