"""What the lines of a timeline may have, by `launch.events`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from meshmend.launch.events import KINDS, fields_of
from meshmend.launch.goodput import HostHistory, TimeAccount, summarize
from meshmend.launch.timeline import Line, read_timeline


def names_of(kind: str) -> set[str]:
    """Return the fields of a kind of events."""
    read, for_people = KINDS[kind]
    return {*fields_of(read), *for_people.split(), "job", "host", "process", "sent"}


def check_fields(lines: Iterable[Line]) -> None:
    """Check that each line is of a known kind, and has no other fields than that."""
    for line in lines:
        assert set(line) <= names_of(line["event"]), line


def read_account(paths: Iterable[Path]) -> TimeAccount | None:
    """Return the account of a job from its hosts' timelines."""
    return summarize([HostHistory(read_timeline(path)) for path in paths])
