"""Reading a machine's description, whichever format it has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import cast

from meshmend.errors import MachineError
from meshmend.machines import lldp, neuron, own, tenstorrent
from meshmend.machines.description import Description, read_topology
from meshmend.machines.entries import read_json, read_text, read_yaml
from meshmend.machines.grid import Grid
from meshmend.machines.machine import Machine, machine_of
from meshmend.topology import Mesh

FORMATS = (tenstorrent.FORMAT, neuron.FORMAT, own.FORMAT, f"a folder with {lldp.FORMAT}")
ADDED = "meshmend.machines"
"""Entry points that read further formats: functions from a text and its file to a description, or None for another
format."""
TEXT_PROTO = re.compile(r"^\w+ ?\{", re.MULTILINE)
"""How a message begins in protobuf's text form, and nothing in YAML."""


def read_machine(
    file: Path | str,
    *,
    intended: Path | str | None = None,
    shape: Sequence[int] | str | None = None,
    wrap: bool | Sequence[bool] = False,
) -> Machine:
    """Return the machine that a file describes.

    `intended` is a description of the machine as it should be: one of your own, or what the same tool wrote while the
    machine was whole. `shape` and `wrap` say what grid it is where the file does not.
    """
    found = read_description(file)
    wanted = None if intended is None else read_description(intended)
    if shape is not None:
        if wanted is not None:
            raise MachineError("Give either a shape or an intended machine, not both.", file=str(file))
        dims = read_topology(shape, str(file)) if isinstance(shape, str) else tuple(shape)
        mesh = Mesh(dims, wrap=wrap)
        wanted = Description("shape", str(file), grids=[Grid.of(mesh.shape, mesh.wrap)], lists_cables=False)
    return machine_of(found, wanted)


def as_machine(machine: Machine | Path | str) -> Machine:
    """Return a machine, read from its file if that is what was given."""
    return machine if isinstance(machine, Machine) else read_machine(machine)


def read_description(file: Path | str) -> Description:
    """Return what a file says, in whichever of `FORMATS` it is."""
    path = Path(file)
    if path.is_dir():
        return lldp.read(path)
    return parse_description(read_text(path), str(path))


def parse_description(text: str, file: str) -> Description:
    """Return what the text of a file says."""
    start = text.lstrip()[:1]
    if start in ("{", "["):
        root = read_json(text, file)
        if neuron.find_devices(root) is not None:
            return neuron.read(root)
        if isinstance(root.value, dict) and own.MARK in root.value:
            return own.read(root)
        raise _unknown(file)
    for point in entry_points(group=ADDED):
        if (found := point.load()(text, file)) is not None:
            return cast("Description", found)
    if TEXT_PROTO.search(text):
        raise _unknown(file)
    root = read_yaml(text, file)
    if isinstance(root.value, dict) and own.MARK in root.value:
        return own.read(root)
    if isinstance(root.value, dict) and {"arch", "ethernet_connections"} & set(root.value):
        return tenstorrent.read(root)
    raise _unknown(file)


def _unknown(file: str) -> MachineError:
    return MachineError(
        f"{file}: not a description of a machine that is known here. Expected one of: {', '.join(FORMATS)}. "
        "Tenstorrent's descriptors in text protobuf need the laboratory: pip install ./lab. For others, write one of "
        'your own, as in: meshmend: 1, shape: 4x8, failed: ["2x2@0,0"].',
        file=file,
        expected=", ".join(FORMATS),
    )
