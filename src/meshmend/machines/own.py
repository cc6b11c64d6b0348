"""A description of your own, in YAML or JSON, for machines whose tools write none of the other formats.

Either a shape, of which parts have failed or are slow:

    meshmend: 1
    shape: 4x8
    wrap: "1"
    hosts: {node0: "4x4@0,0", node1: "4x4@0,4"}
    chips: {tray1.chip3: {at: [0, 3], host: node0}}
    failed: [node1, "0,3", "2x2@2,0", "1,1-1,2"]
    rates: {"0,0-0,1": 1/2}

or cables between named chips, from which the layout is found:

    meshmend: 1
    channels: 4
    cables: [[a, b], [b, c, 3]]
    failed: [c]
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

from meshmend.errors import Coordinate, MachineError, MeshError, name_chip
from meshmend.machines.description import MAX_CHIPS, Chip, Description, read_topology
from meshmend.machines.entries import Entry
from meshmend.machines.grid import Grid
from meshmend.machines.machine import Machine
from meshmend.topology import MAX_AXES, Region, name_cable, parse_chip, parse_wrap
from meshmend.topology.rates import check_rate

FORMAT, MARK, VERSION = "meshmend machine", "meshmend", 1
QUOTE = 'Quote what has a comma in it: "0,3", "0,0-0,1".'
HOST, INTERFACE = re.compile(r"\w[\w.-]{0,252}", re.ASCII), re.compile(r"\w[\w.:-]{0,14}", re.ASCII)
ADDRESS = re.compile(r"\d{1,3}(\.\d{1,3}){3}", re.ASCII)
FIELDS = (MARK, "name", "hardware", "shape", "wrap", "channels", "chips", "hosts", "cables", "failed", "rates")


def read(root: Entry) -> Description:
    """Return what a description of our own says."""
    if root.need(MARK).value != VERSION:
        root.need(MARK).refuse(f"version {VERSION}", advice="Start the file with: meshmend: 1")
    unknown = [key for key in root.mapping() if key not in FIELDS]
    if unknown:
        near = difflib.get_close_matches(str(unknown[0])[:40], FIELDS, 1)
        meant = f"Is {near[0]} meant?" if near else ""
        root.refuse(f"only the fields {', '.join(FIELDS)}", f"{str(unknown[0])[:40]!r}", meant)
    found = Description(FORMAT, root.file)
    if (hardware := root.get("hardware")) is not None:
        found.hardware = _hardware(hardware)
    if (channels := root.get("channels")) is not None:
        found.channels = channels.whole(least=1, most=1024)
    try:
        if root.get("shape") is not None:
            _read_shape(root, found)
        elif root.get("cables") is not None:
            _read_cables(root, found)
        else:
            root.refuse(
                "a field 'shape' or 'cables'", f"only {', '.join(map(str, root.mapping()))}", "As in: shape: 4x8"
            )
    except MeshError as error:
        raise MachineError(f"{root.file}: {error}", file=root.file) from None
    return found


def text_of(machine: Machine) -> str:
    """Return a laid-out machine as JSON of this format."""
    mesh = machine.mesh
    chips = {
        chip.name: {"at": list(at), "host": chip.host or chip.name, "address": chip.address, "ports": dict(chip.ports)}
        for at, chip in sorted(machine.chips.items())
    }
    failed = [",".join(map(str, at)) for at in machine.failed_chips] + [
        name_cable(cable) for cable in mesh.failed_cables
    ]
    facts: dict[str, Any] = {
        MARK: VERSION,
        "shape": "x".join(map(str, mesh.shape)),
        "wrap": ",".join(str(axis) for axis, wraps in enumerate(mesh.wrap) if wraps) or "none",
        "chips": {name: {key: value for key, value in chip.items() if value} for name, chip in chips.items()},
        "failed": failed,
        "rates": {name_cable(cable): str(rate) for cable, rate in mesh.cable_rates.items()},
    }
    if machine.hardware is not None:
        is_file = machine.hardware.endswith(".json")
        facts["hardware"] = str(Path(machine.hardware).absolute()) if is_file else machine.hardware
    return json.dumps(facts, indent=1) + "\n"


def _hardware(entry: Entry) -> str:
    """Return a preset's name, or the path of a hardware file, which is relative to the description."""
    text = entry.text()
    return str(Path(entry.file).parent / text) if text.endswith(".json") else text


def _read_cables(root: Entry, found: Description) -> None:
    for name in ("wrap", "hosts", "rates"):
        if (entry := root.get(name)) is not None:
            entry.refuse("a field 'shape' beside it", f"{name} alone")
    for name, chip in root.items("chips"):
        host = chip.get("host") if isinstance(chip.value, dict) else None
        found.add_chip(str(name)[:256], Chip(str(name)[:256], None if host is None else host.text()))
    for cable in root.need("cables").rows():
        ends = list(cable.rows())
        if len(ends) not in (2, 3):
            cable.refuse("[chip, chip] or [chip, chip, channels]")
        a, b = ends[0].text(), ends[1].text()
        if a == b:
            cable.refuse("two different chips", a)
        for name in (a, b):
            if name not in found.chips:
                found.add_chip(name, Chip(name))
        found.add_channel(a, b, ends[2].whole(least=1, most=1024) if len(ends) == 3 else found.channels or 1)
    for entry in root.rows("failed"):
        name = entry.text()
        hit = [key for key, chip in found.chips.items() if name in (chip.name, chip.host)]
        if not hit:
            entry.refuse("the name of a chip or a host of this file")
        for key in hit:
            found.chips[key] = Chip(found.chips[key].name, found.chips[key].host, failed=True)


