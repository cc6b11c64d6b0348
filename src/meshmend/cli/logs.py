"""The rates that `meshmend availability --log` has read, for people and programs."""

from __future__ import annotations

import math
from typing import Any

from rich.table import Table

from meshmend.availability.log import Duration, FailureLog, Rates
from meshmend.cli.terminal import plain, print_line, print_table, terminal


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


def show_log(log: FailureLog, rates: tuple[Rates, ...]) -> None:
    """Show a log's rates on the terminal."""
    days = f"{log.begin:%Y-%m-%d} to {log.end:%Y-%m-%d}, {log.hours / 24:,.1f} days"
    terminal().print(f"{plain(log.path)}: {log.n_failures:,} failures, {days}", style="bold", soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("part", style="cyan", no_wrap=True)
    for name in ("parts", "failed", "hours between", "95 %", "repaired", "hours", "95 %"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in rates:
        table.add_row(one.kind, f"{one.parts:,}", *_cells(one.failures), *_cells(one.repairs))
    print_table(table)
    if any(not one.repairs.count for one in rates):
        print_line(("No repair of a kind of part: its time to repair stays as assumed.", "dim"))
    terminal().print()


def _cells(one: Duration) -> tuple[str, str, str]:
    low, high = one.interval_h
    return f"{one.count:,}", _hours(one.mean_h), f"{_hours(low)} to {_hours(high)}" if one.hours else "–"


def _hours(hours: float) -> str:
    if not math.isfinite(hours):
        return "∞"
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.1f}"
