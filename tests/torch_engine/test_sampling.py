"""Every sample in exactly one committed step per epoch, whatever dies: held against a ledger that counts."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("torchft")

import meshmend.torch as mmt
from meshmend.errors import ParameterError
from meshmend.torch.sampling import order_of


@dataclass
class Counting:
    """What a sampler asks of torchft's manager."""

    committed: int = 0
    rank: int | None = 0

    def batches_committed(self) -> int:
        return self.committed

    def participating_rank(self) -> int | None:
        return self.rank


def sampler(manager: Any, n_samples: int, batch_size: int, **options: Any) -> mmt.StepSampler:
    return mmt.StepSampler(manager, n_samples, batch_size, **options)


@pytest.mark.parametrize("seed", range(20))
def test_a_job_with_failures_uses_each_sample_once_per_epoch(seed: int) -> None:
    rng = random.Random(seed)
    n_samples, batch_size = rng.randint(1, 200), rng.randint(1, 9)
    chips = [Counting() for _ in range(12)]
    samplers = [sampler(chip, n_samples, batch_size, seed=seed) for chip in chips]
    ledger: Counter[int] = Counter()
    total, always = 0, 0
    for _ in range(150):
        members = list({always, *rng.sample(range(12), rng.randint(0, 11))})
        rng.shuffle(members)
        furthest = max(chips[member].committed for member in members)
        for rank, member in enumerate(members):
            # Who is behind receives the count with the weights, when the quorum has formed.
            chips[member].committed, chips[member].rank = furthest, rank
        used = [int(record) for member in members for record in samplers[member].indices()]
        if rng.random() < 0.3:
            continue  # a chip died: nobody commits
        # Some are told too late and do not commit. They are behind in the next quorum, which has one of those who did.
        finished = rng.sample(members, rng.randint(1, len(members)))
        for member in finished:
            chips[member].committed += len(members)
        always = finished[0]
        ledger.update(used)
        total += len(used)
        assert ledger.total() == total
        counts = [ledger[record] for record in range(n_samples)]
        assert max(counts) - min(counts) <= 1, "a sample was used again before all others were"
        assert samplers[always].epoch == min(counts)
    assert set(ledger) <= set(range(n_samples))


def test_an_epoch_has_an_order_of_its_own_that_is_a_permutation() -> None:
    for n_samples in (1, 2, 7, 1000):
        for epoch in range(3):
            assert sorted(order_of(5, epoch, n_samples)) == list(range(n_samples))
    orders = {(seed, epoch): tuple(order_of(seed, epoch, 100)) for seed in range(5) for epoch in range(5)}
    assert len(set(orders.values())) == 25


def test_an_order_favours_no_place() -> None:
    # Where record 0 of 10 goes, over 2,000 epochs: expected 200 times each, with a standard deviation of 13.
    places = Counter(int(np.flatnonzero(order_of(1, epoch, 10) == 0)[0]) for epoch in range(2000))
    assert all(abs(places[place] - 200) < 65 for place in range(10))


def test_a_step_at_the_end_of_an_epoch_goes_on_with_the_next() -> None:
    at_end = sampler(Counting(committed=3), 10, 3, seed=2)
    assert at_end.indices().tolist() == [order_of(2, 0, 10)[9], *order_of(2, 1, 10)[:2]]
    assert (at_end.position, at_end.epoch) == (9, 0)


def test_a_chip_that_does_not_take_part_has_something_to_compute_with() -> None:
    spare, first = sampler(Counting(rank=None), 10, 3), sampler(Counting(rank=0), 10, 3)
    assert spare.indices().tolist() == first.indices().tolist()


@pytest.mark.parametrize(("options", "named"), [((0, 1), "n_samples"), ((1, 0), "batch_size")])
def test_sizes_below_one_are_refused(options: tuple[int, int], named: str) -> None:
    with pytest.raises(ParameterError, match=rf"StepSampler's {named} is 0, expected at least 1"):
        sampler(Counting(), *options)
    with pytest.raises(ParameterError, match="seed is -1"):
        sampler(Counting(), 1, 1, seed=-1)
