"""The rates that `meshmend availability --log` has read, for people and programs."""

from __future__ import annotations

import math
from typing import Any

from meshmend.availability.log import Duration, FailureLog, Rates
from meshmend.cli.terminal import plain, print_line, print_rows, terminal


def log_facts(log: FailureLog, rates: tuple[Rates, ...]) -> dict[str, Any]:
    """Return the JSON description of a log and its rates."""
    return {
        "path": str(log.path),
        "begin": log.begin.isoformat(),
        "end": log.end.isoformat(),
        "days": log.hours / 24,
        "failures": log.n_failures,
        "rates": [
            {"part": one.kind, "parts": one.parts, "mtbf": _facts(one.failures), "repair": _facts(one.repairs)}
            for one in rates
        ],
    }


def _facts(one: Duration) -> dict[str, Any]:
    hours = (one.mean_h, *one.interval_h)
    mean, low, high = (value if math.isfinite(value) else None for value in hours)
    return {"count": one.count, "in_hours": one.hours, "mean_h": mean, "interval_95_h": [low, high]}


def show_log(log: FailureLog, rates: list[dict[str, Any]]) -> None:
    """Show a log's rates on the terminal."""
    days = f"{log.begin:%Y-%m-%d} to {log.end:%Y-%m-%d}, {log.hours / 24:,.1f} days"
    terminal().print(f"{plain(log.path)}: {log.n_failures:,} failures, {days}", style="bold", soft_wrap=True)
    print_rows(
        rates,
        [
            ("part", lambda row: row["part"]),
            ("parts", lambda row: f"{row['parts']:,}"),
            ("failed", lambda row: f"{row['mtbf']['count']:,}"),
            ("hours between", lambda row: _hours(row["mtbf"]["mean_h"])),
            ("95 %", lambda row: _interval(row["mtbf"])),
            ("repaired", lambda row: f"{row['repair']['count']:,}"),
            ("hours", lambda row: _hours(row["repair"]["mean_h"])),
            ("95 %", lambda row: _interval(row["repair"])),
        ],
    )
    if any(not row["repair"]["count"] for row in rates):
        print_line(("No repair of a kind of part: its time to repair stays as assumed.", "dim"))
    terminal().print()


def _interval(one: dict[str, Any]) -> str | None:
    return " to ".join(map(_hours, one["interval_95_h"])) if one["in_hours"] else None


def _hours(hours: float | None) -> str:
    if hours is None:
        return "∞"
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.1f}"
