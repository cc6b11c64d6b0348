"""What a job trains on: arrays in memory, alone or in a tree, and whatever a feed takes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshmend.jax as mmj
from jax_engine.job.job_cases import DATASET, HOLED, N_SAMPLES, alone
from meshmend.errors import ParameterError
from meshmend.jax.data.example_keys import make_feed, with_offsets

X, Y = DATASET["x"], DATASET["y"]


@pytest.mark.parametrize(
    "dataset", [X, jnp.asarray(X), (X, Y), DATASET, list(X)], ids=["array", "jax", "tuple", "dict", "sequence"]
)
def test_a_batch_has_the_rows_of_its_samples(dataset: Any) -> None:
    fabric = alone(HOLED).fabric
    feed = make_feed(dataset, mmj.KeepGlobal(30), seed=0, n_chips=fabric.mesh.n_chips)
    batch = next(feed.batches(fabric))
    counts = np.asarray(batch.weights) == 1
    order = feed.split(fabric).offsets().ravel()[counts].argsort()
    found = jax.tree.map(lambda array: np.asarray(array)[counts][order], batch.data)
    expected = jax.tree.map(
        lambda array: np.asarray(array)[batch.indices], np.stack(dataset) if isinstance(dataset, list) else dataset
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    with_keys, places = with_offsets(batch, fabric).data
    assert with_keys is batch.data
    assert np.asarray(places)[counts][order].tolist() == [[0, place] for place in range(30)]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (X[:31], "has 31 samples, fewer than the 32 of one global batch.* a global_batch of at most 31"),
        ({"x": X, "y": Y[:-1]}, r"dataset\['x'\] has 100, dataset\['y'\] has 99"),
        ({"x": X, "n": 3}, r"one row per sample, but dataset\['n'\] is a single number"),
        ({}, "there are no arrays"),
        (iter(X), "The dataset is a .*iterator, expected something with len.* cannot go back"),
        ([], "no samples"),
    ],
)
def test_datasets_that_do_not_work_are_refused(dataset: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        make_feed(dataset, mmj.KeepGlobal(32), seed=0, n_chips=8)


def test_a_batch_per_chip_counts_for_the_chips_that_are_left() -> None:
    assert make_feed(X, mmj.KeepPerChip(10), seed=0, n_chips=10).epoch_size == N_SAMPLES
    with pytest.raises(ParameterError, match="fewer than the 110"):
        make_feed(X, mmj.KeepPerChip(10), seed=0, n_chips=11)
