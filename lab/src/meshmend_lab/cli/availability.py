"""`meshmend lab availability`: what each failure policy is worth over months."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from meshmend.cli.common import check_output, print_json
from meshmend.cli.options import (
    CableRateOption,
    HoleOptions,
    JsonOption,
    MachineOptions,
    WrapOption,
    hardware_option,
    option,
)
from meshmend.cli.terminal import plain, print_line, print_rows, terminal, working
from meshmend.cost.hardware import hardware_facts
from meshmend.cost.units import name_seconds
from meshmend.errors import ParameterError
from meshmend.machines.machine import through_xla
from meshmend.topology import Mesh, name_cable, name_shape
from meshmend_lab.availability import Assumptions, Estimate, Outcome, Study, simulate
from meshmend_lab.availability.assumptions import DEFAULTS, JOB_HARDWARE, SOURCES, TABLE, name_payload, read_assumptions
from meshmend_lab.availability.report import write_report
from meshmend_lab.availability.simulate import LOSSES, sweep
from meshmend_lab.availability.throughput import Throughput

PAGES = (".html", ".htm")
ASSUMPTIONS, SIMULATION, OUTPUT = "Assumptions", "Simulation", "Output"
"""Panels of the help."""
MAX_DAYS = 36_500
"""A century: longer than any machine runs, and short enough to simulate."""


def _print_table(wanted: bool) -> None:
    """Print every assumption, and end the command."""
    if not wanted:
        return
    print_rows(
        list(TABLE),
        [
            ("assumption", str),
            ("default", lambda name: TABLE[name].write(DEFAULTS[name])),
            ("what it is", lambda name: TABLE[name].what),
        ],
        words=("default",),
        wrapped="what it is",
    )
    print_line(("Their sources are on the page that -o writes, and in --json.", "dim"))
    raise typer.Exit


def command(
    shape: Annotated[
        str | None,
        typer.Argument(metavar="SHAPE", help="Chips along each axis, as in 16x32; or --machine.", show_default=False),
    ] = None,
    *,
    machine: MachineOptions,
    wrap: WrapOption = "none",
    cable_rate: CableRateOption = None,
    assume: Annotated[
        list[str] | None,
        option(
            "--assume",
            "NAME=X,…",
            "Other assumptions than the published ones, as in spares=1,restart_s=60 or payload_bytes=50MB. Repeatable.",
            rich_help_panel=ASSUMPTIONS,
        ),
    ] = None,
    _: Annotated[
        bool,
        option(
            "--assumptions",
            "",
            "All assumptions, with their defaults.",
            callback=_print_table,
            is_eager=True,
            rich_help_panel=ASSUMPTIONS,
        ),
    ] = False,
    hardware: Annotated[str | None, hardware_option(f"the machine's, as a job drives it: {JOB_HARDWARE}")] = None,
    days: Annotated[float, option("--days", "DAYS", "Length of a run.", min=0.0, rich_help_panel=SIMULATION)] = 365.0,
    runs: Annotated[
        int,
        option(
            "--runs", "N", "Independent runs; more runs give narrower intervals.", min=1, rich_help_panel=SIMULATION
        ),
    ] = 20,
    seed: Annotated[int, option("--seed", "N", "Random seed.", min=0, rich_help_panel=SIMULATION)] = 0,
    checks: Annotated[
        int,
        option("--checks", "N", "States to plan in full, to check the estimates.", min=0, rich_help_panel=SIMULATION),
    ] = 2,
    page: Annotated[Path | None, option("--output", "F", "One page for the decision-maker: .html.", "-o")] = None,
    name: Annotated[str, option("--name", "NAME", "Name of the machine on the page.", rich_help_panel=OUTPUT)] = "",
    json: JsonOption = False,
) -> None:
    """Simulate months of operation under each failure policy, and report what each is worth.

    Quick repair, sub-mesh, hot spares, optical cubes, dynamic slices, elastic slices, fault-tolerant.

    The page has the machine, the policies, the price of a failure, a sweep of failure rates, and every assumption with
    its source. It needs no other file and no network, and prints well.

    Example: meshmend lab availability 32x32 --assume price=3,spares=1 -o report.html
    """
    if not 0 < days <= MAX_DAYS:
        raise ParameterError(f"--days {days:g}: expected more than 0, and at most {MAX_DAYS:,}.")
    check_output("--output", page, PAGES)
    if name and page is None:
        raise ParameterError("--name is for the page: give --output F.html as well.")
    described = machine.hardware(None)
    driven = JOB_HARDWARE if described is None else through_xla(described)
    given = read_assumptions(assume) if assume else {}
    # The simulation makes failures of its own; slow cables stay.
    mesh = machine.mesh(shape, HoleOptions(wrap=wrap, cable_rate=cable_rate)).whole
    assumptions = Assumptions.of(mesh, hardware=hardware or driven, **given)
    known = Throughput(assumptions)
    with working("planning, then simulating", json, total=runs) as tell:
        study = simulate(
            assumptions,
            days=days,
            runs=runs,
            seed=seed,
            checks=checks,
            throughput=known,
            on_run=lambda _: tell(advance=1),
        )
        if page is not None:
            tell("sweeping failure rates")
            page.write_text(write_report(study, sweep(study, known), name=name), encoding="utf-8")
    facts = study_facts(study)
    if json:
        print_json(facts)
        return
    _show(study, facts["policies"])
    if page is not None:
        print_line(f"Written to {plain(page)}.")


def study_facts(study: Study) -> dict[str, Any]:
    """Return the JSON description of a study."""
    assumptions = study.assumptions
    return {
        "mesh": name_shape(assumptions.mesh.shape),
        "wrap": list(assumptions.mesh.wrap),
        "chips": assumptions.mesh.size,
        "cable_rates": {name_cable(cable): str(rate) for cable, rate in assumptions.mesh.cable_rates.items()},
        "days": study.days,
        "runs": study.runs,
        "seed": study.seed,
        "assumptions": {
            **{name: _assumed_fact(getattr(assumptions, name)) for name in TABLE},
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


def _assumed_fact(value: Any) -> Any:
    if isinstance(value, tuple):
        return name_shape(value)
    return _finite(value) if isinstance(value, float) else value


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
        "goodput: work kept, relative to a machine that never fails or saves. Gain: goodput above that of quick "
        "repair, run by run. $: per useful chip-hour. Down: time without training. Lost: work thrown away. Stops per "
        "year: by failures + to take repaired chips back. ±: 95 % interval.",
        f"A step on the whole machine: {name_seconds(step)}, of which the all-reduce of "
        f"{name_payload(assumptions)} takes {name_seconds(study.all_reduce_s)} on {assumptions.hardware.name}.",
        f"{assumptions.spares} spare hosts, or {assumptions.spare_cubes} spare cubes of "
        f"{name_shape(assumptions.cube)}, cost ${assumptions.price:g} per chip-hour like all others; slices are "
        f"{name_shape(assumptions.slice_shape)}. --assumptions lists every assumption; --assume changes one.",
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
