"""`meshmend availability`: what each of the four answers to a failure is worth over months."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from meshmend.availability import Assumptions, Estimate, Outcome, Study, simulate
from meshmend.availability.assumptions import GROWS, SOURCES
from meshmend.availability.job import require_simpy
from meshmend.availability.plot import plot, sweep
from meshmend.availability.simulate import LOSSES
from meshmend.availability.throughput import Throughput
from meshmend.cli.common import exit_on_error, print_json
from meshmend.cli.options import (
    HardwareOption,
    HoleOptions,
    JsonOption,
    MachineOptions,
    OptionalShapeArgument,
    WrapOption,
)
from meshmend.cli.outputs import check_plot
from meshmend.cli.pricing import hardware_facts
from meshmend.cli.terminal import plain, print_line, print_table, terminal, working
from meshmend.cost import DEFAULT_HARDWARE
from meshmend.cost.units import name_bytes, name_seconds, parse_bytes
from meshmend.errors import ParameterError
from meshmend.topology import Mesh, name_shape, parse_shape

MAX_DAYS = 36_500
"""A century: longer than any machine runs, and short enough to simulate."""


def _hours(what: str, name: str) -> Any:
    return typer.Option(f"--{name}", metavar="HOURS", help=what)


def _seconds(what: str, name: str) -> Any:
    return typer.Option(f"--{name}", metavar="S", min=0.0, help=what)


def command(
    machine: MachineOptions,
    shape: OptionalShapeArgument = None,
    host: Annotated[str, typer.Option("--host", metavar="HxW", help="Chips per host; hosts tile the mesh.")] = "4x2",
    board: Annotated[
        str, typer.Option("--board", metavar="HxW", help="Chips per board; boards tile a host. Or none.")
    ] = "2x2",
    wrap: WrapOption = "none",
    days: Annotated[float, typer.Option("--days", metavar="DAYS", min=0.0, help="Length of a run.")] = 365.0,
    runs: Annotated[
        int, typer.Option("--runs", metavar="N", min=1, help="Independent runs; more runs give narrower intervals.")
    ] = 20,
    mtbf_chip: Annotated[float, _hours("Mean time between failures of a chip; inf: never.", "mtbf-chip")] = 85_000,
    mtbf_board: Annotated[float, _hours("The same of a board, not counting its chips.", "mtbf-board")] = 150_000,
    mtbf_host: Annotated[float, _hours("The same of a host, not counting its boards.", "mtbf-host")] = 19_000,
    repair_chip: Annotated[float, _hours("Mean time to repair a chip.", "repair-chip")] = 24.0,
    repair_board: Annotated[float, _hours("Mean time to repair a board.", "repair-board")] = 24.0,
    repair_host: Annotated[float, _hours("Mean time to repair a host.", "repair-host")] = 24.0,
    quick_repair: Annotated[float, _hours("quick repair: mean time to repair anything.", "quick-repair")] = 4.0,
    checkpoint_minutes: Annotated[
        float, typer.Option("--checkpoint-minutes", metavar="MINUTES", help="Training time between checkpoints.")
    ] = 60.0,
    save_seconds: Annotated[float, _seconds("How long training pauses for a checkpoint.", "save-seconds")] = 30.0,
    detect_seconds: Annotated[float, _seconds("Time from a failure to a decision.", "detect-seconds")] = 60.0,
    restart_seconds: Annotated[float, _seconds("Time from a decision to the first step.", "restart-seconds")] = 300.0,
    swap_seconds: Annotated[float, _seconds("hot spares: time to wire a spare in.", "swap-seconds")] = 60.0,
    replan_seconds: Annotated[float, _seconds("fault-tolerant: time to plan round the hole.", "replan-seconds")] = 10.0,
    grow: Annotated[
        str,
        typer.Option(
            "--grow", metavar="NAME", help=f"When a smaller job takes repaired chips back: {', '.join(GROWS)}."
        ),
    ] = "worth",
    spares: Annotated[int, typer.Option("--spares", metavar="N", min=0, help="hot spares: hosts kept ready.")] = 2,
    price: Annotated[float, typer.Option("--price", min=0.0, metavar="$", help="Price per chip-hour.")] = 2.0,
    crew_price: Annotated[
        float,
        typer.Option("--crew-price", min=0.0, metavar="$", help="quick repair: price of the crew per hour."),
    ] = 0.0,
    payload: Annotated[
        str | None, typer.Option("--payload", metavar="SIZE", help="Gradients per step; default: BERT, 668MB.")
    ] = None,
    compute_seconds: Annotated[
        float | None,
        typer.Option("--compute-seconds", metavar="S", help="A step without its all-reduce; default: BERT, 0.132."),
    ] = None,
    hardware: HardwareOption = DEFAULT_HARDWARE,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Random seed.")] = 0,
    checks: Annotated[
        int, typer.Option("--checks", metavar="N", min=0, help="States to plan in full, to check the estimates.")
    ] = 2,
    plot_to: Annotated[
        Path | None, typer.Option("--plot", metavar="F", help="Plot it, with a sweep of failure rates: .png, .svg.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Simulate months of operation under the four answers to a failure, and report what each is worth.

    Quick repair, sub-mesh, hot spares, fault-tolerant.

    Example: meshmend availability 32x32 --plot worth.svg
    """
    with exit_on_error(json):
        require_simpy()
        check_plot("--plot", plot_to)
        if not 0 < days <= MAX_DAYS:
            raise ParameterError(f"--days {days:g}: expected more than 0, and at most {MAX_DAYS:,}.")
        mesh = machine.mesh(shape, HoleOptions(wrap=wrap))
        others: dict[str, Any] = {} if payload is None else {"payload_bytes": parse_bytes(payload)}
        if compute_seconds is not None:
            others["compute_s"] = compute_seconds
        assumptions = Assumptions.of(
            Mesh(mesh.shape, wrap=mesh.wrap),  # the simulation makes failures of its own
            host=parse_shape(host),
            board=None if board == "none" else parse_shape(board),
            mtbf_chip_h=mtbf_chip,
            mtbf_board_h=mtbf_board,
            mtbf_host_h=mtbf_host,
            repair_chip_h=repair_chip,
            repair_board_h=repair_board,
            repair_host_h=repair_host,
            hardware=hardware,
            quick_repair_h=quick_repair,
            checkpoint_min=checkpoint_minutes,
            save_s=save_seconds,
            detect_s=detect_seconds,
            restart_s=restart_seconds,
            swap_s=swap_seconds,
            replan_s=replan_seconds,
            spares=spares,
            price=price,
            crew_price=crew_price,
            grow=grow,
            **others,
        )
        throughput = Throughput(assumptions)
        with working("planning, then simulating", json, total=runs) as tell:
            study = simulate(
                assumptions,
                days=days,
                runs=runs,
                seed=seed,
                checks=checks,
                throughput=throughput,
                on_run=lambda _: tell(advance=1),
            )
            if plot_to is not None:
                tell("sweeping failure rates")
                plot(study, sweep(study, throughput), plot_to)
        if json:
            print_json(_facts(study))
        else:
            _show(study)
            if plot_to is not None:
                print_line(f"Drawn to {plain(plot_to)}.")