def _read_shape(root: Entry, found: Description) -> None:
    if (cables := root.get("cables")) is not None:
        cables.refuse("either a shape or cables", "both", "With a shape, list what is missing: failed and rates.")
    shape = read_topology(root.need("shape").text(64), root.file)
    if not 1 <= len(shape) <= MAX_AXES or not 1 <= math.prod(shape) <= MAX_CHIPS:
        root.need("shape").refuse(f"1 to {MAX_AXES} axes and at most {MAX_CHIPS:,} chips")
    wrap = root.get("wrap")
    wraps = [False] * len(shape) if wrap is None else parse_wrap(wrap.text(64), len(shape), f"wrap: {wrap.text(64)}:")
    found.grids, found.lists_cables = [Grid.of(shape, wraps)], False
    host_of: dict[Coordinate, str] = {}
    for name, region in root.items("hosts"):
        for coordinate in _chips_of(region, shape):
            if coordinate in host_of:
                region.refuse("each chip on one host", f"{name_chip(coordinate)}, which {host_of[coordinate]} has")
            host_of[coordinate] = str(name)[:256]
    named: dict[Coordinate, str] = {}
    wired: dict[Coordinate, dict[str, Any]] = {}
    for name, chip in root.items("chips"):
        at = chip.need("at") if isinstance(chip.value, dict) else chip
        coordinate = _coordinate(at, shape)
        if coordinate in named:
            at.refuse("each place once", f"that of {named[coordinate]}")
        named[coordinate] = str(name)[:256]
        if isinstance(chip.value, dict) and (host := chip.get("host")) is not None:
            host_of[coordinate] = host.text()
        if isinstance(chip.value, dict) and (address := chip.get("address")) is not None:
            ports = {str(other): port.matching(INTERFACE, "an interface") for other, port in chip.items("ports")}
            wired[coordinate] = {"address": address.matching(ADDRESS, "an IPv4 address"), "ports": ports}
    for coordinate in sorted({*named, *host_of}):
        name = named.get(coordinate, ",".join(map(str, coordinate)))
        more = wired.get(coordinate, {})
        found.add_chip(name, Chip(name, host_of.get(coordinate), coordinate=coordinate, **more))
    for entry in root.rows("failed"):
        _read_failed(entry, found, shape)
    for text, rate in root.items("rates"):
        if rate.value is None:
            rate.refuse("a rate", advice=QUOTE)
        found.rates[_cable(str(text), rate, shape)] = check_rate(
            rate.value if _is_number(rate.value) else rate.text(32)
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_failed(entry: Entry, found: Description, shape: tuple[int, ...]) -> None:
    if isinstance(entry.value, list):
        found.failed_coordinates.append(_coordinate(entry, shape))
        return
    if _is_number(entry.value):
        entry.refuse("a chip, a host or a cable of this machine", advice=QUOTE)
    name = entry.text()
    hit = [
        chip.coordinate
        for chip in found.chips.values()
        if name in (chip.name, chip.host) and chip.coordinate is not None
    ]
    if hit:
        found.failed_coordinates += hit
    elif re.fullmatch(r"[\d,]+-[\d,]+", name):
        found.failed_cables.append(_cable(name, entry, shape))
    elif "@" in name or re.fullmatch(r"[\d,]+", name):
        found.failed_coordinates += _chips_of(entry, shape)
    else:
        entry.refuse("a chip, a host or a cable of this machine, as in 0,3 or 2x2@0,0 or 0,0-0,1 or a name")


def _chips_of(entry: Entry, shape: tuple[int, ...]) -> list[Coordinate]:
    """Return the places of a box such as 2x2@0,0, or of one chip."""
    text = entry.text(128)
    region = Region.parse(text)
    if len(region.at) != len(shape) or any(
        a + n > length for a, n, length in zip(region.at, region.shape, shape, strict=True)
    ):
        entry.refuse(f"a box inside {'x'.join(map(str, shape))}")
    return list(itertools.product(*(range(a, a + n) for a, n in zip(region.at, region.shape, strict=True))))


def _coordinate(entry: Entry, shape: tuple[int, ...]) -> Coordinate:
    parts = list(entry.rows())
    if len(parts) != len(shape):
        entry.refuse(f"{len(shape)} coordinates")
    return tuple(part.whole(most=n - 1) for part, n in zip(parts, shape, strict=True))


def _cable(text: str, entry: Entry, shape: tuple[int, ...]) -> tuple[Coordinate, Coordinate]:
    ends = text.split("-")
    if len(text) > 128 or len(ends) != 2:
        entry.refuse("a cable as the key, as in 0,0-0,1", repr(text[:40]))
    a, b = sorted(parse_chip(end) for end in ends)
    if any(len(end) != len(shape) for end in (a, b)):
        entry.refuse(f"a cable between chips of {len(shape)} coordinates", repr(text[:40]))
    return a, b
