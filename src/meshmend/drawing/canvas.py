"""Canvas: a sheet of panels, each a mesh with its hole, under a title and over a legend. All sizes follow the mesh."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import Collection, LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.transforms import AffineDeltaTransform

from meshmend.drawing.geometry import FigureLayout, Points, Stroke, cables, failed_cable_marks, head, shorten
from meshmend.drawing.style import BLUE_CHIP, CABLE, CHIP, CHIP_EDGE, GREY, INK, RED, SLOW_CABLE, YELLOW, Look

TITLE_PT, TEXT_PT, SMALL_PT = 12.0, 9.0, 7.0
WIDTH_IN = 9.6
"""Width of a sheet; a mesh that would not be legible in it gets more."""
SLOW_DASH: Any = (0, (0.5, 0.5))
"""Wide and in short dashes, so that it shows on both sides of a transfer that covers it, and without colour too."""
SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "meshmend",
    "font.family": "DejaVu Sans",
    "hatch.linewidth": 0.6,
    "path.simplify": False,
    "text.parse_math": False,  # names are text: a $ in one does not start a formula
}


@dataclass(frozen=True)
class Scale:
    """Sizes that fit a mesh on its sheet. Lengths without a unit are in distances between neighbours."""

    cell_in: float

    @property
    def cell_pt(self) -> float:
        """Points from chip to chip."""
        return 72 * self.cell_in

    @property
    def names_chips(self) -> bool:
        """Whether a chip is large enough to carry its coordinate."""
        return self.cell_pt >= 44

    @property
    def chip(self) -> float:
        """Half-width of a chip."""
        return 0.24 if self.names_chips else 0.2

    @property
    def line_pt(self) -> float:
        """Width of a transfer's line."""
        return float(np.clip(0.036 * self.cell_pt, 0.8, 2.0))

    @property
    def head(self) -> tuple[float, float]:
        """Length and width of an arrow head."""
        length = float(np.clip(7.5 / self.cell_pt, 0.13, 0.24))
        return length, 0.9 * length


