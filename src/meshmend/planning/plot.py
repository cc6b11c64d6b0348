"""Plot: time against payload on log axes, with the bound drawn in. Needs matplotlib (the extra `draw`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from meshmend.cost.units import format_bytes, name_seconds
from meshmend.extras import new_figure
from meshmend.planning.compare import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAYLOADS = tuple(float(payload) for payload in np.geomspace(1e3, 1e10, 43))
"""1 KB to 10 GB, six payloads per decade."""

_GAP_COLOURS = ("#33475b", "#d9822b", "#e9c46a", "#8ab6d6", "#b8443c")
_COLOURS = ("#1f5fa8", "#d9822b", "#3a8f5c", "#8c4fa3", "#b8443c", "#4aa3b8", "#7a7a2e", "#d1679b")


def plot(comparison: Comparison, full: Comparison | None, path: Path) -> None:
    """Draw `comparison` in solid lines and the full mesh, if there is one, in thin dashed ones; save to `path`."""
    figure = new_figure(path, (9, 8))
    axes, below = figure.subplots(2, 1, height_ratios=(3, 1))
    names = [entry.planner for entry in comparison.entries]
    colour_of = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    for entry in comparison.entries:
        if entry.sweep:
            axes.loglog(comparison.payloads, entry.sweep, color=colour_of[entry.planner], lw=2, label=entry.planner)
    if full is not None:
        for entry in full.entries:
            if entry.sweep:
                label = f"{entry.planner}, full mesh"
                axes.loglog(
                    full.payloads, entry.sweep, color=colour_of[entry.planner], lw=1, ls=(0, (5, 3)), label=label
                )
    least = [comparison.bound.seconds(p, comparison.hardware.link_bytes_per_s) for p in comparison.payloads]
    axes.loglog(comparison.payloads, least, color="black", lw=1.5, label=f"bound, {comparison.bound.units:.3f} M/b")
    _dress(axes, comparison, full, least)
    _draw_gaps(below, comparison)
    figure.savefig(path, dpi=150)


def _dress(axes: Axes, comparison: Comparison, full: Comparison | None, least: list[float]) -> None:
    hardware = comparison.hardware
    entries = comparison.entries + (full.entries if full is not None else ())
    times = [seconds for entry in entries for seconds in entry.sweep]
    low = min(times, default=least[-1])
    # Below the fastest plan only the bound continues, towards zero: that part of the plot is cut off.
    axes.set_ylim(bottom=low / 4)
    axes.set_xlim(comparison.payloads[0], comparison.payloads[-1])
    axes.fill_between(comparison.payloads, least, axes.get_ylim()[0], color="black", alpha=0.06, lw=0)
    axes.axvline(comparison.payload_bytes, color="grey", lw=0.8, ls=":")
    axes.annotate(
        format_bytes(comparison.payload_bytes),
        (comparison.payload_bytes, 0.985),
        xycoords=("data", "axes fraction"),
        xytext=(-4, 0),
        textcoords="offset points",
        ha="right",
        va="top",
        color="grey",
    )
    axes.xaxis.set_major_formatter(lambda value, _: format_bytes(value))
    axes.yaxis.set_major_formatter(lambda value, _: name_seconds(value))
    axes.set_xlabel("payload per chip")
    axes.set_ylabel(f"time of an all-reduce, {comparison.mode}")
    axes.set_title(f"{comparison.mesh}: {comparison.mesh.n_chips:,} chips\n{hardware}", loc="left", fontsize=11)
    axes.grid(visible=True, which="major", color="#dddddd", lw=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", fontsize=9)


def _draw_gaps(axes: Axes, comparison: Comparison) -> None:
    """Draw a bar for each plan, in parts: what its time is spent on."""
    priced = [(entry.planner, entry.forecast.gap.parts) for entry in comparison.entries if entry.forecast is not None]
    left = np.zeros(len(priced))
    for name, colour in zip(priced[0][1] if priced else (), _GAP_COLOURS, strict=False):
        seconds = np.array([parts[name] for _, parts in priced])
        axes.barh([planner for planner, _ in priced], seconds, left=left, color=colour, label=name, height=0.7)
        left += seconds
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(lambda value, _: name_seconds(value))
    axes.set_title(f"What the time for {format_bytes(comparison.payload_bytes)} is spent on", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.15))
