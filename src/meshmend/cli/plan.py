"""`meshmend plan`: make a schedule or read one, prove it, predict its time, describe it and save it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from rich.text import Text

from meshmend.cli.common import SCHEDULES, check_output, forecast_facts, mesh_facts, print_facts, print_json
from meshmend.cli.options import (
    CollectiveOption,
    HoleOptions,
    JsonOption,
    MachineOptions,
    NeighboursOption,
    OptionalPayloadOption,
    OptionalPlanArgument,
    PlannerOption,
    PriceOptions,
    given_options,
    is_file,
    load_plan,
    option,
    tuned_planner,
)
from meshmend.cli.terminal import approved, plain, print_rows, working
from meshmend.cost import Forecast, busiest_link_load, predict
from meshmend.cost.hardware import hardware_facts
from meshmend.cost.units import format_bytes, name_seconds, parse_bytes
from meshmend.planning import Auto, Candidate, Choice, Derived, Planner, Tuned, choose, plan
from meshmend.planning.proven import DEFAULT_PAYLOAD_BYTES, split_planner
from meshmend.schedule import Collective, Schedule
from meshmend.schedule.serialize import save
from meshmend.schedule.verify import Proof, verify


def command(
    plan_of: OptionalPlanArgument = None,
    *,
    machine: MachineOptions,
    holes: HoleOptions,
    planner: PlannerOption = Auto.name,
    collective: CollectiveOption = Collective.ALL_REDUCE,
    neighbours_only: NeighboursOption = False,
    payload: OptionalPayloadOption = None,
    price: PriceOptions,
    save_to: Annotated[Path | None, option("--save", "F", "File for the schedule: .npz, or .txt to read it.")] = None,
    json: JsonOption = False,
) -> None:
    """Plan an all-reduce, or another collective, for the chips that survive; prove it, and predict how long it takes.

    A saved plan is proven and predicted as it is.

    Example: meshmend plan 16x32 --fail 4x2@6,8 --payload 102MB --hardware tpu-v3
    Example: meshmend plan plan.npz --payload 1GB --mode asynchronous
    """
    check_output("--save", save_to, SCHEDULES)
    hardware, mode = price.read_hardware(machine), price.read_mode()
    payload_bytes = DEFAULT_PAYLOAD_BYTES if payload is None else parse_bytes(payload)
    choice: Choice | None = None
    started = time.perf_counter()
    if plan_of is not None and is_file(plan_of):
        given = given_options(holes, machine, planner=planner, collective=collective, neighbours_only=neighbours_only)
        schedule = load_plan(plan_of, *given, proven=False)
    else:
        mesh = machine.mesh(plan_of, holes)
        # Told what to plan for, a planner tunes the parameters that are not given.
        is_told = payload is not None or machine.hardware(price.hardware) is not None
        tunes = is_told or split_planner(planner)[0] == Auto.name
        chosen = tuned_planner(
            planner, payload, hardware if is_told else None, mode if tunes else None, collective=collective
        )
        with working(f"planning {mesh}", json):
            if isinstance(chosen, Auto | Tuned) and not neighbours_only:
                choice = choose(mesh, chosen)
                schedule = choice.schedule
            else:
                schedule = plan(mesh, chosen, verify=False, neighbours_only=neighbours_only)
    plan_seconds = time.perf_counter() - started
    with working(f"proving {schedule.n_transfers:,} transfers", json) as tell:
        proof = verify(schedule)
        tell("predicting its time, and the bound")
        forecast = predict(schedule, payload_bytes, hardware, mode=mode)
    if save_to is not None:
        save(schedule, save_to)
    if json:
        facts = schedule_facts(schedule, proof) | _time_facts(forecast) | {"plan_seconds": plan_seconds}
        if choice is not None:
            facts["considered"] = [_candidate_facts(candidate) for candidate in choice.considered]
        print_json(facts)
    else:
        more = {"planned in": name_seconds(plan_seconds)} | ({} if save_to is None else {"saved": plain(save_to)})
        show_schedule(schedule, proof, more, forecast)
        if choice is not None:
            _show_considered(choice)


def _time_facts(forecast: Forecast) -> dict[str, Any]:
    return {
        "payload_bytes": forecast.payload_bytes,
        "hardware": hardware_facts(forecast.hardware)["hardware"],
        "mode": forecast.mode,
        **forecast_facts(forecast),
        "bound": forecast.bound.units,
        "bound_why": forecast.bound.why,
    }


def _time_rows(forecast: Forecast) -> dict[str, str | Text]:
    """Return the predicted time, how far it is from the bound, and what it is spent on."""
    why = forecast.bound.highest_line(forecast.payload_bytes, forecast.hardware.link_bytes_per_s).why
    return {
        "time": Text.assemble(
            (name_seconds(forecast.seconds), "bold"),
            f" for {format_bytes(forecast.payload_bytes)} per chip on {forecast.hardware.name}: ",
            (f"{forecast.ratio_to_bound:.3f}×", "bold"),
            f" the bound of {name_seconds(forecast.bound_seconds)}",
        ),
        "bound": str(forecast.bound),
        "with latency": f"at least {name_seconds(forecast.least_seconds)}: {why}",
        "hardware": f"{forecast.hardware}; {forecast.mode}",
        "by cause": "\n".join(f"{_part(forecast, seconds)}{name}" for name, seconds in forecast.gap.parts.items()),
    }


def _part(forecast: Forecast, seconds: float) -> str:
    """Return a part of the time and its share, in columns."""
    return f"{name_seconds(seconds):>9}  {seconds / forecast.seconds:>4.0%}  " if forecast.seconds else ""


def _candidate_facts(candidate: Candidate) -> dict[str, Any]:
    return {
        "planner": candidate.planner.name,
        "parameters": _parameters(candidate.planner),
        "seconds": candidate.seconds,
        "at_least_seconds": candidate.floor_seconds,
        "unsupported_reason": candidate.unsupported_reason,
    }


def _parameters(planner: Planner) -> dict[str, Any]:
    """Return a planner's parameters; of a part of an all-reduce, those of the planner that makes the all-reduce."""
    own: dict[str, Any] = asdict(planner)  # type: ignore[call-overload]  # planners are dataclasses
    if isinstance(planner, Derived):
        own = _parameters(planner.planner)
    own.pop("collective", None)  # what was asked for, the same in every row
    if own.get("lag") == 0:
        del own["lag"]
    return own


