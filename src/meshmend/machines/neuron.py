"""`neuron-ls` in JSON: the devices of a Trainium instance and their neighbours.

`neuron-ls -j` prints a list of devices; from Neuron 2.34 on, `neuron-ls --output-format json` puts the list under a
top-level field, next to what is common to all. Each device lists its neighbours under `connected_to`. One that is
listed as a neighbour and not as a device has failed.
"""

from __future__ import annotations

from meshmend.machines.description import Chip, Description
from meshmend.machines.entries import Entry
from meshmend.machines.grid import Grid

FORMAT = "neuron-ls"
TORUS = Grid.of((4, 4), (True, True))
N_CORES = {8: "trainium2"}
"""Hardware presets, by the number of cores of a device."""


def find_devices(root: Entry) -> Entry | None:
    """Return the list of devices, in either form; None if there is none."""
    if isinstance(root.value, list):
        lists = [root]
    elif isinstance(root.value, dict):
        lists = [entry for _, entry in root.items() if isinstance(entry.value, list)]
    else:
        return None
    for rows in lists:
        if rows.value and all(isinstance(row, dict) and "neuron_device" in row for row in rows.value):
            return rows
    return None


def read(root: Entry) -> Description:
    """Return the devices that `neuron-ls` lists."""
    found = Description(FORMAT, root.file)
    devices = find_devices(root)
    if devices is None:
        root.refuse("a list of devices with a field 'neuron_device', as `neuron-ls -j` prints it")
    host = None
    if isinstance(root.value, dict):
        for name in ("instance_id", "instance-id"):
            entry = root.get(name)
            host = host if entry is None else entry.text()
    neighbours: dict[int, set[int]] = {}
    cores = set()
    for device in devices.rows():
        number = device.need("neuron_device").whole(most=2**16)
        bus = device.get("bdf")
        name = f"device {number}" + ("" if bus is None else f" ({bus.text(32)})")
        found.add_chip(f"{number}", Chip(name, host))
        near = device.get("connected_to")
        neighbours[number] = set() if near is None else {other.whole(most=2**16) for other in near.rows()}
        if (count := device.get("nc_count")) is not None:
            cores.add(count.whole(most=2**16))
    for number, others in neighbours.items():
        for other in sorted(others - {number}):
            if f"{other}" not in found.chips:
                found.add_chip(f"{other}", Chip(f"device {other}", host, failed=True))
            if other not in neighbours or number in neighbours[other]:
                first, second = sorted((f"{number}", f"{other}"))
                found.cables[first, second] = 1
            else:
                found.notes.append(f"Device {number} lists {other} as connected, but not the reverse: taken as failed.")
    if 2 < len(found.chips) <= TORUS.size and cores <= {2, 8}:
        found.grids = [TORUS]  # trn1.32xlarge and trn2.48xlarge: sixteen devices
    found.hardware = N_CORES.get(next(iter(cores))) if len(cores) == 1 else None
    return found
