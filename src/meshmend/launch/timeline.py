"""The timeline: a small log of when everything happened, to break a restart down into stages.

One line of JSON per event, in one file per host that later attempts append to. A line is written atomically, and
survives the process that wrote it. Its size is bounded: a full file is renamed, and what it replaces goes into a
history in which a thousand steps are one line. A log that cannot be written never stops the job, nor does a disk
that hangs: a thread writes, which an event waits for only as long as the disk answers.
"""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from meshmend.files import locked
from meshmend.launch.history import MARK, is_taken_in, take_in

Event = dict[str, Any]

STAGES = ("detect", "rendezvous", "start", "plan", "compile", "restore", "first step")
"""What a recovery is made of, in order."""

MAX_EVENTS = 10_000
"""Events that are remembered in memory."""
MAX_FILE_BYTES = 48 << 20
"""All files of a host together: the current one, the one before it (about 60,000 steps in both), and the history."""
MAX_LINE_BYTES = 256 << 10
"""Of one event, which may list 20,000 hosts; what is longer keeps its time and name only."""
HUNG_AFTER_S = 5.0
"""How long an event waits for its line to be written. After that none does, until all that were left are written."""
IDLE_S = 5.0
"""How long the thread that writes stays without anything to write."""


class Timeline:
    """Records events with the time, the host and the attempt; without a file, only in memory.

    >>> timeline = Timeline(None)
    >>> with timeline.timed("plan"):
    ...     pass
    >>> timeline.note("step", number=1)["number"]
    1
    >>> [event["event"] for event in timeline.events]
    ['plan', 'step']
    """

    def __init__(self, path: str | Path | None, *, max_bytes: int = MAX_FILE_BYTES, **facts: Any) -> None:
        self.path = Path(path) if path is not None else None
        self.max_bytes = max_bytes
        self.facts = facts
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._changed = threading.Condition()
        self._lines: deque[tuple[int, bytes]] = deque(maxlen=MAX_EVENTS)
        """Lines that are still to be written, each with its number."""
        self._n_lines = self._n_written = 0
        self._writer: threading.Thread | None = None
        self._hangs = False
        self._error: OSError | None = None
        self._warned = False
        self._turning: threading.Thread | None = None

    def note(self, event: str, *, at: float | None = None, **facts: Any) -> Event:
        """Record an event; `at` is its time, by default now.

        It is in the file when this returns, unless the disk hangs: then it will be when the disk is back.
        """
        line: Event = {"at": time.time() if at is None else at, "event": event, **self.facts, **facts}
        text = json.dumps(line).encode() + b"\n"
        if len(text) > min(MAX_LINE_BYTES, self.max_bytes // 5):
            line = {"at": line["at"], "event": event[:100], "left_out_bytes": len(text)}
            text = json.dumps(line).encode() + b"\n"
        with self._changed:
            self.events.append(line)
            if self.path is not None:
                self._n_lines += 1
                self._lines.append((self._n_lines, text))
                self._wait_written(self.path, self._n_lines)
        self._warn()
        return line

    def _wait_written(self, path: Path, number: int) -> None:
        """Wait for a line, with the lock held, if the disk is not known to hang."""
        if self._writer is None or not self._writer.is_alive():  # a fork has no threads
            self._writer = threading.Thread(
                target=self._write_lines, args=(path, IDLE_S), name="meshmend-timeline", daemon=True
            )
            try:
                self._writer.start()
            except RuntimeError:  # at the end of the interpreter there are no new threads
                self._write_lines(path, 0.0)
        self._changed.notify_all()
        if not self._hangs and not self._changed.wait_for(lambda: self._n_written >= number, HUNG_AFTER_S):
            self._hangs = True
            self._error = TimeoutError(f"no answer within {HUNG_AFTER_S:g} s")

    def _write_lines(self, path: Path, idle_s: float) -> None:
        """Write what there is, until there is nothing for so long."""
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._lines, idle_s):
                    self._writer = None
                    return
                number, text = self._lines.popleft()
            error = None
            try:
                self._append(path, text)
            except OSError as why:
                error = why
            with self._changed:
                self._n_written, self._error = number, error or self._error
                self._hangs = self._hangs and bool(self._lines)
                self._changed.notify_all()

    def _append(self, path: Path, text: bytes) -> None:
        if not self._write(path, text):
            self._turn_over(path, len(text))
            self._write(path, text)

    def _write(self, path: Path, text: bytes) -> bool:
        """Add a line to the current file; return False, and add nothing, if the file is full."""
        handle = _open(path)
        try:
            size = os.fstat(handle).st_size
            if self._is_full(size, len(text)):
                return False
            if size and os.pread(handle, 1, size - 1) != b"\n":
                # A writer that was killed, or a full disk, has left a torn line: it must not spoil this one.
                text = b"\n" + text
            if os.write(handle, text) < len(text):
                raise OSError("the disk took only a part of a line")
            return True
        finally:
            os.close(handle)

    def _is_full(self, size: int, more: int) -> bool:
        return bool(size) and size + more >= self.max_bytes // 5

    def _turn_over(self, path: Path, more: int) -> None:
        """Begin a new file; the one before the last goes into the history, in a thread: that may take a second.

        A host's agent and its worker may find a file full at the same moment, so this is for one at a time.
        """
        if self._turning is not None:
            self._turning.join()
        older, full = _older(path), _full(path)
        with ExitStack() as lock:
            lock.enter_context(locked(path))
            if not self._is_full(path.stat().st_size if path.exists() else 0, more):
                return  # the other one has begun a new file
            if full.exists():  # of a process that was killed before it had condensed it
                self._condense(path, full)
            if older.exists():
                older.replace(full)
            path.replace(older)
            if full.exists():
                self._turning = threading.Thread(target=self._condense, args=(path, full, lock.pop_all()), daemon=True)
                self._turning.start()

    def _condense(self, path: Path, full: Path, lock: ExitStack | None = None) -> None:
        try:
            if not is_taken_in(_read_file(_history(path)), full):
                take_in(_history(path), full, _events, max_bytes=self.max_bytes // 5)
            full.unlink()
        except OSError as error:
            self._error = error  # which the next event says
        finally:
            if lock is not None:
                lock.close()

    def _warn(self) -> None:
        if self._error is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"The timeline {self.path} cannot be written: {self._error}. The job continues without it; its last "
                f"{MAX_EVENTS:,} events are still in memory.",
                stacklevel=3,
            )

    @contextmanager
    def timed(self, event: str, **facts: Any) -> Iterator[Event]:
        """Record an event when it is over, with its seconds; more facts may be put into what is yielded."""
        started, more = time.time(), dict(facts)
        yield more
        self.note(event, at=started, seconds=time.time() - started, **more)


