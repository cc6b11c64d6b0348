"""Stragglers: who makes the others wait, from the time that each chip computes.

Each step, each chip's compute time is compared with the median over all chips, so that whatever slows down all of them
(a longer sequence, a clock that drifts) cancels. A chip is late in a step if it takes 20 % longer than that. It is
named once it was late in at least 24 of the last 40 steps, and in so many that chance does not explain it.

False alarms. A pause of a single chip or of a host makes it late in the steps that it lasts for; if those are fewer
than 24 of 40 there is no verdict, however long they take. Where ordinary jitter makes a chip late in a share p of its
steps, independently, a given step completes a verdict against it with probability P(Binomial(40, p) >= k) at most. p
is measured: the median over all chips of how often they were late, one more for safety; and k is the least count from
24 up for which that probability is below 1e-12. So 10,000 chips raise 0.01 false alarms in a million steps at most. A
chip whose jitter is far larger than that of the others, or lasts for tens of steps, is a straggler.

What is missed: less than 20 %, or less than 5 % of the whole step; half of the chips or more being slow, which moves
the median; and slow cables, which nobody measures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshmend.errors import Coordinate, ParameterError
from meshmend.quarantine.judge import LAG_STEPS
from meshmend.quarantine.observation import LAG, Observation
from meshmend.quarantine.suspect import Suspect
from meshmend.topology import Mesh

WINDOW = 40
"""Steps that are looked back on."""
LATE = 1.2
"""A chip is late in a step that takes it so many times the median."""
WORTH = 0.05
"""A chip is late only if it makes the step so much longer: what costs less is not worth leaving out a chip for."""
FALSE_ALARMS = 1e-12
"""Probability at most that chance completes a verdict, per chip and step."""
MIN_COMPARED = 4
"""Chips that must be measured in a step to compare them."""


class Stragglers:
    """Watches the times of a mesh's chips, step by step.

    `hosts` lists the chips of each host by its number. If all chips of a host of several are slow, the host is named.

    >>> watch, mesh = Stragglers(Mesh("2x2")), Mesh("2x2")
    >>> observations = [observation for step in range(40) for observation in watch.add(step, [1.0, 1.0, 1.5, 1.0])]
    >>> [(str(observation.suspects[0]), observation.step, observation.evidence) for observation in observations]
    [('1,0', 23, 'late in 24 of the last 24 steps, in the median 1.50 times as long as the others')]
    """

    def __init__(self, mesh: Mesh, hosts: Sequence[Sequence[Coordinate]] = ()) -> None:
        self.mesh = mesh
        self._ranks_of_host = [
            np.array([mesh.rank_of[tuple(chip)] for chip in chips if mesh.rank_of[tuple(chip)] >= 0], dtype=np.int64)
            for chips in hosts
        ]
        self._late = _Lateness(mesh.n_chips)
        self._named: set[Suspect] = set()

    def add(self, step: int, compute_s: Annotated[ArrayLike, "[N]"], *, step_s: float = 0.0) -> tuple[Observation, ...]:
        """Take in the times of one step, by rank; return observations against whoever has turned out slow, each once.

        NaN is what was not measured. `step_s` is how long the whole step took: a chip that makes it less than 5 %
        longer is not late. A suspect that has recovered, and is slow again later, is named again.
        """
        compute = np.asarray(compute_s, dtype=np.float64)
        if compute.shape != (self.mesh.n_chips,):
            raise ParameterError(
                f"compute_s has the shape {compute.shape}, expected {(self.mesh.n_chips,)}: one time per live chip."
            )
        self._late.add(compute, WORTH * step_s)
        suspects = self._slow()
        new = {suspect: ranks for suspect, ranks in suspects.items() if suspect not in self._named}
        self._named = set(suspects) | {one for one in self._named if self._is_still_late(one)}
        return tuple(_sign(suspect, step, self._late.numbers(ranks)) for suspect, ranks in sorted(new.items()))

    def _slow(self) -> dict[Suspect, NDArray[np.int64]]:
        """Return who is slow, and the chips that say so."""
        slow, nearly = self._late.slow()
        found: dict[Suspect, NDArray[np.int64]] = {}
        if not slow.any():
            return found
        for host, ranks in enumerate(self._ranks_of_host):
            if len(ranks) > 1 and slow[ranks].any() and nearly[ranks].all():
                found[Suspect(host=host)] = ranks
                slow[ranks] = False
        for rank in np.flatnonzero(slow):
            found[Suspect.chip(self.mesh.chip(int(rank)))] = np.array([rank])
        return found

    def _is_still_late(self, suspect: Suspect) -> bool:
        """Whether what was named has not recovered yet: a count on the edge of the limit is not news at every step."""
        ranks = self._ranks_of_host[suspect.host] if suspect.host is not None else self.mesh.rank(suspect.ends[0])
        return bool(self._late.counts[ranks].max() >= LAG_STEPS // 2)


class _Lateness:
    """How often each of n chips was late in the last `WINDOW` steps, and by how much."""

    def __init__(self, n: int) -> None:
        self._ratios = np.full((WINDOW, n), np.nan)
        self._late = np.zeros((WINDOW, n), dtype=np.bool_)
        self.counts = np.zeros(n, dtype=np.int64)
        self._n_steps = 0

    def add(self, times: NDArray[np.float64], ignored_s: float) -> None:
        slot = self._n_steps % WINDOW
        there = times[np.isfinite(times)]
        typical = float(np.median(there)) if len(there) >= MIN_COMPARED else math.nan
        ratios = times / typical if typical > 0 else np.full(times.shape, np.nan)
        late = (ratios > LATE) & (times - typical > ignored_s)  # not what is NaN
        self.counts += late.astype(np.int64) - self._late[slot]
        self._ratios[slot], self._late[slot] = ratios, late
        self._n_steps += 1

    def slow(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return who was late too often, and who was nearly so."""
        if self.counts.max(initial=0) < LAG_STEPS:
            nobody = np.zeros(len(self.counts), dtype=np.bool_)
            return nobody, nobody
        needed = least_count(int(np.median(self.counts)) + 1)
        return self.counts >= needed, self.counts >= 0.75 * needed

    def numbers(self, which: NDArray[np.int64]) -> dict[str, float]:
        """Return the evidence against some of them together."""
        ratios = self._ratios[:, which]
        return {
            "steps": int(self.counts[which].max()),
            "window": min(self._n_steps, WINDOW),
            "factor": round(float(np.nanmedian(ratios)), 3),
            "typical": int(np.median(self.counts)),
        }


@lru_cache(maxsize=WINDOW + 1)
def least_count(usual: int) -> int:
    """Return in how many of 40 steps somebody must be late to be named, where others are late in `usual` of them.

    >>> least_count(1), least_count(4), least_count(8)
    (24, 24, 30)
    """
    p = min(usual / WINDOW, 1.0)
    tail, count = 0.0, WINDOW
    while count >= LAG_STEPS:
        tail += math.comb(WINDOW, count) * p**count * (1 - p) ** (WINDOW - count)
        if tail >= FALSE_ALARMS:
            break
        count -= 1
    return count + 1


def _sign(suspect: Suspect, step: int, numbers: dict[str, float]) -> Observation:
    text = (
        f"late in {numbers['steps']:.0f} of the last {numbers['window']:.0f} steps, in the median "
        f"{numbers['factor']:.2f} times as long as the others"
    )
    return Observation(LAG, (suspect,), step, text, numbers)
