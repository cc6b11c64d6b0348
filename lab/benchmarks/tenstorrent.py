"""Tenstorrent: which mesh its runtime opens with chips lost, asked of the runtime itself, without hardware.

    python lab/benchmarks/tenstorrent.py table                          the table of docs/tenstorrent.md
    python lab/benchmarks/tenstorrent.py ask ~/tt/bin/python FOLDER     asks, and writes ttnn_meshes.json: half an hour
    python lab/benchmarks/tenstorrent.py check ~/tt/bin/python FOLDER   asks again what it opens by itself, and compares

FOLDER has the cluster descriptors of tenstorrent/tt-umd (tests/cluster_descriptor_examples), ~/tt is an environment
with `pip install ttnn`. Every single chip and every 2×2 board is lost in turn. Chips that are lost are taken out of the
descriptor, and the others numbered from 0 on without gaps, as UMD numbers what it finds (`get_next_chip_id` in its
topology_discovery.hpp). The runtime is asked what it opens by itself, and then, with a mesh graph descriptor as a user
may write one, for larger meshes than that, the largest first, and for lines: once for each loss and its mirror images.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from meshmend.errors import Coordinate, MachineError
from meshmend.topology import Mesh
from meshmend_lab.tenstorrent import runtime as ttnn_runtime
from meshmend_lab.tenstorrent.compare import UsedMesh, compare_with_runtime
from meshmend_lab.tenstorrent.numbered import NumberedMachine, read_numbered

KEPT = Path(ttnn_runtime.__file__).with_name("ttnn_meshes.json")
MACHINES = {
    "tt_umd_6u_cluster_desc.yaml": ("WORMHOLE_B0", 4),
    "tt_umd_blackhole_galaxy.yaml": ("BLACKHOLE", 2),
    "tt_umd_t3k_cluster_desc.yaml": ("WORMHOLE_B0", 2),
    "tt_umd_blackhole_8xP150.yaml": ("BLACKHOLE", 2),
}
"""The descriptors, with the architecture and the channels per cable that a mesh graph descriptor asks for."""
NAMES = dict(zip(MACHINES, ("Wormhole Galaxy", "Blackhole Galaxy", "T3000", "8 × p150"), strict=True))
BY_CHIP = ("arch", "chips", "chip_unique_ids", "harvesting", "chip_to_bus_id", "asic_locations", "chip_pci_bdfs")
ASK_SECONDS = 900.0
"""Its search for a line of 31 chips took it more than two minutes, while other work shared the two cores."""
MESH_GRAPH = """
mesh_descriptors {{
  name: "M0"
  arch: {arch}
  device_topology {{ dims: [ {rows}, {columns} ] }}
  host_topology {{ dims: [ 1, 1 ] }}
  channels {{ count: {channels} policy: RELAXED }}
}}
top_level_instance {{ mesh {{ mesh_descriptor: "M0" mesh_id: 0 }} }}
"""


def without(whole: dict[str, Any], lost: Collection[int]) -> dict[str, Any]:
    """Return a cluster descriptor as UMD would write it if these chips were gone."""
    number = {chip: new for new, chip in enumerate(chip for chip in sorted(whole["arch"]) if chip not in lost)}

    def ends(pairs: list[list[dict[str, Any]]] | None) -> list[list[dict[str, Any]]]:
        here = [
            [end if "chip" not in end else {**end, "chip": number.get(end["chip"])} for end in p] for p in pairs or ()
        ]
        return [pair for pair in here if all(end.get("chip", 0) is not None for end in pair)]

    found = dict(whole)
    for key in BY_CHIP:
        if whole.get(key):
            found[key] = {number[chip]: value for chip, value in whole[key].items() if chip in number}
    for key in ("ethernet_connections", "ethernet_connections_to_remote_devices"):
        found[key] = ends(whole.get(key))
    mmio = [(chip, device) for entry in whole["chips_with_mmio"] for chip, device in entry.items() if chip in number]
    found["chips_with_mmio"] = [{number[chip]: device} for chip, device in mmio]
    found["boards"] = []
    for board in whole["boards"]:
        parts = [
            {**part, "chips": [number[c] for c in part["chips"] if c in number]} if "chips" in part else part
            for part in board
        ]
        if any(part.get("chips") for part in parts):
            found["boards"].append(parts)
    return found


def losses(shape: tuple[int, ...]) -> Iterator[Sequence[Coordinate]]:
    """Yield every single chip, and every 2×2 board, of a grid."""
    rows, columns = shape
    yield from ([at] for at in itertools.product(range(rows), range(columns)))
    for r, c in itertools.product(range(rows - 1), range(columns - 1)):
        yield [(r, c), (r, c + 1), (r + 1, c), (r + 1, c + 1)]


def is_first_image(at: Sequence[Coordinate], shape: tuple[int, ...]) -> bool:
    """Return whether none of a loss's mirror images comes before it: only one of them is asked about further."""
    flips = itertools.product((False, True), repeat=len(shape))
    images = [
        sorted(tuple(n - 1 - x if f else x for x, n, f in zip(one, shape, flip, strict=True)) for one in at)
        for flip in flips
    ]
    return sorted(at) == min(images)


