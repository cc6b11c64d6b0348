"""Failure and repair rates from an operator's own log.

A log is a CSV file with a header. Each row has a `time` (ISO 8601, UTC unless it says otherwise), an `event`, and the
name of the part in one of the columns `host`, `board` and `chip`; the log needs only those columns that it uses. Events
are `failed` and `repaired`, and `begin` and `end` without a part, for when the log was kept; without them it was kept
from its first row to its last.

Rates are of maximum likelihood, for times that are exponentially distributed: failures per hour in which a part was up,
and repairs per hour in which one was down. Their intervals are exact for the number of failures and of repairs found.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from meshmend.errors import ParameterError

KINDS = ("host", "board", "chip")
"""Columns that name a part."""
EVENTS = ("failed", "repaired", "begin", "end")
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Duration:
    """A mean time in hours with its 95 % interval, from `count` events in `hours` hours; infinite without any."""

    hours: float
    count: int

    @property
    def mean_h(self) -> float:
        """The estimate of maximum likelihood."""
        return self.hours / self.count if self.count else math.inf

    @property
    def interval_h(self) -> tuple[float, float]:
        """Where the true mean is, by the exact interval of a Poisson count (Garwood, 1936).

        >>> low, high = Duration(hours=1000.0, count=10).interval_h
        >>> round(low, 1), round(high, 1)
        (54.4, 208.5)
        """
        from scipy.special import gammaincinv  # half of chi-square's quantile; scipy.stats would take a second

        tail = (1 - CONFIDENCE) / 2
        low = self.hours / float(gammaincinv(self.count + 1, 1 - tail))
        return low, self.hours / float(gammaincinv(self.count, tail)) if self.count else math.inf


@dataclass(frozen=True)
class Rates:
    """How one kind of part fails and is repaired: time up per failure, and time down per repair."""

    kind: str
    parts: int
    failures: Duration
    repairs: Duration


@dataclass(frozen=True)
class Outage:
    """A part was down for so long; `is_over` unless it still was at the end of the log."""

    part: str
    down_h: float
    is_over: bool


@dataclass(frozen=True)
class FailureLog:
    """What a log says: its outages by the kind of part, of the kinds that it has a column for."""

    path: Path
    begin: datetime
    end: datetime
    outages: Mapping[str, tuple[Outage, ...]]

    @property
    def hours(self) -> float:
        """How long the log was kept."""
        return (self.end - self.begin).total_seconds() / 3600

    @property
    def n_failures(self) -> int:
        """Failures of all kinds."""
        return sum(map(len, self.outages.values()))

    def rates(self, parts: Mapping[str, int]) -> tuple[Rates, ...]:
        """Return how each kind of part fails; `parts` says how many of each the log is about."""
        found = []
        for kind, outages in self.outages.items():
            named = len({one.part for one in outages})
            if named > parts.get(kind, 0):
                raise ParameterError(
                    f"{self.path} names {named} {kind}s that failed, but it is about {parts.get(kind, 0)}. Say how "
                    "many chips the log is about with --log-chips."
                )
            down_h = math.fsum(one.down_h for one in outages)
            repaired = sum(one.is_over for one in outages)
            up_h = parts[kind] * self.hours - down_h
            found.append(Rates(kind, parts[kind], Duration(up_h, len(outages)), Duration(down_h, repaired)))
        return tuple(found)


def read_log(path: str | Path) -> FailureLog:
    """Read a log; raise a `ParameterError` that names the line if it makes no sense."""
    path = Path(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            kinds = _kinds(path, reader.fieldnames)
            rows = [_row(path, reader.line_num, row, kinds) for row in reader if any(row.values())]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ParameterError(f"The log {path} cannot be read: {error}.") from None
    if not any(row.event == "failed" for row in rows):
        raise ParameterError(f"The log {path} has no row with the event 'failed': there is no rate to be had from it.")
    rows.sort(key=lambda row: row.time)
    begin, end = _bounds(path, rows)
    if begin == end:
        raise ParameterError(f"The log {path} covers no time. Add rows with the events 'begin' and 'end'.")
    return FailureLog(path, begin, end, _outages(path, rows, end, kinds))


@dataclass(frozen=True)
class _Row:
    line: int
    time: datetime
    event: str
    kind: str
    part: str


def _kinds(path: Path, names: object) -> list[str]:
    found = [str(name).strip().lower() for name in names] if isinstance(names, list) else []
    kinds = [kind for kind in KINDS if kind in found]
    if not {"time", "event"} <= set(found) or not kinds:
        raise ParameterError(
            f"{path}, line 1: expected the columns time, event, and at least one of {', '.join(KINDS)}; got "
            f"{', '.join(found) or 'nothing'}."
        )
    return kinds


def _row(path: Path, line: int, row: Mapping[str, str | None], kinds: list[str]) -> _Row:
    cells = {str(name).strip().lower(): str(value or "").strip() for name, value in row.items()}
    where = f"{path}, line {line}"
    event = cells["event"].lower()
    if event not in EVENTS:
        raise ParameterError(f"{where}: the event is {cells['event']!r}, expected one of: {', '.join(EVENTS)}.")
    try:
        time = datetime.fromisoformat(cells["time"])
    except ValueError:
        raise ParameterError(
            f"{where}: the time is {cells['time']!r}, expected ISO 8601, as in 2026-03-01T14:05:00Z."
        ) from None
    named = [kind for kind in kinds if cells.get(kind)]
    if event in ("failed", "repaired") and len(named) != 1:
        raise ParameterError(
            f"{where}: expected the part's name in one of the columns {', '.join(kinds)}; got {len(named)} names."
        )
    kind = named[0] if named else ""
    return _Row(line, time if time.tzinfo else time.replace(tzinfo=UTC), event, kind, cells.get(kind, ""))


def _bounds(path: Path, rows: list[_Row]) -> tuple[datetime, datetime]:
    """Return when the log was kept; check that nothing happened outside of it."""
    begin, end = rows[0].time, rows[-1].time
    for row in rows:
        if row.event == "begin" and row.time > begin:
            raise ParameterError(f"{path}, line {row.line}: the log begins at {row.time}, after its row of {begin}.")
        if row.event == "end" and row.time < end:
            raise ParameterError(f"{path}, line {row.line}: the log ends at {row.time}, before its row of {end}.")
    return begin, end


def _outages(path: Path, rows: list[_Row], end: datetime, kinds: list[str]) -> dict[str, tuple[Outage, ...]]:
    found: dict[str, list[Outage]] = {kind: [] for kind in kinds}
    down: dict[tuple[str, str], _Row] = {}

    def note(failed: _Row, until: datetime, *, is_over: bool) -> None:
        down_h = (until - failed.time).total_seconds() / 3600
        found[failed.kind].append(Outage(failed.part, down_h, is_over))

    for row in rows:
        key = (row.kind, row.part)
        if row.event == "failed":
            if key in down:
                raise ParameterError(
                    f"{path}, line {row.line}: {row.kind} {row.part!r} failed, but it is down since line "
                    f"{down[key].line}. Add the row in which it was repaired."
                )
            down[key] = row
        elif row.event == "repaired":
            if key not in down:
                raise ParameterError(
                    f"{path}, line {row.line}: {row.kind} {row.part!r} was repaired, but no row before says that it "
                    "failed. Add that row, or leave this one out."
                )
            note(down.pop(key), row.time, is_over=True)
    for row in down.values():
        note(row, end, is_over=False)
    return {kind: tuple(outages) for kind, outages in found.items()}
