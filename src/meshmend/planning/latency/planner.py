"""Latency: short payloads in few steps, each chip exchanging with partners that may be many cables away.

A short payload's time is the number of steps and of hops, not of bytes. By recursive doubling every chip of a power of
two of chips has the sum after log₂ P exchanges: with the chip that differs from it in one bit of its place on a grid
(`sites`), nearest first. Chips beyond the power of two are folded into another before, and handed the sum after.

Longer payloads halve what is exchanged in the first levels, where partners are near: each keeps the sum of one half
(Rabenseifner), and the halves are gathered back over the same partners in the end. And they may be cut into two parts,
of which one goes along rows where the other goes along columns, so that they share no link.

On full tori whose sides are powers of two, whole payloads are exchanged at the distances of Swing (De Sensi et al.,
NSDI 2024): 1, −1, 3, −5, 11, … instead of 1, 2, 4, 8, 16, …, a third less in all.

Partners exchange partial sums and all keep them. So there is no chip where a chunk is first complete, no all-gather in
it, and no way to send from neighbour to neighbour only: the chips between would have to hold what passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import ParameterError
from meshmend.planning.base import Floor, Planner, Unsupported, check_count
from meshmend.planning.build import Transfers
from meshmend.planning.latency.sites import Bit, Sites, lay_out, n_sites
from meshmend.schedule import Op, Schedule
from meshmend.topology import Mesh

MAX_CHIPS = 2048
"""Laying sites over more chips takes more than some seconds and 100 MB."""
MAX_HALVINGS = 8
"""Payloads that would want more of them are better served by trees or rings."""
CROSSED = 0.6
"""How far the second part prefers the other axis, in powers of two of the distance: less than one."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class _Level:
    """One round of exchanges: the partner of each site, and which half of what they share it keeps (0 or 1)."""

    partner: Ints
    side: Ints


@final
@dataclass(frozen=True)
class Latency(Planner):
    """Exchanges between routed partners, in about log₂ P steps: for short payloads on any connected survivors.

    `halvings` is the number of first levels in which partners exchange half of what they hold. `parts` is 1, or 2 for a
    second half of the payload that takes the axes in another order.

    >>> Latency().plan(Mesh("4x4", failed=["1,1"]))
    Schedule(latency all-reduce on 4x4 minus 1x1@1,1: 15 chips, 5 steps, 1 chunk, 38 transfers)
    """

    name: ClassVar[str] = "latency"
    is_splittable: ClassVar[bool] = False

    halvings: int = 0
    parts: int = 1

    def __post_init__(self) -> None:
        if self.halvings != 0 or isinstance(self.halvings, bool):
            object.__setattr__(self, "halvings", check_count("halvings", self.halvings))
        if self.parts not in (1, 2):
            raise ParameterError(f"parts is {self.parts!r}, expected 1 or 2.")

    def variants(self, mesh: Mesh, step_cost: float) -> Sequence[Latency]:
        """Return this planner and those with about the best number of halvings, in one part and in two."""
        levels = _n_levels(mesh)

        def guess(halvings: int) -> float:
            return halvings * step_cost + _load(levels, halvings)

        best = min(range(min(levels, MAX_HALVINGS) + 1), key=guess)
        tries = {(h, parts) for h in (best - 1, best, best + 1) for parts in (1, 2) if 0 <= h <= levels}
        return [Latency(*choice) for choice in sorted(tries | {(self.halvings, self.parts)})]

    def floor(self, mesh: Mesh) -> Floor:
        """Return what the exchanges cost at least: each is of a run of chunks, and all of it crosses some link."""
        levels = _n_levels(mesh)
        halvings = min(self.halvings, levels)
        folds = 2 if mesh.n_chips > n_sites(mesh) else 0
        load = _load(levels, halvings)
        return Floor(levels + halvings + folds, folds + load / self.parts, folds + load)

    def n_transfers(self, mesh: Mesh) -> int:
        """Return one transfer for each site and level, there and where it halves back; folded chips add two."""
        sites, levels = n_sites(mesh), _n_levels(mesh)
        return self.parts * (sites * (levels + min(self.halvings, levels)) + 2 * (mesh.n_chips - sites))

    def is_routed(self, mesh: Mesh, phase: str) -> bool:  # noqa: ARG002
        """Say that partners are anywhere."""
        return True

    def _check(self, mesh: Mesh) -> None:
        if mesh.n_chips > MAX_CHIPS:
            raise Unsupported(
                f"it serves at most {MAX_CHIPS:,} chips, and {mesh.n_chips:,} survive: laying its exchanges over more "
                f"takes minutes. Plan with weave, whose number of chunks can be set."
            )

    def _plan(self, mesh: Mesh) -> Schedule:
        """Return both parts, level beside level."""
        sites = lay_out(mesh)
        halvings = min(self.halvings, len(sites.bits))
        chunks = 1 << halvings
        transfers = Transfers()
        owners = [
            self._add_part(transfers, sites, part * chunks, _levels(mesh, sites.bits, halvings, part))
            for part in range(self.parts)
        ]
        return transfers.schedule(
            mesh, planner=self.name, total_chunks=self.parts * chunks, owners=np.concatenate(owners)
        )

    def _add_part(self, transfers: Transfers, sites: Sites, base: int, levels: list[_Level]) -> Ints:
        """Add the transfers of one part, whose first chunk is `base`; return the owners of its chunks."""
        chips, folds = sites.chips, np.flatnonzero(sites.folded >= 0)
        halvings = min(self.halvings, len(levels))
        size = 1 << halvings
        inside, outside = chips[folds], sites.folded[folds]
        step = 0
        transfers.add("fold in", Op.REDUCE, step=0, src=outside, dst=inside, first_chunk=base, n_chunks=size)
        first = np.full(sites.n, base, dtype=np.int64)
        for level in levels[:halvings]:
            step, size = step + 1, size // 2
            theirs = first + np.where(level.side == 0, size, 0)
            first = first + np.where(level.side == 0, 0, size)
            to = chips[level.partner]
            transfers.add("halve", Op.REDUCE, step=step, src=chips, dst=to, first_chunk=theirs, n_chunks=size)
        for level in levels[halvings:]:
            step += 1
            transfers.add("double", Op.REDUCE, step=step, src=chips, dst=chips[level.partner], first_chunk=first)
        # All sites that end with a chunk have its sum at the same time; the first of them owns it.
        _, site = np.unique(first, return_index=True)
        for level in levels[:halvings][::-1]:
            step += 1
            to = chips[level.partner]
            transfers.add("gather back", Op.COPY, step=step, src=chips, dst=to, first_chunk=first, n_chunks=size)
            first = np.minimum(first, first[level.partner])
            size *= 2
        transfers.add("hand back", Op.COPY, step=step + 1, src=inside, dst=outside, first_chunk=base, n_chunks=size)
        return np.asarray(chips[site])


