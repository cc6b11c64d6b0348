"""What has happened in a job so far, read from its hosts' timelines as they grow: for those who watch it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshmend.launch.timeline import earlier_files, parse_lines, split_recovery

Event = dict[str, Any]

STEPS = ("kept", "step")
"""Events that say that a host has done a step: its copy is in memory, or the script says so."""


class Tail:
    """The events of one timeline; `read` adds those that have been written since.

    A file that was full and has been renamed is read to its end first. `remember=False` is for readers that keep what
    they need themselves.
    """

    def __init__(self, path: Path, *, remember: bool = True) -> None:
        self.path = path
        self.events: list[Event] = []
        self._remember = remember
        self._inode = 0
        self._offset = 0

    def read(self) -> list[Event]:
        """Return the events that are new. A line that is not whole yet is left for the next time."""
        new: list[Event] = []
        for path in (*earlier_files(self.path), self.path):
            try:
                with path.open("rb") as file:
                    inode = os.fstat(file.fileno()).st_ino
                    if inode != self._inode:
                        if path != self.path:
                            continue  # read to its end already, or older than what is followed here
                        self._inode, self._offset = inode, 0
                    file.seek(self._offset)
                    data = file.read()
            except OSError:
                continue
            whole = data.rfind(b"\n") + 1
            self._offset += whole
            new += parse_lines(data[:whole] if self._remember else _without_old_copies(data[:whole]))
        if self._remember:
            self.events += new
        return new


def _without_old_copies(lines: bytes) -> bytes:
    """Leave out that there is a copy of a step, where there is one of a later step: they are half of the lines."""
    found = lines.splitlines(keepends=True)
    copies = [number for number, line in enumerate(found) if b'"event": "kept"' in line[:64]]
    for number in reversed(copies[:-1]):
        del found[number]
    return b"".join(found)


@dataclass(frozen=True)
class Recovery:
    """How the others continued after hosts were lost."""

    step: int
    """The first that all of them have done since."""
    resumed: int
    source: str
    total_s: float
    stages_s: dict[str, float]


class Story:
    """The timelines of a job's hosts."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.tails = {host: Tail(path) for host, path in enumerate(paths)}
        self.began = time.time()

    def read(self) -> None:
        """Read what is new."""
        for tail in self.tails.values():
            tail.read()

    def step_of(self, host: int) -> int:
        """Return the last step that a host has done since this began to watch; 0 if there is none."""
        return max((event["step"] for event in self._steps(host, self.began)), default=0)

    @property
    def step(self) -> int:
        """The last step that any host has done."""
        return max((self.step_of(host) for host in self.tails), default=0)

    @property
    def meshes(self) -> list[int]:
        """Chips that the job has trained on, in order."""
        found: list[tuple[float, int]] = sorted(
            (event["at"], event["chips"])
            for tail in self.tails.values()
            for event in tail.events
            if event["event"] == "fabric" and event["at"] > self.began
        )
        chips = [chips for _, chips in found]
        return [n for i, n in enumerate(chips) if i == 0 or chips[i - 1] != n]

    def recovery(self, survivors: Iterable[int], killed_at: float) -> Recovery | None:
        """Return how these hosts continued after a failure at some time; None if they have not all done so yet."""
        firsts: dict[int, Event] = {}
        for host in survivors:
            restored = [event for event in self.tails[host].events if event["event"] == "restore"]
            since = max((event["at"] for event in restored if event["at"] > killed_at), default=float("inf"))
            if (steps := self._steps(host, since)) == []:
                return None
            firsts[host] = steps[0]
        if not firsts:
            return None
        last = max(firsts, key=lambda host: firsts[host]["at"])
        at = firsts[last]["at"]
        restored = [e for e in self.tails[last].events if e["event"] == "restore" and killed_at < e["at"] <= at]
        gave_up = [e["at"] for host in firsts for e in self.tails[host].events if e["event"] == "gave up"]
        return Recovery(
            step=firsts[last]["step"],
            resumed=restored[-1].get("step", 0),
            source=str(restored[-1].get("source", "")),
            total_s=at - killed_at,
            stages_s=split_recovery(self.tails[last].events, gave_up, killed_at, at),
        )

    def _steps(self, host: int, since: float) -> list[Event]:
        return [e for e in self.tails[host].events if e["event"] in STEPS and e["at"] > since and "step" in e]
