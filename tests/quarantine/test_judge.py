"""Observations to verdicts: the rules of each kind, and that the order of arrival does not matter."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from meshmend.quarantine import Observation, Suspect
from meshmend.quarantine.judge import judge, recent

A, B, C, D = (Suspect.chip((0, n)) for n in range(4))
MAJORITY = {"agree": 63, "differ": 1}


def digest(chip: Suspect, step: int, chunk: int = 0, **numbers: float) -> Observation:
    return Observation("digest", (chip,), step, "", {"chunk": chunk, **MAJORITY, **numbers})


def recompute(step: int, *suspects: Suspect, **numbers: float) -> Observation:
    return Observation("recompute", suspects, step, "", numbers)


@pytest.mark.parametrize(
    ("observations", "named"),
    [
        ([digest(A, 1)], []),
        ([digest(A, 1), digest(A, 1)], []),  # the same one, heard twice
        ([digest(A, 1), digest(B, 1)], []),
        ([digest(A, 1), digest(A, 2)], [A]),
        ([digest(A, 1, 0), digest(A, 1, 5)], []),  # one flip is in the parameters and in the moments
        ([digest(A, 1, attempt=1), digest(A, 2, attempt=1)], []),  # and stays there
        ([digest(A, 1, attempt=1), digest(A, 1, attempt=2)], [A]),
        ([digest(A, 1), recompute(1, A)], []),  # the gradient was wrong, so the replica is
        ([digest(A, 9, attempt=1), replace(recompute(7, A), numbers={"attempt": 1})], []),
        ([digest(A, 9, attempt=2), replace(recompute(7, A), numbers={"attempt": 1})], [A]),
        # not because of that gradient
        ([digest(A, 5, attempt=1), replace(recompute(7, A), numbers={"attempt": 1})], [A]),
        ([digest(A, 1, agree=1, differ=1), digest(A, 2, agree=1, differ=1)], []),  # two replicas: either may be right
        ([digest(A, 1), digest(A, 2), digest(B, 1), digest(B, 2)], [A, B]),
        ([recompute(1, A)], []),
        ([recompute(1, A, B), recompute(1, A, C)], []),  # one step
        ([recompute(1, A, B), recompute(2, A, B), recompute(3, A, C)], [A]),
        ([recompute(1, A, B)], []),
        ([recompute(1, A, B), recompute(2, A, B)], []),  # these two cannot be told apart
        ([recompute(1, A, B), recompute(2, A, C)], [A]),
        ([recompute(1, A, agree=2, differ=1)], [A]),  # a third one has decided
        ([recompute(1, A, agree=1, differ=1)], []),
        ([recompute(1, A, agree=1, differ=2)], []),  # three that differ: the program is not deterministic
        ([digest(A, 1), recompute(9, A)], [A]),
    ],
)
def test_the_rules(observations: list[Observation], named: list[Suspect]) -> None:
    assert [verdict.suspect for verdict in judge(observations)] == named


def test_no_single_observation_but_a_decided_one_names_anybody() -> None:
    """By brute force over what a check may report."""
    counts: list[dict[str, Any]] = [{}, *({"agree": a, "differ": d} for a in range(4) for d in range(4))]
    for kind, names, numbers in itertools.product(("digest", "recompute"), ((A,), (A, B), (A, B, C)), counts):
        decided = kind == "recompute" and len(names) == 1 and numbers.get("agree", 0) >= 2
        decided = decided and numbers["agree"] > numbers["differ"]
        assert bool(judge([Observation(kind, names, 1, "", numbers)])) == decided


def test_the_order_of_observations_does_not_matter() -> None:
    rng = random.Random(1)
    pool = [A, B, C, D]
    for _ in range(200):
        observations = []
        for _ in range(rng.randint(1, 8)):
            step, chip = rng.randint(1, 4), rng.choice([A, B, C, D])
            several = rng.sample(pool, rng.randint(1, 3))
            observations.append(rng.choice([digest(chip, step), recompute(step, *several)]))
        expected = judge(observations)
        rng.shuffle(observations)
        assert judge(observations) == expected


def test_a_verdict_has_its_evidence() -> None:
    observations = [
        Observation("recompute", (A,), 5, "chunk 2 is off by 4"),
        Observation("recompute", (A,), 3, "chunk 1 is off by 8"),
    ]
    (verdict,) = judge(observations)
    assert verdict.step == 5
    assert verdict.why == "recompute at step 3: chunk 1 is off by 8; recompute at step 5: chunk 2 is off by 4"


def test_observations_that_are_far_apart_are_not_counted_together() -> None:
    observations = [recompute(step, A) for step in (1, 101, 200)]
    assert judge(recent(observations[:2], 100)) == []
    assert [one.suspect for one in judge(recent(observations, 100))] == [A]
