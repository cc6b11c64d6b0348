"""From observations to verdicts: nothing is quarantined on one unconfirmed observation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshmend.quarantine.observation import DIGEST, RECOMPUTE, Observation
from meshmend.quarantine.suspect import Suspect

WINDOW_STEPS = 10_000
"""Observations further apart are not counted together: a machine of a thousand chips sees a cosmic ray now and then."""
MAX_OBSERVATIONS = 10_000
"""Observations that are remembered, the newest."""
CONFIRMED = 2
"""Separate observations against a suspect that make a verdict."""


@dataclass(frozen=True)
class Verdict:
    """A suspect that is to be left out, and why."""

    suspect: Suspect
    observations: tuple[Observation, ...]
    """All that speak against it, in the order of steps."""

    @property
    def step(self) -> int:
        """The last step of its observations."""
        return self.observations[-1].step

    @property
    def why(self) -> str:
        """The evidence in one line."""
        told = []
        for one in self.observations[:3]:
            attempt = one.numbers.get("attempt")
            when = f"step {one.step}" + ("" if attempt is None else f" of attempt {attempt:.0f}")
            told.append(f"{one.kind} at {when}: {one.evidence or 'no details'}")
        more = len(self.observations) - len(told)
        return "; ".join(told) + (f"; and {more} more" if more else "")


def recent(observations: Iterable[Observation], window_steps: int = WINDOW_STEPS) -> list[Observation]:
    """Return the observations that count together, in order of steps: those of the last steps, and not too many."""
    found = sorted(set(observations), key=_order)
    last = max((observation.step for observation in found), default=0)
    return [observation for observation in found if observation.step > last - window_steps][-MAX_OBSERVATIONS:]


def judge(observations: Iterable[Observation]) -> list[Verdict]:
    """Return who is to be quarantined, and why: the verdicts of a set of observations.

    A verdict needs two separate observations against the same suspect. The same step again after a restart is a
    separate one. What one fault may have caused alone counts once, however many observations it led to.

    - **digest**: a check in which the majority of all replicas agrees. One flipped bit of a gradient is in the
      parameters and in the moments, in every later step, until the state is restored: all chunks and steps of one
      attempt count once. They do not count beside another wrong number of this attempt, at that step or before: the
      replica may differ because of that. Where observations have no attempt, each step counts. Without a majority (two
      replicas that differ) it does not count, because either may be right.
    - **recompute**: two chips that disagree are one observation against either. A third one decides: with two against
      one, it has confirmed the observation. Another disagreement with another partner does so, too.

    Observations of different checks add up: a wrong replica, and in the next attempt a wrong gradient, are two. An
    observation that points at several suspects counts against each. The one that most observations point at is named,
    and explains them: they count against nobody else. Two that the same observations point at are not named.

    Verdicts depend on the set of observations alone, in whatever order they arrive: all processes that have the same
    observations come to the same verdicts.

    >>> chip = Suspect.parse("2,3")
    >>> differs = Observation("digest", (chip,), 400, "chunk 7 differs", {"chunk": 7, "agree": 63, "differ": 1})
    >>> judge([differs])
    []
    >>> [str(one.suspect) for one in judge([differs, Observation("recompute", (chip,), 410, "its gradient differs")])]
    ['2,3']
    """
    left = sorted(set(observations), key=_order)
    found = []
    while (verdict := _strongest(left)) is not None:
        found.append(verdict)
        left = [observation for observation in left if verdict.suspect not in observation.suspects]
    return found


def _strongest(observations: list[Observation]) -> Verdict | None:
    """Return the verdict that most observations support; None if none is confirmed."""
    against: dict[Suspect, list[Observation]] = {}
    for observation in filter(_counts, observations):
        for suspect in observation.suspects:
            against.setdefault(suspect, []).append(observation)
    confirmed = []
    for suspect, named in against.items():
        weight = _weight(named)
        always_named = set.intersection(*(set(observation.suspects) for observation in named))
        if weight >= CONFIRMED and not any(len(against[other]) == len(named) for other in always_named - {suspect}):
            confirmed.append((-weight, suspect, Verdict(suspect, tuple(named))))
    return min(confirmed, key=lambda one: one[:2])[2] if confirmed else None


def _weight(observations: list[Observation]) -> int:
    """Return how many of these observations are separate ones."""
    computed = {
        (observation.kind, _state_of(observation), observation.step)
        for observation in observations
        if observation.kind != DIGEST
    }
    replicas: dict[tuple[str, float], int] = {}
    for observation in observations:
        if observation.kind == DIGEST:
            replicas[_state_of(observation)] = min(
                observation.step, replicas.get(_state_of(observation), observation.step)
            )
    explained = {state for _, state, step in computed if step <= replicas.get(state, -1)}
    is_decided = any(observation.kind == RECOMPUTE and _has_majority(observation, 2) for observation in observations)
    return max(len(computed) + len(replicas.keys() - explained), CONFIRMED if is_decided else 0)


def _state_of(observation: Observation) -> tuple[str, float]:
    """Return a name for the state that an observation is of: that of an attempt, which stays damaged until it ends."""
    attempt = observation.numbers.get("attempt")
    return ("step", observation.step) if attempt is None else ("attempt", attempt)


def _counts(observation: Observation) -> bool:
    """Whether an observation counts at all."""
    if observation.kind == DIGEST:
        return _has_majority(observation, 1)
    return observation.kind == RECOMPUTE


def _has_majority(observation: Observation, least: int) -> bool:
    agree, differ = observation.numbers.get("agree", 0), observation.numbers.get("differ", 1)
    return len(observation.suspects) == 1 and agree >= least and agree > differ


def _order(observation: Observation) -> tuple[int, str]:
    return observation.step, observation.to_json()
