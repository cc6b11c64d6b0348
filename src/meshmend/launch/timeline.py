"""The timeline: a small log of when everything happened, to break a restart down into stages.

One line of JSON per event, in one file per host that later rounds append to. A line is written whole, and survives the
process that wrote it. Its size is bounded: when a file is full, a thousand of its older steps become one line, with the
times of the first and the last, and everything else stays as it was. So what the time of a job was spent on can be told
after millions of steps. A thread writes, and no event waits for it: neither a full disk nor one that hangs stops a job.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import shutil
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from meshmend.files import locked

Line = dict[str, Any]
"""An event as it is written. `launch.events` has the kinds of events and their fields."""

STAGES = ("detect", "rendezvous", "waiting", "start", "plan", "compile", "restore", "first step")
"""What a recovery is made of, in order; "waiting" is for hosts, while there are too few."""

MAX_EVENTS = 10_000
"""Events that are remembered in memory."""
MAX_FILE_BYTES = 8 << 20
"""Of a host's file. When it is full, the last quarter of it stays as it is: more than 5,000 steps."""
MAX_STEPS = 1000
"""Steps that become one line."""
MARK = "condensed"
"""The first event of a condensed file: who follows the file sees that it is another one."""
MAX_LINE_BYTES = 256 << 10
"""Of one event, which may list 20,000 hosts; what is longer keeps its time and name only."""
HUNG_AFTER_S = 5.0
"""When a disk that has not answered for so long is said to hang."""
FLUSH_S = 2.0
"""How long a process that ends waits for its last lines to be written."""
IDLE_S = 5.0
"""How long the thread that writes stays without anything to write."""


class Timeline:
    """Records events with the time, the host and the round; without a file, only in memory.

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
        self.events: deque[Line] = deque(maxlen=MAX_EVENTS)
        self._file = None if path is None else EventFile(Path(path), max_bytes)
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque(maxlen=MAX_EVENTS)
        """Lines that are still to be written."""
        self._writes_since: float | None = None
        """Since when the thread waits for the disk; None while it does not."""
        self._writer: threading.Thread | None = None
        self._error: OSError | None = None
        self._warned = False
        _OPEN.add(self)

    def note(self, event: str, *, at: float | None = None, **facts: Any) -> Line:
        """Record an event; `at` is its time, by default now. It is in the file soon after, or after a `flush`."""
        line: Line = {"at": time.time() if at is None else at, "event": event, **self.facts, **facts}
        text = json.dumps(line).encode() + b"\n"
        if len(text) > min(MAX_LINE_BYTES, self.max_bytes // 8):
            line = {"at": line["at"], "event": event[:100], "left_out_bytes": len(text)}
            text = json.dumps(line).encode() + b"\n"
        with self._changed:
            self.events.append(line)
            if self._file is not None:
                if len(self._lines) == MAX_EVENTS:
                    self._error = self._error or OSError(errno.EBUSY, "its disk is too slow for so many events")
                self._lines.append(text)
                self._wake_writer(self._file)
        self._warn()
        return line

    def flush(self, timeout_s: float = FLUSH_S) -> None:
        """Wait until all that was noted is written, at most so long. Call it where a process ends at once."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines and self._writes_since is None, timeout_s)
        self._warn()

    def _wake_writer(self, file: EventFile) -> None:
        if self._writer is None or not self._writer.is_alive():  # a fork has no threads
            self._writer = threading.Thread(
                target=self._write_lines, args=(file, IDLE_S), name="meshmend-timeline", daemon=True
            )
            try:
                self._writer.start()
            except RuntimeError:  # at the end of the interpreter there are no new threads
                self._write_lines(file, 0.0)
        self._changed.notify_all()

    def _write_lines(self, file: EventFile, idle_s: float) -> None:
        """Write what there is, until there is nothing for so long."""
        while True:
            with self._changed:
                self._writes_since = None
                self._changed.notify_all()
                if not self._changed.wait_for(lambda: self._lines, idle_s):
                    self._writer = None
                    return
                text = self._lines.popleft()
                while self._lines and len(text) + len(self._lines[0]) < self.max_bytes // 8:
                    text += self._lines.popleft()
                self._writes_since = time.monotonic()
            try:
                file.append(text)
            except OSError as error:
                self._error = error

    def _warn(self) -> None:
        since = self._writes_since
        if since is not None and time.monotonic() - since > HUNG_AFTER_S:
            self._error = TimeoutError(f"no answer within {HUNG_AFTER_S:g} s")
        if self._error is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"The timeline {self.path} cannot be written: {self._error}. The job continues without it; its last "
                f"{MAX_EVENTS:,} events are still in memory.",
                stacklevel=3,
            )

    @contextmanager
    def timed(self, event: str, **facts: Any) -> Iterator[Line]:
        """Record an event when it is over, with its seconds; more facts may be put into what is yielded."""
        started, more = time.time(), dict(facts)
        yield more
        self.note(event, at=started, seconds=time.time() - started, **more)