class Sheet:
    """A figure with one panel per title, all of the same mesh."""

    def __init__(
        self,
        layout: FigureLayout,
        *,
        title: str,
        subtitle: str = "",
        panels: Sequence[str] = ("",),
        keys: Sequence[Artist] = (),
        colour_bar: bool = False,
    ) -> None:
        self.layout = layout
        left, right, top, bottom = layout.box
        across, down = right - left, bottom - top
        n = len(panels)
        columns = _columns(n, across, down)
        rows = math.ceil(n / columns)
        bar_in = 1.0 if colour_bar else 0.0
        room = WIDTH_IN - 0.4 - bar_in
        cell = min(room / (columns * across), 8.4 / (rows * down), 0.78)
        self.scale = Scale(max(cell, 0.25 if n == 1 else 0.2))
        cell = self.scale.cell_in
        numbers_in = 0.0 if self.scale.names_chips or not layout.is_plane else 0.17
        # A colour bar needs room for its label, however flat the mesh is.
        panel_in = (across * cell + numbers_in, max(down * cell + numbers_in, 2.2 if colour_bar else 0.0))
        gap_in = 0.3
        grid_in = columns * panel_in[0] + (columns - 1) * gap_in
        width_in = max(grid_in + 0.4 + bar_in, 5.2)
        self.figure = Figure(figsize=(width_in, 5.0), facecolor="white")
        FigureCanvasAgg(self.figure)
        self.legend, legend_in = self._legend(keys, width_in)
        heading = _wrapped(title, width_in - 0.4, TITLE_PT * 1.08)
        if any(layout.mesh.wrap[-2:]):
            subtitle += "\nLines that are cut off at an edge continue at the opposite edge."
        below = _wrapped(subtitle, width_in - 0.4, TEXT_PT) if subtitle else ""
        names = [_wrapped(name, panel_in[0] + 0.2, TEXT_PT) if name else "" for name in panels]
        name_in = max((name.count("\n") + 1) * 0.165 + 0.08 if name else 0.0 for name in names)
        title_in = 0.14 + (heading.count("\n") + 1) * 0.215
        subtitle_in = (below.count("\n") + 1) * 0.175 + 0.04 if below else 0.0
        top_in = title_in + subtitle_in + 0.06
        height_in = top_in + rows * (panel_in[1] + name_in) + (rows - 1) * 0.12 + 0.1 + legend_in
        self.figure.set_size_inches(width_in, height_in)
        self.figure.text(
            0.2 / width_in, 1 - 0.14 / height_in, heading, size=TITLE_PT, weight="bold", color=INK, va="top"
        )
        self.figure.text(0.2 / width_in, 1 - title_in / height_in, below, size=TEXT_PT, color=GREY, va="top")
        if self.legend is not None:
            self.legend.set_bbox_to_anchor((0.5, 0.06 / height_in), transform=self.figure.transFigure)
        self.panels: list[Axes] = []
        start_in = (width_in - grid_in - bar_in) / 2
        for i, name in enumerate(names):
            row, column = divmod(i, columns)
            in_row = min(columns, n - row * columns)
            offset = (columns - in_row) * (panel_in[0] + gap_in) / 2
            x_in = start_in + offset + column * (panel_in[0] + gap_in) + numbers_in
            spare_in = panel_in[1] - down * cell - numbers_in
            y_in = height_in - top_in - (row + 1) * (panel_in[1] + name_in) - row * 0.12 + spare_in / 2
            size = across * cell / width_in, down * cell / height_in
            axes = self.figure.add_axes((x_in / width_in, y_in / height_in, *size))
            axes.set_xlim(left, right)
            axes.set_ylim(bottom, top)
            axes.axis("off")
            if name:
                above = y_in + down * cell + numbers_in + 0.05
                middle = x_in + across * cell / 2
                self.figure.text(
                    middle / width_in, above / height_in, name, size=TEXT_PT, color=INK, ha="center", va="bottom"
                )
            self.panels.append(axes)
        self.colour_axes: Axes | None = None
        if colour_bar:
            box, tall_in = self.panels[-1].get_position(), min(panel_in[1] - 0.2, 4.5)
            corner = box.x1 + 0.18 / width_in, (box.y0 + box.y1) / 2 - tall_in / 2 / height_in
            self.colour_axes = self.figure.add_axes((*corner, 0.16 / width_in, tall_in / height_in))

    def _legend(self, keys: Sequence[Artist], width_in: float) -> tuple[Legend | None, float]:
        """Add the legend with as many columns as fit, and return its height."""
        if not keys:
            return None, 0.05
        for n_columns in range(min(len(keys), 4), 0, -1):
            legend = self.figure.legend(
                handles=list(keys),
                ncols=n_columns,
                loc="lower center",
                frameon=False,
                fontsize=TEXT_PT,
                handlelength=3.4,
                columnspacing=1.6,
                borderaxespad=0,
            )
            box = legend.get_window_extent()
            if box.width / self.figure.dpi <= width_in - 0.1 or n_columns == 1:
                break
            legend.remove()
        return legend, box.height / self.figure.dpi + 0.06

    def draw_mesh(self, axes: Axes, fills: Sequence[str] = (CHIP,), *, unnamed: int | None = None) -> None:
        """Draw cables, chips and the hole; `fills` is one colour for all live chips, or one per chip.

        The rank `unnamed` gets no coordinate written into it, because something else will be drawn there.
        """
        layout, scale = self.layout, self.scale
        width = float(np.clip(0.018 * scale.cell_pt, 0.4, 1.0))
        for slow, colour, dash, name in ((False, CABLE, "-", "cables"), (True, SLOW_CABLE, SLOW_DASH, "slow cables")):
            lines = [np.vstack([line, [[np.nan, np.nan]]]) for line in cables(layout, slow=slow)]
            if lines:
                x, y = np.concatenate(lines).T
                axes.add_line(
                    Line2D(x, y, color=colour, lw=2.6 * scale.line_pt if slow else width, ls=dash, zorder=1, label=name)
                )
        broken = failed_cable_marks(layout)
        if len(broken):
            axes.add_line(
                Line2D(
                    *broken.T, ls="", marker="x", ms=0.16 * scale.cell_pt, mew=1.4, color=RED, zorder=4, label="broken"
                )
            )
        for positions, fill, edge, name in (
            (layout.live, fills, CHIP_EDGE, "chips"),
            (layout.failed, (RED,), RED, "failed chips"),
        ):
            if len(positions):
                # One square, placed many times: an SVG then holds it once.
                squares = PolyCollection(
                    [scale.chip * np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]])],
                    offsets=positions,
                    offset_transform=axes.transData,
                    facecolors=list(fill),
                    edgecolors=edge,
                    linewidths=float(np.clip(0.014 * scale.cell_pt, 0.35, 0.8)),
                    zorder=3,
                    label=name,
                )
                to_page: Any = axes.transData
                squares.set_transform(AffineDeltaTransform(to_page))
                self.add(axes, squares)
        if len(layout.failed):
            reach = 0.62 * scale.chip
            arms = [
                np.array([position - reach * arm, position + reach * arm])
                for position in layout.failed
                for arm in (np.array([1, 1]), np.array([1, -1]))
            ]
            crosses = LineCollection(arms, colors="white", linewidths=0.8 * scale.line_pt, zorder=3.1, label="crosses")
            self.add(axes, crosses)
        self._number(axes, unnamed)

    def add(self, axes: Axes, artist: Collection) -> None:
        """Add lines or shapes to a panel. Nothing is clipped: nothing reaches out of it, and clips bloat an SVG."""
        axes.add_collection(artist, autolim=False)
        artist.set_clip_on(False)

    def draw_strokes(
        self,
        axes: Axes,
        strokes: Sequence[Stroke],
        look: Look,
        *,
        arrows: bool,
        name: str,
        behind_chips: bool = False,
        colours: Sequence[str] | None = None,
        widths: Sequence[float] | None = None,
    ) -> None:
        """Draw lines in one style, with or without arrow heads; `colours` and `widths`, one per line, replace its own.

        A width is in line widths.
        """
        length, width = self.scale.head
        pieces: list[Points] = []
        of_stroke: list[int] = []
        for number, stroke in enumerate(strokes):
            mine = shorten(stroke, 0.7 * length) if arrows else stroke.pieces
            pieces += mine
            of_stroke += [number] * len(mine)
        lw = self.scale.line_pt
        own = [look.colour] * len(strokes) if colours is None else list(colours)
        lines = LineCollection(
            pieces,
            colors=[own[i] for i in of_stroke],
            linewidths=lw if widths is None else [lw * widths[i] for i in of_stroke],
            label=name,
            capstyle="butt" if widths is None else "round",
        )
        lines.set_zorder(2 if behind_chips else 5)
        lines.set_linestyle((0, look.dash) if look.dash else "solid")
        self.add(axes, lines)
        if arrows:
            heads = [head(stroke, length, width) for stroke in strokes]
            self.add(
                axes,
                PolyCollection(
                    heads,
                    facecolors="white" if look.open_head else own,
                    edgecolors=own,
                    linewidths=0.5 * lw,
                    zorder=5.1,
                    label=f"{name}: heads",
                ),
            )

    def _number(self, axes: Axes, unnamed: int | None) -> None:
        """Write coordinates into the chips, or numbers along the edges where chips are too small."""
        layout, scale = self.layout, self.scale
        mesh = layout.mesh
        if scale.names_chips:
            longest = max(len(",".join(str(n - 1) for n in mesh.shape)), 3)
            size = min(SMALL_PT, 2 * scale.chip * scale.cell_pt * 0.88 / (0.62 * longest))
            if size >= 4.5:
                for rank, ((x, y), chip) in enumerate(zip(layout.live, mesh.coords.tolist(), strict=True)):
                    name = ",".join(map(str, chip)) if rank != unnamed else ""
                    axes.text(x, y, name, size=size, color=INK, ha="center", va="center_baseline", zorder=6)
            return
        if not layout.is_plane:
            return
        every = next(k for k in (1, 2, 4, 5, 10, 20, 50, 100, 1000) if k * scale.cell_pt >= 15)
        left, top = layout.box[0] + 0.08, layout.box[2] + 0.08
        n_rows, n_columns = (1, *mesh.shape)[-2:]
        for row in range(0, n_rows, every):
            axes.text(left, row, str(row), size=SMALL_PT, color=GREY, ha="right", va="center")
        for column in range(0, n_columns, every):
            axes.text(column, top, str(column), size=SMALL_PT, color=GREY, ha="center", va="bottom")


