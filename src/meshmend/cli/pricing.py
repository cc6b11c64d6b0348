"""What the commands that predict share: how a payload and hardware are given, and how they are told."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from meshmend.cost import PRESETS, Forecast, Hardware, find_hardware
from meshmend.cost.hardware import adjusted
from meshmend.cost.predict import MODES, Mode
from meshmend.cost.units import parse_rate, parse_seconds
from meshmend.errors import ParameterError

PayloadOption = Annotated[
    str, typer.Option("--payload", metavar="SIZE", help="What each chip brings: 102MB, 1.34GB, 64MiB.")
]
AutoPayloadOption = Annotated[
    str | None,
    typer.Option("--payload", metavar="SIZE", help="auto: what each chip brings. Default 100MB."),
]
AutoHardwareOption = Annotated[
    str | None, typer.Option("--hardware", metavar="NAME", help=f"auto: one of {', '.join(PRESETS)}. Default tpu-v3.")
]
HardwareOption = Annotated[str, typer.Option("--hardware", metavar="NAME", help=f"One of: {', '.join(PRESETS)}.")]
LinkRateOption = Annotated[
    str | None, typer.Option("--link-rate", metavar="RATE", help="Of one link, one way: 40mbit, 656Gb/s, 82GB/s.")
]
StepLatencyOption = Annotated[
    str | None, typer.Option("--step-latency", metavar="TIME", help="What every step costs: 5us, 1ms.")
]
HopLatencyOption = Annotated[
    str | None, typer.Option("--hop-latency", metavar="TIME", help="What every link of a path adds: 1us.")
]
LinksAtOnceOption = Annotated[
    int | None, typer.Option("--links-at-once", min=1, help="Links that a chip can drive at once, if not all.")
]
ModeOption = Annotated[
    str, typer.Option("--mode", help="How the engine waits: lock-step (each step for all), or asynchronous.")
]


def read_hardware(
    name: str, link_rate: str | None, step_latency: str | None, hop_latency: str | None, links_at_once: int | None
) -> Hardware:
    """Return the preset, with the numbers that were given in place of its own."""
    return adjusted(
        find_hardware(name),
        link_bytes_per_s=None if link_rate is None else parse_rate(link_rate),
        step_latency_s=None if step_latency is None else parse_seconds(step_latency),
        hop_latency_s=None if hop_latency is None else parse_seconds(hop_latency),
        links_at_once=links_at_once,
    )


def read_mode(mode: str) -> Mode:
    """Return the mode of that name."""
    for known in MODES:
        if mode == known:
            return known
    raise ParameterError(f"--mode {mode}: expected one of: {', '.join(MODES)}.")


def hardware_facts(hardware: Hardware) -> dict[str, Any]:
    """Return what the JSON says of hardware."""
    return {
        "name": hardware.name,
        "link_bytes_per_s": hardware.link_bytes_per_s,
        "step_latency_s": hardware.step_latency_s,
        "hop_latency_s": hardware.hop_latency_s,
        "links_at_once": hardware.links_at_once,
        "sources": dict(hardware.sources),
    }


def forecast_facts(forecast: Forecast) -> dict[str, Any]:
    """Return what the JSON says of a forecast."""
    return {
        "seconds": forecast.seconds,
        "bound_seconds": forecast.bound_seconds,
        "ratio_to_bound": forecast.ratio_to_bound,
        "busiest_link_load": forecast.busiest_link_load,
        "busiest_links": [
            {"src": list(link.src), "dst": list(link.dst), "load": link.load} for link in forecast.busiest_links
        ],
        "by_phase": forecast.by_phase,
    }
