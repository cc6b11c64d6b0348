"""Tenstorrent descriptors in text protobuf: what a machine should be, and what it is.

A *mesh graph descriptor* gives the intended grid and channels per cable; a *physical system descriptor* lists the
chips and channels that were found, over all hosts. Intended minus observed is the hole. Schemas: tt-metal,
`tt_metal/fabric/protobuf/`.
"""

from __future__ import annotations

import math
import re

from meshmend.machines.description import MAX_CHIPS, Chip, Description
from meshmend.machines.entries import Entry
from meshmend.machines.grid import Grid
from meshmend.topology import MAX_AXES, name_shape
from meshmend_lab.tenstorrent.text_proto import read_text_proto

INTENDED, OBSERVED = "Tenstorrent mesh graph descriptor", "Tenstorrent physical system descriptor"
HARDWARE = {"WORMHOLE_B0": "tenstorrent-wormhole-galaxy", "BLACKHOLE": "tenstorrent-blackhole-galaxy"}
# What begins a line stays on it, and no two parts of a pattern can match the same blanks: a file of nothing but blank
# lines would take a time that grows with their square.
BEGINS_INTENDED, BEGINS_OBSERVED = (
    re.compile(rf"^[ \t]*(?:{names})\s*(?::\s*)?\{{", re.MULTILINE)
    for names in ("mesh_descriptors|device_topology", "system_graph|asic_descriptors")
)


def read_text(text: str, file: str) -> Description | None:
    """Return what the text of either descriptor says, None if it is neither: an entry point of `meshmend.machines`."""
    if BEGINS_INTENDED.search(text):
        return read_intended(read_text_proto(text, file))
    return read_observed(read_text_proto(text, file)) if BEGINS_OBSERVED.search(text) else None


def read_intended(root: Entry) -> Description:
    """Return the grid that a mesh graph descriptor asks for."""
    found = Description(INTENDED, root.file, lists_cables=False)
    meshes = list(root.need("mesh_descriptors").rows())
    if len(meshes) != 1:
        names = [mesh.need("name").value[0] for mesh in meshes[:4]]
        root.need("mesh_descriptors").refuse("one mesh", f"{len(meshes)}: {', '.join(map(str, names))}")
    mesh = meshes[0]
    topology = _one(mesh, "device_topology")
    dims = [n.whole(least=1, most=MAX_CHIPS) for n in topology.need("dims").rows()]
    if not 1 <= len(dims) <= MAX_AXES or math.prod(dims) > MAX_CHIPS:
        topology.need("dims").refuse(f"at most {MAX_AXES} axes and {MAX_CHIPS:,} chips", name_shape(dims)[:60])
    types = topology.get("dim_types") or topology.get("types")
    wraps = [False] * len(dims) if types is None else [_is_ring(kind) for kind in types.rows()]
    if types is not None and len(wraps) != len(dims):
        types.refuse(f"one type for each of {len(dims)} axes", f"{len(wraps)}")
    found.grids = [Grid.of(dims, wraps)]
    if mesh.get("channels") is not None:
        found.channels = _number(_one(mesh, "channels"), "count", least=1, most=64)
    if mesh.get("express_connections") is not None:
        found.notes.append("Express connections join no neighbours; they are not part of the mesh.")
    arch = mesh.get("arch")
    found.hardware = None if arch is None else HARDWARE.get(str(arch.value[-1]))
    return found


def _is_ring(kind: Entry) -> bool:
    if kind.value not in ("LINE", "RING"):
        kind.refuse("LINE or RING")
    return bool(kind.value == "RING")


def read_observed(root: Entry) -> Description:
    """Return the chips and channels that a physical system descriptor lists."""
    found = Description(OBSERVED, root.file)
    for row in root.rows("asic_descriptors"):
        asic = _number(row, "asic_id")
        about = _one(row, "asic_descriptor")
        tray, location = _number(about, "tray_id", default=0), _number(about, "asic_location", default=0)
        host = about.get("host_name")
        name = None if host is None else next(host.rows()).text()
        found.add_chip(str(asic), Chip(f"asic {asic} (tray {tray}, location {location})", name))
    ends: dict[tuple[str, str], set[tuple[int, int]]] = {}
    for graph in root.need("system_graph").rows():
        for host in graph.rows("asic_connectivity_graph"):
            _read_host(host, found, ends)
    for (a, b), channels in ends.items():
        if a not in found.chips or b not in found.chips:
            lost = a if a not in found.chips else b
            found.notes.append(f"A cable leads to asic {lost}, which is not described; it was left out.")
        elif a == b:
            found.notes.append(f"A channel joins {found.chips[a].name} to itself; it was left out.")
        else:
            found.add_channel(a, b, len(channels))
    return found


def _read_host(host: Entry, found: Description, ends: dict[tuple[str, str], set[tuple[int, int]]]) -> None:
    """Collect channels; both ends list each of them, and one is enough."""
    name = host.get("host_name")
    for asic in host.rows("asic_topologies"):
        a = str(_number(asic, "asic_id"))
        if a not in found.chips:
            found.add_chip(a, Chip(f"asic {a}", None if name is None else next(name.rows()).text()))
        topology = asic.get("topology")
        for edge in () if topology is None else next(topology.rows()).rows("asic_connections"):
            b = str(_number(edge, "dst_asic_id"))
            for channel in edge.rows("eth_connections"):
                here = _number(channel, "src_chan", default=0, most=63)
                there = _number(channel, "dst_chan", default=0, most=63)
                pair, ports = ((a, b), (here, there)) if a < b else ((b, a), (there, here))
                ends.setdefault(pair, set()).add(ports)


def _one(entry: Entry, name: str) -> Entry:
    values = list(entry.need(name).rows())
    if len(values) != 1:
        entry.need(name).refuse(f"{name} once", f"{len(values)} of them")
    values[0].mapping()
    return values[0]


def _number(entry: Entry, name: str, *, default: int | None = None, least: int = 0, most: int = 2**64) -> int:
    """Return a number; the text form leaves zeros out."""
    if default is not None and entry.get(name) is None:
        return default
    (*_, last) = entry.need(name).rows()
    return last.whole(least, most)