def line_key(name: str, look: Look, *, arrow: bool) -> Line2D:
    """Return a legend entry for a line; an arrow has its head in the middle."""
    marker = ">" if arrow else ""
    fill = "white" if look.open_head else look.colour
    style: Any = (0, look.dash) if look.dash else "-"
    return Line2D([], [], color=look.colour, lw=1.8, ls=style, marker=marker, ms=5, mfc=fill, mew=1.0, label=name)


def chip_keys() -> list[Artist]:
    """Return the legend entries for blue and yellow chips."""
    return [
        Patch(facecolor=fill, edgecolor=CHIP_EDGE, label=name)
        for fill, name in ((BLUE_CHIP, "blue: its pair is intact"), (YELLOW, "yellow: its pair has a hole"))
    ]


def failed_key(layout: FigureLayout) -> list[Artist]:
    """Return the legend entries for failed chips, failed cables and slow cables, if there are any."""
    keys: list[Artist] = []
    if len(layout.failed):
        keys.append(Patch(facecolor=RED, edgecolor="white", hatch="xxx", label="failed chip"))
    if layout.mesh.failed_cables:
        keys.append(Line2D([], [], ls="", marker="x", ms=6, mew=1.6, color=RED, label="failed cable"))
    if layout.mesh.has_slow_cables:
        rates = sorted(set(layout.mesh.cable_rates.values()))
        named = f"rate {rates[0]}" if len(rates) == 1 else f"rates {rates[0]} to {rates[-1]}"
        keys.append(Line2D([], [], color=SLOW_CABLE, lw=4.5, ls=SLOW_DASH, label=f"slow cable, {named}"))
    return keys


