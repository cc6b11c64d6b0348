"""Descriptions in the form of each tool, of machines as they are sold, whole or with parts removed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

Edge = tuple[int, int]


@dataclass(frozen=True)
class Sample:
    """A machine: its cables with their channels, and what its tool writes about it."""

    name: str
    cables: dict[Edge, int]
    write: Callable[[Sample], str]
    shape: tuple[int, ...]
    wrap: tuple[bool, ...]
    extra: frozenset[Edge] = frozenset()
    boards: tuple[tuple[str, tuple[int, ...]], ...] = ()
    coordinates: dict[int, tuple[int, int]] = field(default_factory=dict)
    chips: tuple[int, ...] = ()

    def without(self, chips: Collection[int] = (), cables: Collection[Edge] = ()) -> Sample:
        """The same machine as its tool sees it when these are gone."""
        kept = {edge: n for edge, n in self.cables.items() if edge not in cables and not set(edge) & set(chips)}
        boards = tuple((kind, tuple(c for c in held if c not in chips)) for kind, held in self.boards)
        return replace(
            self,
            cables=kept,
            chips=tuple(chip for chip in self.chips if chip not in chips),
            boards=tuple((kind, held) for kind, held in boards if held),
            coordinates={chip: at for chip, at in self.coordinates.items() if chip not in chips},
        )

    @property
    def text(self) -> str:
        return self.write(self)


def grid_cables(shape: tuple[int, int], wrap: tuple[bool, bool], channels: int = 1) -> dict[Edge, int]:
    """Cables of a grid whose chips are numbered in row-major order."""
    rows, columns = shape
    found = {}
    for r in range(rows):
        for c in range(columns):
            for nr, nc, wraps, n in ((r + 1, c, wrap[0], rows), (r, c + 1, wrap[1], columns)):
                if (nr < rows and nc < columns) or (wraps and n > 2):
                    a, b = r * columns + c, (nr % rows) * columns + nc % columns
                    found[min(a, b), max(a, b)] = channels
    return found


def write_umd(sample: Sample) -> str:
    lines = ["arch:", *(f"  {chip}: wormhole_b0" for chip in sample.chips), "chips:"]
    if sample.coordinates:
        for chip, (x, y) in sample.coordinates.items():
            lines += [f"  {chip}:", f"    - {x}", f"    - {y}", "    - 0", "    - 0"]
    else:
        lines.append("  {}")
    lines += [
        "chip_unique_ids:",
        *(f"  {chip}: {10**17 + 31 * chip}" for chip in sample.chips),
        "ethernet_connections:",
    ]
    port: dict[int, int] = {}
    for (a, b), channels in sample.cables.items():
        for _ in range(channels):
            lines += ["  -"]
            for chip in (a, b):
                port[chip] = port.get(chip, -1) + 1
                lines += [f"    - chip: {chip}", f"      chan: {port[chip]}"]
    if not sample.cables:
        lines.append("  []")
    lines += ["ethernet_connections_to_remote_devices:", "  []", "chips_with_mmio:", "  - 0: 0", "boards:"]
    for number, (kind, chips) in enumerate(sample.boards):
        lines += ["  -", f"    - board_id: {7 * 10**16 + number}", f"    - board_type: {kind}", "    - chips:"]
        lines += [f"        - {chip}" for chip in chips]
    return "\n".join(lines) + "\n"


def write_neuron(sample: Sample) -> str:
    near: dict[int, list[int]] = {chip: [] for chip in sample.chips}
    for a, b in sample.cables:
        near[a].append(b)
        near[b].append(a)
    rows = [{"neuron_device": c, "bdf": f"{c:02x}:00.0", "connected_to": near[c], "nc_count": 8} for c in sample.chips]
    return json.dumps(rows)


def sample_of(name: str, cables: dict[Edge, int], write: Callable[[Sample], str], **more: object) -> Sample:
    chips = tuple(sorted({chip for edge in cables for chip in edge}))
    return Sample(name, cables, write, chips=chips, **more)  # type: ignore[arg-type]


def blackhole_galaxy() -> tuple[dict[Edge, int], frozenset[Edge]]:
    """Four trays of 2x4: a 4x8 torus, with four cables that join no neighbours of it."""
    cables = {}
    for tray in range(4):
        for (a, b), n in grid_cables((2, 4), (False, False), 2).items():
            cables[8 * tray + a, 8 * tray + b] = n
    for chip in range(8):
        for a, b in ((0, 1), (2, 3)):  # trays on top of each other
            cables[8 * a + chip, 8 * b + chip] = 2
    extra = set()
    for chip in (0, 2, 3, 4, 6, 7):
        for a, b in ((0, 3), (1, 2)):  # trays side by side: only the ends of rows are neighbours
            edge = (8 * a + chip, 8 * b + chip)
            cables[edge] = 4 if chip == 7 else 2
            if chip in (2, 6):
                extra.add(edge)
    return cables, frozenset(extra)


_BH, _BH_EXTRA = blackhole_galaxy()
_T3K = {(0, 1): 2, (0, 2): 2, (0, 4): 2, (1, 3): 2, (1, 5): 2, (2, 3): 2, (2, 6): 2, (3, 7): 2, (4, 5): 2, (6, 7): 2}
_T3K_AT = {0: (1, 0), 1: (1, 1), 2: (2, 0), 3: (2, 1), 4: (0, 0), 5: (0, 1), 6: (3, 0), 7: (3, 1)}
_N300S = (("n300", (0, 4)), ("n300", (1, 5)), ("n300", (2, 6)), ("n300", (3, 7)))
PLAIN = (False, False)
SAMPLES = {
    sample.name: sample
    for sample in (
        sample_of(
            "galaxy",
            grid_cables((4, 8), PLAIN, 4),
            write_umd,
            shape=(4, 8),
            wrap=PLAIN,
            boards=tuple(("ubb", tuple(range(8 * n, 8 * n + 8))) for n in range(4)),
        ),
        sample_of(
            "blackhole galaxy",
            _BH,
            write_umd,
            shape=(4, 8),
            wrap=(True, True),
            extra=_BH_EXTRA,
            boards=(("ubb_blackhole", tuple(range(32))),),
        ),
        sample_of(
            "8 p150",
            {(a, a | bit): 2 for bit in (1, 2, 4) for a in range(8) if not a & bit},
            write_umd,
            shape=(2, 4),
            wrap=(False, True),
            boards=tuple(("p150", (n,)) for n in range(8)),
        ),
        sample_of("t3000", _T3K, write_umd, shape=(2, 4), wrap=PLAIN, boards=_N300S, coordinates=_T3K_AT),
        sample_of(
            "2 n300",
            {(0, 1): 2, (0, 3): 2, (1, 2): 2, (2, 3): 2},
            write_umd,
            shape=(2, 2),
            wrap=PLAIN,
            boards=(("n300", (0, 1)), ("n300", (2, 3))),
            coordinates={0: (1, 0), 1: (1, 1), 2: (2, 1), 3: (2, 0)},
        ),
        sample_of("trainium2", grid_cables((4, 4), (True, True)), write_neuron, shape=(4, 4), wrap=(True, True)),
    )
}

OWN = """
meshmend: 1
hardware: tpu-v3
shape: 4x8
wrap: "1"
hosts: {node0: "4x4@0,0", node1: "4x4@0,4"}
chips: {tray1.chip3: {at: [0, 3]}}
failed: ["2x2@2,0", "1,1-1,2", tray1.chip3]
rates: {"0,0-0,1": 1/2}
"""
OWN_CABLES = "meshmend: 1\nchannels: 2\ncables:\n" + "".join(
    f"  - [c{a}, c{b}, {n}]\n" for (a, b), n in grid_cables((3, 4), (True, False), 2).items()
)


def removed(sample: Sample, rng: random.Random, chips: int, cables: int) -> Sample:
    """The machine with that many chips, and then cables, gone at random."""
    fewer = sample.without(chips=rng.sample(sample.chips, chips))
    return fewer.without(cables=rng.sample(sorted(fewer.cables), min(cables, len(fewer.cables))))
