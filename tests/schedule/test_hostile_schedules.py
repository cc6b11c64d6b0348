"""Attacks on the proof. Exact counting, by code that the verifier does not share, is the oracle.

`pytest -m slow tests/schedule/test_hostile_schedules.py` is the long attack.
"""

from __future__ import annotations

from collections import Counter

import pytest

from counting import is_right
from hostile_schedules import ATTACKS, hostile_schedule
from meshmend import Mesh, Op, Schedule, verify
from meshmend.errors import CollisionError, VerificationError, WrongSumError


@pytest.mark.parametrize(
    "seeds",
    [pytest.param(range(200), id="200"), pytest.param(range(200, 10_200), id="10000", marks=pytest.mark.slow)],
)
def test_a_schedule_is_proven_if_and_only_if_it_is_right(seeds: range) -> None:
    verdicts: Counter[tuple[str, bool]] = Counter()
    for seed in seeds:
        kind, schedule = hostile_schedule(seed)
        right = is_right(schedule)
        for method in ("exact", "fingerprint"):
            try:
                verify(schedule, method=method)
                proven = True
            except (WrongSumError, CollisionError):
                proven = False
            assert proven == right, (seed, kind, method)
        verdicts[kind, right] += 1
    for kind in ATTACKS:
        assert verdicts[kind, False] >= len(seeds) // 50, (kind, verdicts)
    # Attacks that happen to do no harm must pass: a proof that refuses everything would be no use.
    assert sum(n for (_, right), n in verdicts.items() if right) >= len(seeds) // 20


@pytest.mark.parametrize("times", [*range(59, 66), 122, 124])
@pytest.mark.parametrize("method", ["exact", "fingerprint"])
def test_doublings_do_not_come_round_to_one(times: int, method: str) -> None:
    # 2⁶¹ ≡ 1 modulo the prime of the fingerprints: without a count, 62 steps of this look like an all-reduce.
    schedule = Schedule(
        Mesh("1x2"),
        total_chunks=1,
        step=[step for step in range(times) for _ in range(2)],
        src=[0, 1] * times,
        dst=[1, 0] * times,
        op=Op.REDUCE,
        owners=[0],
    )
    with pytest.raises(VerificationError, match="got it 999 times or more"):
        verify(schedule, method=method)  # type: ignore[arg-type]
    assert not schedule.is_proven
