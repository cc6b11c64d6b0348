from __future__ import annotations

import json
import math
from collections import Counter

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.errors import ParameterError
from meshmend.jax import KeepGlobal, KeepPerChip, Position
from meshmend.jax.data.policy import BatchSplit, Policy

POLICIES = st.one_of(
    st.builds(KeepGlobal, st.integers(1, 100)),
    st.builds(KeepPerChip, st.integers(1, 4), st.sampled_from(["linear", "sqrt", "none"])),
)


def split_of(policy: Policy, epoch_size: int, n_chips: int, n_cores: int = 1) -> BatchSplit:
    return BatchSplit(epoch_size, policy.global_batch(n_chips), n_chips, n_cores)


@given(
    POLICIES,
    st.integers(1, 200),
    st.lists(st.tuples(st.integers(1, 64), st.integers(1, 2), st.integers(1, 8)), min_size=1, max_size=8),
)
def test_every_sample_is_used_once_however_often_the_chips_change(
    policy: Policy, epoch_size: int, runs: list[tuple[int, int, int]]
) -> None:
    """A run of some steps on some chips, then on others: count what each device's rows hold, epoch by epoch."""
    at, used = Position(), Counter[tuple[int, int]]()
    for n_chips, n_cores, n_steps in runs:
        split = split_of(policy, epoch_size, n_chips, n_cores)
        for _ in range(n_steps):
            offsets = split.offsets()
            real = offsets[offsets < split.count(at)]
            used.update((at.epoch, at.sample + int(offset)) for offset in real)
            at = split.after(at)
    wanted = [(epoch, sample) for epoch in range(at.epoch) for sample in range(epoch_size)]
    wanted += [(at.epoch, sample) for sample in range(at.sample)]
    assert used == Counter(wanted)


@given(st.integers(1, 200), st.integers(1, 300), st.integers(1, 40), st.integers(1, 2))
def test_no_chip_and_no_device_has_more_than_one_more_than_another(
    epoch_size: int, n_examples: int, n_chips: int, n_cores: int
) -> None:
    split = BatchSplit(epoch_size, n_examples, n_chips, n_cores)
    offsets = split.offsets()
    assert offsets.shape == (n_chips * n_cores, split.rows)
    assert split.rows == math.ceil(n_examples / (n_chips * n_cores)), "no row more than the fullest device needs"
    for count in {1, min(n_examples, epoch_size), n_examples}:
        by_device = (offsets < count).sum(axis=1)
        by_chip = by_device.reshape(n_chips, n_cores).sum(axis=1)
        assert np.ptp(by_device) <= 1
        assert np.ptp(by_chip) <= 1
        assert by_device.sum() == count


@given(st.integers(1, 90), st.integers(1, 100), st.data())
def test_a_position_some_steps_ahead_is_where_single_steps_lead(
    epoch_size: int, batch: int, data: st.DataObject
) -> None:
    split = BatchSplit(epoch_size, batch, 4)
    start = Position(data.draw(st.integers(0, 3)), data.draw(st.integers(0, epoch_size - 1)))
    at = start
    for steps in range(30):
        assert split.position(start, steps) == at
        at = split.after(at)
    for epochs in range(6):
        at, n = start, 0
        while at.epoch < epochs:
            at, n = split.after(at), n + 1
        assert split.steps_until(start, epochs) == n


def test_the_learning_rate_follows_the_batch_by_the_rule() -> None:
    assert [KeepPerChip(8, rule).learning_rate_factor(48, 64) for rule in ("linear", "none")] == [0.75, 1.0]
    assert KeepPerChip(8, "sqrt").learning_rate_factor(16, 64) == 0.5
    assert KeepPerChip(8).learning_rate_factor(64, 64) == 1.0
    assert KeepPerChip(8, reference=256).learning_rate_factor(48, 64) == 1.5
    assert KeepGlobal(8).learning_rate_factor(48, 64) == 1.0


def test_a_position_is_a_pytree_of_two_ints_and_json() -> None:
    position = Position(epoch=3, sample=70)
    assert jax.tree.leaves(position) == [3, 70]
    assert Position(*json.loads(json.dumps(position))) == position


def test_sizes_and_rules_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ParameterError, match="KeepGlobal's n_examples is 0, expected at least 1"):
        KeepGlobal(0)
    with pytest.raises(ParameterError, match="KeepPerChip's reference is 0"):
        KeepPerChip(8, reference=0)
    with pytest.raises(ParameterError, match="'cubic', expected one of linear, sqrt, none"):
        KeepPerChip(8, "cubic")
