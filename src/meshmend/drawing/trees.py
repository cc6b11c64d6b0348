"""Trees: how the contributions to a chunk come together at its owner, or how an owner's chunk spreads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from meshmend.drawing.canvas import SETTINGS, Sheet, failed_key, line_key
from meshmend.drawing.geometry import FigureLayout, strokes
from meshmend.drawing.style import GREEN, describe, phase_looks, phases_in_order, some_chunks
from meshmend.errors import DrawingError, name_chip
from meshmend.schedule import Collective, Op, Schedule

MAX_TREES = 12
"""Trees on one sheet."""
SMALL_CELL_PT = 24.0
"""Points between chips below which a tree is drawn without arrow heads."""
OWNERS = {
    Collective.ALL_GATHER: "owner, where the chunk comes from",
    Collective.ALL_REDUCE_WITH_UPDATE: "owner, where the sum is complete and may be replaced",
}
"""What an owner is in the legend of trees, where it is more than the chip at which the sum is complete."""


def draw_trees(schedule: Schedule, chunks: Iterable[int] | None = None, *, title: str | None = None) -> Figure:
    """Draw how the contributions to a chunk come together at its owner, one panel per chunk.

    Of an all-gather, which adds nothing, draw how the owner's chunk spreads. The more contributions a line carries (or
    the more chips it serves), the wider it is. By default up to four chunks are drawn, fewer of a large mesh, evenly
    spread over the payload.
    """
    n_panels = 4 if schedule.mesh.size <= 256 else 2 if schedule.mesh.size <= 576 else 1
    asked = some_chunks(schedule, chunks, n_panels)
    if not 1 <= len(asked) <= MAX_TREES:
        raise DrawingError(f"A sheet holds 1 to {MAX_TREES} trees: got {len(asked)} chunks.")
    layout = FigureLayout(schedule.mesh)
    looks = phase_looks(schedule)
    found = [chunk_tree(schedule, chunk) for chunk in asked]
    used = [phase for phase in phases_in_order(schedule) if any((tree.phase == phase).any() for tree in found)]
    spreads = schedule.collective is Collective.ALL_GATHER
    panels = [
        f"chunk {chunk}: {'from' if spreads else 'to'} {name_chip(schedule.mesh.chip(int(schedule.owners[chunk])))} "
        f"over at most {tree.depth} transfers"
        for chunk, tree in zip(asked, found, strict=True)
    ]
    with mpl.rc_context(SETTINGS):
        owner = OWNERS.get(schedule.collective, "owner, where the sum is complete")
        root = Line2D([], [], ls="", marker="*", ms=12, mfc=GREEN, mec="white", label=owner)
        keys: list[Artist] = [line_key(schedule.phase_names[phase], looks[phase], arrow=True) for phase in used]
        sheet = Sheet(
            layout,
            title=title or f"{schedule.planner}: how the {'chunks spread' if spreads else 'sums come together'}",
            subtitle=describe(schedule)
            + f"\nwider lines {'serve more chips' if spreads else 'carry more contributions'}",
            panels=panels,
            keys=[*keys, root, *failed_key(layout)],
        )
        for axes, chunk, tree in zip(sheet.panels, asked, found, strict=True):
            sheet.draw_mesh(axes, unnamed=int(schedule.owners[chunk]))
            for phase in used:
                rows = tree.phase == phase
                lines = strokes(layout, tree.src[rows], tree.dst[rows], chip=sheet.scale.chip)
                # Of many chips the heads would hide the lines, which show by their width where they lead: from 0.6 for
                # one contribution to 4 for all of them.
                sheet.draw_strokes(
                    axes,
                    lines,
                    looks[phase],
                    arrows=sheet.scale.cell_pt >= SMALL_CELL_PT,
                    name=schedule.phase_names[phase],
                    widths=(0.6 + 3.4 * np.sqrt(tree.carries[rows] / schedule.mesh.n_chips)).tolist(),
                )
            x, y = layout.live[schedule.owners[chunk]]
            size = float(np.clip(0.6 * sheet.scale.cell_pt, 13, 24))
            axes.add_line(
                Line2D([x], [y], ls="", marker="*", ms=size, mfc=GREEN, mec="white", mew=0.7, zorder=7, label="owner")
            )
    return sheet.figure


@dataclass(frozen=True)
class Tree:
    """The distinct transfers that add to one chunk, and the longest chain of them that ends at the owner.

    Of an all-gather, those that copy the owner's chunk, and the longest chain of them.
    """

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    phase: NDArray[np.int64]
    carries: NDArray[np.int64]
    """Contributions that each transfer carries; of an all-gather, chips that get the chunk by way of it."""
    depth: int


def chunk_tree(schedule: Schedule, chunk: int) -> Tree:
    """Find the transfers that add to a chunk (or copy it, in an all-gather), and the length of their longest chain."""
    first = schedule.first_chunk.astype(np.int64)
    spreads = schedule.collective is Collective.ALL_GATHER
    holds = (
        (schedule.op == (Op.COPY if spreads else Op.REDUCE)) & (first <= chunk) & (chunk < first + schedule.n_chunks)
    )
    rows = np.flatnonzero(holds)
    depth = np.zeros(schedule.mesh.n_chips, dtype=np.int64)
    weight = np.ones(schedule.mesh.n_chips, dtype=np.int64)
    carries = np.zeros(schedule.n_transfers, dtype=np.int64)
    # Rows are in order of step, and reads see the state before the step.
    by_step = np.split(rows, np.flatnonzero(np.diff(schedule.step[rows])) + 1)
    for step_rows in by_step:
        np.maximum.at(depth, schedule.dst[step_rows], depth[schedule.src[step_rows]] + 1)
    # What a chip sends on it has received before; backwards, those that it serves have been counted before it.
    for step_rows in reversed(by_step) if spreads else by_step:
        near, far = (schedule.src, schedule.dst) if spreads else (schedule.dst, schedule.src)
        carries[step_rows] = weight[far[step_rows]]
        np.add.at(weight, near[step_rows], carries[step_rows])
    ends = np.stack([schedule.src[rows], schedule.dst[rows], schedule.phase[rows]]).astype(np.int64)
    table, line = np.unique(ends, axis=1, return_inverse=True)
    total = np.zeros(table.shape[1], dtype=np.int64)
    np.maximum.at(total, line.ravel(), carries[rows])
    longest = depth.max() if spreads else depth[schedule.owners[chunk]]
    return Tree(table[0], table[1], table[2], total, int(longest))
