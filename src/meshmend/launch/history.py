"""The long memory of a timeline: what a full file of events becomes, small enough to be kept for good.

Steps are what fills a timeline. In the history up to a thousand of them are one line, with the times of the first and
the last; everything else stays as it was. So what the time of a job was spent on can be told after millions of steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]

MAX_STEPS = 1000
"""Steps per line of the history."""
MARK = "condensed"
"""The event that says which file was taken into the history last."""


def condense(events: Iterable[Event]) -> Iterator[Event]:
    """Return the events with runs of steps made one each.

    >>> steps = [{"at": float(n), "event": "step", "step": n, "loss": 1 / n, "host": 0} for n in (1, 2, 3)]
    >>> list(condense(steps))
    [{'at': 3.0, 'event': 'steps', 'host': 0, 'first': 1, 'step': 3, 'since': 1.0, 'loss': 0.3333333333333333}]
    """
    run: list[Event] = []
    kept: Event | None = None
    for event in events:
        if event["event"] == "kept":
            kept = event
            continue
        is_step = event["event"] == "step" and isinstance(event.get("step"), int)
        if not is_step or (run and not _belongs(event, run)):
            yield from _line(run, kept)
            run, kept = [], None
        if is_step:
            run.append(event)
        else:
            yield event
    yield from _line(run, kept)


def _belongs(event: Event, run: list[Event]) -> bool:
    """Whether a step goes on with a run of them: the next number, of the same attempt, and the run is not full."""
    same = all(event.get(name) == run[-1].get(name) for name in ("launch", "attempt", "chips"))
    return same and event["step"] == run[-1]["step"] + 1 and len(run) < MAX_STEPS


def _line(run: list[Event], kept: Event | None) -> Iterator[Event]:
    if run:
        facts = {name: value for name, value in run[-1].items() if name not in ("event", "step", "loss", "waited_s")}
        waited = sum(event.get("waited_s", 0.0) for event in run)
        yield {
            "at": facts.pop("at"),
            "event": "steps",
            **facts,
            "first": run[0]["step"],
            "step": run[-1]["step"],
            "since": run[0]["at"],
            **({"loss": run[-1]["loss"]} if "loss" in run[-1] else {}),
            **({"waited_s": waited} if waited else {}),
        }
    if kept is not None:
        yield kept


def take_in(history: Path, full: Path, read: Callable[[Path], Iterable[Event]], *, max_bytes: int) -> None:
    """Add a full file to the history, as a whole or not at all, and leave it where it is.

    The history's last line names the file, by its first line: a reader that finds both counts it once. If the
    history itself is too long, its oldest lines go.
    """
    lines = history.read_bytes().splitlines(keepends=True) if history.exists() else []
    lines += [json.dumps(event).encode() + b"\n" for event in condense(read(full))]
    while lines and sum(map(len, lines)) > max_bytes:
        del lines[: 1 + len(lines) // 10]
    with full.open("rb") as file:
        first = file.readline().decode(errors="replace")
    mark = {"at": 0.0, "event": MARK, "first_line": first[:300]}
    lines = [line for line in lines if f'"event": "{MARK}"'.encode() not in line[:60]]
    draft = history.with_name(history.name + ".draft")
    draft.write_bytes(b"".join(lines) + json.dumps(mark).encode() + b"\n")
    draft.replace(history)


def is_taken_in(history: list[Event], full: Path) -> bool:
    """Whether a file's events are in the history already."""
    if not history or history[-1]["event"] != MARK or not full.exists():
        return False
    with full.open("rb") as file:
        return bool(history[-1].get("first_line") == file.readline().decode(errors="replace")[:300])
