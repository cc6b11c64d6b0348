"""History: when which part of a machine fails, drawn once and used for every policy.

Failures of a level come as a Poisson process over all its parts. One that hits a part that is already down has
no effect, so each part alternates between exponential times up and its repairs; and because the draws do not depend on
how long repairs take, machines that are repaired at different speeds still see the same failures.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshmend.topology import Region, all_placements
from meshmend_lab.availability.assumptions import Assumptions


class FailureEvent(NamedTuple):
    """A part is struck `at_h` hours into the run; its repair takes `repair_factor` times the mean of its level."""

    at_h: float
    level: int
    part: int
    repair_factor: float


def draw(assumptions: Assumptions, hours: float, seed: int, run: int) -> list[FailureEvent]:
    """Return all failures of one run in order."""
    failures = []
    for number, level in enumerate(assumptions.levels):
        random = np.random.default_rng([seed, run, number])
        parts = assumptions.parts(level)
        count = int(random.poisson(parts * hours / level.mtbf_h))
        times, struck = random.uniform(0, hours, count), random.integers(parts, size=count)
        factors = random.exponential(size=count)
        failures += [
            FailureEvent(float(t), number, int(p), float(f)) for t, p, f in zip(times, struck, factors, strict=True)
        ]
    return sorted(failures)


def regions(assumptions: Assumptions) -> list[list[Region]]:
    """Return the chips of every part, for each level in the order of its parts."""
    return [all_placements(assumptions.mesh.shape, level.shape, align=level.shape) for level in assumptions.levels]