def write(figure: Figure, path: Path) -> None:
    """Write a figure as .svg, .png or .pdf; the same figure gives the same bytes."""
    with mpl.rc_context(SETTINGS):
        if path.suffix == ".svg":
            text = io.StringIO()
            figure.savefig(text, format="svg", metadata={"Date": None})
            # A hundredth of a point is enough and saves a third of the size. Scales stay, or letters would shrink.
            short = re.sub(r"scale\([^)]*\)|(\d+\.\d\d)\d+", lambda found: found[1] or found[0], text.getvalue())
            path.write_text(short, encoding="utf-8")
        elif path.suffix == ".pdf":
            figure.savefig(path, format="pdf", metadata={"CreationDate": None})
        else:
            figure.savefig(path, format="png", dpi=160)


def _columns(n: int, across: float, down: float) -> int:
    """Choose the number of panels per row: no gaps, and a sheet a little wider than high."""

    def odd(k: int) -> float:
        rows = math.ceil(n / k)
        return abs(math.log(k * across / (rows * down) / 1.6)) + 1.6 * (rows * k - n) / n

    return min(range(1, n + 1), key=odd)


def _wrapped(text: str, width_in: float, size_pt: float) -> str:
    """Break lines that would not fit; the average character is about 0.56 of the font size wide."""
    per_line = max(int(72 * width_in / (0.56 * size_pt)), 12)
    return "\n".join(textwrap.fill(line, per_line, break_on_hyphens=False) for line in text.split("\n"))
