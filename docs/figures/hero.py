"""Draw hero.svg, hero-narrow.svg and weave_trees.svg: rings that a hole breaks, trees round it, what they are worth.

python docs/figures/hero.py

It plans and predicts first, which takes half a minute, prints the times and writes docs/data/hero.csv.
"""

from __future__ import annotations

import csv
from itertools import pairwise
from pathlib import Path

import numpy as np
from sheet import sheet

import meshmend as mm
from meshmend.cost import PRESETS
from meshmend.planning.weave.trees import Trees, grow

FIGURES = Path(__file__).parent
TIMES = FIGURES.parent / "data" / "hero.csv"
STYLE = "".join((FIGURES / name).read_text(encoding="utf-8") for name in ("survive.css", "hero.css"))
HOLED = mm.Mesh("8x8", failed=["2x2@2,2"])
CELL = 22.0
N_TREES = 256
USES = (0.95, 0.99, 1.01)
"""Where the colours of a cable change: its uses over its share."""

MESH, PAYLOAD_BYTES, HARDWARE = mm.Mesh("16x32", failed=["4x2@6,8"]), 1e9, PRESETS["tpu-v6e"]
SEGMENTS = (1, 2, 4, 8, 16)
RINGS = {
    "one ring": [("hamiltonian", {})],
    "the paper's rings": [
        ("row-pairs", {"orientation": way, "segments": n}) for way in ("rows", "columns") for n in SEGMENTS
    ],
}
"""What meshmend's own choice is compared with, each with its best parameters for this payload."""

Point = tuple[float, float]


def times() -> dict[str, str]:
    """Return the predicted time of each way to sum, in units of payload over link rate, and the bound."""
    plans = {name: [mm.plan(MESH, planner, **terms) for planner, terms in ways] for name, ways in RINGS.items()}
    plans["meshmend"] = [mm.plan(MESH, payload_bytes=PAYLOAD_BYTES, hardware=HARDWARE)]
    unit_s = PAYLOAD_BYTES / HARDWARE.link_bytes_per_s
    found = {
        name: min(mm.predict(plan, PAYLOAD_BYTES, HARDWARE).seconds for plan in several) / unit_s
        for name, several in plans.items()
    }
    found["the bound"] = mm.bound(MESH).units
    return {name: f"{units:.2f}" for name, units in found.items()}


def read() -> dict[str, str]:
    with TIMES.open(encoding="utf-8", newline="") as file:
        return {row["plan"]: row["units"] for row in csv.DictReader(file)}


def write(found: dict[str, str]) -> None:
    TIMES.write_text("plan,units\n" + "".join(f"{name},{units}\n" for name, units in found.items()), encoding="utf-8")


def line(name: str, corner: Point, ends: list[list[int]]) -> str:
    (y0, x0), (y1, x1) = ((corner[1] + CELL * row, corner[0] + CELL * column) for row, column in ends)
    return f'<line class="{name}" x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}"/>'


def panel(at: Point, title: tuple[str, str], mesh: mm.Mesh, lines: list[tuple[str, list[list[int]]]]) -> list[str]:
    """Return a mesh under its title: `lines` from chip to chip, each of a class, and the chips over them."""
    x, y = at
    corner = (x + CELL / 2, y + 48)
    parts = [f'<text x="{x:g}" y="{y + 13 + 16 * n:g}">{words}</text>' for n, words in enumerate(title)]
    parts += [line(name, corner, ends) for name, ends in lines]
    for row, column in np.ndindex(*mesh.shape):
        cx, cy = corner[0] + CELL * column, corner[1] + CELL * row
        if mesh.rank_of[row, column] >= 0:
            parts.append(f'<circle class="chip" cx="{cx:g}" cy="{cy:g}" r="4"/>')
        else:
            parts.append(f'<circle class="dead" cx="{cx:g}" cy="{cy:g}" r="7"/>')
            parts.append(f'<path class="cross" d="M{cx - 3:g} {cy - 3:g}l6 6m0 -6l-6 6"/>')
    return parts


def cables(mesh: mm.Mesh) -> list[list[list[int]]]:
    found: list[list[list[int]]] = mesh.coords[mesh.cables].tolist()
    return found


def broken_rings(mesh: mm.Mesh) -> list[tuple[str, list[list[int]]]]:
    """Return a ring round each pair of rows; those that the hole touches do not close."""
    found = []
    for top in range(0, mesh.shape[0], 2):
        columns = range(mesh.shape[1])
        ring = [[top, c] for c in columns] + [[top + 1, c] for c in reversed(columns)] + [[top, 0]]
        whole = [all(mesh.rank_of[tuple(chip)] >= 0 for chip in pair) for pair in pairwise(ring)]
        name = "tree" if all(whole) else "ring"
        found += [(name, list(pair)) for pair, kept in zip(pairwise(ring), whole, strict=True) if kept]
    return found


