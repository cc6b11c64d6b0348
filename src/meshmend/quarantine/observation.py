"""An observation: what a check has seen, as it is sent between processes and written down. Read as untrusted input."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from meshmend.errors import QuarantineError
from meshmend.quarantine.suspect import MAX_TEXT, Suspect

DIGEST, RECOMPUTE = KINDS = ("digest", "recompute")
"""Replicas that disagree, and a gradient that another chip cannot repeat."""
MAX_EVIDENCE = 2000
MAX_SUSPECTS = 16
MAX_NUMBERS = 32
LAST_STEP = 1 << 53


@dataclass(frozen=True)
class Observation:
    """The finding of one check at one step.

    `suspects` are chips: one if the check names a culprit. Several mean that it is one of them, and the check cannot
    tell which: two chips that compute different gradients from the same samples are both suspects.

    `numbers` says how much the check knows; `judge` reads these:

    - digest: "agree" and "differ", the numbers of replicas that have the majority's digest and another one;
    - recompute: "agree" and "differ", how many chips computed the same and another gradient, a third chip included
      if one was asked;
    - "attempt" of the job, set by the `FaultLog`: a step that is seen again after a restart is another observation.

    >>> seen = Observation("digest", (Suspect.parse("2,3"),), 400, "chunk 7 differs", {"chunk": 7, "agree": 63})
    >>> Observation.of(json.loads(seen.to_json())) == seen
    True
    """

    kind: str
    suspects: tuple[Suspect, ...]
    step: int
    evidence: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = tuple(sorted(set(self.suspects)))
        facts = dict(sorted(self.numbers.items()))
        if self.kind not in KINDS:
            raise _refused(f"its kind is {self.kind[:50]!r}, expected one of {', '.join(KINDS)}")
        if not 1 <= len(named) <= MAX_SUSPECTS:
            raise _refused(f"it names {len(named)} suspects, expected 1 to {MAX_SUSPECTS}")
        if any(one.kind != "chip" for one in named):
            raise _refused("it names a cable or a host, and checks compare chips")
        if not 0 <= self.step < LAST_STEP:
            raise _refused(f"its step is {self.step}, expected a number from 0")
        if len(self.evidence) > MAX_EVIDENCE:
            raise _refused(f"its evidence has {len(self.evidence):,} characters, expected at most {MAX_EVIDENCE:,}")
        if len(facts.keys() - {"attempt"}) > MAX_NUMBERS or any(len(name) > MAX_TEXT for name in facts):
            raise _refused(f"it has {len(facts)} numbers, expected at most {MAX_NUMBERS}, with short names")
        if not all(math.isfinite(number) for number in facts.values()):
            raise _refused("one of its numbers is not finite")
        object.__setattr__(self, "suspects", named)
        object.__setattr__(self, "numbers", facts)

    def facts(self) -> dict[str, Any]:
        """Return everything as JSON can write it."""
        return {
            "kind": self.kind,
            "suspects": [str(one) for one in self.suspects],
            "step": self.step,
            "evidence": self.evidence,
            "numbers": dict(self.numbers),
        }

    def to_json(self) -> str:
        """Return this as one line: the same text for equal observations."""
        return json.dumps(self.facts(), allow_nan=False)

    @classmethod
    def of(cls, facts: Any) -> Observation:
        """Return the observation that `facts` describes; raise `QuarantineError` if it is none."""
        if not isinstance(facts, dict) or set(facts) != {"kind", "suspects", "step", "evidence", "numbers"}:
            raise _refused("it does not have exactly kind, suspects, step, evidence and numbers")
        kind, step, evidence = facts["kind"], facts["step"], facts["evidence"]
        suspects, numbers = facts["suspects"], facts["numbers"]
        if (
            not isinstance(kind, str)
            or not isinstance(evidence, str)
            or not (_is_number(step) and isinstance(step, int))
        ):
            raise _refused("kind and evidence are texts, and step is a whole number")
        if not isinstance(suspects, list) or not all(isinstance(one, str) for one in suspects):
            raise _refused("suspects is a list of texts")
        if len(suspects) > MAX_SUSPECTS:
            raise _refused(f"it names {len(suspects)} suspects, expected 1 to {MAX_SUSPECTS}")
        if not isinstance(numbers, dict) or not all(_is_number(number) for number in numbers.values()):
            raise _refused("numbers has a finite number for each name")
        return cls(kind, tuple(Suspect.parse(one) for one in suspects), step, evidence, numbers)

    def __hash__(self) -> int:
        return hash((self.kind, self.suspects, self.step, self.evidence, tuple(self.numbers.items())))


def is_count(value: object, limit: float = 1e15) -> bool:
    """Whether what JSON has is a number from 0 up to a limit; true and false are none."""
    return _is_number(value) and 0 <= value < limit


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def _refused(why: str) -> QuarantineError:
    return QuarantineError(f"This is no observation of a fault: {why}.")
