"""Hosts wired to each other, by LLDP: a folder with what `lldpcli show neighbors -f json0` prints on each host.

`HOST.json` is the file of a host. Each host names its neighbours, with their addresses and the interface that they are
on. A cable counts if both of its ends see it: what only one sees is dying, or leads to something without a file here.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from meshmend.errors import MachineError
from meshmend.machines.description import Chip, Description
from meshmend.machines.entries import Entry, read_json, read_text
from meshmend.machines.own import ADDRESS, HOST, INTERFACE

FORMAT = "LLDP of hosts"
COMMAND = "lldpcli show neighbors -f json0"


def read(folder: Path) -> Description:
    """Return the hosts of a folder and the cables between them."""
    found = Description(FORMAT, str(folder))
    files = {path.stem: path for path in sorted(folder.glob("*.json"))}
    if not files:
        expected = f"a file HOST.json for each host, as `{COMMAND} > HOST.json` writes it"
        raise MachineError(f"{folder}: expected {expected}, got none.", file=str(folder), expected=expected)
    ports: dict[str, dict[str, list[str]]] = {host: defaultdict(list) for host in files}
    addresses: dict[str, str] = {}
    for host, path in files.items():
        root = read_json(read_text(path), str(path))
        for interface in _first(root, "lldp").rows("interface"):
            chassis = _first(interface, "chassis")
            if chassis.get("name") is None:
                continue  # something that does not say its name, as a plain switch
            other = _first(chassis, "name").need("value").matching(HOST, "the name of a host")
            ports[host][other].append(interface.need("name").matching(INTERFACE, "an interface"))
            if chassis.get("mgmt-ip") is not None:
                addresses[other] = _first(chassis, "mgmt-ip").need("value").matching(ADDRESS, "an IPv4 address")
    for host in files:
        towards = {other: ends[0] for other, ends in ports[host].items() if other in ports}
        found.add_chip(host, Chip(host, host, address=addresses.get(host), ports=towards))
    for host, near in ports.items():
        for other, ends in near.items():
            back = len(ports[other][host]) if other in ports else 0
            if not back:
                what = "sees nothing of it" if other in ports else "has no file here"
                found.notes.append(f"{host} sees {other} on {', '.join(ends)}, which {what}: not used.")
            elif host < other:
                found.add_channel(host, other, min(back, len(ends)))
    return found


def _first(entry: Entry, field: str) -> Entry:
    """Return the first row of a field, which json0 always writes as a list."""
    rows = list(entry.rows(field))
    if not rows:
        entry.refuse(f"a list {field!r} that is not empty", advice=f"Write it with: {COMMAND}")
    return rows[0]
