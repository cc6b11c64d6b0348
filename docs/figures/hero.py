"""Draw hero.svg: a hole that breaks the rings, a tree that goes round it, and what that is worth in time.

python docs/figures/hero.py
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

import meshmend as mm
from meshmend.cost import PRESETS
from meshmend.planning.weave.trees import grow

LINES, BROKEN, OTHER, CHIP = "#2a6f97", "#d1495b", "#d9d9d9", "#333333"
SEGMENTS = (1, 2, 4, 8, 16)
PAYLOAD_BYTES, HARDWARE = 1e9, PRESETS["tpu-v6e"]
RINGS = {
    "one ring\n(hamiltonian)": [("hamiltonian", {})],
    "the paper's rings\n(row-pairs)": [
        ("row-pairs", {"orientation": way, "segments": n}) for way in ("rows", "columns") for n in SEGMENTS
    ],
}
"""What meshmend's own choice is compared with, each with its best parameters for this payload."""


def draw_mesh(ax: Axes, mesh: mm.Mesh, title: str) -> None:
    ax.set_title(title, fontsize=11)
    ax.set_aspect("equal")
    ax.invert_yaxis()
    ax.axis("off")
    live = np.zeros(mesh.shape, dtype=bool)
    live[tuple(mesh.coords.T)] = True
    for (row, column), alive in np.ndenumerate(live):
        if alive:
            ax.plot(column, row, "o", color=CHIP, markersize=5, zorder=3)
        else:
            ax.plot(column, row, "X", color=BROKEN, markersize=8, zorder=3)


def draw_broken_rings(ax: Axes, mesh: mm.Mesh) -> None:
    """Draw a ring round each pair of rows; those that the hole touches do not close."""
    draw_mesh(ax, mesh, "A board dies: its ring no longer closes")
    for top in range(0, mesh.shape[0], 2):
        columns = range(mesh.shape[1])
        ring = [(top, c) for c in columns] + [(top + 1, c) for c in reversed(columns)] + [(top, 0)]
        alive = [all(mesh.rank_of[chip] >= 0 for chip in pair) for pair in pairwise(ring)]
        for ((r0, c0), (r1, c1)), whole in zip(pairwise(ring), alive, strict=True):
            if whole:
                look = {"color": LINES} if all(alive) else {"color": BROKEN, "linestyle": (0, (2, 1.5))}
                ax.plot((c0, c1), (r0, r1), linewidth=2.2, **look)


def draw_tree(ax: Axes, mesh: mm.Mesh) -> None:
    draw_mesh(ax, mesh, "meshmend weaves trees round the hole")
    trees = grow(mesh, 64)
    every = mesh.coords[mesh.cables][:, :, ::-1]
    ax.add_collection(LineCollection(every, colors=OTHER, linewidths=1))
    first = int(np.flatnonzero(trees.axis == 1)[1])
    ax.add_collection(LineCollection(every[trees.cables[first]], colors=LINES, linewidths=2.2))


def draw_times(ax: Axes, mesh: mm.Mesh) -> None:
    plans = {name: [mm.plan(mesh, planner, **terms) for planner, terms in ways] for name, ways in RINGS.items()}
    plans["meshmend\n(mm.plan)"] = [mm.plan(mesh, payload_bytes=PAYLOAD_BYTES, hardware=HARDWARE)]
    unit_s = PAYLOAD_BYTES / HARDWARE.link_bytes_per_s
    times = {
        name: min(mm.predict(plan, PAYLOAD_BYTES, HARDWARE).seconds for plan in several) / unit_s
        for name, several in plans.items()
    }
    times["no all-reduce\ncan be faster"] = mm.bound(mesh).units
    for name, units in times.items():
        print(f"{units:.2f} M/b predicted: {name}".replace("\n", " "))  # noqa: T201
    colours = [OTHER, OTHER, LINES, CHIP]
    bars = ax.barh(list(times), list(times.values()), color=colours, height=0.62)
    ax.bar_label(bars, [f"{value:.2f}" for value in times.values()], padding=4, fontsize=10)
    name = str(mesh).replace("x", "×")
    ax.set_title(f"1 GB on {name}, links of TPU v6e:\npredicted time × link rate / payload", fontsize=11)
    ax.invert_yaxis()
    ax.set_xlim(0, max(times.values()) * 1.15)
    ax.spines[["top", "right", "bottom"]].set_visible(False)
    ax.tick_params(left=False, bottom=False, labelbottom=False, labelsize=10)


def main() -> None:
    mpl.rcParams.update({"svg.hashsalt": "meshmend", "svg.fonttype": "none"})
    small, large = mm.Mesh("8x8", failed=["2x2@2,2"]), mm.Mesh("16x32", failed=["4x2@6,8"])
    figure, axes = plt.subplots(1, 3, figsize=(12.5, 3.7), layout="constrained", width_ratios=(1, 1, 1.25))
    draw_broken_rings(axes[0], small)
    draw_tree(axes[1], small)
    draw_times(axes[2], large)
    figure.get_layout_engine().set(wspace=0.08)
    figure.savefig(Path(__file__).with_name("hero.svg"), metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
