"""`meshmend predict`: how long a plan takes, before anybody runs it."""

from __future__ import annotations

from meshmend.cli.common import (
    FailCableOption,
    FailOption,
    JsonOption,
    ShapeArgument,
    WrapOption,
    mesh_facts,
    print_facts,
    print_json,
    read_mesh,
    told_errors,
)
from meshmend.cli.plan import ChunksOption, OrientationOption, PlannerOption, SegmentsOption, read_planner
from meshmend.cli.pricing import (
    HardwareOption,
    HopLatencyOption,
    LinkRateOption,
    LinksAtOnceOption,
    ModeOption,
    PayloadOption,
    StepLatencyOption,
    forecast_facts,
    hardware_facts,
    read_hardware,
    read_mode,
)
from meshmend.cost import Bound, Forecast, bound, predict
from meshmend.cost.units import name_bytes, name_seconds, parse_bytes
from meshmend.planning import Auto, plan
from meshmend.schedule import Schedule


def command(
    shape: ShapeArgument,
    payload: PayloadOption,
    planner: PlannerOption = Auto.name,
    hardware: HardwareOption = "ideal",
    fail: FailOption = None,
    fail_cable: FailCableOption = None,
    wrap: WrapOption = "none",
    orientation: OrientationOption = None,
    segments: SegmentsOption = None,
    chunks: ChunksOption = None,
    link_rate: LinkRateOption = None,
    step_latency: StepLatencyOption = None,
    hop_latency: HopLatencyOption = None,
    links_at_once: LinksAtOnceOption = None,
    mode: ModeOption = "lock-step",
    json: JsonOption = False,
) -> None:
    """Predict how long an all-reduce takes, and how far that is from the least possible.

    Example: meshmend predict 16x32 --fail 4x2@6,8 --planner row-pairs --payload 102MB --hardware tpu-v3
    """
    with told_errors(json):
        mesh = read_mesh(shape, fail, fail_cable, wrap)
        chosen = read_hardware(hardware, link_rate, step_latency, hop_latency, links_at_once)
        payload_bytes = parse_bytes(payload)
        told = (payload, chosen) if planner == Auto.name else (None, None)
        schedule = plan(mesh, read_planner(planner, orientation, segments, chunks, *told))
        forecast = predict(schedule, payload_bytes, chosen, mode=read_mode(mode))
        if json:
            print_json(
                {
                    **mesh_facts(mesh),
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
        f"{name_seconds(seconds):>9}  {seconds / forecast.seconds:>4.0%}  {name}" if forecast.seconds else name
        for name, seconds in forecast.by_phase.items()
    ]
    busiest = ", ".join(str(link) for link in forecast.busiest_links)
    print_facts(
        f"{schedule.planner} on {schedule.mesh}, {name_bytes(forecast.payload_bytes)} a chip",
        {
            "hardware": str(forecast.hardware),
            "time": f"[bold]{name_seconds(forecast.seconds)}[/] ({forecast.mode}, {schedule.n_steps:,} steps)",
            "bound": f"{name_seconds(forecast.bound_seconds)} = {least}",
            "ratio": f"{forecast.ratio_to_bound:.3f}× the bound",
            "busiest links": f"{forecast.busiest_link_load:.4f} of the payload: {busiest}",
            "by phase": "\n".join(phases),
        },
    )
