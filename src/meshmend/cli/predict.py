"""`meshmend predict`: how long a plan takes, before anybody runs it."""

from __future__ import annotations

from rich.text import Text

from meshmend.cli.common import mesh_facts, print_facts, print_json, told_errors
from meshmend.cli.options import (
    HoleOptions,
    JsonOption,
    PayloadOption,
    PlanArgument,
    PlannerOption,
    PriceOptions,
    TuningOptions,
    given_options,
    is_file,
    load_plan,
)
from meshmend.cli.pricing import forecast_facts, hardware_facts
from meshmend.cli.terminal import plain
from meshmend.cost import Bound, Forecast, bound, predict
from meshmend.cost.units import name_bytes, name_seconds, parse_bytes
from meshmend.planning import Auto, plan
from meshmend.schedule import Schedule


def command(
    plan_of: PlanArgument,
    payload: PayloadOption,
    *,
    planner: PlannerOption = Auto.name,
    holes: HoleOptions,
    price: PriceOptions,
    tuning: TuningOptions,
    json: JsonOption = False,
) -> None:
    """Predict how long an all-reduce takes, and how far that is from the least possible.

    Of a saved plan, that plan is proven and predicted; otherwise one is made.

    Example: meshmend predict 16x32 --fail 4x2@6,8 --planner row-pairs --payload 102MB --hardware tpu-v3
    """
    with told_errors(json):
        chosen, mode = price.read_hardware(), price.read_mode()
        payload_bytes = parse_bytes(payload)
        if is_file(plan_of):
            named = [] if planner == Auto.name else ["--planner"]
            schedule = load_plan(plan_of, *given_options(holes, tuning), *named)
        else:
            schedule = plan(holes.mesh(plan_of), tuning.planner(planner, payload, chosen))
        forecast = predict(schedule, payload_bytes, chosen, mode=mode)
        if json:
            print_json(
                {
                    **mesh_facts(schedule.mesh),
                    "planner": schedule.planner,
                    "chunks": schedule.total_chunks,
                    "steps": schedule.n_steps,
                    "transfers": schedule.n_transfers,
                    "payload_bytes": payload_bytes,
                    "hardware": hardware_facts(chosen),
                    "mode": forecast.mode,
                    **forecast_facts(forecast),
                    "bound": _bound_of(schedule, forecast).units,
                    "bound_why": _bound_of(schedule, forecast).why,
                }
            )
        else:
            _show(schedule, forecast)


def _bound_of(schedule: Schedule, forecast: Forecast) -> Bound:
    return bound(schedule.mesh, links_at_once=forecast.hardware.links_at_once, collective=schedule.collective)


def _show(schedule: Schedule, forecast: Forecast) -> None:
    least = _bound_of(schedule, forecast)
    phases = [
        f"{name_seconds(seconds):>9}  {seconds / forecast.seconds:>4.0%}  {plain(name)}"
        if forecast.seconds
        else plain(name)
        for name, seconds in forecast.by_phase.items()
    ]
    busiest = ", ".join(str(link) for link in forecast.busiest_links)
    print_facts(
        f"{schedule.planner} on {schedule.mesh}, {name_bytes(forecast.payload_bytes)} a chip",
        {
            "hardware": str(forecast.hardware),
            "time": Text.assemble(
                (name_seconds(forecast.seconds), "bold"), f" ({forecast.mode}, {schedule.n_steps:,} steps)"
            ),
            "bound": f"{name_seconds(forecast.bound_seconds)} = {least}",
            "ratio": f"{forecast.ratio_to_bound:.3f}× the bound",
            "busiest links": f"{forecast.busiest_link_load:.4f} of the payload: {busiest}",
            "by phase": "\n".join(phases),
        },
    )
