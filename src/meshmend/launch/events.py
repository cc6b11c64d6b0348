"""The events of a job: what its hosts write into their timelines, with the fields of each kind.

    agent of a host     round, host lost, below minimum, recovered, left out
    its worker          process, join, fabric, plan, compile, restore, step, kept, saved, checkpoint, gave up, done, …
    torchft's manager   process, quorum, join, plan, restore, step, refused, …
         |
         +-- Timeline.note, delivery --> timeline/host-N.jsonl -- read_event --> goodput, watch, metrics

`Timeline.note` writes a line of JSON, and `read_event` reads it again. Lines come from files that others may have
written: a field that is missing, or has a value of another type, has its default, and a kind that is not known here has
only what all events have.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from meshmend.launch.hosts import Hosts, name_hosts
from meshmend.launch.timeline import Line, Timeline
from meshmend.quarantine import Quarantined

LOST, RECOVERED, BELOW_MINIMUM, QUARANTINED = "host lost", "recovered", "below minimum", "quarantined"
Done = tuple[int, float, tuple[int, ...]]
"""A step, when it was done, and the hosts that did it."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """What every event has, and all that programs read of most."""

    event: str
    """Its kind."""
    at: float = 0.0
    """When it happened, in seconds since the epoch; with `seconds`, when it began."""
    seconds: float = 0.0
    round: int | None = None
    step: int = 0

    @property
    def ended(self) -> float:
        """When it was over."""
        return self.at + self.seconds


@dataclass(frozen=True, kw_only=True)
class Start(Event):
    """A stage of a worker's start, the last of which knows who takes part; or a quorum under torchft."""

    chips: int | None = None
    hosts: list[int] | None = None
    machine: str | None = None
    """As `Hosts.read` reads it; None where devices report their coordinates."""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Restored(Event):
    """The state of a step is in place."""

    source: str = ""
    survives: str = ""
    """Which failures its copies in memory survive."""
    saved: int | None = None
    """The last step with a checkpoint on disk."""


@dataclass(frozen=True, kw_only=True)
class StepDone(Event):
    """A step is done; or many of a file that was full, from the `first`, done at `since`, to `step`."""

    loss: float | None = None
    examples: int | None = None
    waited_s: float = 0.0
    """For its data."""
    first: int | None = None
    since: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CompiledAhead(Event):
    """The loss of a host, or of a whole domain, is planned and compiled for, unless there was a problem."""

    lost: int | None = None
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class Copies(Event):
    """How often copies are kept in memory."""

    every: int = 1


@dataclass(frozen=True, kw_only=True)
class RoundBegins(Event):
    """A round begins, of a job that needs so many hosts and has so many."""

    least: int = 0
    most: int = 0


@dataclass(frozen=True, kw_only=True)
class Alert(Event):
    """For an operator. `id` is the same on all hosts that write it."""

    id: str = ""
    text: str = ""
    lost: list[int] | None = None


KINDS: dict[str, tuple[type[Event], str]] = {
    "round": (RoundBegins, ""),
    "process": (Start, ""),
    "join": (Start, ""),
    "fabric": (Start, ""),
    "quorum": (Start, ""),
    "refused": (Event, "why"),
    "tiles": (Event, "tiles chips wasted"),
    "measuring": (Event, ""),
    "measure": (Event, ""),
    "plan": (Event, "planner steps from_cache from_process"),
    "compile": (Event, "loaded why_not_loaded"),
    "program": (Event, "saved why_not_saved"),
    "compile ahead": (CompiledAhead, "domain saved why_not_saved"),
    "restore": (Restored, ""),
    "started from": (Event, "path"),
    "skipped": (Event, "why"),
    "set aside": (Event, "steps"),
    "forgot": (Event, "folder"),
    "state incomplete": (Event, "hosts wait_s"),
    "feed": (Event, "position batch"),
    "step": (StepDone, "chips position"),
    "steps": (StepDone, "chips position"),
    "kept": (Event, "bytes"),
    "copies": (Copies, "at_risk_s cut_s write_s"),
    "copy skipped": (Event, ""),
    "checkpoint": (Event, ""),
    "saved": (Event, ""),
    "not saved": (Event, "why"),
    "verified": (Event, ""),
    "observation": (Event, "kind suspects why"),
    "gave up": (Event, "why"),
    "stopped": (Event, ""),
    "left out": (Event, "count"),
    "done": (Event, ""),
    LOST: (Alert, "why chips"),
    BELOW_MINIMUM: (Alert, "hosts least"),
    RECOVERED: (Alert, "hosts joined"),
    QUARANTINED: (Alert, "suspect chips hosts by why until verified"),
}
"""The kinds of events in a job's order: the fields that programs read, and more that people do."""