def tree(trees: Trees, axis: int, spine: str = "spine") -> list[tuple[str, list[list[int]]]]:
    """Return the second tree along an axis over all cables, what is not along the axis as `spine`."""
    every, number = cables(trees.mesh), int(np.flatnonzero(trees.axis == axis)[1])
    used = [every[cable] for cable in trees.cables[number].tolist()]
    names = ["tree" if start[1 - axis] == end[1 - axis] else spine for start, end in used]
    return [("cable", ends) for ends in every] + list(zip(names, used, strict=True))


def uses(trees: Trees) -> list[tuple[str, list[list[int]]]]:
    """Return every cable, in the colour of how many trees use it."""
    mesh = trees.mesh
    counts = np.bincount(trees.cables.ravel(), minlength=mesh.n_cables)
    share = counts * mesh.n_cables / (N_TREES * (mesh.n_chips - 1))
    return [(f"u{level}", ends) for level, ends in zip(np.digitize(share, USES), cables(mesh), strict=True)]


def bars(found: dict[str, str], x: float, y: float, width: float) -> list[str]:
    """Return the predicted times as bars from nought, each under its name."""
    said = {"one ring": "bar", "the paper's rings": "bar", "meshmend": "own", "the bound": "least"}
    names = {"the bound": "the bound: no all-reduce can be faster"}
    mesh = str(MESH).replace("x", "×")
    parts = [f'<text x="{x:g}" y="{y + 13:g}">Predicted time of 1 GB on {mesh},</text>']
    parts += [f'<text x="{x:g}" y="{y + 29:g}">links of TPU v6e, × payload / link rate</text>']
    for n, (name, units) in enumerate(found.items()):
        top, long = y + 44 + 44 * n, width * float(units) / max(map(float, found.values()))
        bold = " bold" if name == "meshmend" else ""
        parts.append(f'<text class="soft{bold}" x="{x:g}" y="{top + 12:g}">{names.get(name, name)}</text>')
        parts.append(f'<rect class="{said[name]}" x="{x:g}" y="{top + 17:g}" width="{long:.1f}" height="16" rx="2"/>')
        parts.append(f'<text class="{bold.strip()}" x="{x + long + 8:.1f}" y="{top + 30:g}">{units}</text>')
    return parts


def draw_hero(found: dict[str, str], *, narrow: bool) -> str:
    second, third = ((200.0, 12.0), (16.0, 240.0, 300.0)) if narrow else ((260.0, 12.0), (510.0, 12.0, 350.0))
    parts = panel((16, 12), ("A board dies: its ring", "no longer closes"), HOLED, broken_rings(HOLED))
    parts += panel(second, ("meshmend weaves trees", "round the hole"), HOLED, tree(grow(HOLED, 64), 1, "tree"))
    label = "A failed board breaks a ring; a tree goes round the hole; predicted times of an all-reduce by each."
    return sheet(*((380, 470) if narrow else (920, 244)), [*parts, *bars(found, *third)], label, STYLE)


def draw_trees() -> str:
    combs, mended = grow(mm.Mesh("8x8"), 16), grow(HOLED, N_TREES)
    parts = panel((16, 12), ("warp: all rows,", "one column"), combs.mesh, tree(combs, 1))
    parts += panel((210, 12), ("weft: all columns,", "one row"), combs.mesh, tree(combs, 0))
    parts += panel((16, 244), ("warp, repaired", "round a hole"), HOLED, tree(mended, 1))
    parts += panel((210, 244), ("uses of a cable over", f"its share, {N_TREES} trees"), HOLED, uses(mended))
    words = (f"under {USES[0]}", f"{USES[0]} – {USES[1]}", f"{USES[1]} – {USES[2]}", f"over {USES[2]}")
    for level, said in enumerate(words):
        x, y = 210 + 88 * (level % 2), 470 + 20 * (level // 2)
        parts.append(f'<line class="u{level}" x1="{x}" y1="{y}" x2="{x + 14}" y2="{y}"/>')
        parts.append(f'<text class="soft" x="{x + 18}" y="{y + 4}">{said}</text>')
    label = "A warp tree, a weft tree, a tree repaired round a hole, and how evenly the trees use the cables."
    return sheet(400, 508, parts, label, STYLE)


def pictures() -> dict[Path, str]:
    """Return the pictures, by file."""
    found = read()
    return {
        FIGURES / "hero.svg": draw_hero(found, narrow=False),
        FIGURES / "hero-narrow.svg": draw_hero(found, narrow=True),
        FIGURES / "weave_trees.svg": draw_trees(),
    }


def main() -> None:
    found = times()
    for name, units in found.items():
        print(f"{units} M/b predicted: {name}")  # noqa: T201
    write(found)
    for path, text in pictures().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
