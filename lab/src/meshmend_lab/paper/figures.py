"""The ten figures of the paper, each as our own plan or routes: a mesh, a planner and a view.

They are drawn by `meshmend_lab.paper.drawing`, which knows no planner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshmend.planning import plan
from meshmend.schedule import Schedule
from meshmend.topology import Mesh


@dataclass(frozen=True)
class PaperFigure:
    """How one figure is made. `planner` is empty where routes are drawn."""

    title: str
    mesh: Mesh
    planner: str
    view: Literal["routes", "rings", "payload", "shards", "phases"]

    def schedule(self) -> Schedule:
        """Plan what the figure shows."""
        return plan(self.mesh, self.planner)


_WHOLE, _HOLED = Mesh("8x8"), Mesh("8x8", failed=["2x2@2,2"])

FIGURES: dict[int, PaperFigure] = {
    1: PaperFigure("Dimension-order routing", Mesh("6x6"), "", "routes"),
    2: PaperFigure("Routes round a failed 2×2 region", Mesh("6x6", failed=["2x2@2,2"]), "", "routes"),
    3: PaperFigure("One Hamiltonian ring over near neighbours", _WHOLE, "hamiltonian", "rings"),
    4: PaperFigure("Two concurrent reductions, along X and along Y", Mesh("4x4"), "two-color", "rings"),
    5: PaperFigure("The phases of the two-color reduction", Mesh("4x4"), "two-color", "phases"),
    6: PaperFigure("Row pairs, first phase: two rows form a ring", _WHOLE, "row-pairs", "payload"),
    7: PaperFigure("Row pairs, second phase: alternate rows form rings", _WHOLE, "row-pairs", "shards"),
    8: PaperFigure("One Hamiltonian ring round a failed 2×2 region", _HOLED, "hamiltonian", "rings"),
    9: PaperFigure("Yellow chips forward to the blue rings", _HOLED, "row-pairs", "payload"),
    10: PaperFigure("The steps of the forwarding scheme", Mesh("6x6", failed=["2x2@2,2"]), "row-pairs", "phases"),
}
