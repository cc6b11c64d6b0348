"""Fit hardware to timed loops: what a collective's start, a step, a message and a byte cost.

A loop repeats a step of the engine. With few steps and many, short and long messages, one lane and all of them, its
times are a sum,

    seconds = start + steps · (step + messages · message + bytes · lanes / (rate · min(lanes, links at once))),

whose numbers are fitted, none of them below zero, for every possible number of links at once; the best fit counts. Each
engine runs loops of its own (`meshmend.jax.measure`, `meshmend.torch.measure`); what follows from their times is here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CORES = 0
"""In place of a number of links at once: bytes cost what handles the messages its time."""
WIDER = 0.98
"""How much smaller an error must be for a chip to be called wider: a narrower one explains as much with less."""


@dataclass(frozen=True)
class TimedLoop:
    """A timed loop: so many steps, with so many lanes of so many bytes each.

    `messages` is how many messages a step has for whatever handles them: a chip has as many as lanes, and cores that
    chips share have those of all chips. `starts` is how often a collective was started: not at all in what a loop of
    many steps took longer than one of few.
    """

    steps: int
    lanes: int
    message_bytes: int
    seconds: float
    messages: float | None = None
    starts: int = 1

    def costs(self, width: int) -> tuple[float, float, float, float]:
        """Return how often the start, a step, a message and a byte are paid for, if a chip drives so many links."""
        messages = float(self.lanes) if self.messages is None else self.messages
        moved = messages if width == CORES else self.lanes / min(self.lanes, width)
        return self.starts, self.steps, self.steps * messages, self.steps * self.message_bytes * moved


@dataclass(frozen=True)
class FittedCosts:
    """Seconds of a start, a step, a message and a byte, and how many links a chip drives at once (or `CORES`)."""

    start_s: float
    step_s: float
    message_s: float
    byte_s: float
    width: int


def fit_loops(loops: Sequence[TimedLoop], widths: Iterable[int]) -> FittedCosts:
    """Return the costs whose times are closest, in proportion, to those of the loops; narrow chips come first.

    >>> kinds = [(steps, lanes, size) for steps in (2, 99) for lanes in (1, 2) for size in (1, 10**6)]
    >>> loops = [TimedLoop(s, n, size, 1e-3 + s * (1e-5 + n * size / 1e9)) for s, n, size in kinds]
    >>> found = fit_loops(loops, widths=[1, 2])
    >>> found.width, round(found.start_s, 6), round(1 / found.byte_s)
    (1, 0.001, 1000000000)
    """
    from scipy.optimize import nnls

    took = np.array([loop.seconds for loop in loops])
    best: tuple[float, int, NDArray[np.float64]] | None = None
    for width in widths:
        rows = np.array([loop.costs(width) for loop in loops], dtype=np.float64)
        costs, error = nnls(rows / took[:, None], np.ones(len(took)))
        if best is None or error < WIDER * best[0]:
            best = error, width, costs
    assert best is not None  # noqa: S101  # there is at least one width
    _, width, (start, step, message, byte) = best
    return FittedCosts(float(start), float(step), float(message), float(max(byte, 1e-15)), width)
