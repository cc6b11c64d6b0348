"""The NumPy engine: runs a schedule on arrays in one process. The reference for the other engines.

>>> import numpy as np, meshmend as mm, meshmend.numpy as mmn
>>> mesh = mm.Mesh("4x4", failed=["2x2@0,0"])
>>> schedule = mm.plan(mesh, planner="hamiltonian")
>>> payload = np.arange(12 * 100).reshape(12, 100)        # one row per live chip
>>> summed = mmn.run(schedule, payload)
>>> bool((summed == payload.sum(axis=0)).all())
True
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import ScheduleError
from meshmend.schedule import Collective, Op, Schedule
from meshmend.schedule.fused_update import update_steps
from meshmend.schedule.verify import ensure_proven

__all__ = ["Update", "run"]

Number = TypeVar("Number", bound=np.generic)
Update = Callable[[int, NDArray[Any]], NDArray[Any]]
"""The function that an owner applies to a complete chunk: from its number and its sum to what every chip ends with."""


def run(
    schedule: Schedule, payload: Annotated[NDArray[Number], "[N, ...]"], *, update: Update | None = None
) -> Annotated[NDArray[Number], "[N, ...]"]:
    """Run a schedule on `payload`, one row per rank, and return what every chip holds at the end.

    Rows may have any shape and size; sums use the payload's own dtype. Where the size is not divisible by
    the number of chunks, the last chunks are padded with zeros, which do not change sums.

    An all-reduce with an update may be given one: `update(chunk, values)` is called once for each chunk, at its owner,
    with its sum, and every chip ends with what it returns.
    """
    if update is not None:
        if schedule.collective is not Collective.ALL_REDUCE_WITH_UPDATE:
            raise ScheduleError(
                f"The schedule is for {schedule.collective}, which has no update. Plan with "
                f"collective={Collective.ALL_REDUCE_WITH_UPDATE.value!r}."
            )
        ensure_proven(schedule)
    n_chips, n_chunks, repeats = schedule.mesh.n_chips, schedule.total_chunks, schedule.repeats
    if payload.ndim < 1 or len(payload) != n_chips:
        raise ScheduleError(
            f"The payload has shape {payload.shape}, expected one row for each of {n_chips} live chips."
        )
    flat = payload.reshape(n_chips, -1)
    size = flat.shape[1]
    chunk_size = -(-size // n_chunks)
    held: NDArray[Any] = np.zeros((n_chips, n_chunks, chunk_size), dtype=payload.dtype)
    held.reshape(n_chips, -1)[:, :size] = flat
    if repeats > 1:
        # Repeats share no chunk, so each can be run on its own, and all of them side by side.
        apart = held.reshape(n_chips, repeats, -1, chunk_size).swapaxes(1, 2)
        n_apart = n_chunks // repeats

        def update_all(chunk: int, values: NDArray[Any]) -> NDArray[Any]:
            parts = enumerate(values.reshape(repeats, chunk_size))
            return (
                np.concatenate([update(repeat * n_apart + chunk, part) for repeat, part in parts]) if update else values
            )

        done = _run(
            schedule.template,
            np.ascontiguousarray(apart).reshape(n_chips, n_apart, -1),
            update_all if update is not None else None,
        )
        held = done.reshape(n_chips, -1, repeats, chunk_size).swapaxes(1, 2)
    else:
        held = _run(schedule, held, update)
    return held.reshape(n_chips, -1)[:, :size].reshape(payload.shape)


def _run(
    schedule: Schedule, held: Annotated[NDArray[Any], "[N, K, n]"], update: Update | None
) -> Annotated[NDArray[Any], "[N, K, n]"]:
    """Run all steps on what chips hold, of shape (chips, chunks, elements), in place."""
    due: dict[int, list[int]] = {}
    if update is not None:
        for chunk, step in enumerate(update_steps(schedule).tolist()):
            due.setdefault(step, []).append(chunk)

    def update_after(step: int) -> None:
        for chunk in due.get(step, ()):
            if update is not None:
                owner = schedule.owners[chunk]
                held[owner, chunk] = update(chunk, held[owner, chunk].copy())

    update_after(-1)  # a chip alone has nothing to wait for
    for step, (start, stop) in enumerate(pairwise(schedule.step_starts.tolist())):
        # Runs of one length are moved together; a step rarely has more than two or three lengths.
        outbox = []
        lengths = schedule.n_chunks[start:stop]
        for length in np.unique(lengths):
            rows = np.flatnonzero(lengths == length) + start
            chunks = schedule.first_chunk[rows].astype(np.int64)[:, None] + np.arange(length)
            outbox.append((rows, chunks, held[schedule.src[rows][:, None], chunks]))
        for rows, chunks, data in outbox:
            dst = schedule.dst[rows][:, None]
            adds = schedule.op[rows] == Op.REDUCE
            data[adds] += held[dst[adds], chunks[adds]]
            held[dst, chunks] = data
        update_after(step)
    return held
