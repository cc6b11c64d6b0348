from __future__ import annotations

from itertools import islice
from typing import Any

import jax
import numpy as np
import pytest

import meshmend as mm
import meshmend.jax as mmj
from jax_engine.data import two_hosts
from jax_engine.two_processes import run_two
from meshmend.errors import ParameterError

N = 83


class Source:
    """Records that say their own number, and count how often each was read."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def __len__(self) -> int:
        return N

    def __getitem__(self, record: int) -> dict[str, Any]:
        self.reads.append(record)
        return {"number": record, "x": np.full(3, record, np.float32)}


def fabric_of(*failed: str, shape: str = "4x4") -> mmj.Fabric:
    mesh = mm.Mesh(shape)
    return mmj.discover(jax.devices()[: mesh.size], shape=shape, failed=failed)


def test_each_epoch_is_another_permutation_that_follows_from_seed_and_epoch() -> None:
    feed = mmj.Feed(Source(), mmj.KeepGlobal(8), seed=5)
    epochs = [feed.records(epoch) for epoch in range(4)]
    for order in epochs:
        assert sorted(order) == list(range(N))
    assert len({order.tobytes() for order in epochs}) == 4
    assert not np.array_equal(epochs[0], np.arange(N))
    again = mmj.Feed(Source(), mmj.KeepPerChip(3), seed=5)
    np.testing.assert_array_equal(again.records(2), epochs[2])
    others = [mmj.Feed(Source(), mmj.KeepGlobal(8), seed=seed).records(epoch) for seed in (4, 6) for epoch in range(4)]
    assert not {order.tobytes() for order in others} & {order.tobytes() for order in epochs}


@pytest.mark.parametrize("policy", [mmj.KeepGlobal(21), mmj.KeepGlobal(5), mmj.KeepPerChip(2)])
def test_batches_hold_the_samples_that_they_say(policy: Any) -> None:
    fabric, source = fabric_of("2x2@0,2"), Source()
    feed = mmj.Feed(source, policy, threads=2)
    batches = list(feed.batches(fabric, epochs=2))
    size = policy.global_batch(12)
    assert len(batches) == 2 * -(-N // size)
    assert len({batch.weights.shape for batch in batches}) == 1
    for batch in batches:
        numbers, weights = np.asarray(batch.data["number"]), np.asarray(batch.weights)
        np.testing.assert_array_equal(np.asarray(batch.data["x"]), numbers[:, None] * np.ones(3))
        assert set(weights) <= {0.0, 1.0}
        real = numbers[weights > 0]
        assert sorted(real) == sorted(batch.indices)
        assert set(numbers) == set(batch.indices), "padding repeats samples of the same step"
        assert batch.data["x"].sharding == fabric.sharding(fabric.axes)
        held = weights.reshape(12, -1).sum(axis=1)
        assert np.ptp(held) <= 1
    for epoch in range(2):
        used = np.concatenate([batch.indices for batch in batches if batch.at.epoch == epoch])
        np.testing.assert_array_equal(used, feed.records(epoch))
    assert batches[-1].after == mmj.Position(2, 0)
    padding = sum(len(batch.weights) - len(batch.indices) for batch in batches)
    assert padding > 0
    assert len(source.reads) == 2 * N, "padding is not read"


def test_any_position_restores_on_other_chips() -> None:
    """Stop after a few steps, though more was read ahead, and go on with fewer chips, then with all."""
    used: list[int] = []
    at = mmj.Position()
    for failed, steps in (([], 2), (["2x2@0,2"], 1), (["2x2@0,2", "2x2@2,0"], 2), ([], None)):
        feed = mmj.Feed(Source(), mmj.KeepPerChip(1), seed=1, threads=2, prefetch=4)
        for batch in islice(feed.batches(fabric_of(*failed), at=at, epochs=1), steps):
            assert batch.at == at
            used += batch.indices.tolist()
            at = batch.after
            assert batch.learning_rate_factor == (16 - 4 * len(failed)) / 16
    assert at == mmj.Position(1, 0)
    assert used == mmj.Feed(Source(), mmj.KeepGlobal(1), seed=1).records(0).tolist()


def test_a_position_may_come_back_from_a_checkpoint_as_arrays() -> None:
    feed = mmj.Feed(Source(), mmj.KeepGlobal(16))
    restored = jax.tree.map(np.asarray, mmj.Position(1, 32))
    batch = next(iter(feed.batches(fabric_of(), at=restored)))
    assert batch.after == (1, 48)
    assert [type(number) for number in batch.after] == [int, int]


def test_the_callers_transformations_are_kept_and_random_ones_follow_the_record() -> None:
    grain: Any = pytest.importorskip("grain", reason="needs grain: pip install 'meshmend[restart]'")

    def noisy(sample: int, rng: np.random.Generator) -> np.ndarray:
        return np.array([sample, 1000 * rng.random()], np.float32)

    dataset = grain.MapDataset.range(N).map(lambda sample: sample + 100).random_map(noisy, seed=3)
    by_chips = []
    for failed in ([], ["2x2@0,2"]):
        feed = mmj.Feed(dataset, mmj.KeepGlobal(20))
        pairs: list[Any] = []
        for batch in feed.batches(fabric_of(*failed), epochs=2):
            rows = np.asarray(batch.data)[np.asarray(batch.weights) > 0]
            assert sorted(rows[:, 0]) == sorted(batch.indices + 100)
            pairs += sorted((batch.at.epoch, *row.tolist()) for row in rows)
        by_chips.append(pairs)
    assert by_chips[0] == by_chips[1]
    first, second = ({pair[1:] for pair in by_chips[0] if pair[0] == epoch} for epoch in range(2))
    assert not first & second, "another epoch, other noise"


def test_two_cores_of_a_chip_share_its_samples() -> None:
    mesh = mm.Mesh("2x4", failed=["2x2@0,0"])
    devices = np.array(jax.devices()[:8]).reshape(4, 2)
    fabric = mmj.Fabric(mesh, jax.sharding.Mesh(devices, ("chip", "core")), None)
    feed = mmj.Feed(Source(), mmj.KeepPerChip(3))
    batch = next(iter(feed.batches(fabric)))
    assert batch.weights.shape == (16,)
    assert np.asarray(batch.weights).reshape(4, 4).sum(axis=1).tolist() == [3, 3, 3, 3]
    real = np.asarray(batch.data["number"])[np.asarray(batch.weights) > 0]
    assert sorted(real) == sorted(batch.indices)
    assert len(real) == 12


@pytest.mark.parametrize("global_batch", [4, 30, 75])
def test_processes_together_read_the_whole_batch_and_none_reads_anothers(global_batch: int) -> None:
    """Four hosts with 4×2 tiles of an 8×4 mesh, whose ranks are not contiguous, one chip of the last failed."""
    source, fabric = Source(), fabric_of("7,3", shape="8x4")
    feed = mmj.Feed(source, mmj.KeepGlobal(global_batch), threads=2)
    split, coords = feed.split(fabric), enumerate(fabric.mesh.coords)
    host_of = {rank: (x // 4, y // 2) for rank, (x, y) in coords}
    hosts = [[rank for rank in host_of if host_of[rank] == host] for host in sorted(set(host_of.values()))]
    assert [len(host) for host in hosts] == [8, 8, 8, 7]
    start = mmj.Position(0, 5)
    for step in range(split.steps_until(start, 2)):
        at = split.position(start, step)
        wanted = feed.records(at.epoch, at.sample, at.sample + split.count(at)).tolist()
        read = []
        for host in hosts:
            source.reads.clear()
            data, weights = feed.read(fabric, at, host, range(split.rows))
            mine = data["number"][weights > 0].tolist()
            # A host of which no chip is among the first has no sample of a short batch: it borrows the first one.
            assert sorted(source.reads) == (sorted(mine) or wanted[:1])
            read += mine
        assert sorted(read) == sorted(wanted)


def test_a_filter_is_refused_where_it_takes_a_sample_out() -> None:
    grain: Any = pytest.importorskip("grain", reason="needs grain: pip install 'meshmend[restart]'")
    feed = mmj.Feed(grain.MapDataset.range(N).filter(lambda sample: sample != 7), mmj.KeepGlobal(16), threads=2)
    with pytest.raises(ParameterError, match=r"no sample \d+ in epoch 0: a filter has removed it"):
        list(feed.batches(fabric_of(), epochs=1))


@pytest.mark.parametrize("side", [None, "2x2"])
def test_what_batches_are_like_is_known_from_one_sample(side: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source()
    feed = mmj.Feed(source, mmj.KeepPerChip(3), threads=0, prefetch=0)
    fabric = fabric_of("1,1") if side is None else mmj.tile(fabric_of("1,1"), side)
    like = feed.like(fabric)
    assert len(source.reads) == 1
    batch = next(feed.batches(fabric))

    def shapes(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), tree)

    assert shapes((like.data, like.weights)) == shapes((batch.data, batch.weights))
    assert (like.learning_rate_factor, like.at, like.after) == (batch.learning_rate_factor, batch.at, batch.after)
    monkeypatch.setattr(jax, "process_index", lambda: 7)
    assert shapes(feed.like(fabric).data) == shapes(batch.data), "a process without a device there may ask"


def test_a_process_without_a_device_in_the_fabric_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = mmj.Feed(Source(), mmj.KeepGlobal(2))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(ParameterError, match="Process 1 has no device in Fabric"):
        feed.batches(fabric_of())


def test_sources_and_positions_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ParameterError, match="has no samples"):
        mmj.Feed([], mmj.KeepGlobal(2))
    grain: Any = pytest.importorskip("grain", reason="needs grain: pip install 'meshmend[restart]'")
    with pytest.raises(ParameterError, match="has endlessly many samples"):
        mmj.Feed(grain.MapDataset.range(5).repeat(), mmj.KeepGlobal(2))
    with pytest.raises(ParameterError, match="threads is -1"):
        mmj.Feed([1], mmj.KeepGlobal(2), threads=-1)
    feed = mmj.Feed(Source(), mmj.KeepGlobal(2))
    with pytest.raises(ParameterError, match=r"sample=83\), but an epoch has the samples 0 to 82"):
        feed.batches(fabric_of(), at=mmj.Position(0, 83))


@pytest.mark.slow
def test_two_processes_feed_one_job_each_with_its_own_samples() -> None:
    first, second = run_two("jax_engine.data.two_hosts", timeout_s=120)
    alone = two_hosts.train(fabric_of(*two_hosts.FAILED))
    assert first["params"] == second["params"] == alone["params"]
    assert first["used"] == second["used"] == alone["used"]
    assert sorted(first["read"] + second["read"]) == sorted(sample for step in alone["used"] for sample in step)
    assert min(len(first["read"]), len(second["read"])) > 0