def larger(n_live: int, least: int) -> list[tuple[int, int]]:
    """Return rectangles of at most `n_live` and more than `least` chips, the largest and squarest first."""
    sides = [(r, c) for r in range(2, n_live + 1) for c in range(2, r + 1) if least < r * c <= n_live]
    return sorted(sides, key=lambda side: (-side[0] * side[1], side[0]))


class Asker:
    """Asks about losses of one machine; the answers have the numbers that devices have on the whole machine."""

    def __init__(self, python: str, descriptor: Path, folder: Path) -> None:
        self.python, self.descriptor, self.folder = python, descriptor, folder
        self.whole = yaml.safe_load(descriptor.read_text(encoding="utf-8"))
        self.arch, self.channels = MACHINES[descriptor.name]

    def ask(self, lost: Collection[int], shape: tuple[int, int] | None = None) -> dict[str, Any] | None:
        """Return the mesh that the runtime opens, None if it opens none."""
        path = self.folder / "hurt.yaml"
        path.write_text(yaml.safe_dump(without(self.whole, lost), default_flow_style=None), encoding="utf-8")
        graph = None
        if shape is not None:
            graph = MESH_GRAPH.format(arch=self.arch, rows=shape[0], columns=shape[1], channels=self.channels)
        try:
            found = ttnn_runtime.ask(path, self.python, mesh_graph=graph, timeout_s=ASK_SECONDS)
        except MachineError as error:
            print(f"    {shape or 'by itself'}: {str(error).partition(': ')[2][:160]}", file=sys.stderr)
            return None
        old = [chip for chip in sorted(self.whole["arch"]) if chip not in lost]
        return {"shape": found["shape"], "devices": [old[device] for device in found["devices"]]}

    def largest(self, lost: Collection[int], opened: dict[str, Any] | None) -> tuple[dict[str, Any] | None, ...]:
        """Return the largest rectangle and the longest line that the runtime opens if a user asks for them."""
        n_live = len(self.whole["arch"]) - len(lost)
        rectangle = None if opened is None or 1 in opened["shape"] else opened
        shapes = larger(n_live, 0 if rectangle is None else len(rectangle["devices"]))
        asked = next((found for shape in shapes if (found := self.ask(lost, shape))), rectangle)
        lines = ((n, 1) for n in range(n_live, 1, -1))
        return asked, next((found for shape in lines if (found := self.ask(lost, shape))), None)


def machine_answers(
    descriptor: Path, python: str, folder: Path, *, further: bool, chips: Collection[int] | None = None
) -> dict[str, Any]:
    """Return everything that is kept about one machine; without `further`, only what the runtime opens by itself.

    With `chips`, only about the losses of each of these single chips.
    """
    machine = read_numbered(descriptor)
    asker = Asker(python, descriptor, folder)
    whole = ttnn_runtime.ask(descriptor, python, directions=True)
    cables: dict[tuple[int, int], int] = {}
    for a, b in asker.whole["ethernet_connections"]:
        pair = (min(a["chip"], b["chip"]), max(a["chip"], b["chip"]))
        cables[pair] = cables.get(pair, 0) + 1
    found = []
    for at in losses(machine.mesh.shape):
        lost = sorted(machine.devices[one] for one in at)
        if chips is not None and (len(lost) > 1 or lost[0] not in chips):
            continue
        answer: dict[str, Any] = {"lost": [list(one) for one in at], "chips": lost, "opened": asker.ask(lost)}
        if further and is_first_image(at, machine.mesh.shape):
            answer["asked"], answer["line"] = asker.largest(lost, answer["opened"])
        found.append(answer)
        shapes = {key: answer[key] and answer[key]["shape"] for key in ("opened", "asked", "line") if key in answer}
        print(f"{descriptor.name} without {answer['chips']}: {shapes}", flush=True)
    return {
        "file": descriptor.name,
        "ttnn": whole["ttnn"],
        "hardware": machine.hardware,
        "shape": list(machine.mesh.shape),
        "wrap": list(machine.mesh.wrap),
        "cables": [[a, b, n] for (a, b), n in sorted(cables.items())],
        "whole": {key: whole[key] for key in ("shape", "devices", "directions")},
        "losses": found,
    }


