"""Lowering: from one valid schedule to an equivalent one that needs no routing.

`neighbour_hops` is for networks whose routers cannot route round a hole: it replaces every transfer between chips
that are not neighbours by hops from neighbour to neighbour. The chips along the route have no spare memory, only their
own copy of the forwarded chunk. That is enough, because a forwarded chunk is on its way into, or out of, one sum. At
each chip along the route:

- Its own copy is *spent*: it was already sent on and will be replaced before it is used again. Then the forwarded
  chunk is stored there and sent on.
- Its own copy is part of the sum that is still to be sent on, and so is the forwarded chunk. Then they are added
  there and travel together; the first transfer ends here, and a hop or two is saved.
- It already holds the same value as the sender. Then the transfer starts here.

Where none of these applies, as when partial sums are exchanged and kept (recursive doubling), there is no such
schedule and a `LoweringError` says where. Sums may be taken in another order than in the original.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from meshmend import routing
from meshmend.errors import LoweringError, RoutingError, VerificationError, name_chip
from meshmend.routing import Routes
from meshmend.schedule import Collective, Op, Schedule
from meshmend.schedule.classes import ChunkClasses
from meshmend.schedule.verify import verify as prove

__all__ = ["neighbour_hops"]

BY_HOPS = " by neighbour hops"
"""What is added to the planner's name where a schedule was rewritten."""
Row = tuple[int, int, int, int, int, int, int]
"""Step, source, destination, first chunk, number of chunks, op and phase of a transfer."""


def neighbour_hops(schedule: Schedule, routes: Routes | None = None, *, verify: bool = True) -> Schedule:
    """Return an equivalent schedule in which every transfer is between neighbours, proven before it is returned.

    Transfers follow `routes`, by default those of `meshmend.routing.trace`. Steps with transfers of several hops
    become more steps. A schedule between neighbours only is returned unchanged.

    >>> from meshmend import Mesh, plan
    >>> mesh = Mesh("8x8", failed=["2x2@2,2"])
    >>> lowered = neighbour_hops(plan(mesh, "row-pairs"))
    >>> bool((mesh.link(lowered.src, lowered.dst) >= 0).all())
    True
    """
    mesh = schedule.mesh
    near = mesh.link(schedule.template.src, schedule.template.dst) >= 0
    if near.all():
        return schedule
    if schedule.repeats > 1:
        # Hops take steps of their own, and what a period was is none any more.
        schedule = schedule.expanded()
        near = mesh.link(schedule.src, schedule.dst) >= 0
    if routes is not None and routes.mesh != mesh:
        raise RoutingError(f"The routes are for {routes.mesh}, the schedule for {mesh}.", scheme=routes.scheme)
    rows = _join_runs(np.concatenate(list(_Lowering(schedule, near, routes).blocks())))
    step, src, dst, first_chunk, n_chunks, op, phase = rows.T
    lowered = schedule.replace(
        step=np.unique(step, return_inverse=True)[1],
        src=src,
        dst=dst,
        first_chunk=first_chunk,
        n_chunks=n_chunks,
        op=op,
        phase=phase,
        planner=f"{schedule.planner}{BY_HOPS}",
    )
    if verify:
        try:
            prove(lowered)
        except VerificationError as error:
            raise LoweringError(
                f"{schedule.planner} cannot be lowered to neighbour hops: its partial sums do not all flow to one "
                f"owner per chunk, so they cannot be merged along the route. {error}",
                planner=schedule.planner,
            ) from error
    return lowered


@dataclass(frozen=True)
class _Far:
    """One class of chunks that a transfer moves along a path of several hops."""

    row: int
    chunk_class: int
    path: tuple[int, ...]
    spent: tuple[bool, ...]
    """For each chip of the path whether its own copy is spent once the step is over."""


@dataclass(frozen=True)
class _Start:
    """Where on its path a transfer starts, the number of the content that it sends, and when that is available."""

    position: int
    content: int
    ready: int


