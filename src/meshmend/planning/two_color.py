"""Two-color: two concurrent reductions, one along rows then columns, one the other way (figures 4 and 5).

Half of the payload is reduce-scattered along the rows (X), its shards along the columns (Y), and gathered back in
the reverse order; the other half goes Y then X at the same time. On a wrapped axis a ring is the axis itself; on a
plain one it goes out over the even places and back over the odd ones, so that no hop is longer than two chips.
For full meshes and tori. Latency grows with the sides of the mesh, not with the number of chips.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from meshmend.planning.base import Planner
from meshmend.planning.build import Transfers, line_ring, ring_all_gather, ring_owners, ring_reduce_scatter
from meshmend.schedule import Op, Schedule
from meshmend.topology import Mesh, name_shape


@final
@dataclass(frozen=True)
class TwoColor(Planner):
    """Rings along X then Y for one half of the payload, Y then X for the other (figures 4 and 5)."""

    name: ClassVar[str] = "two-color"

    def why_not(self, mesh: Mesh) -> str | None:
        """Say why rows and columns do not all form rings, or None."""
        if mesh.n_axes != 2:
            return f"it needs a mesh of two axes, and {name_shape(mesh.shape)} has {mesh.n_axes}."
        if not mesh.is_full:
            return "it needs every row and every column whole, and chips or cables have failed."
        return None

    def plan(self, mesh: Mesh) -> Schedule:
        """Return both reductions, each phase of one beside the same phase of the other."""
        rows, columns = mesh.shape
        # A step lasts as long as its largest transfer. The shorter rings have the larger shards, so they send
        # each shard in pieces, and the steps of the two colors come out about equally long.
        pieces = max(1, round(max(mesh.shape) / min(mesh.shape)))
        half = rows * columns * pieces
        transfers = Transfers()
        owners = np.empty(2 * half, dtype=np.int64)
        first_steps = max(_n_steps(n, mesh, pieces) for n in mesh.shape)
        for color, axis in enumerate((1, 0)):
            owners[color * half : (color + 1) * half] = self._color(
                transfers, mesh, axis=axis, pieces=pieces, first_chunk=color * half, first_steps=first_steps
            )
        return transfers.schedule(mesh, planner=self.name, total_chunks=2 * half, owners=owners)

    def _color(
        self, transfers: Transfers, mesh: Mesh, *, axis: int, pieces: int, first_chunk: int, first_steps: int
    ) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Add one color, whose first phase runs along `axis`; return the owners of its chunks."""
        ranks = mesh.rank_of if axis == 1 else mesh.rank_of.T
        n_lines, n = ranks.shape
        long_ring, cross_ring = (
            line_ring(n, wrap=mesh.wrap[axis]),
            line_ring(n_lines, wrap=mesh.wrap[1 - axis]),
        )
        first, second = ("X", "Y") if axis == 1 else ("Y", "X")
        # A shard of the first phase is n_lines shards of the second, each `pieces` chunks.
        shard = n_lines * pieces
        cuts = pieces if n == min(mesh.shape) else 1
        lines = np.arange(n_lines)[:, None, None]
        for gather in (False, True):
            time, position, which = (ring_all_gather if gather else ring_reduce_scatter)(n)
            cut = np.arange(cuts)
            start = 3 * first_steps if gather else 0
            transfers.add(
                f"along {first}: {'all-gather' if gather else 'reduce-scatter'}",
                Op.COPY if gather else Op.REDUCE,
                step=start + time[:, None] * cuts + cut,
                src=ranks[lines, long_ring[position][:, None]],
                dst=ranks[lines, long_ring[(position + 1) % n][:, None]],
                first_chunk=first_chunk + which[:, None] * shard + cut * (shard // cuts),
                n_chunks=shard // cuts,
            )
        # After the first phase, place `long_ring[i]` of every line owns shard i + 1.
        owned = np.empty(n, dtype=np.int64)
        owned[long_ring[ring_owners(n)]] = np.arange(n)
        places = np.arange(n)[:, None]
        for gather in (False, True):
            time, position, which = (ring_all_gather if gather else ring_reduce_scatter)(n_lines)
            transfers.add(
                f"along {second}: {'all-gather' if gather else 'reduce-scatter'} of shards",
                Op.COPY if gather else Op.REDUCE,
                step=(2 if gather else 1) * first_steps + time,
                src=ranks[cross_ring[position], places],
                dst=ranks[cross_ring[(position + 1) % n_lines], places],
                first_chunk=first_chunk + owned[places] * shard + which * pieces,
                n_chunks=pieces,
            )
        place_of_shard = long_ring[ring_owners(n)]
        line_of_shard = cross_ring[ring_owners(n_lines)]
        return np.repeat(ranks[line_of_shard[None, :], place_of_shard[:, None]].ravel(), pieces).astype(np.int64)


def _n_steps(n: int, mesh: Mesh, pieces: int) -> int:
    return (n - 1) * (pieces if n == min(mesh.shape) else 1)