def _show_considered(choice: Choice) -> None:
    def time_of(candidate: Candidate) -> str | None:
        if candidate.seconds is not None:
            return name_seconds(candidate.seconds)
        return None if candidate.floor_seconds is None else f"≥ {name_seconds(candidate.floor_seconds)}"

    def outcome(candidate: Candidate) -> str:
        if candidate.seconds is not None:
            return "taken" if candidate is choice.considered[0] else ""
        return candidate.unsupported_reason or "ruled out"

    print_rows(
        [one for one in choice.considered if one.unsupported_reason is not None or time_of(one) is not None],
        [("considered", _name_candidate), ("time", time_of), ("", outcome)],
        wrapped="",
    )


def _name_candidate(candidate: Candidate) -> str:
    """Return a planner and those of its parameters that were chosen; only the planner, if it cannot serve the mesh."""
    parameters = {} if candidate.unsupported_reason is not None else _parameters(candidate.planner)
    owners = "even" if isinstance(candidate.planner, Derived) else "any"
    unsaid = {"budget_s": parameters.get("budget_s"), "owners": owners}  # the same in every row, or the default
    given = [
        str(value) if name == "orientation" else f"{name} {value}"
        for name, value in parameters.items()
        if value is not None and unsaid.get(name) != value
    ]
    return ", ".join([candidate.planner.name, *given])


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


def show_schedule(schedule: Schedule, proof: Proof, more: Mapping[str, str], forecast: Forecast | None = None) -> None:
    """Print the same facts as a table, the predicted time first."""
    times = {} if forecast is None else {name: _part(forecast, s) for name, s in forecast.by_phase.items()}
    phases = [
        f"steps {p.first_step:>4} – {p.last_step:<4}  {times.get(p.name, '')}{plain(p.name)}" for p in schedule.phases
    ]
    busiest = "" if forecast is None else f": {', '.join(str(link) for link in forecast.busiest_links)}"
    print_facts(
        f"{schedule.planner} {schedule.collective} on {schedule.mesh}",
        {
            **({} if forecast is None else _time_rows(forecast)),
            "chips": f"{schedule.mesh.n_chips:,} live of {schedule.mesh.size:,}",
            "steps": f"{schedule.n_steps:,}",
            "chunks": f"{schedule.total_chunks:,}",
            "transfers": f"{schedule.n_transfers:,}",
            "busiest link": f"{busiest_link_load(schedule):.4f} of the payload{busiest}",
            "phases": "\n".join(phases),
            **more,
            "proof": approved(proof),
        },
    )
