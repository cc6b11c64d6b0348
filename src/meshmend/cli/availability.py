"""`meshmend availability`: what each failure policy is worth over months."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from meshmend.availability import Estimate, Outcome, Study
from meshmend.availability.assumptions import SOURCES, name_payload
from meshmend.availability.log import Duration, FailureLog, Rates
from meshmend.availability.plot import plot
from meshmend.availability.report import write_report
from meshmend.availability.simulate import LOSSES
from meshmend.cli.common import print_json
from meshmend.cli.options import JsonOption, MachineOptions, OptionalShapeArgument
from meshmend.cli.outputs import check_output, check_plot
from meshmend.cli.studies import StudyOptions
from meshmend.cli.terminal import plain, print_line, print_rows, terminal
from meshmend.cost.hardware import hardware_facts
from meshmend.cost.units import name_seconds
from meshmend.errors import ParameterError
from meshmend.topology import Mesh, name_cable, name_shape

PAGES = (".html", ".htm")


def command(
    machine: MachineOptions,
    options: StudyOptions,
    shape: OptionalShapeArgument = None,
    plot_to: Annotated[
        Path | None, typer.Option("--plot", metavar="F", help="Plot it, with a sweep of failure rates: .png, .svg.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="F", help="One page for the decision-maker: .html.")
    ] = None,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="What the machine is called on the page.")] = "",
    json: JsonOption = False,
) -> None:
    """Simulate months of operation under each failure policy, and report what each is worth.

    Quick repair, sub-mesh, hot spares, optical cubes, dynamic slices, elastic slices, fault-tolerant.

    The page has the machine, the policies, the price of a failure, a sweep of failure rates, and every assumption with
    its source. It needs no other file and no network, and prints well.

    Example: meshmend availability 32x32 --plot worth.svg
    Example: meshmend availability 32x32 --price 3 -o report.html
    """
    options.check()
    check_plot("--plot", plot_to)
    check_output("--output", page, PAGES)
    if name and page is None:
        raise ParameterError("--name is for the page: give --output F.html, too.")
    assumptions, logged = options.assumptions(machine, shape)
    study, swept = options.simulate(assumptions, swept=plot_to is not None or page is not None, as_json=json)
    if plot_to is not None:
        plot(study, swept, plot_to)
    if page is not None:
        page.write_text(write_report(study, swept, name=name), encoding="utf-8")
    facts = study_facts(study) | ({} if logged is None else {"log": _log_facts(*logged)})
    if json:
        print_json(facts)
        return
    if logged is not None:
        _show_log(logged[0], facts["log"]["rates"])
    _show(study, facts["policies"])
    if plot_to is not None:
        print_line(f"Drawn to {plain(plot_to)}.")
    if page is not None:
        print_line(f"Written to {plain(page)}.")


def study_facts(study: Study) -> dict[str, Any]:
    """Return the JSON description of a study."""
    assumptions = study.assumptions
    shapes = ("host", "cube", "slice_shape")
    numbers = {
        name: _finite(value) if isinstance(value, float) else value
        for name, value in asdict(assumptions).items()
        if name not in ("mesh", "levels", "hardware", *shapes)
    }
    return {
        "mesh": name_shape(assumptions.mesh.shape),
        "wrap": list(assumptions.mesh.wrap),
        "chips": assumptions.mesh.size,
        "cable_rates": {name_cable(cable): str(rate) for cable, rate in assumptions.mesh.cable_rates.items()},
        "days": study.days,
        "runs": study.runs,
        "seed": study.seed,
        "assumptions": {
            **{name: name_shape(getattr(assumptions, name)) for name in shapes},
            "levels": [
                {
                    "name": one.name,
                    "shape": name_shape(one.shape),
                    "mtbf_h": _finite(one.mtbf_h),
                    "repair_h": one.repair_h,
                }
                for one in assumptions.levels
            ],
            "hardware": hardware_facts(assumptions.hardware)["hardware"],
            **numbers,
        },
        "sources": dict(SOURCES),
        "hours_between_failures": _finite(1 / assumptions.failures_per_h) if assumptions.failures_per_h else None,
        "all_reduce_seconds": study.all_reduce_s,
        "policies": [_outcome_facts(outcome) for outcome in study.outcomes],
        "planned_in_full": study.planned,
        "checks": [
            {
                "mesh": check.mesh,
                "estimated_seconds": check.estimated_s,
                "exact_seconds": check.exact_s,
                "step_error": check.error,
            }
            for check in study.checks
        ],
    }


def _outcome_facts(outcome: Outcome) -> dict[str, Any]:
    return {
        "policy": outcome.name,
        "goodput": _estimate_facts(outcome.goodput),
        "gain_over_quick_repair": _estimate_facts(outcome.gain),
        "utilisation": _estimate_facts(outcome.utilisation),
        "cost_per_useful_chip_hour": _estimate_facts(outcome.cost),
        "losses": {cause: _estimate_facts(outcome.losses[cause]) for cause in LOSSES},
        "downtime": outcome.downtime,
        "interruptions_per_year": _estimate_facts(outcome.interruptions_per_year),
        "regrowths_per_year": _estimate_facts(outcome.regrowths_per_year),
    }


def _estimate_facts(estimate: Estimate) -> dict[str, float | None]:
    return {"mean": _finite(estimate.mean), "half_width_95": _finite(estimate.half_width)}


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def _show(study: Study, policies: list[dict[str, Any]]) -> None:
    assumptions = study.assumptions
    mesh: Mesh = assumptions.mesh
    rate = assumptions.failures_per_h
    often = f"a failure every {1 / rate:,.1f} h" if rate else "no failures"
    title = f"{mesh}: {mesh.size:,} chips, {study.days:g} days, {study.runs} runs, {often}"
    terminal().print(title, style="bold", soft_wrap=True)
    best = max(row["goodput"]["mean"] for row in policies)
    print_rows(
        policies,
        [
            ("policy", lambda row: row["policy"]),
            ("goodput, %", lambda row: _interval(row["goodput"], 100, ".2f")),
            (
                "gain, %",
                lambda row: "" if row is policies[0] else _interval(row["gain_over_quick_repair"], 100, ".2f", "+"),
            ),
            ("$", lambda row: _interval(row["cost_per_useful_chip_hour"], 1, ".3f")),
            ("down", lambda row: f"{row['downtime']:.1%}"),
            ("lost", lambda row: f"{row['losses']['lost work']['mean']:.1%}"),
            (
                "stops",
                lambda row: f"{row['interruptions_per_year']['mean']:.0f}+{row['regrowths_per_year']['mean']:.0f}",
            ),
        ],
        style=lambda row: "bold" if row["goodput"]["mean"] == best else None,
    )
    step = assumptions.compute_s + study.all_reduce_s
    notes = [
        "goodput: work kept, relative to a machine that never fails or saves. gain: goodput above that of quick "
        "repair, run by run. $: per useful chip-hour. down: time without training. lost: work thrown away. stops per "
        "year: by failures + to take repaired chips back. ±: 95 % interval.",
        f"A step on the whole machine: {name_seconds(step)}, of which the all-reduce of "
        f"{name_payload(assumptions)} takes {name_seconds(study.all_reduce_s)} on {assumptions.hardware.name}.",
        f"{assumptions.spares} spare hosts, or {assumptions.spare_cubes} spare cubes of "
        f"{name_shape(assumptions.cube)}, cost ${assumptions.price:g} per chip-hour like all others; slices are "
        f"{name_shape(assumptions.slice_shape)}. Every assumption is an option (--help), with its source in --json.",
    ]
    if study.checks:
        worst = max(abs(check.error) for check in study.checks)
        notes.append(
            f"{study.planned} states were planned in full and the others estimated from them; on the "
            f"{len(study.checks)} with the most holes, the estimated step is off by at most {worst:.2%}."
        )
    for note in notes:
        print_line((note, "dim"))


def _interval(estimate: dict[str, float | None], scale: float, form: str, sign: str = "") -> str:
    """Return a mean and half the width of its interval, as far as they are finite."""
    mean, half = (math.inf if one is None else scale * one for one in estimate.values())
    return f"{mean:{sign}{form}}" + (f" ± {half:{form}}" if math.isfinite(half) else "")


def _log_facts(log: FailureLog, rates: tuple[Rates, ...]) -> dict[str, Any]:
    """Return the JSON description of a log and its rates."""
    return {
        "path": str(log.path),
        "begin": log.begin.isoformat(),
        "end": log.end.isoformat(),
        "days": log.hours / 24,
        "failures": log.n_failures,
        "rates": [
            {"part": one.kind, "parts": one.parts, "mtbf": _mean_time(one.failures), "repair": _mean_time(one.repairs)}
            for one in rates
        ],
    }


def _mean_time(one: Duration) -> dict[str, Any]:
    mean, low, high = map(_finite, (one.mean_h, *one.interval_h))
    return {"count": one.count, "in_hours": one.hours, "mean_h": mean, "interval_95_h": [low, high]}


def _show_log(log: FailureLog, rates: list[dict[str, Any]]) -> None:
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
            ("95 %", lambda row: _log_interval(row["mtbf"])),
            ("repaired", lambda row: f"{row['repair']['count']:,}"),
            ("hours", lambda row: _hours(row["repair"]["mean_h"])),
            ("95 %", lambda row: _log_interval(row["repair"])),
        ],
    )
    if any(not row["repair"]["count"] for row in rates):
        print_line(("No repair of a kind of part: its time to repair stays as assumed.", "dim"))
    terminal().print()


def _log_interval(one: dict[str, Any]) -> str | None:
    return " to ".join(map(_hours, one["interval_95_h"])) if one["in_hours"] else None


def _hours(hours: float | None) -> str:
    if hours is None:
        return "∞"
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.1f}"
