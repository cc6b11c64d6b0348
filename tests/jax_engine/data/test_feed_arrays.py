"""Batches of arrays, whose rows are taken at once, are those that are read sample by sample: bit for bit."""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshmend as mm
import meshmend.jax as mmj
from meshmend.jax.data.feed import Rows

DTYPES = ["f4", ">f4", "f8", "i8", ">i2", "u1", "?", "c8", ml_dtypes.bfloat16]
POLICIES = [mmj.KeepGlobal(1), mmj.KeepGlobal(7), mmj.KeepGlobal(40), mmj.KeepPerChip(1), mmj.KeepPerChip(3, "sqrt")]


class Samples:
    """The same samples as an object that is no array, so that they are read one by one."""

    def __init__(self, arrays: Any) -> None:
        self.rows = Rows(arrays)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        return self.rows[number]


def two_cores() -> mmj.Fabric:
    devices = np.array(jax.devices()[:8]).reshape(4, 2)
    return mmj.Fabric(mm.Mesh("2x4", failed=["2x2@0,0"]), jax.sharding.Mesh(devices, ("chip", "core")), None)


def fabric_of(kind: str) -> mmj.Fabric:
    if kind == "cores":
        return two_cores()
    whole = mmj.discover(jax.devices()[:16], shape="4x4", failed=[] if kind == "full" else ["2x2@0,2"])
    return mmj.tile(whole, "2x2") if kind == "tiles" else whole


def dataset(n_samples: int, kinds: list[Any], rng: np.random.Generator) -> Any:
    """A tree of arrays whose rows have different shapes: numbers, vectors, none, and windows that share memory."""

    def array(*shape: int, dtype: Any) -> Any:
        return rng.integers(-90, 90, (n_samples, *shape)).astype(dtype)

    windows = np.lib.stride_tricks.sliding_window_view(rng.normal(size=n_samples + 4), 5)
    leaves = [array(*[(), (3,), (2, 2), (0,)][i % 4], dtype=dtype) for i, dtype in enumerate(kinds)]
    return {"leaves": tuple(leaves), "windows": windows, "none": None}


def assert_same(found: Any, expected: Any) -> None:
    structure: Any = jax.tree.structure(found)
    assert structure == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert getattr(one, "sharding", None) == getattr(other, "sharding", None)
        if not isinstance(one, jax.ShapeDtypeStruct):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@given(
    n_samples=st.integers(1, 120),
    policy=st.sampled_from(POLICIES),
    kind=st.sampled_from(["full", "hole", "tiles", "cores"]),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 3),
    ahead=st.sampled_from([(0, 0), (1, 0), (1, 1), (16, 2)]),
    rng=st.integers(0, 99).map(np.random.default_rng),
)
@settings(max_examples=25, deadline=None)
def test_batches_of_arrays_are_those_that_are_read_one_by_one(
    n_samples: int,
    policy: Any,
    kind: str,
    dtypes: list[Any],
    seed: int,
    epoch: int,
    ahead: tuple[int, int],
    rng: np.random.Generator,
) -> None:
    fabric, arrays = fabric_of(kind), dataset(n_samples, dtypes, rng)
    ours = mmj.Feed(Rows(arrays), policy, seed=seed, threads=ahead[0], prefetch=ahead[1])
    theirs = mmj.Feed(Samples(arrays), policy, seed=seed, threads=ahead[1], prefetch=ahead[0])
    at = mmj.Position(epoch, int(rng.integers(n_samples)))
    found = list(ours.batches(fabric, at=at, epochs=epoch + 2))
    expected = list(theirs.batches(fabric, at=at, epochs=epoch + 2))
    assert len(found) == len(expected) > 1
    for one, other in zip(found, expected, strict=True):
        assert_same((one.data, one.weights), (other.data, other.weights))
        assert (one.at, one.after, one.learning_rate_factor) == (other.at, other.after, other.learning_rate_factor)
        assert one.indices.tolist() == other.indices.tolist()
    like, other_like = ours.like(fabric), theirs.like(fabric)
    assert_same((like.data, like.weights), (other_like.data, other_like.weights))
    # Any devices' rows: those of another process, too, and of one without a sample at the end of an epoch.
    split = ours.split(fabric)
    for position in (at, found[-1].at):
        devices = rng.choice(split.n_devices, rng.integers(1, split.n_devices + 1), replace=False).tolist()
        rows = np.sort(rng.choice(split.rows, rng.integers(1, split.rows + 1), replace=False)).tolist()
        assert_same(ours.read(fabric, position, devices, rows), theirs.read(fabric, position, devices, rows))


@pytest.mark.parametrize("n_samples", [4**8 + 1, 70_000])
def test_a_long_epoch_has_each_sample_once_in_the_order_of_its_records(n_samples: int) -> None:
    """One more than a power of 4, where grain's own shuffle would repeat a sample and leave one out."""
    fabric = fabric_of("hole")
    feed = mmj.Feed(np.arange(n_samples), mmj.KeepGlobal(1500), seed=2)
    seen = []
    for batch in feed.batches(fabric, epochs=1):
        rows, weights = np.asarray(batch.data), np.asarray(batch.weights)
        order = feed.split(fabric).offsets().ravel()[weights == 1].argsort()
        assert rows[weights == 1][order].tolist() == batch.indices.tolist()
        seen += batch.indices.tolist()
    assert sorted(seen) == list(range(n_samples))
    objects = mmj.Feed(range(n_samples), mmj.KeepGlobal(1500), seed=2)
    assert objects.records(0).tolist() == seen
    last = mmj.Position(0, n_samples - 900)
    assert_same(next(objects.batches(fabric, at=last)).data, next(feed.batches(fabric, at=last)).data)


def test_objects_in_arrays_are_samples() -> None:
    fabric, x = fabric_of("full"), np.arange(12.0)
    objects = np.array([{"x": one} for one in x])
    expected = next(mmj.Feed(objects, mmj.KeepGlobal(12)).batches(fabric)).data["x"]
    for array in (x, jax.numpy.asarray(x), Rows(x)):
        assert_same(next(mmj.Feed(array, mmj.KeepGlobal(12)).batches(fabric)).data, expected)
