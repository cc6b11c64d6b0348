"""Events on their way from hosts to the store, and into its folder: each of them once, and nobody waits for a disk.

    worker, agent --> timeline in the host's memory --> agent: Outbox ==> store: Inbox --> FOLDER/timeline/host-N.jsonl

An agent sends one batch at a time, and says which it believes to be the store's last one. If it is, the store writes
the batch; if not, because an answer was lost or the store is another one, it only says which its last one is. Its last
one stands in its file: in the last line of a batch. So a store that was killed goes on where its file ends, and one
that begins with an empty folder hears how the round has started, and what came last.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import secrets
import threading
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshmend.launch.events import Restored, RoundBegins, Start, read_event
from meshmend.launch.membership import Message
from meshmend.launch.timeline import EventFile, Line, condense, parse, timeline_of

ROUTINE = ("step", "steps", "kept", "verified")
"""Events that come as long as a job trains: nobody waits for them. All others are news."""
BATCHES_PER_S, LINES_PER_S = 100, 1000
"""What the store gets of routine from all hosts together: with more of them, each sends less often, and condensed."""
OFTEN_S, NEWS_S = 0.2, 1.0
"""Interval between two batches of a host, at least; and between two with news, at most."""
MAX_BATCH_BYTES = 40 << 10
"""Of a batch as it is sent: the start of a round of 20,000 hosts, compressed."""
MAX_UNPACKED_BYTES = 4 << 20
KEPT_BYTES = 128 << 10
"""Of batches that are kept for a store that has less."""
MAX_PENDING = 4000
"""Events that wait for the store, at most: then they are condensed, and at last the oldest are left out."""
AGAIN_S = 10.0
"""When a batch is sent again that the store could not write."""
SETTLE_S = 5.0
"""How long the store may take at its start to find out what is in its folder, and at its end to write the rest."""


@dataclass
class PackedEvents:
    """Some events of one host, packed."""

    number: int
    lines: str
    starts: bool
    """Whether a round's start is among them, without which the others say little."""


