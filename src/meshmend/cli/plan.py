"""`meshmend plan`: make a schedule, prove it, describe it and save it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from meshmend.cli.common import exit_on_error, mesh_facts, print_facts, print_json
from meshmend.cli.options import (
    AutoOptions,
    CollectiveOption,
    HoleOptions,
    JsonOption,
    MachineOptions,
    NeighboursOption,
    OptionalShapeArgument,
    PlannerOption,
    TuningOptions,
)
from meshmend.cli.outputs import SCHEDULES, check_output
from meshmend.cli.pricing import hardware_facts
from meshmend.cli.terminal import approved, plain, print_table, working
from meshmend.cost import DEFAULT_HARDWARE, Forecast, busiest_link_load, predict
from meshmend.cost.units import name_bytes, name_seconds, parse_bytes
from meshmend.planning import Auto, Candidate, Choice, Derived, Planner, Tuned, choose, plan
from meshmend.planning.proven import DEFAULT_PAYLOAD_BYTES
from meshmend.schedule import Collective, Schedule
from meshmend.schedule.serialize import save
from meshmend.schedule.verify import Proof, verify


def command(
    shape: OptionalShapeArgument = None,
    *,
    machine: MachineOptions,
    planner: PlannerOption = Auto.name,
    collective: CollectiveOption = Collective.ALL_REDUCE,
    holes: HoleOptions,
    tuning: TuningOptions,
    auto: AutoOptions,
    neighbours_only: NeighboursOption = False,
    save_to: Annotated[
        Path | None, typer.Option("--save", metavar="F", help="Write the schedule to F: .npz, or .txt to read it.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Plan an all-reduce, or another collective, for the chips that survive, and prove it.

    Example: meshmend plan 16x32 --fail 4x2@6,8 --payload 102MB --hardware tpu-v3
    """
    with exit_on_error(json):
        check_output("--save", save_to, SCHEDULES)
        mesh = machine.mesh(shape, holes)
        hardware = machine.hardware(auto.hardware)
        chosen = tuning.planner(planner, auto.payload, hardware, collective=collective)
        payload_bytes = DEFAULT_PAYLOAD_BYTES if auto.payload is None else parse_bytes(auto.payload)
        with working(f"planning {mesh}", json) as tell:
            started = time.perf_counter()
            choice = choose(mesh, chosen) if isinstance(chosen, Auto | Tuned) and not neighbours_only else None
            if choice is not None:
                schedule = choice.schedule
            else:
                schedule = plan(mesh, chosen, verify=False, neighbours_only=neighbours_only)
            plan_seconds = time.perf_counter() - started
            tell(f"proving {schedule.n_transfers:,} transfers")
            proof = verify(schedule)
            tell("predicting its time, and the bound")
            forecast = predict(schedule, payload_bytes, hardware or DEFAULT_HARDWARE)
        if save_to is not None:
            save(schedule, save_to)
        if json:
            facts = schedule_facts(schedule, proof) | _time_facts(forecast) | {"plan_seconds": plan_seconds}
            if choice is not None:
                facts["considered"] = [_candidate_facts(candidate) for candidate in choice.considered]
            print_json(facts)
        else:
            more = {"planned in": name_seconds(plan_seconds)} | ({} if save_to is None else {"saved": plain(save_to)})
            show_schedule(schedule, proof, more, {"time": _name_time(forecast)})
            if choice is not None:
                _show_considered(choice)


def _time_facts(forecast: Forecast) -> dict[str, Any]:
    return {
        "payload_bytes": forecast.payload_bytes,
        "hardware": hardware_facts(forecast.hardware),
        "seconds": forecast.seconds,
        "bound_seconds": forecast.bound_seconds,
        "ratio_to_bound": forecast.ratio_to_bound,
    }


def _name_time(forecast: Forecast) -> Text:
    """Return the predicted time, how far it is from the bound, and for what."""
    return Text.assemble(
        (name_seconds(forecast.seconds), "bold"),
        f" for {name_bytes(forecast.payload_bytes)} per chip on {forecast.hardware.name}: ",
        (f"{forecast.ratio_to_bound:.3f}×", "bold"),
        f" the bound of {name_seconds(forecast.bound_seconds)}",
    )


def _candidate_facts(candidate: Candidate) -> dict[str, Any]:
    return {
        "planner": candidate.planner.name,
        "parameters": _parameters(candidate.planner),
        "seconds": candidate.seconds,
        "at_least_seconds": candidate.floor_seconds,
        "why_not": candidate.why_not,
    }


def _parameters(planner: Planner) -> dict[str, Any]:
    """Return a planner's parameters; of a part of an all-reduce, those of the planner that makes the all-reduce."""
    own: dict[str, Any] = asdict(planner)  # type: ignore[call-overload]  # planners are dataclasses
    if isinstance(planner, Derived):
        own = _parameters(planner.planner)
    own.pop("collective", None)  # what was asked for, the same in every row
    return own


def _show_considered(choice: Choice) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("considered", style="cyan", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("", min_width=16)
    for candidate in choice.considered:
        parameters = _candidate_facts(candidate)["parameters"]
        owners = "even" if isinstance(candidate.planner, Derived) else "any"
        unsaid = {"budget_s": parameters.get("budget_s"), "owners": owners}  # the same in every row, or the default
        given = ", ".join(
            str(value) if name == "orientation" else f"{name} {value}"
            for name, value in parameters.items()
            if value is not None and unsaid.get(name) != value
        )
        name = f"{candidate.planner.name}, {given}" if given else candidate.planner.name
        if candidate.why_not is not None:
            table.add_row(candidate.planner.name, "–", candidate.why_not)
        elif candidate.seconds is not None:
            table.add_row(name, name_seconds(candidate.seconds), "taken" if candidate is choice.considered[0] else "")
        elif candidate.floor_seconds is not None:
            table.add_row(name, f"≥ {name_seconds(candidate.floor_seconds)}", "ruled out")
    print_table(table)


def schedule_facts(schedule: Schedule, proof: Proof) -> dict[str, Any]:
    """Return the JSON of `plan` and `verify` for a proven schedule."""
    return {
        **mesh_facts(schedule.mesh),
        "planner": schedule.planner,
        "collective": str(schedule.collective),
        "chunks": schedule.total_chunks,
        "steps": schedule.n_steps,
        "transfers": schedule.n_transfers,
        "verified": True,
        "verify_method": proof.method,
        "false_pass_probability": proof.false_pass_probability,
        "verify_seconds": proof.seconds,
        "busiest_link_load": busiest_link_load(schedule),
        "phases": [
            {"name": p.name, "first_step": p.first_step, "last_step": p.last_step, "transfers": p.n_transfers}
            for p in schedule.phases
        ],
    }


def show_schedule(
    schedule: Schedule, proof: Proof, more: Mapping[str, str], first: Mapping[str, Text] | None = None
) -> None:
    """Print the same facts as a table, after what a reader wants to know `first`."""
    phases = [f"steps {p.first_step:>4} – {p.last_step:<4}  {plain(p.name)}" for p in schedule.phases]
    print_facts(
        f"{schedule.planner} {schedule.collective} on {schedule.mesh}",
        {
            **(first or {}),
            "chips": f"{schedule.mesh.n_chips:,} live of {schedule.mesh.size:,}",
            "steps": f"{schedule.n_steps:,}",
            "chunks": f"{schedule.total_chunks:,}",
            "transfers": f"{schedule.n_transfers:,}",
            "busiest link": f"{busiest_link_load(schedule):.4f} of the payload",
            "phases": "\n".join(phases),
            **more,
            "proof": approved(proof),
        },
    )
