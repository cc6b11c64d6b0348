"""The JSON of hardware and forecasts, shared by the commands that predict."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshmend.cost import Forecast, Hardware


def hardware_facts(hardware: Hardware) -> dict[str, Any]:
    """Return the JSON of hardware."""
    return dataclasses.asdict(hardware) | {"sources": dict(hardware.sources)}


def forecast_facts(forecast: Forecast) -> dict[str, Any]:
    """Return the JSON of a forecast."""
    return {
        "seconds": forecast.seconds,
        "bound_seconds": forecast.bound_seconds,
        "least_seconds": forecast.least_seconds,
        "ratio_to_bound": forecast.ratio_to_bound,
        "busiest_link_load": forecast.busiest_link_load,
        "busiest_links": [
            {"src": list(link.src), "dst": list(link.dst), "load": link.load} for link in forecast.busiest_links
        ],
        "by_phase": forecast.by_phase,
        "gap": dataclasses.asdict(forecast.gap),
    }
