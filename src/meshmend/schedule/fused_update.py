"""The fused update: the moment at which a chunk is complete at its owner, on its way up, and has not yet been sent down
again.

An owner that applies the optimizer's update there, between the two, updates its share of the weights for the price of
the all-reduce. That takes a schedule that *factors through its owners*: after the last REDUCE into it, the owner's
chunk is complete; it is sent on only after that; and every chip's final value is a copy of it. `verify` asks
`check_updates` whether a schedule that claims to be an all-reduce with an update is one.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import ScheduleError, UpdateError, name_chip
from meshmend.schedule.classes import ChunkClasses
from meshmend.schedule.collective import Collective, Op
from meshmend.schedule.schedule import Schedule

BLOCK = 2**26
"""Cells, one per chip and class of chunks, that are followed at a time: 64 MB."""


def with_update(schedule: Schedule) -> Schedule:
    """Return an all-reduce as one that can be updated on its way, still to be proven.

    >>> import meshmend as mm
    >>> with_update(mm.plan(mm.Mesh("4x4"), "hamiltonian"))
    Schedule(hamiltonian all-reduce-with-update on 4x4: 16 chips, 30 steps, 32 chunks, 960 transfers)
    """
    if schedule.collective is not Collective.ALL_REDUCE:
        raise ScheduleError(f"Only an all-reduce can have an update: got a schedule of a {schedule.collective}.")
    updated = schedule.template.replace(collective=Collective.ALL_REDUCE_WITH_UPDATE, may_idle=schedule.repeats > 1)
    return updated.repeated(schedule.repeats, schedule.period)


def update_steps(schedule: Schedule) -> NDArray[np.int64]:
    """Return for each chunk of the template the step of the last REDUCE into its owner; −1 where there is none.

    The update is after that step's writes. Repeat r has its updates r periods later.
    """
    template = schedule.template
    classes = ChunkClasses(template)
    sizes = np.diff(classes.starts, append=template.total_chunks)
    return np.repeat(_update_steps(template, classes), sizes)


def update_windows(schedule: Schedule) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each chunk of the template the first and the last step after whose writes its update may be.

    From the last REDUCE into its owner to the step before the owner first sends it on.

    >>> import meshmend as mm
    >>> first, last = update_windows(mm.plan(mm.Mesh("4x4"), "hamiltonian", collective="all-reduce-with-update"))
    >>> set(first.tolist()), set(last.tolist())
    ({14}, {14})
    """
    template = schedule.template
    classes = ChunkClasses(template)
    updates = _update_steps(template, classes)
    sends = np.full(classes.n, template.n_steps, dtype=np.int64)
    starts = template.step_starts
    for step in reversed(range(template.n_steps)):
        rows = slice(int(starts[step]), int(starts[step + 1]))
        row, column = classes.moves(rows, 0, classes.n, cells=classes.n_moves)
        sends[column[(template.src[row] == classes.owners[column]) & (updates[column] < step)]] = step
    sizes = np.diff(classes.starts, append=template.total_chunks)
    return np.repeat(updates, sizes), np.repeat(sends - 1, sizes)


def check_updates(schedule: Schedule, classes: ChunkClasses) -> None:
    """Raise `UpdateError` unless every chip ends with a copy of what each chunk's owner has when it is updated."""
    updates = _update_steps(schedule, classes)
    n_chips = schedule.mesh.n_chips
    width = max(1, BLOCK // n_chips)
    for first in range(0, classes.n, width):
        last = min(first + width, classes.n)
        updated = _replay(schedule, classes, first, last, updates[first:last])
        wrong = np.flatnonzero(~updated.T)
        if len(wrong):
            chunk_class, chip = divmod(int(wrong[0]), n_chips)
            number = first + chunk_class
            _raise_not_updated(schedule, chip, int(classes.starts[number]), int(updates[number]))


def _update_steps(schedule: Schedule, classes: ChunkClasses) -> NDArray[np.int64]:
    updates = np.full(classes.n, -1, dtype=np.int64)
    adds = schedule.op == Op.REDUCE
    starts = schedule.step_starts
    for step in range(schedule.n_steps):
        rows = slice(int(starts[step]), int(starts[step + 1]))
        row, column = classes.moves(rows, 0, classes.n, cells=classes.n_moves)
        updates[column[adds[row] & (schedule.dst[row] == classes.owners[column])]] = step
    return updates


def _replay(
    schedule: Schedule, classes: ChunkClasses, first: int, last: int, updates: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return, for each chip and class, whether the chip ends with what the owner had when it was updated."""
    width = last - first
    updated = np.zeros((schedule.mesh.n_chips, width), dtype=np.bool_)
    cells = updated.reshape(-1)
    owners = classes.owners[first:last] * width + np.arange(width)
    due = np.argsort(updates, kind="stable")
    edges = np.searchsorted(updates[due], np.arange(-1, schedule.n_steps + 1))
    cells[owners[due[: edges[1]]]] = True
    starts = schedule.step_starts
    for step in range(schedule.n_steps):
        rows = slice(int(starts[step]), int(starts[step + 1]))
        row, column = classes.moves(rows, first, last, len(cells))
        arriving = cells[schedule.src[row].astype(np.int64) * width + column]
        # A sum of what came from the owner and of anything else is no copy of it.
        cells[schedule.dst[row].astype(np.int64) * width + column] = arriving & (schedule.op[row] == Op.COPY)
        cells[owners[due[edges[step + 1] : edges[step + 2]]]] = True
    return updated


def _raise_not_updated(schedule: Schedule, chip: int, chunk: int, update: int) -> NoReturn:
    """Raise the error for a chip that does not end with the value that the owner has when it is updated."""
    mesh, owner = schedule.mesh, int(schedule.owners[chunk])
    carries = (schedule.first_chunk <= chunk) & (chunk < schedule.first_chunk + schedule.n_chunks)
    early = np.flatnonzero(carries & (schedule.src == owner) & (schedule.step <= update))
    into = np.flatnonzero(carries & (schedule.dst == chip))
    names = name_chip(mesh.chip(chip)), name_chip(mesh.chip(owner))
    if len(early):
        row = int(early[-1])
        why = f"step {schedule.step[row]} sends it from its owner before that"
    elif len(into):
        row = int(into[-1])
        sender = name_chip(mesh.chip(int(schedule.src[row])))
        why = f"its last write there is step {schedule.step[row]}, a {Op(schedule.op[row]).name} from {sender}"
    else:
        row, why = None, "no step ever writes it there"
    raise UpdateError(
        f"Chunk {chunk} is not updated at its owner {names[1]}, which has the last REDUCE of it in step {update}. Chip "
        f"{names[0]} ends with a value that is no copy of what the owner has then; {why}. Name as owner the chip where "
        "the chunk is first complete, and send it on from there.",
        step=None if row is None else int(schedule.step[row]),
        src=None if row is None else mesh.chip(int(schedule.src[row])),
        dst=mesh.chip(chip),
        chunk=chunk,
        expected="a copy of what the owner has when it is updated",
        got="another value",
    )