def write(machines: list[dict[str, Any]]) -> None:
    """Keep the answers, one loss per line."""
    text = json.dumps({"by": "lab/benchmarks/tenstorrent.py", "machines": machines}, indent=1)
    for machine in machines:
        for part in (*machine["losses"], machine["whole"], machine["cables"], machine["shape"], machine["wrap"]):
            long = json.dumps(part, indent=1)
            for depth in (3, 4):
                text = text.replace(long.replace("\n", "\n" + " " * depth), json.dumps(part))
    KEPT.write_text(text + "\n", encoding="utf-8")


def differences(kept: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return where a machine's answers of now differ from those that are kept."""
    keys = ("ttnn", "hardware", "shape", "wrap", "cables", "whole")
    found = [f"{kept['file']}: {key} was {kept[key]}, is {now[key]}" for key in keys if kept[key] != now[key]]
    for was, new in zip(kept["losses"], now["losses"], strict=True):
        if was["opened"] != new["opened"]:
            found.append(f"{kept['file']} without {was['chips']}: was {was['opened']}, is {new['opened']}")
    return found


def table(payload_bytes: float, only: Sequence[str] = tuple(MACHINES)) -> str:
    """Return, for each machine, what each failure leaves to its runtime and to meshmend; in docs/tenstorrent.md."""
    lines = [
        "| machine | lost | cases | ttnn alone | asked for a mesh | asked for a line | meshmend |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for kept in ttnn_runtime.measured_machines():
        if kept["file"] not in only:
            continue
        grouped: dict[tuple[str, ...], list[UsedMesh]] = {}
        for loss in kept["losses"]:
            mesh = Mesh(kept["shape"], wrap=kept["wrap"], failed=[tuple(at) for at in loss["lost"]])
            if mesh.n_components > 1:
                continue
            compared = compare_with_runtime(
                NumberedMachine(mesh, "", kept["file"], {}, kept["hardware"]), payload_bytes
            )
            cells = dict.fromkeys(("ttnn, by itself", "ttnn, asked for a mesh", "ttnn, asked for a line"), "–")
            cells |= {row.who: cell(row) for row in compared.rows[:-1]}
            what = "one chip" if len(loss["lost"]) == 1 else "a 2×2 board"
            grouped.setdefault((what, *cells.values()), []).append(compared.rows[-1])
        for (what, *others), ours in grouped.items():
            times = sorted(row.seconds or 0.0 for row in ours)
            span = " to ".join(dict.fromkeys(f"{1e3 * seconds:.2f}" for seconds in (times[0], times[-1])))
            last = f"**{ours[0].n_chips}**, {span} ms"
            lines.append(f"| {' | '.join([NAMES[kept['file']], what, f'{len(ours)}', *others, last])} |")
    return "\n".join(lines) + "\n"


def cell(row: UsedMesh) -> str:
    """Write a mesh of the runtime."""
    if row.mesh is None or row.seconds is None:
        return "none"
    return f"{row.n_chips} ({str(row.mesh).replace('x', '×')}), {1e3 * row.seconds:.2f} ms"


def main() -> None:
    """Ask, check or print."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("what", choices=["ask", "check", "table"])
    words.add_argument("python", nargs="?", help="a Python that has ttnn")
    words.add_argument("descriptors", nargs="?", type=Path, help="the folder of cluster descriptors")
    words.add_argument("--only", nargs="*", default=list(MACHINES), help="names of descriptors")
    words.add_argument("--chips", nargs="*", type=int, help="to ask again only about the losses of these chips")
    words.add_argument("--payload", type=float, default=1e8, help="bytes per chip, for the table")
    given = words.parse_args()
    if given.what == "table":
        print(table(given.payload, given.only), end="")
        return
    if given.python is None or given.descriptors is None:
        words.error("to ask, name a Python that has ttnn, and the folder of descriptors")
    kept = {} if not KEPT.exists() else {m["file"]: m for m in json.loads(KEPT.read_text(encoding="utf-8"))["machines"]}
    with tempfile.TemporaryDirectory() as folder:
        for name in given.only:
            path, further = given.descriptors / name, given.what == "ask"
            now = machine_answers(path, given.python, Path(folder), further=further, chips=given.chips)
            if given.chips is not None:
                fresh = {tuple(loss["chips"]): loss for loss in now["losses"]}
                now["losses"] = [fresh.get(tuple(loss["chips"]), loss) for loss in kept[name]["losses"]]
            if further:
                kept[name] = now
                write([kept[known] for known in MACHINES if known in kept])
            elif found := differences(kept[name], now):
                sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
