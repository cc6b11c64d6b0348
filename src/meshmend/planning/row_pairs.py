"""Row pairs: rings of two rows, then rings along the columns (figures 6 and 7), also round holes (9 and 10).

Two neighbouring rows of C chips form a ring of 2C chips, and no two rings share a link. Each ring reduce-scatters
the payload; then, in every column, the chips that hold the same shard (they sit in alternate rows) form a ring and
all-reduce it; then the row rings gather. Half of the payload travels in each direction.

With holes of whole 2×2 blocks, a row pair without a failure is a *blue* ring. A pair with a failure falls into
*yellow* 2×2 blocks, which forward their contributions to the blue rings:

- A block reduces internally, so that each chip at an *exit* holds part of the payload, and forwards it to its
  vertical neighbour in a blue ring. A block with blue rings above and below has four exit chips with a quarter of
  the payload each, as in figure 10; one with a blue ring on one side only has two, with half each.
- A block with no blue ring beside it exits into a yellow block that is nearer to one.
- The results return over the same paths in reverse.

A blue chip sends its shards in a known order, one per step. The yellow blocks work in that same order, so each part
arrives just before the blue ring needs it, and the blue rings start after a handful of steps instead of waiting for
the yellow work. Yellow and blue use different links.

The rings along the columns skip yellow pairs; where a hole lies between two of their chips, the network's
routes go round it (figure 2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, final

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import ParameterError
from meshmend.planning.base import MAX_TRANSFERS, Floor, Planner, Unsupported, check_count
from meshmend.planning.build import DIRECTIONS, Transfers, line_ring, ring_all_gather, ring_owners, ring_reduce_scatter
from meshmend.planning.pair_layout import EXITS, SIDES, Block, Layout, Yellow, lay_out, opposite
from meshmend.schedule import Op, Schedule
from meshmend.topology import Mesh, name_shape

Orientation = Literal["auto", "rows", "columns"]


@final
@dataclass(frozen=True)
class RowPairs(Planner):
    """Rings over pairs of rows, then along columns; yellow blocks beside holes forward to blue rings (figures 6–10).

    `orientation` pairs rows or columns; "auto" takes the one that leaves fewer yellow chips. `segments` cuts the
    payload into parts that are pipelined through the phases, so that one part's column rings run while the next part's
    row rings do: more steps, less waiting.
    """

    name: ClassVar[str] = "row-pairs"

    orientation: Orientation = "auto"
    segments: int = 1

    def __post_init__(self) -> None:
        if self.orientation not in ("auto", "rows", "columns"):
            raise ParameterError(f"orientation is {self.orientation!r}, expected 'auto', 'rows' or 'columns'.")
        object.__setattr__(self, "segments", check_count("segments", self.segments))

    def variants(self, mesh: Mesh, step_cost: float) -> Sequence[RowPairs]:  # noqa: ARG002  # few enough to try all
        """Return both orientations, each with one segment and with a few. One of them is what "auto" would take."""
        orientations: tuple[Orientation, ...] = ("rows", "columns")
        tries = (RowPairs(orientation, n) for orientation in orientations for n in sorted({self.segments, 1, 2, 4}))
        return [planner for planner in tries if planner.unsupported_reason(mesh) is None]

    def n_transfers(self, mesh: Mesh) -> int:
        """Return what the row rings, the shard rings and the yellow blocks have, in every segment."""
        layout = self._layout(mesh)
        n, n_rings = layout.ring_length, len(layout.blue)
        # Each way round: rings reduce and gather; a yellow block sends every slice over four hops, there and back.
        one_way = 2 * n_rings * n * (n - 1) + 2 * n * n_rings * (n_rings - 1) + 8 * n * len(layout.yellow)
        return self.segments * len(DIRECTIONS) * one_way

    def is_routed(self, mesh: Mesh, phase: str) -> bool:  # noqa: ARG002
        """Say that shards travel from one blue ring to the next, past the rows and holes between them."""
        return "rings of shards" in phase

    def floor(self, mesh: Mesh) -> Floor:
        """Return what the row rings alone cost, reduce-scatter and all-gather, for every segment.

        A ring chip sends two slices of 2n per step. Beside a yellow block it takes in a third while the rings reduce,
        and sends a third while they gather, for all but two steps of each.
        """
        layout = self._layout(mesh)
        n = layout.ring_length
        slices = 2 * (n - 1) + (max(0, n - 3) if layout.yellow else 0)
        return Floor(steps=2 * (n - 1) * self.segments, link_load=(n - 1) / n, chip_load=slices / n)

    def _check(self, mesh: Mesh) -> None:
        """Refuse a mesh on which the pairs do not work out."""
        self._layout(mesh)

    def _shrink(self, mesh: Mesh) -> str:
        most = MAX_TRANSFERS // replace(self, segments=1).n_transfers(mesh)
        return f"Ask for at most {most:,} segments." if most else super()._shrink(mesh)

    def _plan(self, mesh: Mesh) -> Schedule:
        """Return the phases of every segment, pipelined."""
        layout = self._layout(mesh)
        transfers = Transfers()
        starts = _timeline(layout, self.segments)
        for segment, start in enumerate(starts):
            first_chunk = segment * layout.chunks
            _add_yellow(transfers, layout, first_chunk, reduce_from=start.rings, gather_from=start.gather)
            _add_rings(transfers, layout, first_chunk, reduce_from=start.rings, gather_from=start.gather)
            _add_shard_rings(transfers, layout, first_chunk, start.shards)
        owners = np.tile(_owners(layout), self.segments)
        return transfers.schedule(mesh, planner=self.name, total_chunks=self.segments * layout.chunks, owners=owners)

    def _layout(self, mesh: Mesh) -> Layout:
        if mesh.n_axes != 2:
            raise Unsupported(f"it needs a mesh of two axes, and {name_shape(mesh.shape)} has {mesh.n_axes}.")
        if self.orientation != "auto":
            return lay_out(mesh, self.orientation)
        layouts: list[Layout] = []
        reasons: list[str] = []
        for orientation in ("rows", "columns"):
            try:
                layouts.append(lay_out(mesh, orientation))
            except Unsupported as refusal:
                reasons.append(refusal.reason)
        if not layouts:
            raise Unsupported(f"by rows, {reasons[0]} By columns, {reasons[1]}")
        return min(layouts, key=lambda layout: len(layout.yellow))


@dataclass(frozen=True)
class _Start:
    """Steps at which a segment's phases start."""

    rings: int
    shards: int
    gather: int


