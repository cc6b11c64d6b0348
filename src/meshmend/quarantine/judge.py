"""From signs to verdicts: nothing is quarantined on one unconfirmed sign."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from meshmend.quarantine.sign import DIGEST, LAG, RECOMPUTE, Sign
from meshmend.quarantine.suspect import Suspect

WINDOW_STEPS = 10_000
"""Signs that are further apart are not held together: a machine of a thousand chips sees a cosmic ray now and then."""
LAG_STEPS = 24
"""Steps that a straggler was late in; `Stragglers` never reports fewer."""
MAX_SIGNS = 10_000
"""Signs that are remembered, the newest."""
CONFIRMED = 2
"""What the observations against a suspect must add up to."""


@dataclass(frozen=True)
class Verdict:
    """A suspect that is to be left out, and why."""

    suspect: Suspect
    signs: tuple[Sign, ...]
    """All that speak against it, in the order of steps."""

    @property
    def step(self) -> int:
        """The last step of its signs."""
        return self.signs[-1].step

    @property
    def why(self) -> str:
        """The evidence in one line."""
        told = [f"{sign.kind} at {_when(sign)}: {sign.evidence or 'no details'}" for sign in self.signs[:3]]
        more = len(self.signs) - len(told)
        return "; ".join(told) + (f"; and {more} more" if more else "")


class Judge:
    """Takes in signs as they come, and says by the rules of `judge` who is to be quarantined."""

    def __init__(self) -> None:
        self._signs: set[Sign] = set()
        self._named: set[Suspect] = set()

    def add(self, signs: Iterable[Sign]) -> tuple[Verdict, ...]:
        """Take in signs; return the verdicts that are new."""
        self._signs = set(recent({*self._signs, *signs}))
        new = tuple(verdict for verdict in judge(self._signs) if verdict.suspect not in self._named)
        self._named |= {verdict.suspect for verdict in new}
        return new


def recent(signs: Iterable[Sign], window_steps: int = WINDOW_STEPS) -> list[Sign]:
    """Return the signs that may be held together, in order of steps: those of the last steps, and not too many."""
    found = sorted(set(signs), key=_order)
    last = max((sign.step for sign in found), default=0)
    return [sign for sign in found if sign.step > last - window_steps][-MAX_SIGNS:]


def judge(signs: Iterable[Sign], listed: Collection[Suspect] = ()) -> list[Verdict]:
    """Return who is to be quarantined, and why: the verdicts of a set of signs.

    A verdict needs two separate observations against the same suspect. The same step again after a restart is a
    separate one. What one fault may have caused alone is one observation, however many signs it left.

    - **digest**: a check in which the majority of all replicas agrees. One flipped bit of a gradient is in the
      parameters and in the moments, in every later step, until the state is restored: all chunks and steps of one
      attempt are one observation. It is none beside another wrong number of this attempt, at that step or before: the
      replica may differ because of that. Where signs have no attempt, each step counts as one. Without a majority (two
      replicas that differ) it is none, because either may be right.
    - **recompute**: two chips that disagree are one observation against either. A third one decides: with two against
      one, it has confirmed the sign. Another disagreement with another partner does so, too.
    - **lag**: its statistics run over a window of many steps, so a sign of at least 24 late steps is confirmed.
      Slowness and wrong numbers are never added up.

    Observations of different checks add up: a wrong replica, and in the next attempt a wrong gradient, are two. A sign
    that points at several suspects counts against each. The one that most observations point at is named; of those that
    all the same signs point at, the smallest, a cable before a chip before a host, since it costs least to leave out:
    if it was the chip, its next sign comes over another cable. Two chips that cannot be told apart are not named.

    Verdicts depend on the set of signs alone, in whatever order they arrive: all processes that have the same signs
    come to the same verdicts.

    What is `listed` is left out already, and explains the signs that name it: they do not count against others of its
    size or smaller. Against a larger one they do: a chip is found although one of its cables was named first.

    >>> chip = Suspect.parse("2,3")
    >>> differs = Sign("digest", (chip,), 400, "chunk 7 differs", {"chunk": 7, "agree": 63, "differ": 1})
    >>> judge([differs])
    []
    >>> [str(one.suspect) for one in judge([differs, Sign("recompute", (chip,), 410, "its gradient differs")])]
    ['2,3']
    """
    left = sorted(set(signs), key=_order)
    found = []
    for is_lag in (False, True):
        rest = [sign for sign in left if (sign.kind == LAG) == is_lag]
        while (verdict := _strongest(rest, listed)) is not None:
            found.append(verdict)
            rest = [sign for sign in rest if verdict.suspect not in sign.suspects]
    return found


def _strongest(signs: list[Sign], listed: Collection[Suspect]) -> Verdict | None:
    """Return the verdict that most observations support; None if none is confirmed."""
    against: dict[Suspect, list[Sign]] = {}
    for sign in signs:
        if _counts(sign):
            explained = max((one.size for one in sign.suspects if one in listed), default=-1)
            for suspect in (one for one in sign.suspects if one.size > explained):
                against.setdefault(suspect, []).append(sign)
    confirmed = []
    for suspect, named in against.items():
        weight = _weight(named)
        rivals = {one for one in named[0].suspects if all(one in sign.suspects for sign in named)} - {suspect}
        if weight >= CONFIRMED and not any(
            one.kind == suspect.kind and len(against.get(one, ())) == len(named) for one in rivals
        ):
            confirmed.append((-weight, suspect.size, str(suspect), Verdict(suspect, tuple(named))))
    return min(confirmed, key=lambda one: one[:3])[3] if confirmed else None


def _weight(signs: list[Sign]) -> int:
    """Return how many observations these signs are."""
    computed = {(sign.kind, _state_of(sign), sign.step) for sign in signs if sign.kind != DIGEST}
    replicas: dict[tuple[str, float], int] = {}
    for sign in signs:
        if sign.kind == DIGEST:
            replicas[_state_of(sign)] = min(sign.step, replicas.get(_state_of(sign), sign.step))
    explained = {state for _, state, step in computed if step <= replicas.get(state, -1)}
    is_decided = any(sign.kind == LAG or (sign.kind == RECOMPUTE and _has_majority(sign, 2)) for sign in signs)
    return max(len(computed) + len(replicas.keys() - explained), CONFIRMED if is_decided else 0)


def _state_of(sign: Sign) -> tuple[str, float]:
    """Return a name for the state that a sign was seen in: that of an attempt, which stays damaged until it ends."""
    attempt = sign.numbers.get("attempt")
    return ("step", sign.step) if attempt is None else ("attempt", attempt)


def _counts(sign: Sign) -> bool:
    """Whether a sign is an observation at all."""
    if sign.kind == DIGEST:
        return _has_majority(sign, 1)
    if sign.kind == LAG:
        return sign.numbers.get("steps", 0) >= LAG_STEPS
    return sign.kind == RECOMPUTE


def _has_majority(sign: Sign, least: int) -> bool:
    agree, differ = sign.numbers.get("agree", 0), sign.numbers.get("differ", 1)
    return len(sign.suspects) == 1 and agree >= least and agree > differ


def _when(sign: Sign) -> str:
    attempt = sign.numbers.get("attempt")
    return f"step {sign.step}" if attempt is None else f"step {sign.step} of attempt {attempt:.0f}"


def _order(sign: Sign) -> tuple[int, str]:
    return sign.step, sign.to_json()
