"""Gap: where the time of a forecast goes, from the bound to the last microsecond.

The parts are differences between forecasts of the same schedule on hardware that is made less ideal one limit at a
time, so they add up to the forecast:

1. *bandwidth*: the bound. No schedule needs less, however well it uses the cables.
2. *uneven load*: the busiest link carries more than the bound requires.
3. *filling and draining*: that link is idle at times, on ideal hardware: while the first chunks are on their way to it,
   after the last have left it, and (in lock-step) while it waits for busier links.
4. *latency*: the hops.
5. *engine limits*: what the start, each step and each message cost, and links that a chip cannot drive at once. On a
   switched network some of it is won back: there no transfers share a link.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from meshmend.cost.hardware import Hardware

ROUNDING = 1e-12
"""What a difference of two forecasts may be off by, relative to the longer one."""


@dataclass(frozen=True)
class Gap:
    """The seconds of a forecast, by what they are spent on. They add up to the forecast.

    In lock-step, over the links of a mesh, no part is negative. In the asynchronous mode a queue may be served in
    another order on other hardware, so that a part can be a little below 0.
    """

    bandwidth: float
    uneven_load: float
    filling_and_draining: float
    latency: float
    engine_limits: float

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of each part, by its name in prose, in the order of the list above; rounding errors are 0."""
        parts = {field.name.replace("_", " "): getattr(self, field.name) for field in dataclasses.fields(self)}
        nothing = sum(parts.values()) * ROUNDING
        return {name: 0.0 if abs(seconds) <= nothing else seconds for name, seconds in parts.items()}


def decompose(
    seconds_on: Callable[[Hardware], float],
    hardware: Hardware,
    *,
    bound_seconds: float,
    busiest_seconds: float,
) -> Gap:
    """Return where `seconds_on(hardware)` goes.

    `bound_seconds` is the bound where chips drive all their links, and `busiest_seconds` how long the busiest link
    takes for all that it carries.
    """
    hops_only = Hardware(hardware.name, hardware.link_bytes_per_s, hop_latency_s=hardware.hop_latency_s)
    ideal = dataclasses.replace(hops_only, hop_latency_s=0.0)
    on_hardware = seconds_on(hardware)
    on_hops = on_hardware if hops_only.priced == hardware.priced else seconds_on(hops_only)
    on_ideal = on_hops if ideal.priced == hops_only.priced else seconds_on(ideal)
    return Gap(
        bandwidth=bound_seconds,
        uneven_load=busiest_seconds - bound_seconds,
        filling_and_draining=on_ideal - busiest_seconds,
        latency=on_hops - on_ideal,
        engine_limits=on_hardware - on_hops,
    )
