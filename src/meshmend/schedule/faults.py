"""Faults: from a chunk that ended wrong to the error that says what happened to it.

`verify` finds that a chunk is wrong; here that one chunk is followed again. Run backwards, the steps give how often
each contribution is in the result; run forwards, they give where one of them was first counted twice. Both need one
number per chip.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import CollisionError, DeadPathError, WrongSumError, name_chip
from meshmend.schedule import Collective, Op, Schedule

MOST_TIMES = 999
"""Counts saturate here: larger ones would say no more."""


def raise_wrong_sum(schedule: Schedule, chip: int, chunk: int) -> NoReturn:
    """Raise the error for a chunk that is known to end wrong at `chip` (a rank), with the likeliest culprit."""
    mesh = schedule.mesh
    rows = np.flatnonzero((schedule.first_chunk <= chunk) & (chunk < schedule.first_chunk + schedule.n_chunks))
    counts = _contributions(schedule, rows, chip)
    wanted = np.ones(mesh.n_chips, dtype=np.int64)
    if schedule.collective is Collective.ALL_GATHER:
        wanted = (np.arange(mesh.n_chips) == schedule.owners[chunk]).astype(np.int64)
    off = np.flatnonzero(counts != wanted)
    if not len(off):
        raise AssertionError("two counts of the same chunk disagree: this is a bug in meshmend")
    source = int(off[0])
    expected = f"the contribution of {name_chip(mesh.chip(source))} {_times(int(wanted[source]))}"
    got = _times(int(counts[source]))
    message = f"expected {expected}, got it {got}"
    if len(off) > 1:
        message += f" ({len(off) - 1} other contributions are wrong too)"
    culprit = _first_doubling(schedule, rows, source) if counts[source] > 1 else None
    into = rows[schedule.dst[rows] == chip]
    if culprit is not None:
        ends = (name_chip(mesh.chip(int(rank[culprit]))) for rank in (schedule.src, schedule.dst))
        message += f". Step {schedule.step[culprit]} counts it twice: it adds {' to '.join(ends)}, and both hold it."
    elif len(into):
        culprit = int(into[-1])
        how = Op(schedule.op[culprit]).name
        sender = name_chip(mesh.chip(int(schedule.src[culprit])))
        message += f". The last write there is step {schedule.step[culprit]}, a {how} from {sender}."
    else:
        message += ". No step ever writes this chunk there."
    raise WrongSumError(
        f"Chip {name_chip(mesh.chip(chip))} ends with a wrong chunk {chunk}: {message}",
        step=int(schedule.step[culprit]) if culprit is not None else None,
        src=mesh.chip(int(schedule.src[culprit])) if culprit is not None else None,
        dst=mesh.chip(chip),
        chunk=chunk,
        expected=expected,
        got=got,
    )


def raise_collision(schedule: Schedule, row: int, other: int, chunk: int) -> NoReturn:
    """Raise the error for two transfers of one step that write the same chunk of the same chip."""
    mesh, step = schedule.mesh, int(schedule.step[row])
    dst = mesh.chip(int(schedule.dst[row]))
    one, two = (mesh.chip(int(schedule.src[r])) for r in (row, other))
    raise CollisionError(
        f"Step {step} writes chunk {chunk} of chip {name_chip(dst)} twice, from {name_chip(one)} and from "
        f"{name_chip(two)}. A step may write a chunk of a chip once: move one of the transfers to another step.",
        step=step,
        src=one,
        dst=dst,
        chunk=chunk,
        expected="one write",
        got="two writes",
    )


def raise_dead_path(schedule: Schedule, row: int, why: str, advice: str) -> NoReturn:
    """Raise the error for a transfer that has no live path."""
    mesh = schedule.mesh
    src, dst = mesh.chip(int(schedule.src[row])), mesh.chip(int(schedule.dst[row]))
    step, chunk = int(schedule.step[row]), int(schedule.first_chunk[row])
    raise DeadPathError(
        f"Step {step} sends chunk {chunk} over {name_chip(src)}→{name_chip(dst)}, but {why}. {advice}".rstrip(),
        step=step,
        src=src,
        dst=dst,
        chunk=chunk,
        expected="a live path",
        got=why,
    )


def _contributions(schedule: Schedule, rows: NDArray[np.int64], chip: int) -> NDArray[np.int64]:
    """Count how often each chip's contribution is in what `chip` holds once `rows` have moved their chunk."""
    # How often each chip's current value is in the result; going back in time, "current" becomes the start.
    weight = np.zeros(schedule.mesh.n_chips, dtype=np.int64)
    weight[chip] = 1
    for now in _steps(schedule, rows, backwards=True):
        dst = schedule.dst[now]
        passed_on = weight[dst]
        weight[dst[schedule.op[now] == Op.COPY]] = 0
        np.add.at(weight, schedule.src[now], passed_on)
        np.minimum(weight, MOST_TIMES, out=weight)
    return weight


def _first_doubling(schedule: Schedule, rows: NDArray[np.int64], source: int) -> int | None:
    """Return the first of `rows` after which some chip holds the contribution of `source` more than once."""
    held = np.zeros(schedule.mesh.n_chips, dtype=np.int64)
    held[source] = 1
    for now in _steps(schedule, rows):
        dst = schedule.dst[now]
        arriving = held[schedule.src[now]] + np.where(schedule.op[now] == Op.REDUCE, held[dst], 0)
        if (arriving > 1).any():
            return int(now[np.argmax(arriving > 1)])
        held[dst] = arriving
    return None


def _steps(schedule: Schedule, rows: NDArray[np.int64], *, backwards: bool = False) -> Iterator[NDArray[np.int64]]:
    """Yield the rows of one step after the other."""
    edges = [0, *(np.flatnonzero(np.diff(schedule.step[rows])) + 1).tolist(), len(rows)]
    pieces = list(pairwise(edges))
    for start, stop in reversed(pieces) if backwards else pieces:
        yield rows[start:stop]


def _times(n: int) -> str:
    if n >= MOST_TIMES:
        return f"{MOST_TIMES} times or more"
    return {0: "not at all", 1: "once", 2: "twice"}.get(n, f"{n} times")