def _open(path: Path) -> int:
    """Open a log to be added to. It is opened for each line: others add to it and rename it, too."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
    try:
        return os.open(path, flags, 0o644)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o644)


def read_timeline(path: str | Path) -> list[Event]:
    """Return the events of a host, oldest first; torn lines (of a killed writer) are left out.

    What is older than the last two files comes from the history, where an event called "steps" stands for many.
    """
    return [*read_before(path), *_read_file(Path(path))]


def read_before(path: str | Path) -> list[Event]:
    """Return the events of a host that are older than its current file."""
    path, full = Path(path), _full(Path(path))
    while True:
        history = _read_file(_history(path))
        parts = (_older(path),) if is_taken_in(history, full) else (full, _older(path))
        events = [event for part in parts for event in _read_file(part)]
        if len(_read_file(_history(path))) == len(history):  # else a file was condensed meanwhile
            return [*(event for event in history if event["event"] != MARK), *events]


def _read_file(path: Path) -> list[Event]:
    return list(_events(path))


def _events(path: Path) -> Iterator[Event]:
    """Return the events of one file, each as it is read: a full file's events would take a hundred megabytes."""
    try:
        with path.open("rb") as file:
            for line in file:
                if (event := parse(line)) is not None:
                    yield event
    except FileNotFoundError:
        return


def parse_lines(lines: bytes) -> list[Event]:
    """Return the events of whole lines."""
    try:
        # All at once takes a third of the time, and torn lines are rare.
        found: list[Event] = json.loads(b"[" + b",".join(lines.splitlines()) + b"]")
    except (ValueError, RecursionError):
        found = []
    if len(found) == lines.count(b"\n") and all(map(is_event, found)):
        return found
    return [event for line in lines.splitlines(keepends=True) if (event := parse(line)) is not None]


def parse(line: bytes) -> Event | None:
    """Return the event of a whole line, None if it is none."""
    if not line.endswith(b"\n"):
        return None
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if is_event(event) else None


def is_event(found: Any) -> bool:
    """Whether this is what `note` writes."""
    return isinstance(found, dict) and "at" in found and "event" in found


def earlier_files(path: Path) -> tuple[Path, Path]:
    """Return where a timeline's current file may be once it is full, the earlier one first."""
    return _full(path), _older(path)


def _older(path: Path) -> Path:
    """Return the path of the previous file of a log."""
    return path.with_name(path.name + ".1")


def _full(path: Path) -> Path:
    """Return the path of the file before that, while it is being condensed."""
    return path.with_name(path.name + ".full")


def _history(path: Path) -> Path:
    """Return the path of what is kept of all files before that."""
    return path.with_name(path.name + ".history")


def split_recovery(
    events: Sequence[Event], gave_up_at: Iterable[float], killed_at: float, committed_at: float
) -> dict[str, float]:
    """Split the time from a failure to the next committed step into stages, in seconds. They add up to the total.

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