class _Lowering:
    """Replays a schedule, tracking who holds what, and yields the rows of the lowered one.

    Chunks that always travel together form a class. Contents are numbered: equal numbers, equal values.
    """

    def __init__(self, schedule: Schedule, near: NDArray[np.bool_], routes: Routes | None) -> None:
        self.schedule = schedule
        classes = ChunkClasses(schedule)
        self.n_classes = classes.n
        self.bounds = np.append(classes.starts, schedule.total_chunks)
        # One entry per class and transfer, in order of transfers.
        self.row, self.chunk_class = classes.moves(slice(0, schedule.n_transfers), 0, classes.n, classes.n_moves)
        self.near = near
        shape = (schedule.mesh.n_chips, self.n_classes)
        self.content = np.repeat(np.arange(shape[0])[:, None], shape[1], axis=1)
        self.next_content = shape[0]
        # Lowered steps: when a copy was last written, and from when on it may be written (again).
        self.written = np.full(shape, -1, dtype=np.int64)
        self.free_from = np.zeros(shape, dtype=np.int64)
        self.far = self._find_far(routes)

    def blocks(self) -> Iterator[NDArray[np.int64]]:
        """Yield the transfers of the lowered schedule, one `Row` a row; its steps may have gaps."""
        s = self.schedule
        columns = np.stack([s.step, s.src, s.dst, s.first_chunk, s.n_chunks, s.op, s.phase], axis=1).astype(np.int64)
        entries = np.searchsorted(self.row, s.step_starts)
        begin = end = 0
        for step in range(s.n_steps):
            fars = self.far.get(step, [])
            transfers = slice(int(s.step_starts[step]), int(s.step_starts[step + 1]))
            near = columns[transfers][self.near[transfers]]
            # A step waits for all before it, unless its transfers span several hops and are independent: then each
            # starts as soon as its data are available, and long routes delay no other transfer.
            waits = len(near) > 0 or not _are_apart(fars)
            if waits:
                begin = end
            # All reads of this step come before its writes.
            starting = [(far, self._start(far)) for far in fars]
            near[:, 0] = begin
            yield near
            self._move_near(slice(int(entries[step]), int(entries[step + 1])), begin)
            hops = [hop for far, start in starting for hop in self._hops(far, start, begin)]
            if hops:
                yield np.array(hops, dtype=np.int64)
            end = max(end, max((hop[0] for hop in hops), default=begin) + 1)
            if waits:
                begin = end

    def _move_near(self, entries: slice, now: int) -> None:
        """Carry out the transfers between neighbours of one step."""
        entries_near = np.flatnonzero(self.near[self.row[entries]]) + entries.start
        row, chunk_class = self.row[entries_near], self.chunk_class[entries_near]
        dst = self.schedule.dst[row]
        content = self.content[self.schedule.src[row], chunk_class]
        adds = self.schedule.op[row] == Op.REDUCE
        content[adds] = self.next_content + np.arange(int(adds.sum()))
        self.next_content += int(adds.sum())
        self.content[dst, chunk_class] = content
        self.written[dst, chunk_class] = now
        self.free_from[dst, chunk_class] = now + 1

    def _start(self, far: _Far) -> _Start:
        """Find where a transfer starts: at the last chip before the end that holds what is sent."""
        held = [int(self.content[chip, far.chunk_class]) for chip in far.path[:-1]]
        position = max(position for position, content in enumerate(held) if content == held[0])
        return _Start(position, held[0], int(self.written[far.path[position], far.chunk_class]) + 1)

    def _hops(self, far: _Far, start: _Start, begin: int) -> Iterator[Row]:
        """Carry one class of chunks along its path, from the lowered step `begin` on."""
        op, phase = Op(self.schedule.op[far.row]), int(self.schedule.phase[far.row])
        k = far.chunk_class
        first_chunk, n_chunks = int(self.bounds[k]), int(self.bounds[k + 1] - self.bounds[k])
        now = max(begin, start.ready)
        for position in range(start.position, len(far.path) - 1):
            src, dst = far.path[position], far.path[position + 1]
            now = max(now, int(self.free_from[dst, k]))
            if position == start.position and start.ready <= self.written[src, k] < now:
                self._refuse(far, src, "is overwritten before it can be sent")
            self.free_from[src, k] = max(int(self.free_from[src, k]), now)
            passes = position + 2 < len(far.path) and far.spent[position + 1]
            ends = position + 2 == len(far.path)
            if not passes and not ends and op is Op.COPY:
                self._refuse(far, dst, "is still needed when another chip's has to pass")
            how = Op.COPY if passes else op
            yield now, src, dst, first_chunk, n_chunks, int(how), phase
            if how is Op.REDUCE:
                self.content[dst, k] = self.next_content
                self.next_content += 1
            else:
                self.content[dst, k] = start.content
            self.written[dst, k] = now
            self.free_from[dst, k] = now + 1
            now += 1
            if not passes:
                return

    def _refuse(self, far: _Far, chip: int, why: str) -> NoReturn:
        schedule, name = self.schedule, self.schedule.mesh.chip
        src, dst = name(int(schedule.src[far.row])), name(int(schedule.dst[far.row]))
        step, chunk = int(schedule.step[far.row]), int(self.bounds[far.chunk_class])
        raise LoweringError(
            f"{schedule.planner} cannot be lowered to neighbour hops: step {step} sends chunk {chunk} over "
            f"{name_chip(src)}→{name_chip(dst)} by way of {name_chip(name(chip))}, whose own chunk {chunk} {why}.",
            planner=schedule.planner,
            step=step,
            chip=name(chip),
            chunk=chunk,
        )

    def _find_far(self, routes: Routes | None) -> dict[int, list[_Far]]:
        """Return the transfers that need several hops, by step, with their paths."""
        schedule, mesh = self.schedule, self.schedule.mesh
        far = np.flatnonzero(~self.near[self.row])
        rows, chunk_class = self.row[far], self.chunk_class[far]
        ends = schedule.src[rows].astype(np.int64) * mesh.n_chips + schedule.dst[rows]
        pairs, pair = np.unique(ends, return_inverse=True)
        paths = self._paths(*np.divmod(pairs, mesh.n_chips), routes)
        # Answers "is this chip's copy spent after this step?" for all of them at once.
        lengths = np.array([len(path) for path in paths])[pair]
        chip = np.concatenate([np.empty(0, dtype=np.int64), *(paths[p] for p in pair)])
        spent = self._spent(chip, np.repeat(chunk_class, lengths), np.repeat(schedule.step[rows], lengths))
        found: dict[int, list[_Far]] = {}
        stop = np.cumsum(lengths)
        for i, row in enumerate(rows.tolist()):
            answers = tuple(spent[stop[i] - lengths[i] : stop[i]].tolist())
            path = tuple(paths[pair[i]].tolist())
            found.setdefault(int(schedule.step[row]), []).append(_Far(row, int(chunk_class[i]), path, answers))
        return found

    def _paths(self, src: NDArray[np.int64], dst: NDArray[np.int64], routes: Routes | None) -> list[NDArray[np.int64]]:
        """Return the ranks along the route of each pair."""
        mesh = self.schedule.mesh
        trace = routing.trace(mesh, src, dst) if routes is None else routes.follow(src, dst)
        paths = trace.paths(mesh, src)
        for number, path in enumerate(paths):
            if path[-1] != dst[number]:
                ends = mesh.chip(int(src[number])), mesh.chip(int(dst[number]))
                raise RoutingError(
                    f"There is no route from {name_chip(ends[0])} to {name_chip(ends[1])} on {mesh}.",
                    src=ends[0],
                    dst=ends[1],
                )
        return paths

    def _spent(
        self, chip: NDArray[np.int64], chunk_class: NDArray[np.int64], step: NDArray[np.integer]
    ) -> NDArray[np.bool_]:
        """Return whether a chip's copy is replaced, after a step, before anything uses it or is added to it."""
        schedule = self.schedule
        n_steps = schedule.n_steps + 1

        def moment(slot: NDArray[np.int64], when: NDArray[np.integer]) -> NDArray[np.int64]:
            # Within a step reads come before writes, so that a copy read and replaced in one step counts as read.
            return (slot * n_steps + when) * 2

        asked = chip * self.n_classes + chunk_class
        is_asked = np.zeros(schedule.mesh.n_chips * self.n_classes, dtype=np.bool_)
        is_asked[asked] = True
        when, replaces = schedule.step[self.row], schedule.op[self.row] == Op.COPY
        read = schedule.src[self.row].astype(np.int64) * self.n_classes + self.chunk_class
        wrote = schedule.dst[self.row].astype(np.int64) * self.n_classes + self.chunk_class
        events = np.concatenate([moment(read, when)[is_asked[read]], (moment(wrote, when) + replaces)[is_asked[wrote]]])
        events.sort()
        position = np.searchsorted(events, moment(asked, step) + 1, side="right")
        following = np.append(events, -1)[position]
        has_event = following // (2 * n_steps) == asked
        if schedule.collective is Collective.REDUCE_SCATTER:
            promised = schedule.owners[self.bounds[chunk_class]] == chip
        else:
            promised = np.ones(len(chip), dtype=np.bool_)
        return np.asarray(np.where(has_event, following % 2 == 1, ~promised), dtype=np.bool_)


def _are_apart(fars: list[_Far]) -> bool:
    """Whether no two of these transfers touch the same chunk at the same chip, so that their order does not matter."""
    touched = [(chip, far.chunk_class) for far in fars for chip in far.path]
    return len(touched) == len(set(touched))


def _join_runs(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Join transfers of one step whose runs of chunks are adjacent."""
    step, src, dst, first, _, op, phase = rows.T
    rows = rows[np.lexsort((first, phase, op, dst, src, step))]
    same = np.delete(rows, (3, 4), axis=1)
    follows = (same[1:] == same[:-1]).all(axis=1) & (rows[1:, 3] == rows[:-1, 3] + rows[:-1, 4])
    starts = np.flatnonzero(np.concatenate([[True], ~follows]))
    joined = rows[starts]
    joined[:, 4] = np.add.reduceat(rows[:, 4], starts)
    return joined
