"""`meshmend predict`: how long a plan takes, without running it."""

from __future__ import annotations

from rich.text import Text

from meshmend.cli.common import exit_on_error, mesh_facts, print_facts, print_json
from meshmend.cli.options import (
    CollectiveOption,
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
from meshmend.cli.terminal import plain, working
from meshmend.cost import Forecast, predict
from meshmend.cost.units import name_bytes, name_seconds, parse_bytes
from meshmend.planning import Auto, plan
from meshmend.schedule import Collective, Schedule


def command(
    plan_of: PlanArgument,
    payload: PayloadOption,
    *,
    planner: PlannerOption = Auto.name,
    collective: CollectiveOption = Collective.ALL_REDUCE,
    holes: HoleOptions,
    price: PriceOptions,
    tuning: TuningOptions,
    json: JsonOption = False,
) -> None:
    """Predict how long an all-reduce, or another collective, takes, and how far that is from the lower bound.

    A saved plan is proven and predicted; for a shape, a plan is made first.

    Example: meshmend predict 16x32 --fail 4x2@6,8 --planner row-pairs --payload 102MB --hardware tpu-v3
    """
    with exit_on_error(json):
        chosen, mode = price.read_hardware(), price.read_mode()
        payload_bytes = parse_bytes(payload)
        if is_file(plan_of):
            named = [] if planner == Auto.name else ["--planner"]
            named += [] if collective == Collective.ALL_REDUCE else ["--collective"]
            schedule = load_plan(plan_of, *given_options(holes, tuning), *named)
        else:
            mesh, wanted = holes.mesh(plan_of), tuning.planner(planner, payload, chosen, collective=collective)
            with working(f"planning and proving {mesh}", json):
                schedule = plan(mesh, wanted)
        with working("predicting its time, and the bound", json):
            forecast = predict(schedule, payload_bytes, chosen, mode=mode)
        if json:
            print_json(
                {
                    **mesh_facts(schedule.mesh),
                    "planner": schedule.planner,
                    "collective": str(schedule.collective),
                    "chunks": schedule.total_chunks,
                    "steps": schedule.n_steps,
                    "transfers": schedule.n_transfers,
                    "payload_bytes": payload_bytes,
                    "hardware": hardware_facts(chosen),
                    "mode": forecast.mode,
                    **forecast_facts(forecast),
                    "bound": forecast.bound.units,
                    "bound_why": forecast.bound.why,
                }
            )
        else:
            _show(schedule, forecast)


def _show(schedule: Schedule, forecast: Forecast) -> None:
    busiest = ", ".join(str(link) for link in forecast.busiest_links)
    over_rate = " over the link's rate" if schedule.mesh.has_slow_cables else ""
    print_facts(
        f"{schedule.planner} {schedule.collective} on {schedule.mesh}, {name_bytes(forecast.payload_bytes)} per chip",
        {
            "time": Text.assemble(
                (name_seconds(forecast.seconds), "bold"),
                ": ",
                (f"{forecast.ratio_to_bound:.3f}×", "bold"),
                f" the bound ({forecast.mode}, {schedule.n_steps:,} steps)",
            ),
            "bound": f"{name_seconds(forecast.bound_seconds)} = {forecast.bound}",
            "with latency": f"at least {name_seconds(forecast.least_seconds)}: {_floor(forecast)}",
            "hardware": str(forecast.hardware),
            "busiest links": f"{forecast.busiest_link_load:.4f} of the payload{over_rate}: {busiest}",
            "by phase": _listed(forecast, forecast.by_phase),
            "by cause": _listed(forecast, forecast.gap.parts),
        },
    )


def _listed(forecast: Forecast, parts: dict[str, float]) -> str:
    """Return one line per part of the time: seconds, share, name."""
    return "\n".join(
        f"{name_seconds(seconds):>9}  {seconds / forecast.seconds:>4.0%}  {plain(name)}"
        if forecast.seconds
        else plain(name)
        for name, seconds in parts.items()
    )


def _floor(forecast: Forecast) -> str:
    return forecast.bound.highest_line(forecast.payload_bytes, forecast.hardware.link_bytes_per_s).why