_OPEN: weakref.WeakSet[Timeline] = weakref.WeakSet()


@atexit.register
def _flush_all() -> None:
    for timeline in list(_OPEN):
        timeline.flush()


class EventFile:
    """A file of events, one line each, that never gets larger than `max_bytes`."""

    def __init__(self, path: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
        self.path = path
        self.max_bytes = max_bytes

    def append(self, text: bytes) -> None:
        """Add lines. A host's agent and its worker both do, so whoever finds the file nearly full takes its lock."""
        if _write(self.path, text, below=self.max_bytes - self.max_bytes // 32):
            return
        with locked(self.path):
            if not _write(self.path, text, below=self.max_bytes):
                self._condense()
                _write(self.path, text)

    def _condense(self) -> None:
        """Condense a full file to at most half its size. If that is not enough, its oldest lines go."""
        path = self.path
        draft, read = path.with_name(path.name + ".draft"), -1
        while read != path.stat().st_size:  # another process may have written without a lock meanwhile
            with path.open("rb") as file:
                was = parse(file.readline()) or {}
                file.seek(max(0, path.stat().st_size - self.max_bytes // 4))
                file.readline()
                recent = file.tell()
                file.seek(0)
                lines = [json.dumps(event).encode() + b"\n" for event in condense(_events(file, recent))]
                while sum(map(len, lines)) > self.max_bytes // 4:
                    del lines[: 1 + len(lines) // 10]
                # For who follows the file: what began where stands behind how many bytes now.
                where = {"was": was.get("at"), "from": recent, "behind": sum(map(len, lines))}
                mark = json.dumps({"at": time.time(), "event": MARK, **where}).encode() + b"\n"
                file.seek(recent)
                with draft.open("wb") as into:
                    into.writelines([mark, *lines])
                    shutil.copyfileobj(file, into)
                read = file.tell()
        draft.replace(path)


def _open(path: Path) -> int:
    """Open a log to be added to. It is opened for each line: others add to it and replace it, too."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
    try:
        return os.open(path, flags, 0o644)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o644)


def _write(path: Path, text: bytes, below: int | None = None) -> bool:
    """Add a line to a file; return False if it is in none: the file has so many bytes, or was replaced meanwhile."""
    handle = _open(path)
    try:
        size = os.fstat(handle).st_size
        if below is not None and size and size + len(text) > below:
            return False
        if size and os.pread(handle, 1, size - 1) != b"\n":
            # A writer that was killed, or a full disk, has left a torn line: it must not spoil this one.
            text = b"\n" + text
        if (n_written := os.write(handle, text)) < len(text):
            if os.fstat(handle).st_size == size + n_written:
                os.ftruncate(handle, size)
            raise OSError(errno.ENOSPC, "the disk took only a part of a line")
        return os.fstat(handle).st_nlink > 0
    finally:
        os.close(handle)


def _events(file: BinaryIO, until: int) -> Iterator[Line]:
    """Return the events before an offset, each as it is read: all at once would take a hundred megabytes."""
    while file.tell() < until:
        if (event := parse(file.readline())) is not None:
            yield event


def condense(events: Iterable[Line], after: Line | None = None) -> Iterator[Line]:
    """Return the events with runs of steps made one each; the first step of a round, from which it counts, stays.

    `after` is the last step before these events.

    >>> steps = [{"at": float(n), "event": "step", "step": n, "loss": 1 / n, "host": 0} for n in (1, 2, 3)]
    >>> first, others = condense(steps)
    >>> others
    {'at': 3.0, 'event': 'steps', 'host': 0, 'first': 2, 'step': 3, 'since': 2.0, 'loss': 0.3333333333333333}
    """
    run: list[Line] = []
    kept: Line | None = None
    for event in events:
        if event["event"] == "kept":
            kept = event
            continue
        is_step = event["event"] in ("step", "steps") and isinstance(event.get("step"), int)
        if not is_step or (run and not _belongs(event, run)):
            yield from _condensed(run, kept)
            run, kept = [], None
        if is_step and after is not None and after.get("round") == event.get("round"):
            run.append(event)
        elif event["event"] != MARK:
            yield event
        after = event if is_step else after
    yield from _condensed(run, kept)


def _first(event: Line) -> int:
    return int(event["first"] if "first" in event else event["step"])


def _belongs(event: Line, run: list[Line]) -> bool:
    """Whether steps go on with a run of them: the next number, of the same round, and the run is not full."""
    same = all(event.get(name) == run[-1].get(name) for name in ("round", "chips"))
    return same and _first(event) == run[-1]["step"] + 1 and event["step"] - _first(run[0]) < MAX_STEPS


def _condensed(run: list[Line], kept: Line | None) -> Iterator[Line]:
    if len(run) == 1:
        yield run[0]
    elif run:
        own = ("event", "first", "step", "since", "loss", "waited_s", "sent")
        facts = {name: value for name, value in run[-1].items() if name not in own}
        waited = sum(event.get("waited_s", 0.0) for event in run)
        yield {
            "at": facts.pop("at"),
            "event": "steps",
            **facts,
            "first": _first(run[0]),
            "step": run[-1]["step"],
            "since": run[0].get("since", run[0]["at"]),
            **({"loss": run[-1]["loss"]} if "loss" in run[-1] else {}),
            **({"waited_s": waited} if waited else {}),
        }
    if kept is not None:
        yield kept


def timeline_of(folder: Path, host: str | int) -> Path:
    """Return where a host records what happened, in a job's shared folder."""
    return folder / "timeline" / f"host-{host}.jsonl"


def read_timeline(path: str | Path) -> list[Line]:
    """Return the events of a host, oldest first; torn lines (of a killed writer) are left out.

    In a file that has been full, an event called "steps" stands for many.
    """
    try:
        return parse_lines(Path(path).read_bytes())
    except FileNotFoundError:
        return []


class Tail:
    """Follows a timeline, for readers that keep what they need themselves.

    That there is a copy of a step is left out where there is one of a later step, which is half of the lines; unless
    the reader wants `all_lines`.
    """

    def __init__(self, path: Path, *, all_lines: bool = False) -> None:
        self.path = path
        self._all_lines = all_lines
        self.is_anew = True
        """Whether what was read last begins with the file's first line, because the file is another one."""
        self._first = b""
        self._offset = 0

    def read(self) -> list[Line]:
        """Return the events since the last time. A line that is not whole yet is left for the next time."""
        try:
            with self.path.open("rb") as file:
                first = file.readline()
                self.is_anew = first != self._first and not self._is_condensed(first)
                self._first, self._offset = first, 0 if self.is_anew else self._offset
                file.seek(self._offset)
                data = file.read()
        except OSError:
            self.is_anew = False
            return []
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        if self._all_lines:
            return parse_lines(data[:whole])
        lines = data[:whole].splitlines(keepends=True)
        copies = [number for number, line in enumerate(lines) if b'"event": "kept"' in line[:64]]
        for number in reversed(copies[:-1]):
            del lines[number]
        return parse_lines(b"".join(lines))

    def _is_condensed(self, first: bytes) -> bool:
        """Go to the same place of a file that begins anew, if it is the condensed one and still has that place."""
        mark, was = parse(first) or {}, parse(self._first) or {}
        if not was or mark.get("was") != was["at"] or self._offset < mark["from"]:
            return False
        self._offset += len(first) + mark["behind"] - mark["from"]
        return True


def parse_lines(data: bytes) -> list[Line]:
    """Return the events of whole lines."""
    lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
    try:
        # All at once takes a third of the time, and torn lines are rare.
        found: list[Line] = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        found = []
    if len(found) != len(lines) or not all(map(_is_event, found)):
        found = [event for line in lines if (event := parse(line)) is not None]
    return found[1:] if found and found[0]["event"] == MARK else found


def parse(line: bytes) -> Line | None:
    """Return the event of a whole line, None if it is none."""
    if not line.endswith(b"\n"):
        return None
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if _is_event(event) else None


def _is_event(found: Any) -> bool:
    return isinstance(found, dict) and isinstance(found.get("event"), str) and isinstance(found.get("at"), int | float)


def process_started_at() -> float:
    """Return when this process was started, as a time of day: before the interpreter and its imports."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
