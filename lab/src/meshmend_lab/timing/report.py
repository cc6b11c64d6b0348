"""What the all-reduces on JAX devices took, as figures, as rows of a table and as text. Needs no JAX."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from meshmend.cost.units import format_bytes, name_seconds, parse_bytes
from meshmend.errors import ParameterError

PSUM = "psum"
"""JAX's own all-reduce: not ours to plan or to predict."""
JOB = "job"
"""The plan that a job takes for a model of that size, whichever planner made it."""
COLUMNS = ("payload", "case", "steps", "measured", "predicted", "off by", "× best", "× psum")
N_NAMES = 2
"""Columns that are names; the others are numbers."""


def read_payload(text: str) -> int:
    """Return the bytes of a payload: whole float32 values, at least one.

    >>> read_payload("4kB"), read_payload("10B")
    (4000, 8)
    """
    n_values = round(parse_bytes(text)) // 4
    if n_values < 1:
        raise ParameterError(f"The payload is {text}, expected at least 4 bytes: one float32 value.")
    return 4 * n_values


def compare(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the results together with what they say about the choice of a plan and about predictions.

    `fastest` is the fastest of all plans measured, the job's included, and `job_to_fastest` is what a job's choice
    costs: 1 where it took the fastest. `median_error` is over all planners and payloads, whichever way they are wrong.
    """
    choices = []
    for payload_bytes in dict.fromkeys(result["payload_bytes"] for result in results):
        by_case = {result["case"]: result for result in results if result["payload_bytes"] == payload_bytes}
        psum, job = by_case[PSUM]["seconds"], by_case[JOB]
        fastest = min((case for case in by_case if case != PSUM), key=lambda case: by_case[case]["seconds"])
        best = by_case[fastest]["seconds"]
        choices.append(
            {
                "payload_bytes": payload_bytes,
                "job": job["planner"],
                "job_s": job["seconds"],
                "fastest": by_case[fastest]["planner"],
                "fastest_s": best,
                "psum_s": psum,
                "job_to_fastest": job["seconds"] / best,
                "job_to_psum": job["seconds"] / psum,
            }
        )
    errors = [abs(result["error"]) for result in results if result["error"] is not None and result["case"] != JOB]
    return {"results": list(results), "choices": choices, "median_error": statistics.median(errors) if errors else None}


def table_rows(facts: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a row of text per result, in the order of `COLUMNS`."""
    choices = {choice["payload_bytes"]: choice for choice in facts["choices"]}
    rows: list[tuple[str, ...]] = []
    for result in facts["results"]:
        choice = choices[result["payload_bytes"]]
        is_planned = result["predicted_s"] is not None
        rows.append(
            (
                format_bytes(result["payload_bytes"]),
                f"{JOB}: {result['planner']}" if result["case"] == JOB else result["case"],
                str(result["steps"]) if is_planned else "–",
                name_seconds(result["seconds"]),
                name_seconds(result["predicted_s"]) if is_planned else "–",
                f"{result['error']:+.0%}" if is_planned else "–",
                f"{result['seconds'] / choice['fastest_s']:.2f}",
                f"{result['seconds'] / choice['psum_s']:.2f}",
            )
        )
    return rows


def title(facts: Mapping[str, Any]) -> str:
    """Return what was measured, where."""
    many = f"{facts['processes']} process{'es' * (facts['processes'] > 1)}"
    return f"all-reduce on {facts['mesh']} of {facts['device_kind']}, {many}, best run"


def summary(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return what the table says of a job's choices and of predictions."""
    found = {
        f"a job of {format_bytes(choice['payload_bytes'])}": f"takes {choice['job']}, {choice['job_to_fastest']:.2f} × "
        f"the fastest plan ({choice['fastest']}), {choice['job_to_psum']:.2f} × psum"
        for choice in facts["choices"]
    }
    if facts["median_error"] is not None:
        found["predictions"] = f"off by {facts['median_error']:.0%} in the median"
    return found


def as_text(facts: Mapping[str, Any]) -> str:
    """Return the table as lines of text, for a process whose output is a log."""
    rows = [COLUMNS, *table_rows(facts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]

    def line(row: Sequence[str]) -> str:
        cells = [f"{cell:<{width}}" for cell, width in zip(row[:N_NAMES], widths, strict=False)]
        return "  ".join(cells + [f"{c:>{w}}" for c, w in zip(row[N_NAMES:], widths[N_NAMES:], strict=True)])

    return "\n".join([title(facts), *map(line, rows), *(f"{name}: {value}" for name, value in summary(facts).items())])
