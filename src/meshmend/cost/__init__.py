"""Cost: how long a schedule takes on given hardware, and how far that is from the lower bound."""

from meshmend.cost.bound import Bound, bound
from meshmend.cost.hardware import DEFAULT_HARDWARE, PRESETS, Hardware, between_tiles, find_hardware
from meshmend.cost.paths import busiest_link_load, link_load
from meshmend.cost.predict import Forecast, Gap, predict
from meshmend.cost.step_demand import StepDemand

__all__ = [
    "DEFAULT_HARDWARE",
    "PRESETS",
    "Bound",
    "Forecast",
    "Gap",
    "Hardware",
    "StepDemand",
    "between_tiles",
    "bound",
    "busiest_link_load",
    "find_hardware",
    "link_load",
    "predict",
]
