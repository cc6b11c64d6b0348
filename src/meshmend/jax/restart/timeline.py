"""When everything happened: a small log that a restart can be taken apart with.

One line of JSON an event, in one file a host that later attempts go on with. A line is written whole, and survives the
process that wrote it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Event = dict[str, Any]

STAGES = ("detect", "rendezvous", "start", "plan", "compile", "restore", "first step")
"""What a recovery is made of, in order."""


class Timeline:
    """Notes events with the time of day, the host and the attempt; with no file, it only remembers them.

    >>> timeline = Timeline(None)
    >>> with timeline.timed("plan"):
    ...     pass
    >>> timeline.note("step", number=1)["number"]
    1
    >>> [event["event"] for event in timeline.events]
    ['plan', 'step']
    """

    def __init__(self, path: str | Path | None, **facts: Any) -> None:
        self.path = Path(path) if path is not None else None
        self.facts = facts
        self.events: list[Event] = []
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def note(self, event: str, *, at: float | None = None, **facts: Any) -> Event:
        """Write an event down; `at` is its time, by default now."""
        line: Event = {"at": time.time() if at is None else at, "event": event, **self.facts, **facts}
        self.events.append(line)
        if self.path is not None:
            handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(handle, (json.dumps(line) + "\n").encode())
            finally:
                os.close(handle)
        return line

    @contextmanager
    def timed(self, event: str, **facts: Any) -> Iterator[Event]:
        """Write an event down when it is over, with its seconds; more facts may be put into what is yielded."""
        started, more = time.time(), dict(facts)
        yield more
        self.note(event, at=started, seconds=time.time() - started, **more)


def read_timeline(path: str | Path) -> list[Event]:
    """Return the events of a file; a last line that is not whole (its writer was killed) is left out."""
    path = Path(path)
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def split_recovery(
    events: Sequence[Event], gave_up_at: Iterable[float], killed_at: float, committed_at: float
) -> dict[str, float]:
    """Take the time from a failure to the next committed step apart, in seconds by stage. They add up to all of it.

    `events` is the timeline of one survivor, `gave_up_at` when any of them gave up: until then is "detect", and until
    the new process starts "rendezvous". "start" is the interpreter, its imports, joining and the fabric; "first step"
    is what remains: reading data, connecting, and the step itself.
    """
    before = [event for event in events if event["at"] <= committed_at]
    start = max(i for i, event in enumerate(before) if event["event"] == "process")
    began = before[start]["at"]
    noticed = [at for at in gave_up_at if killed_at < at < began]
    spent = dict.fromkeys(STAGES, 0.0)
    spent["detect"] = min(noticed, default=killed_at) - killed_at
    spent["rendezvous"] = max(0.0, began - killed_at - spent["detect"])
    for event in before[start:]:
        stage = "start" if event["event"] in ("process", "join", "fabric") else event["event"]
        if stage in spent and "seconds" in event:
            spent[stage] += event["seconds"]
    spent["first step"] = committed_at - killed_at - sum(spent.values())
    return spent


def process_started_at() -> float:
    """Return when this process was started, as a time of day: before the interpreter and its imports."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
