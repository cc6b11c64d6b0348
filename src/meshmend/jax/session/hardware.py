"""The hardware that a job plans for: given, measured before, measured now, or a preset.

A job that a launcher started measures its devices once, and keeps the file in its shared folder, so that a restart
finds it and every process plans for the same numbers. What processes measure differs a little, so process 0's counts.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from meshmend.buckets import Folder
from meshmend.cost import Hardware, find_hardware
from meshmend.cost.hardware import hardware_facts, parse_hardware, read_hardware
from meshmend.errors import ParameterError
from meshmend.jax.engine.fabric import HARDWARE, Fabric
from meshmend.jax.engine.measure import measure
from meshmend.jax.session.session import Session
from meshmend.topology import name_shape


def with_hardware(session: Session, folder: Folder, given: str | Hardware | None, *, measures: bool) -> Session:
    """Return the session with the hardware that its fabric's plans are made for: the same on every process.

    `given` counts if there is any; else what the machine's description says where virtual devices stand for its chips,
    whose links they do not have; else what a file in `folder` says of this kind of device and machine; else, if the
    job `measures`, what its devices show now, which is written there. Otherwise the fabric keeps the preset it has.
    """
    fabric = session.fabric
    if given is not None:
        return replace(session, fabric=replace(fabric, hardware=find_hardware(given)))
    if fabric.platform == "cpu" and fabric.hardware != HARDWARE["cpu"]:
        return session
    path = folder / file_name(fabric, session)
    found = session.coordination.tell(lambda: _read(path))
    if found is None and measures and fabric.mesh.n_cables:
        session.timeline.note("measuring")
        with session.timeline.timed("measure"):
            folder.mkdir(parents=True, exist_ok=True)
            mine = measure(fabric, file=path)
            found = session.coordination.tell(lambda: hardware_facts(mine))
    if found is None:
        return session
    hardware = parse_hardware(found, f"What process 0 has of {path}")
    return replace(session, fabric=replace(fabric, hardware=hardware))


def file_name(fabric: Fabric, session: Session) -> str:
    """Return the name of the file for this kind of device and this machine, whatever of it is left."""
    kind = re.sub(r"[^a-z0-9]+", "-", str(fabric.jax_mesh.devices.flat[0].device_kind).lower()).strip("-")
    shape = fabric.mesh.shape if session.hosts is None else session.hosts.shape
    return f"{kind}-{name_shape(shape)}.json"


def _read(path: Folder) -> dict[str, Any] | None:
    """Return what was measured before; None if nothing was, or if the file is damaged, which is then measured again."""
    try:
        return hardware_facts(read_hardware(path))
    except ParameterError:
        return None
