"""Gather: a reduce-scatter or an all-gather of any connected survivors, within a few per cent of the least time.

The reduce-scatter and the all-gather of an all-reduce by trees are slow on their own: a root in the middle makes the
tree shallow and leaves the corners' links idle for most of the time. Planned directly, an all-gather keeps every link
of a corner busy from beginning to end (`spreading`), which is optimal: a corner must receive what it does not own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import ParameterError
from meshmend.planning.base import MAX_TRANSFERS, Floor, Planner, Unsupported, check_count
from meshmend.planning.gather.spreading import share_out, spread
from meshmend.planning.weave.pieces import Pieces
from meshmend.schedule import Collective, Op, Schedule
from meshmend.topology import Mesh

CHUNKS = 1000
"""Default number of chunks, rounded to the same number per chip: the last of them add a few steps in a thousand."""
DEFAULT_TRANSFERS = 2**21
"""Default limit of transfers. Planning takes about a microsecond per transfer."""
FILLING_PER_SIDE = 0.5
"""Steps beyond the least for each chip along each side of a mesh: while the farthest chunks are on their way."""
SLACK_CHUNKS_PER_CHIP, SLACK_PARTS = (1, 4), (2, 4, 8)
"""Chunks, and parts of each, that are tried where engines wait for their data alone; and for how many transfers."""
SLACK_TRANSFERS = 2**20
ROUNDING = 1e-9


@final
@dataclass(frozen=True)
class Gather(Planner):
    """Reduce-scatters and all-gathers: in every step, every link carries a chunk that its target lacks.

    Where some cables are slow, it carries several: as many as its rate allows in the time that all others take.

    `chunks` cuts the payload; each chip owns the same number of them, give or take one. Left out, it is a multiple of
    the number of chips, about a thousand. With a `lag`, each of these goes in `lag` + 1 parts, one after the other, and
    `chunks` counts the parts. That is for engines that wait only for their input data (`Schedule.interleaved`).

    >>> Gather().plan(Mesh("8x8", failed=["2x2@2,2"]))
    Schedule(gather all-gather on 8x8 minus 2x2@2,2: 60 chips, ... steps, 1,020 chunks, 60,180 transfers)
    """

    name: ClassVar[str] = "gather"
    is_splittable: ClassVar[bool] = False

    chunks: int | None = None
    collective: Collective = Collective.ALL_GATHER
    lag: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "collective", Collective(self.collective))
        if self.chunks is not None:
            object.__setattr__(self, "chunks", check_count("chunks", self.chunks))
        if self.lag != 0:
            object.__setattr__(self, "lag", check_count("lag", self.lag))
        if self.chunks is not None and self.chunks % (self.lag + 1):
            raise ParameterError(f"chunks is {self.chunks}, expected a multiple of the {self.lag + 1} parts of each.")

    def variants(self, mesh: Mesh, step_cost: float) -> Sequence[Gather]:
        """Return this planner and one with about the best number of chunks, as `Weave.variants` does."""
        if self.chunks is not None:
            return [self]
        load, most, per_step = _least_load(mesh, mesh.rates), default_chunks(mesh), Pieces.of(mesh).per_chunk
        filling = FILLING_PER_SIDE * sum(mesh.shape)
        best = per_step * math.sqrt(filling / (load * step_cost)) if load * step_cost > 0 else most
        tuned = max(1, min(round(best), most))
        if tuned > mesh.n_chips:
            tuned -= tuned % mesh.n_chips
        return [self] if tuned == most else [self, replace(self, chunks=tuned)]

    def slack_variants(self, mesh: Mesh, latency: float, message: float) -> Sequence[Gather]:
        """Return the same, and few chunks in several parts each: which of them is fastest, nobody knows beforehand."""
        found = list(self.variants(mesh, latency + message))
        if self.chunks is None and not self.lag:
            for whole, parts in itertools.product(SLACK_CHUNKS_PER_CHIP, SLACK_PARTS):
                candidate = replace(self, chunks=whole * mesh.n_chips * parts, lag=parts - 1)
                if candidate.n_transfers(mesh) <= SLACK_TRANSFERS:
                    found.append(candidate)
        return found

    def floor(self, mesh: Mesh) -> Floor:
        """Return what it costs at least: a chip receives what it does not own, no more per step than its links take."""
        chunks, n = self._n_chunks(mesh), mesh.n_chips
        lacks = 1 - -(-chunks // n) / chunks
        steps = math.ceil(lacks * chunks * _least_load(mesh, Pieces.of(mesh).per_step) - ROUNDING)
        return Floor(steps=steps, link_load=lacks * _least_load(mesh, mesh.rates), chip_load=lacks)

    def n_transfers(self, mesh: Mesh) -> int:
        """Return one transfer for each chunk and each chip that does not own it."""
        return (mesh.n_chips - 1) * self._n_chunks(mesh)

    def _n_chunks(self, mesh: Mesh) -> int:
        return self.chunks or -(-default_chunks(mesh) // (self.lag + 1)) * (self.lag + 1)

    def _check(self, mesh: Mesh) -> None:
        if self.collective.is_all_reduce:
            raise Unsupported(
                "it plans reduce-scatters and all-gathers, and an all-reduce was requested. "
                "Request collective='reduce-scatter' or 'all-gather', or use another planner."
            )
        most = MAX_TRANSFERS // max(1, mesh.n_chips - 1)
        if self.chunks is not None and self.chunks > most:
            raise Unsupported(
                f"it takes at most {most:,} chunks on {mesh.n_chips:,} chips, and {self.chunks:,} were asked for."
            )

    def _plan(self, mesh: Mesh) -> Schedule:
        """Return the all-gather, or the same backwards in time."""
        whole = gather_from(mesh, share_out(mesh.n_chips, self._n_chunks(mesh) // (self.lag + 1)), "all-gather")
        if self.collective is Collective.REDUCE_SCATTER:
            whole = whole.replace(
                step=whole.n_steps - 1 - whole.step,
                src=whole.dst,
                dst=whole.src,
                op=int(Op.REDUCE),
                phase_names=(str(self.collective),),
                collective=self.collective,
            )
        return whole.interleaved(self.lag + 1) if self.lag else whole


def gather_from(mesh: Mesh, owners: NDArray[np.int64], phase: str) -> Schedule:
    """Return the all-gather of chunks with these owners, whatever their shares, still to be proven."""
    columns: dict[str, Any] = spread(mesh, owners, Pieces.of(mesh).per_link(mesh) if mesh.has_slow_cables else None)
    return Schedule(
        mesh,
        **columns,
        total_chunks=len(owners),
        op=int(Op.COPY),
        phase_names=(phase,),
        owners=owners,
        collective=Collective.ALL_GATHER,
        planner=Gather.name,
    )


def default_chunks(mesh: Mesh) -> int:
    """Return the default: `CHUNKS` rounded up to as many for every chip, within `DEFAULT_TRANSFERS`.

    >>> default_chunks(Mesh("8x8")), default_chunks(Mesh("32x32")), default_chunks(Mesh("64x64"))
    (1024, 1024, 512)
    """
    n = mesh.n_chips
    most = max(1, DEFAULT_TRANSFERS // max(1, n - 1))
    return min(n * -(-CHUNKS // n), most)


def _least_load(mesh: Mesh, rates: NDArray[Any]) -> float:
    """Return how long the narrowest chip receives a payload over its cables of these rates."""
    width = np.bincount(mesh.cables.ravel(), np.repeat(rates, 2), mesh.n_chips)
    return 1 / float(width.min()) if mesh.n_chips > 1 else 1.0
