"""Weave: any connected survivors, close to what the cables can carry at all.

Each chunk is summed up a spanning tree to its root and copied back down it. Many trees share the cables evenly
(`trees`), their roots are spread over the chips (`roots`), and the chunks follow each other so closely that links
are busy from soon after the start to shortly before the end, with sums of later chunks going up while earlier
ones come down (`slots`). docs/weave.md says why this is near the bound, and why no ring scheme can be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import ParameterError
from meshmend.planning.base import Floor, Planner
from meshmend.planning.roots import choose_roots, order_trees
from meshmend.planning.slots import MAX_PLACES, Slots, assign_steps
from meshmend.planning.trees import Rooted, grow, measure, reroot
from meshmend.schedule import Op, Schedule
from meshmend.topology import Mesh

PHASES = ("reduce to the roots", "broadcast from the roots")
CHUNKS_PER_SIDE = 16
"""Chunks for each chip along each side, unless told: filling and draining then adds about a fifth."""
MOST_CHUNKS = 4096
MAX_TRANSFERS = 2**25
"""Unless told, no more chunks than this, and fewer where the schedule would have more transfers than this."""
MAX_TRIED_TRANSFERS = 2**21
"""Transfers of a schedule beyond which no number of chunks is tried: planning it would take more than seconds."""
FILLING_PER_SIDE = 1.5
"""Steps of filling and draining for each chip along each side of a plain mesh, as measured (docs/weave.md)."""
FEW_TREES = 256


@final
@dataclass(frozen=True)
class Weave(Planner):
    """One chunk a spanning tree, many trees woven through the mesh: for any connected survivors.

    `chunks` cuts the payload: more of them bring the time of long payloads closer to the bound, and make more
    steps. Left out, it grows with the sides of the mesh.

    >>> from meshmend import plan
    >>> plan(Mesh("4x4", failed=[(1, 1)], failed_cables=["3,2-3,3"]), "weave", chunks=60)
    Schedule(weave all-reduce on 4x4 minus 1x1@1,1, 1 cable: 15 chips, ... steps, 60 chunks, 1,680 transfers)
    """

    name: ClassVar[str] = "weave"

    chunks: int | None = None

    def __post_init__(self) -> None:
        if self.chunks is not None and self.chunks < 1:
            raise ParameterError(f"chunks is {self.chunks}, expected at least 1.")

    def why_not(self, mesh: Mesh) -> str | None:
        """Say that there are too many chunks for so many chips, or None."""
        most = MAX_PLACES // mesh.n_link_slots
        if self.chunks is not None and self.chunks > most:
            return f"it takes at most {most:,} chunks on {mesh.n_chips:,} chips, and {self.chunks:,} were asked for."
        return None

    def variants(self, mesh: Mesh, step_cost: float) -> Sequence[Weave]:
        """Return this planner and one with about the best number of chunks.

        The time is steps · (step_cost + 1/K) with steps = load · K + filling: least where K² is
        filling / (load · step_cost). It is flat there, so that a power of two close by will do.
        """
        load = _least_load(mesh)
        most = min(MOST_CHUNKS, MAX_TRIED_TRANSFERS // max(1, 2 * (mesh.n_chips - 1)))
        best = math.sqrt(FILLING_PER_SIDE * sum(mesh.shape) / (load * step_cost)) if load * step_cost > 0 else most
        power = round(math.log2(max(1.0, min(best, most))))
        tuned = min(2**power, max(1, most))
        return [self] if tuned == (self.chunks or default_chunks(mesh)) else [self, Weave(chunks=tuned)]

    def floor(self, mesh: Mesh) -> Floor:
        """Return what trees cost at least: each uses P−1 of the cables, and a link carries one chunk a step."""
        load, n = _least_load(mesh), mesh.n_chips
        steps = math.ceil((self.chunks or default_chunks(mesh)) * load)
        return Floor(steps=steps, link_load=load, chip_load=2 * (n - 1) / n)

    def plan(self, mesh: Mesh) -> Schedule:
        """Return the woven schedule."""
        chunks = self.chunks or default_chunks(mesh)
        if mesh.n_chips == 1:
            nothing: list[int] = []
            return Schedule(
                mesh,
                total_chunks=chunks,
                step=nothing,
                src=nothing,
                dst=nothing,
                op=nothing,
                owners=[0] * chunks,
                phase_names=PHASES,
                planner=self.name,
            )
        trees = grow(mesh, _n_trees(mesh, chunks))
        eccentricity, somewhere = measure(trees)
        tree_of = order_trees(trees, eccentricity.min(axis=1), chunks, ends=sum(mesh.shape) // 2)
        roots = choose_roots(eccentricity, tree_of)
        rooted = reroot(somewhere, tree_of, roots)
        uses = np.bincount(trees.cables[tree_of].ravel(), minlength=1)
        slots = assign_steps(mesh, rooted, pace=float(uses.max()) / chunks)
        return _schedule(mesh, rooted, slots, roots)


def _least_load(mesh: Mesh) -> float:
    """Return the payload fraction that the busiest link carries at least: (P−1)/E."""
    return (mesh.n_chips - 1) / max(1, mesh.n_cables)


def default_chunks(mesh: Mesh) -> int:
    """Return the number of chunks that weave takes unless told.

    >>> default_chunks(Mesh("32x32"))
    1024
    """
    most = MAX_TRANSFERS // max(1, 2 * (mesh.n_chips - 1))
    return max(1, min(CHUNKS_PER_SIDE * sum(mesh.shape), MOST_CHUNKS, most))


def _n_trees(mesh: Mesh, chunks: int) -> int:
    """Return how many different trees to grow; chunks beyond that take them again."""
    trees = max(FEW_TREES, chunks // 4)
    # A full square mesh is in balance after every such round.
    whole_rounds = trees // sum(mesh.shape) * sum(mesh.shape)
    return min(chunks, whole_rounds or trees)


def _schedule(mesh: Mesh, rooted: Rooted, slots: Slots, roots: NDArray[np.int64]) -> Schedule:
    chunk, rank = np.divmod(slots.cell, np.int32(mesh.n_chips))
    parent = rooted.parent.ravel()[slots.cell]
    op = np.where(slots.down, np.uint8(Op.COPY), np.uint8(Op.REDUCE))
    return Schedule(
        mesh,
        total_chunks=len(roots),
        step=slots.step,
        src=np.where(slots.down, parent, rank),
        dst=np.where(slots.down, rank, parent),
        first_chunk=chunk,
        op=op,
        phase=op,
        phase_names=PHASES,
        owners=roots,
        planner=Weave.name,
    )
