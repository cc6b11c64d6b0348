"""A machine as its operator knows it: the names of its chips, what has failed, and the rate of every slow cable."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from meshmend.drawing.canvas import SETTINGS, SMALL_PT, Sheet, failed_key
from meshmend.drawing.geometry import FigureLayout, strokes
from meshmend.drawing.style import INK, RED
from meshmend.machines import Machine

LEAST_PT = 4.5
"""Smaller letters cannot be read."""


def draw_machine(machine: Machine, *, title: str | None = None) -> Figure:
    """Draw a machine: a name in each chip where it is legible, else coordinates; failed chips with their names."""
    mesh = machine.mesh
    layout = FigureLayout(mesh)
    facts = [f"{machine.format}: {mesh}", f"{mesh.n_chips:,} of {mesh.size:,} chips, {mesh.n_cables:,} cables"]
    if machine.unplaced:
        facts.append(f"failed, with no known place in the mesh: {', '.join(list(machine.unplaced)[:6])}")
    with mpl.rc_context(SETTINGS):
        sheet = Sheet(
            layout, title=title or Path(machine.file).name, subtitle="\n".join(facts), keys=failed_key(layout)
        )
        axes = sheet.panels[0]
        names = {at: chip.name.partition(" (")[0] for at, chip in machine.chips.items()}
        live = [names.get(mesh.chip(rank), "") for rank in range(mesh.n_chips)]
        size = _legible(sheet, [name for name in live if name], 2 * sheet.scale.chip)
        sheet.draw_mesh(axes, names=[_broken(name) for name in live] if size else None, name_pt=size)
        _name_failed(sheet, axes, [names.get(at, "") for at in machine.failed_chips])
        _write_rates(sheet, axes)
    return sheet.figure


def _broken(name: str) -> str:
    """Return a name on two lines, broken at the gap nearest to its middle."""
    gaps = [i for i, c in enumerate(name) if c in " .-_/" and 0 < i < len(name) - 1]
    if not gaps:
        return name
    at = min(gaps, key=lambda i: abs(2 * i - len(name)))
    return f"{name[:at].rstrip()}\n{name[at:].strip(' .')}"


def _legible(sheet: Sheet, names: list[str], across: float) -> float | None:
    """Return the size in which all names fit a width in distances between chips; None where that is too small."""
    longest = max((len(line) for name in names for line in _broken(name).split("\n")), default=0)
    if not longest or not sheet.scale.names_chips:
        return None
    size = min(SMALL_PT, 0.9 * across * sheet.scale.cell_pt / (0.62 * longest))
    return size if size >= LEAST_PT else None


def _name_failed(sheet: Sheet, axes: Axes, names: list[str]) -> None:
    """Write the names of failed chips below them: nothing else is there, since their cables are not drawn."""
    size = _legible(sheet, [name for name in names if name], 0.96)
    if size is None:
        return
    for (x, y), name in zip(sheet.layout.failed, names, strict=True):
        below = y + sheet.scale.chip + 0.04
        axes.text(x, below, _broken(name), size=size, color=RED, ha="center", va="top", linespacing=0.95, zorder=6)


def _write_rates(sheet: Sheet, axes: Axes) -> None:
    """Write its rate on every slow cable, on both ends of one that leaves the picture."""
    mesh, layout = sheet.layout.mesh, sheet.layout
    if not mesh.has_slow_cables or not sheet.scale.names_chips:
        return
    ends = np.array([[mesh.rank(a), mesh.rank(b)] for a, b in mesh.cable_rates])
    for line, rate in zip(strokes(layout, *ends.T, chip=sheet.scale.chip), mesh.cable_rates.values(), strict=True):
        for piece in line.pieces:
            x, y = piece[[(len(piece) - 1) // 2, len(piece) // 2]].mean(axis=0)
            box = {"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none"}
            axes.text(x, y, str(rate), size=SMALL_PT, color=INK, ha="center", va="center", zorder=6, bbox=box)