def _n_levels(mesh: Mesh) -> int:
    return n_sites(mesh).bit_length() - 1


def _load(levels: int, halvings: int) -> float:
    """Return the payload fraction that a site sends, without folding: there, and back where it halves."""
    left = 0.5**halvings
    return 2 * (1 - left) + (levels - halvings) * left


def _levels(mesh: Mesh, bits: tuple[Bit, ...], halvings: int, part: int) -> list[_Level]:
    """Return the rounds, nearest partners first; among equals the second part takes the other axes first."""
    last = max(mesh.n_axes - 1, 1)

    def order(bit: Bit) -> float:
        position = bit.axis if part else last - bit.axis
        return math.log2(bit.reach) + CROSSED * position / last

    ordered = sorted(bits, key=order)
    if halvings == 0 and swings(mesh):
        return [_swing_level(mesh, bit) for bit in ordered]
    numbers = np.arange(1 << len(bits))
    return [_Level(numbers ^ (1 << bit.number), numbers >> bit.number & 1) for bit in ordered]


def swings(mesh: Mesh) -> bool:
    """Say whether some axis wraps and all chips are there, in powers of two."""
    return mesh.is_full and any(mesh.wrap) and all(length.bit_count() == 1 for length in mesh.shape)


def _swing_level(mesh: Mesh, bit: Bit) -> _Level:
    """Return Swing's partners at the distance that takes the place of `bit.reach`: even places forwards, odd ones back.

    Sites are chips here, in order of rank. On an axis that does not wrap the distances stay what they are.
    """
    ranks = np.arange(mesh.n_chips)
    if not mesh.wrap[bit.axis]:
        return _Level(ranks ^ (1 << bit.number), ranks * 0)
    distance = (1 - (-2) ** (round(math.log2(bit.reach)) + 1)) // 3
    position = mesh.coords.astype(np.int64).copy()
    along = position[:, bit.axis]
    along += np.where(along % 2 == 0, distance, -distance)
    along %= mesh.shape[bit.axis]
    return _Level(np.asarray(mesh.rank_of[tuple(position.T)], dtype=np.int64), ranks * 0)
