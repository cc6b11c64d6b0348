"""Weave: any connected survivors, close to the limit that the cables set.

Each chunk is reduced up a spanning tree to its root and broadcast back down. Many trees share the cables evenly
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

from meshmend.planning.base import MAX_TRANSFERS, CannotServe, Floor, Planner, check_count
from meshmend.planning.weave.pieces import Pieces
from meshmend.planning.weave.roots import choose_roots, order_trees
from meshmend.planning.weave.slots import MAX_PLACES, Slots, assign_steps
from meshmend.planning.weave.trees import Rooted, grow, measure, reroot
from meshmend.schedule import Op, Schedule
from meshmend.topology import Mesh

PHASES = ("reduce to the roots", "broadcast from the roots")
CHUNKS_PER_SIDE = 16
"""Default chunks per chip along each side: filling and draining then add about a fifth."""
MOST_CHUNKS = 4096
"""Default limit of chunks; fewer where the schedule would have more than `MAX_TRANSFERS`."""
MAX_TRIED_TRANSFERS = 2**22
TRIED_TRANSFERS_PER_CHIP = 2**9
"""Where planners are compared, no number of chunks but the default is tried that gives more transfers than the larger
of the two: half a gigabyte and some five seconds, or 256 chunks on meshes so large that fewer would be all filling."""
FILLING_PER_SIDE = 1.5
"""Steps of filling and draining for each chip along each side of a plain mesh, as measured (docs/weave.md)."""
FEW_TREES = 256


@final
@dataclass(frozen=True)
class Weave(Planner):
    """One spanning tree per chunk, many trees woven through the mesh: for any connected survivors.

    `chunks` cuts the payload: more of them bring the time of long payloads closer to the bound, and make more
    steps. Left out, it grows with the sides of the mesh.

    >>> from meshmend import plan
    >>> plan(Mesh("4x4", failed=[(1, 1)], failed_cables=["3,2-3,3"]), "weave", chunks=60)
    Schedule(weave all-reduce on 4x4 minus 1x1@1,1, 1 cable: 15 chips, ... steps, 60 chunks, 1,680 transfers)
    """

    name: ClassVar[str] = "weave"

    chunks: int | None = None

    def __post_init__(self) -> None:
        if self.chunks is not None:
            object.__setattr__(self, "chunks", check_count("chunks", self.chunks))

    def variants(self, mesh: Mesh, step_cost: float) -> Sequence[Weave]:
        """Return this planner and one with about the best number of chunks.

        The time is steps · (step_cost + 1/K) with steps = load · K + filling: least where K² is
        filling / (load · step_cost). It is flat there, so a power of two nearby is good enough.
        """
        if self.chunks is not None:
            return [self]
        load = _least_load(mesh)
        most = min(MOST_CHUNKS, _most_chunks(mesh, max(MAX_TRIED_TRANSFERS, TRIED_TRANSFERS_PER_CHIP * mesh.n_chips)))
        best = math.sqrt(FILLING_PER_SIDE * sum(mesh.shape) / (load * step_cost)) if load * step_cost > 0 else most
        power = round(math.log2(max(1.0, min(best, most))))
        tuned = min(2**power, most)
        default = default_chunks(mesh)
        # Where filling takes longer than the chunks themselves, the default costs gigabytes and gains little.
        if default > most and default < FILLING_PER_SIDE * sum(mesh.shape):
            return [Weave(chunks=chunks) for chunks in sorted({most, tuned})]
        return [self] if tuned == default else [self, Weave(chunks=tuned)]

    def floor(self, mesh: Mesh) -> Floor:
        """Return what trees cost at least: each uses P−1 of the cables, and a link carries one chunk per step."""
        load, n = _least_load(mesh), mesh.n_chips
        per_chunk = load * mesh.rates.sum() / Pieces.of(mesh).rates.sum() if mesh.has_slow_cables else load
        steps = math.ceil((self.chunks or default_chunks(mesh)) * per_chunk - 1e-9)
        return Floor(steps=steps, link_load=load, chip_load=2 * (n - 1) / n)

    def n_transfers(self, mesh: Mesh) -> int:
        """Return what trees have: each chunk crosses P−1 cables on its way up, and as many down.

        Over slow cables it goes in pieces: how many is only known afterwards, so that this is the most.
        """
        chunks = self.chunks or default_chunks(mesh)
        whole = 2 * (mesh.n_chips - 1) * chunks
        if not mesh.has_slow_cables:
            return whole
        pieces = Pieces.of(mesh)
        slow = (pieces.per_step > 0) & (pieces.per_step < pieces.per_chunk)
        # A cable of p/q takes q/p + 1 steps for a chunk, and about p/q of the chunks that others carry.
        return whole + 4 * int(slow.sum()) * chunks

    def _check(self, mesh: Mesh) -> None:
        """Refuse too many chunks for so many chips."""
        most = min(MAX_PLACES // mesh.n_link_slots, _most_chunks(mesh, MAX_TRANSFERS))
        if self.chunks is not None and self.chunks > most:
            raise CannotServe(
                f"it takes at most {most:,} chunks on {mesh.n_chips:,} chips, and {self.chunks:,} were asked for."
            )

    def _plan(self, mesh: Mesh) -> Schedule:
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
        pieces = Pieces.of(mesh) if mesh.has_slow_cables else None
        trees = grow(mesh, _n_trees(mesh, chunks), None if pieces is None else pieces.rates)
        eccentricity, somewhere = measure(trees)
        tree_of = order_trees(trees, eccentricity.min(axis=1), chunks, ends=sum(mesh.shape) // 2)
        roots = choose_roots(eccentricity, tree_of)
        rooted = reroot(somewhere, tree_of, roots)
        uses = np.bincount(trees.cables[tree_of].ravel(), minlength=mesh.n_cables)
        if pieces is not None:
            uses = np.ceil(uses / np.maximum(pieces.rates, 1 / pieces.per_chunk))
        slots = assign_steps(mesh, rooted, pace=float(uses.max()) / chunks, pieces=pieces)
        return _schedule(mesh, rooted, slots, roots, pieces)


def _least_load(mesh: Mesh) -> float:
    """Return the payload fraction that the busiest link carries at least: (P−1)/E, where a cable counts by its rate."""
    return (mesh.n_chips - 1) / max(1.0, float(mesh.rates.sum()))


def default_chunks(mesh: Mesh) -> int:
    """Return weave's default number of chunks.

    >>> default_chunks(Mesh("32x32"))
    1024
    """
    return min(CHUNKS_PER_SIDE * sum(mesh.shape), MOST_CHUNKS, _most_chunks(mesh, MAX_TRANSFERS))


def _most_chunks(mesh: Mesh, transfers: int) -> int:
    """Return how many chunks fit into so many transfers; at least one."""
    return max(1, transfers // max(1, 2 * (mesh.n_chips - 1)))


def _n_trees(mesh: Mesh, chunks: int) -> int:
    """Return how many different trees to grow; chunks beyond that take them again."""
    trees = max(FEW_TREES, chunks // 4)
    # A full square mesh is in balance after every such round.
    whole_rounds = trees // sum(mesh.shape) * sum(mesh.shape)
    return min(chunks, whole_rounds or trees)


def _schedule(
    mesh: Mesh, rooted: Rooted, slots: Slots, roots: NDArray[np.int64], pieces: Pieces | None = None
) -> Schedule:
    step, cell, down = slots.step, slots.cell, slots.down
    per_chunk, first, n_pieces = 1, np.int32(0), np.int32(1)
    if pieces is not None and slots.spans is not None:
        per_chunk = pieces.per_chunk
        row, step, first, n_pieces = slots.spans.cut(step, per_chunk)
        order = np.argsort(step, kind="stable")
        cell, down = cell[row[order]], down[row[order]]
        step, first, n_pieces = step[order], first[order], n_pieces[order]
    chunk, rank = np.divmod(cell, np.int32(mesh.n_chips))
    parent = rooted.parent.ravel()[cell]
    op = np.where(down, np.uint8(Op.COPY), np.uint8(Op.REDUCE))
    return Schedule(
        mesh,
        total_chunks=len(roots) * per_chunk,
        step=step,
        src=np.where(down, parent, rank),
        dst=np.where(down, rank, parent),
        first_chunk=chunk * np.int32(per_chunk) + first,
        n_chunks=n_pieces,
        op=op,
        phase=op,
        phase_names=PHASES,
        owners=np.repeat(roots, per_chunk),
        planner=Weave.name,
    )