def _facts(study: Study) -> dict[str, Any]:
    assumptions = study.assumptions
    numbers = {
        name: value for name, value in asdict(assumptions).items() if name not in ("mesh", "host", "levels", "hardware")
    }
    return {
        "mesh": name_shape(assumptions.mesh.shape),
        "wrap": list(assumptions.mesh.wrap),
        "chips": assumptions.mesh.size,
        "days": study.days,
        "runs": study.runs,
        "seed": study.seed,
        "assumptions": {
            "host": name_shape(assumptions.host),
            "levels": [
                {
                    "name": one.name,
                    "shape": name_shape(one.shape),
                    "mtbf_h": _finite(one.mtbf_h),
                    "repair_h": one.repair_h,
                }
                for one in assumptions.levels
            ],
            "hardware": hardware_facts(assumptions.hardware),
            **numbers,
        },
        "sources": dict(SOURCES),
        "hours_between_failures": _finite(1 / assumptions.failures_per_h) if assumptions.failures_per_h else None,
        "all_reduce_seconds": study.all_reduce_s,
        "answers": [_outcome_facts(outcome) for outcome in study.outcomes],
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
        "answer": outcome.name,
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


def _show(study: Study) -> None:
    assumptions, console = study.assumptions, terminal()
    mesh: Mesh = assumptions.mesh
    rate = assumptions.failures_per_h
    often = f"a failure every {1 / rate:,.1f} h" if rate else "no failures"
    title = f"{mesh}: {mesh.size:,} chips, {study.days:g} days, {study.runs} runs, {often}"
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("answer", style="cyan", no_wrap=True)
    for name in ("goodput, %", "gain, %", "$", "down", "lost", "stops"):
        table.add_column(name, justify="right", no_wrap=True)
    best = max(outcome.goodput.mean for outcome in study.outcomes)
    for outcome in study.outcomes:
        table.add_row(
            outcome.name,
            _percent(outcome.goodput),
            "" if outcome is study.outcomes[0] else _percent(outcome.gain, sign="+"),
            f"{outcome.cost.mean:.3f}{_half(outcome.cost.half_width, '.3f')}",
            f"{outcome.downtime:.1%}",
            f"{outcome.losses['lost work'].mean:.1%}",
            f"{outcome.interruptions_per_year.mean:.0f}+{outcome.regrowths_per_year.mean:.0f}",
            style="bold" if outcome.goodput.mean == best else None,
        )
    console.print(title, style="bold", soft_wrap=True)
    print_table(table)
    step = assumptions.compute_s + study.all_reduce_s
    notes = [
        "goodput: work kept, relative to a machine that never fails or saves. gain: goodput above that of quick "
        "repair, run by run. $: per useful chip-hour. down: time without training. lost: work thrown away. stops per "
        "year: by failures + to take repaired chips back. ±: 95 % interval.",
        f"A step on the whole machine: {name_seconds(step)}, of which the all-reduce of "
        f"{name_bytes(assumptions.payload_bytes)} takes {name_seconds(study.all_reduce_s)} on "
        f"{assumptions.hardware.name}.",
        f"{assumptions.spares} spare hosts cost ${assumptions.price:g} per chip-hour like all others. Every assumption "
        "is an option (--help), with its source in --json.",
    ]
    if study.checks:
        worst = max(abs(check.error) for check in study.checks)
        notes.append(
            f"{study.planned} states were planned in full and the others estimated from them; on the "
            f"{len(study.checks)} with the most holes, the estimated step is off by at most {worst:.2%}."
        )
    for note in notes:
        print_line((note, "dim"))


def _percent(estimate: Estimate, sign: str = "") -> str:
    return f"{100 * estimate.mean:{sign}.2f}{_half(100 * estimate.half_width, '.2f')}"


def _half(half_width: float, form: str) -> str:
    return f" ± {half_width:{form}}" if math.isfinite(half_width) else ""