def fields_of(kind: type[Event]) -> dict[str, tuple[type, ...]]:
    """Return the fields of a kind of events, and the types that their values may have."""
    found: dict[str, tuple[type, ...]] = {}
    for name, hint in get_type_hints(kind).items():
        types = [get_origin(one) or one for one in (get_args(hint) if isinstance(hint, UnionType) else (hint,))]
        found[name] = (*types, *[int] * (float in types))
    return found


_FIELDS = {kind: fields_of(kind) for kind, _ in KINDS.values()}


def read_event(line: Mapping[str, Any]) -> Event:
    """Return the event that a line of a timeline stands for.

    >>> read_event({"at": 3.5, "event": "copies", "step": "four", "every": 8, "at_risk_s": 1.0})
    Copies(event='copies', at=3.5, seconds=0.0, round=None, step=0, every=8)
    """
    kind, _ = KINDS.get(line["event"], (Event, ""))
    fields = _FIELDS[kind]
    event = object.__new__(kind)
    # Defaults are the class's: `__init__` would set each of them, for every step of every host.
    vars(event).update([(name, value) for name, value in line.items() if isinstance(value, fields.get(name, ()))])
    return event


def note_lost(timeline: Timeline, name: str, host: int, step: int, machine: Hosts | None, why: str) -> None:
    """Record that a host is lost; `name` is the same for all that do, and for no other round."""
    chips = [] if machine is None else [list(chip) for chip in machine.chips(host)]
    text = f"{why} (after step {step}{f', {len(chips)} chip' + 's' * (len(chips) != 1) if chips else ''})"
    note_alert(
        timeline, LOST, f"{name}/{LOST} {host}", text, {"step": step, "lost": [host], "chips": chips, "why": why}
    )


def note_recovered(timeline: Timeline, name: str, before: Done, now: Done) -> None:
    """Record the first step after an interruption, and since which one."""
    (last, since, were), (step, at, hosts) = before, now
    text = f"training again on {name_hosts(hosts)}: step {step} is done, {at - since:.1f} s after step {last}"
    facts = {"seconds": at - since, "step": step, "hosts": list(hosts)}
    changed = {"lost": sorted({*were} - {*hosts}), "joined": sorted({*hosts} - {*were})}
    note_alert(timeline, RECOVERED, f"{name}/{RECOVERED}", text, facts | changed, at=since)


def note_quarantined(timeline: Timeline, entry: Quarantined, machine: Hosts | None) -> None:
    """Record that a suspect is left out from now on. All hosts take it from the same list, so its `id` is the same."""
    chips = () if machine is None and entry.suspect.host is not None else entry.suspect.chips(machine)
    owners = () if machine is None else [h for h in range(len(machine)) if not {*chips}.isdisjoint(machine.chips(h))]
    what = str(entry.suspect) if entry.suspect.host is not None else f"{entry.suspect.kind} {entry.suspect}"
    until = time.strftime("%Y-%m-%d", time.gmtime(entry.until))
    verified = f"; the state of step {entry.verified} is the last that is known to be good" if entry.verified else ""
    text = f"{what} is quarantined until {until} by {entry.by.removeprefix('by ')}: {entry.why}{verified}"
    facts = {
        "step": entry.step,
        "hosts": list(owners),
        "chips": [list(chip) for chip in chips],
        "suspect": str(entry.suspect),
        "why": entry.why,
        "by": entry.by,
        "until": entry.until,
        "verified": entry.verified,
    }
    note_alert(timeline, QUARANTINED, f"{QUARANTINED} {entry.suspect} {entry.since:.3f}", text, facts)


def note_alert(timeline: Timeline, kind: str, key: str, text: str, facts: Line, at: float | None = None) -> None:
    """Record what an operator wants to hear. All hosts that do give it the same `key`."""
    timeline.note(kind, at=at, id=key, text=f"{timeline.facts.get('job', 'job')}: {text}", **facts)
