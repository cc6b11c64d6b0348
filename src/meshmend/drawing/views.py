"""Views: the still pictures of a schedule. Each reads only the schedule; none depends on the planner that made it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from meshmend.cost.paths import link_time
from meshmend.cost.predict import bound_of
from meshmend.drawing.canvas import SETTINGS, TEXT_PT, Sheet, chip_keys, failed_key, line_key
from meshmend.drawing.geometry import ASIDE, FigureLayout, Points, bends, components, same_way_back, strokes
from meshmend.drawing.style import (
    AT_BOUND,
    BLUE,
    DASHES,
    DETOURS,
    GREY,
    INK,
    SEQUENCE,
    VERMILION,
    YELLOW,
    Look,
    chip_fills,
    count,
    describe,
    lighter,
    phase_looks,
    phases_in_order,
)
from meshmend.errors import name_chip
from meshmend.schedule import Op, Schedule
from meshmend.topology import Mesh


@dataclass(frozen=True)
class Lines:
    """Distinct pairs of chips of one phase; `both[i]` where transfers go in both directions over the same links.

    Such a pair is listed once, with its smaller rank first.
    """

    phase: int
    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    both: NDArray[np.bool_]


def pair_lines(schedule: Schedule, phase: int) -> Lines:
    """Return who sends to whom in a phase."""
    wanted = schedule.phase == phase
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
    panels = [_panel_name(schedule, phases, number) for number, phases in enumerate(groups.values(), 1)]
    note = "Results return over the same lines in the opposite direction." if mirrored and schedule.n_transfers else ""
    title = title or f"{schedule.planner}: who sends to whom"
    return draw_groups(schedule, list(groups.values()), panels if len(panels) > 1 else [], title, note)


def draw_load(schedule: Schedule, *, title: str | None = None) -> Figure:
    """Draw what each link carries over the whole schedule, by width, and by colour against the bound.

    No schedule of this collective on this mesh can keep its busiest link below the bound. So a link at the bound is
    grey, one that is busy for less blue, and one that makes this schedule slower than the bound red.
    """
    layout = FigureLayout(schedule.mesh)
    load = link_time(schedule)
    exists = np.flatnonzero(schedule.mesh.neighbours.ravel() >= 0)
    peak = float(load.max(initial=0.0))
    mean = float(load[exists].mean()) if len(exists) else 0.0
    least = bound_of(schedule).units if schedule.mesh.is_connected else mean
    with mpl.rc_context(SETTINGS):
        keys = failed_key(layout)
        figures = f"busiest link {peak:.3f} of the payload, mean {mean:.3f}, bound {least:.3f}"
        sheet = Sheet(
            layout,
            title=title or f"{schedule.planner}: load of the links",
            subtitle=f"{describe(schedule)}\n{figures}; each direction of a cable on its own right-hand side"
            + ("; the load of a slow one counts over its rate" if schedule.mesh.has_slow_cables else ""),
            keys=keys,
            colour_bar=True,
        )
        axes = sheet.panels[0]
        sheet.draw_mesh(axes)
        colours = LinearSegmentedColormap.from_list("about the bound", [BLUE, AT_BOUND, VERMILION])
        scale = TwoSlopeNorm(least, 0, max(2 * least, peak)) if least else Normalize(0, peak or 1)
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
        bar.set_label("payloads (grey: the bound)", size=TEXT_PT, color=INK)
        if least:
            bar.set_ticks([0, least / 2, least, *np.linspace(least, scale.vmax or least, 3)[1:]])
            bar.ax.yaxis.set_major_formatter("{x:.2f}")
            bar.ax.axhline(least, color=INK, lw=1.2)
        bar.ax.tick_params(labelsize=TEXT_PT - 1)
    return sheet.figure


def draw_routes(mesh: Mesh, src: Sequence[int], dst: Sequence[int], *, title: str | None = None) -> Figure:
    """Draw the routes between pairs of ranks, each in its own style."""
    layout = FigureLayout(mesh)
    with mpl.rc_context(SETTINGS):
        looks = [Look(SEQUENCE[i % len(SEQUENCE)], DASHES[i // 2 % len(DASHES)]) for i in range(len(src))]
        hops = [line.n_hops for line in strokes(layout, src, dst, chip=0.2, offsets="behind")]
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
            subtitle=f"{mesh}, {count(mesh.n_chips, 'live chip')}",
            keys=[*keys, *failed_key(layout)],
        )
        axes = sheet.panels[0]
        sheet.draw_mesh(axes)
        lines = strokes(layout, src, dst, chip=sheet.scale.chip, offsets="behind")
        for name, line, look in zip(names, lines, looks, strict=True):
            sheet.draw_strokes(axes, [line], look, arrows=True, name=name, behind_chips=True)
    return sheet.figure


def draw_groups(
    schedule: Schedule,
    groups: list[list[int]],
    panels: list[str],
    title: str,
    note: str = "",
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
        if any(_detours(schedule.mesh, pairs).any() for pairs in lines.values()):
            keys = [*keys, line_key("round the hole: a colour per ring", Look(DETOURS[0]), arrow=False)]
        sheet = Sheet(
            layout,
            title=title,
            subtitle="\n".join(filter(None, (describe(schedule), note))),
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
        families = dict.fromkeys(name.split(":")[0] for name in names)
        # Families that share a look are the stages of one part of the payload.
        name = names[0] if len(names) == 1 else ", then ".join(families)
        keys.append(line_key(name + " (both ways)" * both, look, arrow=not both))
    if mixed:
        keys.append(line_key("without a head: both ways", Look(GREY), arrow=False))
    return keys


def _draw_lines(sheet: Sheet, axes: Axes, schedule: Schedule, lines: Lines, look: Look) -> None:
    """Draw a phase: arrows where transfers go one way, plain lines where they go both ways."""
    name = schedule.phase_names[lines.phase]
    found = strokes(sheet.layout, lines.src, lines.dst, chip=sheet.scale.chip)
    colours = _line_colours(schedule.mesh, lines, look)
    for arrows, label in ((False, f"{name}, both ways"), (True, name)):
        some = [i for i, both in enumerate(lines.both.tolist()) if both != arrows]
        if some:
            sheet.draw_strokes(
                axes, [found[i] for i in some], look, arrows=arrows, name=label, colours=[colours[i] for i in some]
            )


def _detours(mesh: Mesh, lines: Lines) -> NDArray[np.bool_]:
    """Return which pairs lie on one axis and still cannot be joined by a straight line: a hole is between them."""
    apart = mesh.coords[lines.src].astype(np.int64) != mesh.coords[lines.dst]
    straight = np.flatnonzero((apart.sum(axis=1) == 1) & (mesh.link(lines.src, lines.dst) < 0))
    found = np.zeros(len(lines.src), dtype=np.bool_)
    if not mesh.is_full and len(straight):
        found[straight] = bends(mesh, lines.src[straight], lines.dst[straight])
    return found


def _line_colours(mesh: Mesh, lines: Lines, look: Look) -> list[str]:
    """Return the phase's colour for every line; beside detours, which get a colour per ring, it is paler."""
    round_the_hole = _detours(mesh, lines)
    if not round_the_hole.any():
        return [look.colour] * len(lines.src)
    colours = [lighter(look.colour, 0.55)] * len(lines.src)
    ring = components(list(zip(lines.src.tolist(), lines.dst.tolist(), strict=True)))
    numbers = {ring[i]: n for n, i in reversed(list(enumerate(np.flatnonzero(round_the_hole).tolist())))}
    order = {one: n for n, one in enumerate(sorted(numbers, key=numbers.__getitem__))}
    for i in np.flatnonzero(round_the_hole).tolist():
        colours[i] = DETOURS[order[ring[i]] % len(DETOURS)]
    return colours


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


def _panel_name(schedule: Schedule, phases: list[int], number: int) -> str:
    steps = schedule.step[np.isin(schedule.phase, phases)]
    families = dict.fromkeys(schedule.phase_names[phase].split(":")[0] for phase in phases)
    return f"{number}. {', '.join(families)}\n({name_steps(steps[0], steps[-1])})"


def name_steps(first: int, last: int) -> str:
    """Name a range of steps."""
    return f"steps {first} to {last}" if first < last else f"step {first}"
