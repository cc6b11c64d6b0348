"""The order of an epoch is grain's own, bit for bit, and a permutation where grain's is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.jax.data.shuffle import shuffled

grain: Any = pytest.importorskip("grain", reason="needs grain: pip install 'meshmend[restart]'")

POWERS = [2**k for k in (8, 15, 16, 17, 18, 20, 21, 30, 32, 33, 40, 61)]
SIZES = sorted({1, 2, 3, 5, 83, 1000, 3 * 4**9, 10**9} | {n + d for n in POWERS for d in (-1, 0, 1, 2)})
TOO_SHORT = {4**k + 1 for k in range(8, 32)}
"""Where grain's blocks do not hold the last number."""


def by_grain(offsets: Any, n_samples: int, seed: int, epoch: int) -> list[int]:
    dataset = grain.MapDataset.range(n_samples).shuffle(seed=seed)
    return [dataset[epoch * n_samples + int(offset)] for offset in offsets]


@pytest.mark.parametrize("n_samples", [n for n in SIZES if n not in TOO_SHORT])
def test_the_order_is_grains(n_samples: int) -> None:
    rng = np.random.default_rng(n_samples)
    for seed, epoch in [(0, 0), (2**32 - 1, 0), (2**32 - 2, 3), *rng.integers(0, [2**32, 50], (3, 2)).tolist()]:
        offsets = np.unique([0, n_samples - 1, *rng.integers(0, n_samples, 40)])
        found = shuffled(offsets, n_samples, (seed + epoch) % 2**32)
        assert found.dtype == np.int64
        assert found.tolist() == by_grain(offsets, n_samples, seed, epoch)


@given(st.integers(1, 300_000), st.integers(0, 2**32 - 1), st.integers(0, 9), st.randoms(use_true_random=False))
def test_the_order_is_grains_for_any_size_and_seed(n_samples: int, seed: int, epoch: int, rng: Any) -> None:
    n_samples += n_samples in TOO_SHORT
    offsets = np.array([rng.randrange(n_samples) for _ in range(6)])
    assert shuffled(offsets, n_samples, (seed + epoch) % 2**32).tolist() == by_grain(offsets, n_samples, seed, epoch)


@pytest.mark.parametrize("n_samples", [1, 2, 3, 1000, 4**8 - 1, 4**8, 4**8 + 1, 4**8 + 2, 2**17 + 1, 4**9 + 1])
def test_each_record_comes_once(n_samples: int) -> None:
    """For one more than a power of 4, too, where grain repeats the first record of the epoch and omits the last."""
    found = shuffled(np.arange(n_samples), n_samples, 7)
    assert np.array_equal(np.sort(found), np.arange(n_samples))


def test_offsets_may_have_any_shape_and_their_number_changes_nothing() -> None:
    for n_samples in (100, 10**6):
        offsets = np.random.default_rng(0).integers(0, n_samples, (5, 7))
        found = shuffled(offsets, n_samples, 3)
        assert found.tolist() == [[int(shuffled(np.array([one]), n_samples, 3)[0]) for one in row] for row in offsets]
        assert shuffled(offsets[:0], n_samples, 3).shape == (0, 7)


def test_what_is_returned_may_be_written_to() -> None:
    first = shuffled(np.arange(9), 9, 1)
    wanted = first.tolist()
    first[:] = 0
    assert shuffled(np.arange(9), 9, 1).tolist() == wanted
