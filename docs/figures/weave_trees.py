"""Draw weave_trees.svg: a warp tree, a weft tree, a tree repaired round a hole, and how evenly cables are used.

python docs/figures/weave_trees.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from meshmend import Mesh
from meshmend.planning.weave.trees import Trees, grow

LINES, SPINE, OTHER, CHIP = "#2a6f97", "#d1495b", "#d9d9d9", "#333333"
N_TREES = 256


def draw_mesh(ax: Axes, mesh: Mesh, title: str) -> None:
    ax.set_title(title, fontsize=9)
    ax.set_aspect("equal")
    ax.invert_yaxis()
    ax.axis("off")
    rows, columns = mesh.coords.T
    ax.scatter(columns, rows, s=16, color=CHIP, zorder=3)


def segments(mesh: Mesh) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return mesh.coords[mesh.cables][:, :, ::-1]


def draw_tree(ax: Axes, trees: Trees, number: int, title: str) -> None:
    mesh = trees.mesh
    draw_mesh(ax, mesh, title)
    every = segments(mesh)
    ax.add_collection(LineCollection(every, colors=OTHER, linewidths=1))
    used = every[trees.cables[number]]
    along = np.argmax(used[:, 0] != used[:, 1], axis=1) == 1 - trees.axis[number]
    ax.add_collection(LineCollection(used, colors=[LINES if a else SPINE for a in along], linewidths=2.4))


def main() -> None:
    mpl.rcParams.update({"svg.hashsalt": "meshmend", "svg.fonttype": "none"})
    full, holed = Mesh("8x8"), Mesh("8x8", failed=["2x2@2,2"])
    combs, mended = grow(full, 16), grow(holed, N_TREES)
    figure, axes = plt.subplots(1, 4, figsize=(12, 3.2), layout="constrained")
    warp, weft = (int(np.flatnonzero(combs.axis == axis)[1]) for axis in (1, 0))
    draw_tree(axes[0], combs, warp, "warp: all rows, one column")
    draw_tree(axes[1], combs, weft, "weft: all columns, one row")
    draw_tree(axes[2], mended, int(np.flatnonzero(mended.axis == 1)[1]), "warp, mended round a hole")
    uses = np.bincount(mended.cables.ravel(), minlength=holed.n_cables)
    share = uses * holed.n_cables / (N_TREES * (holed.n_chips - 1))
    draw_mesh(axes[3], holed, f"uses of a cable over its share, {N_TREES} trees")
    cables = LineCollection(segments(holed), array=share, cmap="coolwarm", linewidths=4, clim=(0.9, 1.1))
    axes[3].add_collection(cables)
    figure.colorbar(cables, ax=axes[3], shrink=0.8)
    figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
