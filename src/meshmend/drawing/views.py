"""Views: the still pictures of a schedule. Each reads only the schedule; none depends on the planner that made it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from meshmend.cost.load import link_time
from meshmend.drawing.canvas import (
    SETTINGS,
    TEXT_PT,
    Sheet,
    chip_keys,
    failed_key,
    line_key,
)
from meshmend.drawing.geometry import ASIDE, FigureLayout, Points, same_way_back, strokes
from meshmend.drawing.style import (
    COPY_DASH,
    DASHES,
    GREEN,
    GREY,
    INK,
    SEQUENCE,
    YELLOW,
    Look,
    chip_fills,
    phase_looks,
    phases_in_order,
)
from meshmend.errors import DrawingError, name_chip
from meshmend.schedule import Collective, Op, Schedule
from meshmend.topology import Mesh

MAX_TREES = 12
"""Trees on one sheet."""
OWNERS = {
    Collective.ALL_GATHER: "owner, where the chunk comes from",
    Collective.ALL_REDUCE_WITH_TURN: "owner, where the sum is complete and may be replaced",
}
"""What an owner is in the legend of trees, where it is more than the chip at which the sum is complete."""


@dataclass(frozen=True)
class Lines:
    """Distinct pairs of chips of one phase; `both[i]` where transfers go in both directions over the same links.

    Such a pair is listed once, with its smaller rank first.
    """

    phase: int
    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    both: NDArray[np.bool_]


def pair_lines(schedule: Schedule, phase: int, rows: NDArray[np.bool_] | None = None) -> Lines:
    """Return who sends to whom in a phase, among the given rows of the schedule."""
    wanted = schedule.phase == phase
    if rows is not None:
        wanted &= rows
    n = schedule.mesh.n_chips
    found = np.unique(schedule.src[wanted].astype(np.int64) * n + schedule.dst[wanted])
    src, dst = np.divmod(found, n)
    both = np.isin(dst * n + src, found)
    both[both] = same_way_back(schedule.mesh, src[both], dst[both])
    keep = ~both | (src < dst)
    return Lines(phase, src[keep], dst[keep], both[keep])


def draw_rings(
    schedule: Schedule, stage: Literal["all", "payload", "shards"] = "all", *, title: str | None = None
) -> Figure:
    """Draw who sends to whom while sums are formed, one panel for the payload and one for its shards.

    A line without a head is used in both directions. Where the results return over the same lines, as in every ring,
    a note says so; where they do not, they get separate panels.
    """
    mirrored = _comes_back_mirrored(schedule)
    groups: dict[tuple[bool, bool], list[int]] = {}
    looks = phase_looks(schedule)
    for phase in phases_in_order(schedule):
        of_shards, comes_back = "of shards" in schedule.phase_names[phase], looks[phase].open_head
        if (comes_back and mirrored) or (stage != "all" and of_shards != (stage == "shards")):
            continue
        groups.setdefault((comes_back, of_shards), []).append(phase)
    panels = [_panel_name(schedule, phases, number, len(groups)) for number, phases in enumerate(groups.values(), 1)]
    note = "Results return over the same lines in the opposite direction." if mirrored and schedule.n_transfers else ""
    return _phase_panels(
        schedule, list(groups.values()), panels, title or f"{schedule.planner}: who sends to whom", note
    )


def draw_phases(schedule: Schedule, *, title: str | None = None) -> Figure:
    """Draw every phase in a panel of its own, in order of time; phases that span the same steps share one."""
    groups: dict[tuple[int, int], list[int]] = {}
    for phase in phases_in_order(schedule):
        steps = schedule.step[schedule.phase == phase]
        groups.setdefault((int(steps[0]), int(steps[-1])), []).append(phase)
    panels = []
    for number, ((first, last), phases) in enumerate(groups.items(), 1):
        names = [schedule.phase_names[phase] for phase in phases]
        panels.append(f"{number}. " + "\n".join(names) + f"\n({_name_steps(first, last)})")
    keys: list[Artist] = [
        line_key("adds", Look(GREY), arrow=True),
        line_key("replaces", Look(GREY, COPY_DASH, open_head=True), arrow=True),
        line_key("both ways", Look(GREY), arrow=False),
    ]
    title = title or f"{schedule.planner}, phase by phase"
    return _phase_panels(schedule, list(groups.values()), panels, title, "", keys)


def draw_load(schedule: Schedule, *, title: str | None = None) -> Figure:
    """Draw what each link carries over the whole schedule, by colour and width."""
    layout = FigureLayout(schedule.mesh)
    load = link_time(schedule)
    exists = np.flatnonzero(schedule.mesh.neighbours.ravel() >= 0)
    peak = float(load.max(initial=0.0))
    mean = float(load[exists].mean()) if len(exists) else 0.0
    with mpl.rc_context(SETTINGS):
        keys = failed_key(layout)
        sheet = Sheet(
            layout,
            title=title or f"{schedule.planner}: load of the links",
            subtitle=f"{_describe(schedule)}\nbusiest link {peak:.3f} of the payload, mean {mean:.3f}; "
            "each direction of a cable on its own right-hand side"
            + ("; the load of a slow one counts over its rate" if schedule.mesh.has_slow_cables else ""),
            keys=keys,
            colour_bar=True,
        )
        axes = sheet.panels[0]
        sheet.draw_mesh(axes)
        colours, scale = ListedColormap(mpl.colormaps["viridis_r"](np.linspace(0.1, 1, 256))), Normalize(0, peak or 1)
        src, direction = np.divmod(exists, schedule.mesh.n_directions)
        lines = strokes(layout, src, schedule.mesh.neighbours[src, direction], chip=sheet.scale.chip, aside=ASIDE)
        pieces: list[Points] = []
        shades, widths = [], []
        widest = float(np.clip(0.11 * sheet.scale.cell_pt, 1.6, 5.5))
        for line, amount in zip(lines, load[exists], strict=True):
            for piece in line.pieces:
                pieces.append(piece)
                shades.append(colours(scale(amount)))
                widths.append(widest * (0.25 + 0.75 * amount / (peak or 1)))
        links = LineCollection(pieces, colors=shades, linewidths=widths, zorder=5, label="load", capstyle="butt")
        sheet.add(axes, links)
        bar = sheet.figure.colorbar(mpl.cm.ScalarMappable(scale, colours), cax=sheet.colour_axes)
        bar.set_label("fraction of the payload", size=TEXT_PT, color=INK)
        bar.ax.tick_params(labelsize=TEXT_PT - 1)
    return sheet.figure


def draw_trees(schedule: Schedule, chunks: Iterable[int] | None = None, *, title: str | None = None) -> Figure:
    """Draw how the contributions to a chunk come together at its owner, one panel per chunk.

    Of an all-gather, which adds nothing, draw how the owner's chunk spreads. By default up to four chunks are drawn,
    evenly spread over the payload.
    """
    total = schedule.total_chunks
    n_panels = min(4, total)
    asked = [total * i // n_panels for i in range(n_panels)] if chunks is None else list(chunks)
    for chunk in asked:
        if not 0 <= chunk < total:
            raise DrawingError(f"There is no chunk {chunk}: the schedule has chunks 0 to {total - 1}.")
    if not 1 <= len(asked) <= MAX_TREES:
        raise DrawingError(f"A sheet holds 1 to {MAX_TREES} trees: got {len(asked)} chunks.")
    layout = FigureLayout(schedule.mesh)
    looks = phase_looks(schedule)
    found = [chunk_tree(schedule, chunk) for chunk in asked]
    used = [phase for phase in phases_in_order(schedule) if any((tree.phase == phase).any() for tree in found)]
    spreads = schedule.collective is Collective.ALL_GATHER
    panels = [
        f"chunk {chunk}: {'from' if spreads else 'to'} {name_chip(schedule.mesh.chip(int(schedule.owners[chunk])))} "
        f"in {tree.depth} transfers"
        for chunk, tree in zip(asked, found, strict=True)
    ]
    with mpl.rc_context(SETTINGS):
        owner = OWNERS.get(schedule.collective, "owner, where the sum is complete")
        root = Line2D([], [], ls="", marker="*", ms=12, mfc=GREEN, mec="white", label=owner)
        keys: list[Artist] = [line_key(schedule.phase_names[phase], looks[phase], arrow=True) for phase in used]
        sheet = Sheet(
            layout,
            title=title or f"{schedule.planner}: how the {'chunks spread' if spreads else 'sums come together'}",
            subtitle=_describe(schedule),
            panels=panels,
            keys=[*keys, root, *failed_key(layout)],
        )
        for axes, chunk, tree in zip(sheet.panels, asked, found, strict=True):
            sheet.draw_mesh(axes, unnamed=int(schedule.owners[chunk]))
            for phase in used:
                rows = tree.phase == phase
                lines = strokes(layout, tree.src[rows], tree.dst[rows], chip=sheet.scale.chip)
                sheet.draw_strokes(axes, lines, looks[phase], arrows=True, name=schedule.phase_names[phase])
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
    # Rows are in order of step, and reads see the state before the step.
    for step_rows in np.split(rows, np.flatnonzero(np.diff(schedule.step[rows])) + 1):
        np.maximum.at(depth, schedule.dst[step_rows], depth[schedule.src[step_rows]] + 1)
    table = np.unique(np.stack([schedule.src[rows], schedule.dst[rows], schedule.phase[rows]]).astype(np.int64), axis=1)
    longest = depth.max() if spreads else depth[schedule.owners[chunk]]
    return Tree(table[0], table[1], table[2], int(longest))


def draw_routes(mesh: Mesh, src: Sequence[int], dst: Sequence[int], *, title: str | None = None) -> Figure:
    """Draw the routes between pairs of ranks, each in its own style."""
    layout = FigureLayout(mesh)
    with mpl.rc_context(SETTINGS):
        looks = [Look(SEQUENCE[i % len(SEQUENCE)], DASHES[i // 2 % len(DASHES)]) for i in range(len(src))]
        hops = [line.n_hops for line in strokes(layout, src, dst, chip=0.2, lanes="behind")]
        names = [f"{name_chip(mesh.chip(a))} to {name_chip(mesh.chip(b))}" for a, b in zip(src, dst, strict=True)]
        keys: list[Artist] = [
            line_key(f"{name}: {n} hop{'s' * (n != 1)}", look, arrow=True)
            for name, n, look in zip(names, hops, looks, strict=True)
        ]
        if len(keys) > 16:
            keys = [*keys[:15], Line2D([], [], ls="", label=f"and {len(keys) - 15} more")]
        sheet = Sheet(
            layout,
            title=title or "Routes",
            subtitle=f"{mesh}, {_count(mesh.n_chips, 'live chip')}",
            keys=[*keys, *failed_key(layout)],
        )
        axes = sheet.panels[0]
        sheet.draw_mesh(axes)
        lines = strokes(layout, src, dst, chip=sheet.scale.chip, lanes="behind")
        for name, line, look in zip(names, lines, looks, strict=True):
            sheet.draw_strokes(axes, [line], look, arrows=True, name=name, behind_chips=True)
    return sheet.figure


def draw_schedule_routes(schedule: Schedule, *, title: str | None = None) -> Figure:
    """Draw the routes of all transfers between chips that are not neighbours, by phase."""
    layout = FigureLayout(schedule.mesh)
    looks = phase_looks(schedule)
    far = schedule.mesh.link(schedule.src, schedule.dst) < 0
    if not far.any():
        raise DrawingError(
            f"Every transfer of this {schedule.planner} schedule is between neighbours, so it has no routes to draw. "
            "Draw its rings, or name the routes that you want to see: --route 0,0-3,5."
        )
    phases = [phase for phase in phases_in_order(schedule) if far[schedule.phase == phase].any()]
    lines = {phase: pair_lines(schedule, phase, far) for phase in phases}
    with mpl.rc_context(SETTINGS):
        sheet = Sheet(
            layout,
            title=title or f"{schedule.planner}: routes of transfers between chips that are not neighbours",
            subtitle=_describe(schedule),
            panels=[schedule.phase_names[phase] for phase in phases] if len(phases) > 1 else [""],
            keys=[*_phase_keys(schedule, lines, looks), *failed_key(layout)],
        )
        for axes, phase in zip(sheet.panels, phases, strict=True):
            sheet.draw_mesh(axes)
            _draw_lines(sheet, axes, schedule, lines[phase], looks[phase])
    return sheet.figure


def _phase_panels(
    schedule: Schedule,
    groups: list[list[int]],
    panels: list[str],
    title: str,
    note: str,
    keys: list[Artist] | None = None,
) -> Figure:
    """Draw groups of phases, one panel each; without `keys`, the legend names every phase."""
    layout = FigureLayout(schedule.mesh)
    looks = phase_looks(schedule)
    lines = {phase: pair_lines(schedule, phase) for group in groups for phase in group}
    fills = chip_fills(schedule)
    with mpl.rc_context(SETTINGS):
        if keys is None:
            keys = _phase_keys(schedule, lines, looks)
        if YELLOW in fills:
            keys = [*keys, *chip_keys()]
        sheet = Sheet(
            layout,
            title=title,
            subtitle="\n".join(filter(None, (_describe(schedule), note))),
            panels=panels or [""],
            keys=[*keys, *failed_key(layout)],
        )
        for axes, group in zip(sheet.panels, groups or [[]], strict=True):
            sheet.draw_mesh(axes, fills)
            for phase in group:
                _draw_lines(sheet, axes, schedule, lines[phase], looks[phase])
    return sheet.figure


def _phase_keys(schedule: Schedule, lines: dict[int, Lines], looks: tuple[Look, ...]) -> list[Artist]:
    """Return a legend entry per phase; phases that look alike share one, under the name of their family."""
    alike: dict[tuple[Look, bool], list[str]] = {}
    mixed = any(pairs.both.any() and not pairs.both.all() for pairs in lines.values())
    for phase, pairs in lines.items():
        alike.setdefault((looks[phase], bool(pairs.both.all())), []).append(schedule.phase_names[phase])
    keys: list[Artist] = []
    for (look, both), names in alike.items():
        name = names[0] if len(names) == 1 else ", ".join(dict.fromkeys(name.split(":")[0] for name in names))
        keys.append(line_key(name + " (both ways)" * both, look, arrow=not both))
    if mixed:
        keys.append(line_key("without a head: both ways", Look(GREY), arrow=False))
    return keys


def _draw_lines(sheet: Sheet, axes: Axes, schedule: Schedule, lines: Lines, look: Look) -> None:
    """Draw a phase: arrows where transfers go one way, plain lines where they go both ways."""
    name = schedule.phase_names[lines.phase]
    found = strokes(sheet.layout, lines.src, lines.dst, chip=sheet.scale.chip)
    for arrows, label in ((False, f"{name}, both ways"), (True, name)):
        some = [line for line, both in zip(found, lines.both, strict=True) if both != arrows]
        if some:
            sheet.draw_strokes(axes, some, look, arrows=arrows, name=label)


def _comes_back_mirrored(schedule: Schedule) -> bool:
    """Whether the copies use exactly the pairs that the additions use, backwards, and the lines drawn for them."""
    n = schedule.mesh.n_chips
    src, dst = schedule.src.astype(np.int64), schedule.dst.astype(np.int64)
    adds = schedule.op == Op.REDUCE
    there = np.unique(src[adds] * n + dst[adds])
    if not np.array_equal(there, np.unique(dst[~adds] * n + src[~adds])):
        return False
    src, dst = np.divmod(there, n)
    drawn_too = np.isin(dst * n + src, there)
    return bool((drawn_too | same_way_back(schedule.mesh, src, dst)).all())


def _panel_name(schedule: Schedule, phases: list[int], number: int, n_panels: int) -> str:
    if n_panels == 1:
        return ""
    steps = schedule.step[np.isin(schedule.phase, phases)]
    families = dict.fromkeys(schedule.phase_names[phase].split(":")[0] for phase in phases)
    return f"{number}. {', '.join(families)}\n({_name_steps(steps[0], steps[-1])})"


def _name_steps(first: int, last: int) -> str:
    return f"steps {first} to {last}" if first < last else f"step {first}"


def _describe(schedule: Schedule) -> str:
    mesh = schedule.mesh
    return (
        f"{schedule.collective} on {mesh}: {_count(mesh.n_chips, 'live chip')}, "
        f"{_count(schedule.n_steps, 'step')}, {_count(schedule.total_chunks, 'chunk')}"
    )


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'s' * (n != 1)}"