class Outbox:
    """What a host's agent has for the store. `send` sends a message, and returns whether there is a store."""

    def __init__(self, send: Callable[[Message], bool]) -> None:
        self._send = send
        self._stream = secrets.token_hex(8)
        self._pending: list[Line] = []
        self._most = MAX_PENDING
        self._batches: list[PackedEvents] = []
        self._number = self._have = 0
        """Of the last batch, and of the last that the store has."""
        self._has_news = False
        self._step: Line | None = None
        """The last one that is not pending."""
        self._last_step: Line | None = None
        self._news_at = self._routine_at = self._free_at = 0.0
        """From when on a batch with news may be made, one without, and any be sent: not while one is under way."""
        self._changed = threading.Condition()

    def add(self, line: Line) -> None:
        """Take an event. The first step of a round is news."""
        with self._changed:
            is_first = self._last_step is None or self._last_step.get("round") != line.get("round")
            if line["event"] == "step":
                self._last_step = line
            self._has_news |= line["event"] not in ROUTINE or (line["event"] == "step" and is_first)
            self._pending.append(line)
            if len(self._pending) > self._most:
                self._shorten()

    def _shorten(self) -> None:
        """Condense what is pending; if that is not enough, leave out the oldest steps, or else the oldest events."""
        lines = list(condense(self._pending, self._step))
        if (too_many := len(lines) - MAX_PENDING) > 0:
            oldest = sorted(range(len(lines)), key=lambda i: (lines[i]["event"] not in ROUTINE, i))
            left_out = {*oldest[: too_many + MAX_PENDING // 4]}
            count = sum(lines[i].get("count", 1) if lines[i]["event"] == "left out" else 1 for i in left_out)
            lines = [line for i, line in enumerate(lines) if i not in left_out]
            lines.insert(0, {"at": time.time(), "event": "left out", "count": count})
        self._pending, self._most = lines, len(lines) + MAX_PENDING // 4

    def on_have(self, message: Message) -> None:
        """Take the store's answer: which batch is its last one."""
        with self._changed:
            if message["stream"] == self._stream:
                self._free_at = time.monotonic() + AGAIN_S if message.get("again") else 0.0
                self._have = int(message["number"])
                self._changed.notify_all()

    def on_lost(self) -> None:
        """Take that the connection has ended: what was under way may have arrived or not."""
        with self._changed:
            self._free_at = 0.0
            self._changed.notify_all()

    def tick(self, n_hosts: int, *, flush: bool = False) -> None:
        """Send what is due in a job of so many hosts."""
        with self._changed:
            now = time.monotonic()
            if now < self._free_at:
                return
            batch = next((batch for batch in self._batches if batch.number > self._have), None)
            if batch is None and self._pending:
                interval = max(OFTEN_S, n_hosts / BATCHES_PER_S)
                if flush or now >= (self._news_at if self._has_news else self._routine_at):
                    # All hosts may have had news at once: not so their next batches.
                    spread = random.uniform(0.5, 1.5) if self._has_news else 1.0  # noqa: S311  # nobody gains by guessing it
                    self._news_at, self._routine_at = now + min(interval, NEWS_S), now + spread * interval
                    batch = self._pack(int(max(LINES_PER_S / BATCHES_PER_S, LINES_PER_S * interval / n_hosts)))
            if batch is not None:
                own = {"number": batch.number, "have": self._have, "lines": batch.lines}
                if self._send({"type": "events", "stream": self._stream, **own}):
                    self._free_at = float("inf")

    def flush(self, n_hosts: int, timeout_s: float) -> None:
        """Send all, and wait until the store has it, at most so long."""
        until = time.monotonic() + timeout_s
        with self._changed:
            while (self._pending or self._have < self._number) and time.monotonic() < until:
                self.tick(n_hosts, flush=True)
                if self._free_at < float("inf"):
                    return  # there is no store, or it cannot write
                self._changed.wait(until - time.monotonic())

    def _pack(self, most: int) -> PackedEvents:
        """Make a batch of the oldest events."""
        lines = self._pending if len(self._pending) <= most else list(condense(self._pending, self._step))
        self._number += 1
        n = len(lines)
        while True:
            some = [*lines[: n - 1], {**lines[n - 1], "sent": [self._stream, self._number]}]
            text = "".join(json.dumps(line) + "\n" for line in some).encode()
            packed = base64.b64encode(zlib.compress(text, 1)).decode()
            if len(packed) <= MAX_BATCH_BYTES and len(text) <= MAX_UNPACKED_BYTES:
                break
            if n == 1:
                lines[0] = {"at": lines[0]["at"], "event": lines[0]["event"][:100], "left_out_bytes": len(text)}
            n = max(1, n // 2)
        self._pending, self._has_news, self._most = lines[n:], n < len(lines), MAX_PENDING
        self._step = next((line for line in reversed(some) if line["event"] in ("step", "steps")), self._step)
        events = [read_event(line) for line in some]
        if any(isinstance(event, RoundBegins) for event in events):
            for earlier in self._batches:
                earlier.starts = False
        starts = any(isinstance(event, RoundBegins | Start | Restored) for event in events)
        self._batches.append(PackedEvents(self._number, packed, starts))
        while len(self._batches) > 1 and sum(len(batch.lines) for batch in self._batches) > KEPT_BYTES:
            self._batches.remove(next((one for one in self._batches[:-1] if not one.starts), self._batches[0]))
        return self._batches[-1]


@dataclass(frozen=True)
class _Arrived:
    """A batch at the store, and whom to answer."""

    key: Hashable
    stream: str
    have: int
    number: int
    lines: str


class Inbox:
    """What the store keeps of its hosts' events, in a folder; without one, nothing. A thread reads and writes it.

    `wake` is called from that thread when there are `answers`, and `log` with a line when the folder cannot be written.
    Its memory is bounded: of each host one batch waits, which the host sends again if the disk is full.
    """

    def __init__(self, folder: Path | None, *, wake: Callable[[], None], log: Callable[[str], None]) -> None:
        self.folder = folder
        self.answers: deque[tuple[Hashable, Message]] = deque()
        self.rounds_before = 0
        """The last round of earlier jobs in the folder."""
        self._wake, self._log = wake, log
        self._last: dict[int, tuple[str, int]] = {}
        """Of each host: whose batch is the last one, and its number."""
        self._ends: dict[int, int] = {}
        """Where the last batch ends in a file that another store has left: what follows may be a part of one."""
        self._waiting: OrderedDict[int, _Arrived] = OrderedDict()
        self._changed = threading.Condition()
        self._is_closed = False
        self._is_failing = False
        found = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(found,), name="meshmend-events", daemon=True)
        self._thread.start()
        found.wait(SETTLE_S)

    def put(self, key: Hashable, host: int, message: Message) -> None:
        """Have a batch written, and answered; raise ValueError if it is none."""
        stream, have, number, lines = (message[name] for name in ("stream", "have", "number", "lines"))
        if not (isinstance(stream, str) and isinstance(lines, str) and isinstance(have, int) and have < number):
            raise ValueError("this is no batch of events")
        with self._changed:
            self._waiting[host] = _Arrived(key, stream[:64], have, int(number), lines)
            self._changed.notify_all()

    def close(self) -> None:
        """Write what is left, if the disk answers."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(SETTLE_S)

    def _run(self, found: threading.Event) -> None:
        with contextlib.suppress(OSError):
            self._find()
        found.set()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                host, arrived = self._waiting.popitem(last=False)
            answer: Message = {"type": "have", "stream": arrived.stream}
            try:
                self._write(host, arrived)
                self._is_failing = False
            except (OSError, ValueError, zlib.error) as error:
                answer["again"] = True
                if not self._is_failing:
                    self._is_failing = True
                    self._log(f"events of host {host} cannot be written to {self.folder}: {error}; it keeps them")
            self.answers.append((arrived.key, {**answer, "number": self._number(host, arrived.stream)}))
            self._wake()

    def _number(self, host: int, stream: str) -> int:
        whose, number = self._last.get(host, ("", 0))
        return number if whose == stream else 0

    def _write(self, host: int, batch: _Arrived) -> None:
        """Write a batch, if it is the one after the last."""
        if self._number(host, batch.stream) != batch.have:
            return
        if self.folder is not None:
            unpack = zlib.decompressobj()
            text = unpack.decompress(base64.b64decode(batch.lines, validate=True), MAX_UNPACKED_BYTES)
            path = timeline_of(self.folder, host)
            if (end := self._ends.get(host)) is not None and batch.have and path.exists():
                os.truncate(path, end)
            EventFile(path).append(text)
        self._ends.pop(host, None)
        self._last[host] = batch.stream, batch.number

    def _find(self) -> None:
        """Find out what is in the folder."""
        for path in [] if self.folder is None else sorted((self.folder / "timeline").glob("host-*.jsonl")):
            name = path.stem.removeprefix("host-")
            is_last = True
            for line, end in _backwards(path):
                event: dict[str, Any] = parse(line) or {"event": ""}
                self.rounds_before = max(self.rounds_before, read_event(event).round or 0)
                match event.get("sent"):
                    case [str(stream), int(number)] if name.isdecimal():
                        self._last[int(name)], self._ends[int(name)] = (stream, number), end
                        is_last = False
                if not is_last and "round" in event:
                    break


def _backwards(path: Path, most: int = 256 << 10) -> list[tuple[bytes, int]]:
    """Return the last lines of a file, the last one first, and where each ends."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - most))
        lines = file.read().splitlines(keepends=True)
    found = []
    for line in reversed(lines):
        found.append((line, end))
        end -= len(line)
    return found
