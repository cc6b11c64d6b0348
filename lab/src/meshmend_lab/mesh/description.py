"""The machine file of a lab: what its processes read, in the format of any other machine (`meshmend machine FILE`).

It says which axes wrap, which cables have failed and which are slow, and how fast a link is: a process that knows only
a shape would plan for another network than the one it runs on. Hardware is a file of its own beside it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshmend.cost import Hardware, find_hardware
from meshmend.cost.hardware import write_hardware
from meshmend.files import write_whole
from meshmend.machines.own import MARK, VERSION
from meshmend.topology import Mesh, name_cable, name_shape
from meshmend_lab.mesh.delay import delay_seconds

MACHINE, HARDWARE = "machine.json", "hardware.json"


def write_machine(folder: Path, mesh: Mesh, hardware: Hardware) -> None:
    """Write the description of a mesh whose links are of that hardware into a folder, which is made if need be."""
    folder.mkdir(mode=0o755, exist_ok=True)
    write_hardware(hardware, folder / HARDWARE, {"mesh": str(mesh)})
    write_whole(folder / MACHINE, json.dumps(facts_of(mesh, HARDWARE), indent=1) + "\n")


def facts_of(mesh: Mesh, hardware: str | None = None) -> Mapping[str, Any]:
    """Return the description of a mesh, as what JSON can write and `meshmend machine` reads.

    >>> facts_of(Mesh("2x2", wrap=[False, True], cable_rates={"0,0-1,0": "1/2"}), "tpu-v4")["rates"]
    {'0,0-1,0': '1/2'}
    """
    axes = [str(axis) for axis, wraps in enumerate(mesh.wrap) if wraps]
    return {
        MARK: VERSION,
        "shape": name_shape(mesh.shape),
        "wrap": ",".join(axes) or "none",
        "failed": [*map(str, mesh.holes), *map(name_cable, mesh.failed_cables)],
        "rates": {name_cable(cable): str(rate) for cable, rate in mesh.whole.cable_rates.items()},
    } | ({} if hardware is None else {"hardware": hardware})


def hardware_of(rate: str, rate_bytes_per_s: float, delay: str | None = None) -> Hardware:
    """Return the hardware of a lab: its processes share one machine's cores, its links have a rate and a delay."""
    engine = find_hardware("gloo-loopback")
    limited = ("link_bytes_per_s", f"{rate} per link, which tc holds it to")
    delayed = () if delay is None else (("hop_latency_s", f"{delay} one way, for which each link holds every frame"),)
    return dataclasses.replace(
        engine,
        name=f"lab of {rate}" + (f", {delay}" if delay else ""),
        link_bytes_per_s=rate_bytes_per_s,
        hop_latency_s=delay_seconds(delay),
        is_switched=False,
        sources=(limited, *engine.sources[1:], *delayed),
    )
