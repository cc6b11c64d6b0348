"""The machine file of a lab: what its processes read, in the format of any other machine (`meshmend machine FILE`).

It says which axes wrap, which cables have failed and which are slow, and how fast a link is: a process that knows only
a shape would plan for another network than the one it runs on. Hardware is a file of its own beside it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from meshmend.cost import Hardware, find_hardware
from meshmend.cost.hardware import write_hardware
from meshmend.files import write_whole
from meshmend.machines.own import facts_of
from meshmend.topology import Mesh
from meshmend_lab.mesh.delay import delay_seconds

MACHINE, HARDWARE = "machine.json", "hardware.json"


def write_machine(folder: Path, mesh: Mesh, hardware: Hardware) -> None:
    """Write the description of a mesh whose links are of that hardware into a folder, which is made if need be."""
    folder.mkdir(mode=0o755, exist_ok=True)
    write_hardware(hardware, folder / HARDWARE, {"mesh": str(mesh)})
    write_whole(folder / MACHINE, json.dumps(facts_of(mesh, HARDWARE), indent=1) + "\n")


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
