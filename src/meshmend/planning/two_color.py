"""Two-color: two concurrent reductions, one along rows then columns, one the other way (figures 4 and 5).

Half of the payload is reduce-scattered along the rows (X), its shards along the columns (Y), and gathered back in
the reverse order; the other half goes Y then X at the same time. Each half goes in both directions of its rings. On an
axis that wraps a ring is the axis itself; on a plain one it goes out over the even positions and back over the odd
ones, so that no hop is longer than two chips. For full meshes and tori. Latency grows with the sides of the mesh, not
with its chips.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from meshmend.planning.base import Planner, Unsupported
from meshmend.planning.build import DIRECTIONS, Transfers, line_ring, ring_all_gather, ring_owners, ring_reduce_scatter
from meshmend.schedule import Op, Schedule
from meshmend.topology import Mesh, name_shape


@final
@dataclass(frozen=True)
class TwoColor(Planner):
    """Rings along X then Y for one half of the payload, Y then X for the other (figures 4 and 5)."""

    name: ClassVar[str] = "two-color"

    def n_transfers(self, mesh: Mesh) -> int:
        """Return what rings along rows and columns have, both ways round, to reduce and to gather."""
        total = 0
        for axis in (1, 0):
            n, n_lines = mesh.shape[axis], mesh.shape[1 - axis]
            cuts = _pieces(mesh) if n == min(mesh.shape) else 1
            total += n * n_lines * ((n - 1) * cuts + n_lines - 1)
        return 2 * len(DIRECTIONS) * total

    def is_routed(self, mesh: Mesh, phase: str) -> bool:
        """Say that hops are of two chips on an axis that does not wrap."""
        return not mesh.wrap[1 if phase.startswith("along X") else 0]

    def _check(self, mesh: Mesh) -> None:
        """Refuse a mesh whose rows and columns do not all form rings."""
        if mesh.n_axes != 2:
            raise Unsupported(f"it needs a mesh of two axes, and {name_shape(mesh.shape)} has {mesh.n_axes}.")
        if not mesh.is_full:
            raise Unsupported("it needs every row and every column intact, and chips or cables have failed.")

    def _plan(self, mesh: Mesh) -> Schedule:
        """Return both reductions, each phase of one beside the same phase of the other."""
        pieces = _pieces(mesh)
        transfers = Transfers()
        owners: list[NDArray[np.int64]] = []
        for axis in (1, 0):
            for direction in DIRECTIONS:
                first_chunk = len(owners) * mesh.size * pieces
                owners.append(_add_color(transfers, mesh, axis, direction, pieces, first_chunk))
        total = len(owners) * mesh.size * pieces
        return transfers.schedule(mesh, planner=self.name, total_chunks=total, owners=np.concatenate(owners))


def _pieces(mesh: Mesh) -> int:
    """Return how many pieces the shards of the shorter rings are sent in.

    A step lasts as long as its largest transfer. The shorter rings have the larger shards; cut into pieces, they make
    the steps of the two colors about equally long.
    """
    return max(1, round(max(mesh.shape) / min(mesh.shape)))


def _add_color(
    transfers: Transfers, mesh: Mesh, axis: int, direction: int, pieces: int, first_chunk: int
) -> NDArray[np.int64]:
    """Add the part of a color that goes one way round, first phase along `axis`; return the owners of its chunks."""
    ranks = (mesh.rank_of if axis == 1 else mesh.rank_of.T).astype(np.int64)
    n_lines, n = ranks.shape
    first, second = ("X", "Y") if axis == 1 else ("Y", "X")
    # Rows and columns of `along` and `across` are in ring order.
    ranks = ranks[line_ring(n_lines, wrap=mesh.wrap[1 - axis])[:, None], line_ring(n, wrap=mesh.wrap[axis])]
    # Each of the four phases gets as many steps as the longest needs; the collector closes up what stays empty.
    phase_steps = max(mesh.shape) * pieces
    # A shard of the first phase is n_lines shards of the second, each `pieces` chunks.
    shard = n_lines * pieces
    cuts = pieces if n == min(mesh.shape) else 1
    cut, line = np.arange(cuts), np.arange(n_lines)[:, None, None]
    owner = ring_owners(n, direction)
    for what, op, sends, outer, inner in (
        ("reduce-scatter", Op.REDUCE, ring_reduce_scatter, 0, 1),
        ("all-gather", Op.COPY, ring_all_gather, 3, 2),
    ):
        time, position, which = (column[:, None] for column in sends(n, direction))
        transfers.add(
            f"along {first}: {what}",
            op,
            step=outer * phase_steps + time * cuts + cut,
            src=ranks[line, position],
            dst=ranks[line, (position + direction) % n],
            first_chunk=first_chunk + which * shard + cut * (shard // cuts),
            n_chunks=shard // cuts,
        )
        time, position, which = (column[:, None] for column in sends(n_lines, direction))
        transfers.add(
            f"along {second}: {what} of shards",
            op,
            step=inner * phase_steps + time,
            src=ranks[position, owner],
            dst=ranks[(position + direction) % n_lines, owner],
            first_chunk=first_chunk + np.arange(n) * shard + which * pieces,
            n_chunks=pieces,
        )
    return np.repeat(ranks[ring_owners(n_lines, direction), owner[:, None]].ravel(), pieces)