def _timeline(layout: Layout, segments: int) -> list[_Start]:
    """Schedule every segment on the row rings and on the shard rings.

    A row ring gathers an earlier segment as soon as its shards are summed, and takes in a new segment while it
    waits. Times count from the first ring's start; the yellow blocks' lead comes before it.
    """
    # Yellow blocks need one step more per segment than the rings: the last shard is not sent on, but it is summed.
    lap = layout.ring_length - 1 + bool(layout.yellow)
    shard_steps = 2 * (len(layout.blue) - 1)
    lead = max((yellow.lead + 1 for yellow in layout.yellow), default=0)
    ring_free, shards_free = lead, 0
    starts: dict[int, _Start] = {}
    waiting: deque[tuple[int, int, int]] = deque()
    fresh = deque(range(segments))
    while fresh or waiting:
        if fresh and (not waiting or waiting[0][2] + shard_steps > ring_free):
            shards = max(ring_free + layout.ring_length - 1, shards_free)
            waiting.append((fresh.popleft(), ring_free, shards))
            shards_free = shards + shard_steps
        else:
            segment, rings, shards = waiting.popleft()
            ring_free = max(ring_free, shards + shard_steps)
            starts[segment] = _Start(rings, shards, ring_free)
        ring_free += lap
    return [starts[segment] for segment in range(segments)]


def _add_rings(transfers: Transfers, layout: Layout, first_chunk: int, *, reduce_from: int, gather_from: int) -> None:
    """Phase one (figure 6) and its reverse: every blue ring, in both directions."""
    n, rings = layout.ring_length, layout.rings
    for way, direction in enumerate(DIRECTIONS):
        for what, op, sends, start in (
            ("reduce-scatter", Op.REDUCE, ring_reduce_scatter, reduce_from),
            ("all-gather", Op.COPY, ring_all_gather, gather_from),
        ):
            time, position, shard = sends(n, direction)
            transfers.add(
                f"{layout.orientation[:-1]} rings: {what}",
                op,
                step=start + time,
                src=rings[:, position],
                dst=rings[:, (position + direction) % n],
                first_chunk=first_chunk + layout.slice_start(way, shard),
                n_chunks=len(layout.blue),
            )


