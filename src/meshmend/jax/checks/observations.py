"""What the checks have found, as observations: the words and numbers that a judge reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from meshmend.jax.checks.digests import Disagreement
from meshmend.quarantine import Observation, Suspect
from meshmend.quarantine.observation import DIGEST, MAX_SUSPECTS

SIGNS_PER_CHIP = 4
"""Observations against one chip from one check, at most: a few pieces that differ say as much as all of them."""


def digest_observations(found: Sequence[Disagreement], step: int) -> list[Observation]:
    """Return the observations of replicas that differ after a step.

    >>> found = Disagreement((2, 1), "params['w'], elements 0 to 299", 11, 12, 0)
    >>> digest_observations([found], 400)[0].evidence
    "params['w'], elements 0 to 299: 11 of 12 replicas agree, and this one differs"
    """
    observations, told = [], Counter[tuple[int, ...]]()
    for one in found:
        told[one.chip] += 1
        if one.agreeing and told[one.chip] <= SIGNS_PER_CHIP:
            numbers = {"chunk": one.piece, "agree": one.agreeing, "differ": one.of - one.agreeing}
            evidence = f"{one.where}: {one.agreeing} of {one.of} replicas agree, and this one differs"
            observations.append(Observation(DIGEST, (Suspect.chip(one.chip),), step, evidence, numbers))
    open_pieces = {one.piece: one for one in found if not one.agreeing}
    for piece, one in list(open_pieces.items())[:SIGNS_PER_CHIP]:
        chips = sorted({other.chip for other in found if other.piece == piece})
        evidence = f"{one.where}: no majority of the {one.of} replicas agrees"
        suspects = tuple(Suspect.chip(chip) for chip in chips[:MAX_SUSPECTS])
        observations.append(
            Observation(DIGEST, suspects, step, evidence, {"chunk": piece, "agree": 0, "differ": one.of})
        )
    return observations