def _add_shard_rings(transfers: Transfers, layout: Layout, first_chunk: int, start: int) -> None:
    """Phase two (figure 7): the chips that own the same shard, one in each blue ring, all-reduce it in a ring."""
    n_rings, across = len(layout.blue), "column" if layout.orientation == "rows" else "row"
    order = line_ring(n_rings, wrap=layout.wrap_pairs)
    rings = layout.rings[order]
    for way, direction in enumerate(DIRECTIONS):
        owner = ring_owners(layout.ring_length, direction)[:, None]
        shard = np.arange(layout.ring_length)[:, None]
        for what, op, sends, later in (
            ("reduce-scatter", Op.REDUCE, ring_reduce_scatter, 0),
            ("all-gather", Op.COPY, ring_all_gather, n_rings - 1),
        ):
            time, position, part = sends(n_rings, direction)
            transfers.add(
                f"{across} rings of shards: {what}",
                op,
                step=start + later + time,
                src=rings[position, owner],
                dst=rings[(position + direction) % n_rings, owner],
                first_chunk=first_chunk + layout.slice_start(way, shard) + part,
            )


@dataclass(frozen=True)
class _Stream:
    """Slices that leave a yellow block through one chip.

    `time[i]` is when the blue ring sends `shard[i]` on, counted from the ring's start. Two streams that share the
    block's links are kept apart by their `stagger`: one of them starts a step earlier and comes back a step later.
    """

    way: int
    side: str
    shard: NDArray[np.int64]
    time: NDArray[np.int64]
    stagger: int = 0


def _streams(layout: Layout, yellow: Yellow, above: list[_Stream]) -> list[_Stream]:
    """Say which slices leave through which chip: those of the parent's streams, or in the order of the blue rings."""
    if yellow.parent is not None:
        return [replace(stream, side=yellow.exits[0]) for stream in above]
    streams = []
    n = layout.ring_length
    shard = np.arange(n)
    for way, direction in enumerate(DIRECTIONS):
        for stagger, side in enumerate(yellow.exits):
            row = 2 * yellow.block[0] + (-1 if side == "up" else 2)
            column = 2 * yellow.block[1] + EXITS[side][way][1]
            position = column if row % 2 == 0 else n - 1 - column
            time = (direction * (position - shard)) % n
            # With two exits each takes every other slice. The rings above and below reach a slice at times of
            # opposite parity, so "even times" picks each slice for exactly one of them.
            takes = time % len(yellow.exits) == 0
            streams.append(_Stream(way, side, shard[takes], time[takes], stagger))
    return streams


def _add_yellow(transfers: Transfers, layout: Layout, first_chunk: int, *, reduce_from: int, gather_from: int) -> None:
    """Figure 10: sums inside the blocks, forwarded to the blue rings in the order they need; results back."""
    streams: dict[Block, list[_Stream]] = {}
    for yellow in layout.yellow:
        streams[yellow.block] = _streams(layout, yellow, streams[yellow.parent] if yellow.parent else [])
        for stream in streams[yellow.block]:
            row, column = EXITS[stream.side][stream.way]
            leaving = layout.chip(yellow.block, (row, column))
            across = layout.chip(yellow.block, (row, 1 - column))
            along = layout.chip(yellow.block, (1 - row, column))
            corner = layout.chip(yellow.block, (1 - row, 1 - column))
            down, right = SIDES[stream.side]
            beyond = layout.chip(
                (yellow.block[0] + down, yellow.block[1] + right), EXITS[opposite(stream.side)][stream.way]
            )
            begin = reduce_from + stream.time - yellow.lead - stream.stagger
            # A ring position has one shard when the gather starts and gets the rest in the order it sent them.
            back = gather_from + (stream.time + 1) % layout.ring_length + 3 * yellow.depth + stream.stagger
            first = first_chunk + layout.slice_start(stream.way, stream.shard)
            slices: dict[str, Any] = {"first_chunk": first, "n_chunks": len(layout.blue)}
            for src, dst, hop, what, reverse in (
                (corner, along, 0, "yellow blocks: reduce-scatter", "yellow blocks: all-gather"),
                (across, leaving, 0, "yellow blocks: reduce-scatter", "yellow blocks: all-gather"),
                (along, leaving, 1, "yellow blocks: reduce-scatter", "yellow blocks: all-gather"),
                (leaving, beyond, 2, "yellow forwards to blue", "blue returns to yellow"),
            ):
                transfers.add(what, Op.REDUCE, step=begin + hop, src=src, dst=dst, **slices)
                transfers.add(reverse, Op.COPY, step=back + 2 - hop, src=dst, dst=src, **slices)


def _owners(layout: Layout) -> NDArray[np.int64]:
    """Return who owns each chunk of a segment once its reductions are done."""
    n_rings = len(layout.blue)
    rings = layout.rings[line_ring(n_rings, wrap=layout.wrap_pairs)]
    owners = [
        rings[ring_owners(n_rings, direction)[None, :], ring_owners(layout.ring_length, direction)[:, None]].ravel()
        for direction in DIRECTIONS
    ]
    return np.concatenate(owners)
