from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.errors import LedgerError
from meshmend.jax import Ledger
from meshmend.jax.ledger import Entry


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl")


def write(ledger: Ledger, *steps: tuple[int, int, list[int]]) -> Ledger:
    for step, epoch, samples in steps:
        ledger.record(step, epoch=epoch, samples=samples)
    return ledger


def test_a_ledger_in_order_says_how_much_there_is(ledger: Ledger) -> None:
    write(ledger, (5, 0, [3, 1]), (6, 0, [0, 2]), (7, 1, [2, 3, 0]))
    account = ledger.check(4)
    assert (account.steps, account.epochs, account.left_over) == (3, 1, 3)
    with pytest.raises(
        LedgerError, match=r"1 complete epochs and 3 samples of one more, expected 2 .* Not used: 1"
    ) as e:
        ledger.check(4, epochs=2)
    assert e.value.samples == (1,)
    write(ledger, (8, 1, [1]))
    assert ledger.check(4, epochs=2).left_over == 0
    with pytest.raises(LedgerError, match="2 complete epochs and 0 samples of one more, expected 3"):
        ledger.check(4, epochs=3)


def test_an_empty_ledger_is_in_order(ledger: Ledger) -> None:
    assert ledger.check(4).steps == 0
    with pytest.raises(LedgerError, match="0 complete epochs"):
        ledger.check(4, epochs=1)


def test_going_back_undoes_the_later_steps_too(ledger: Ledger) -> None:
    """With more chips after a repair the epoch may end in fewer steps: then the last of the old ones must not count."""
    write(ledger, (0, 0, [0]), (1, 0, [1]), (2, 0, [2]), (3, 0, [3]), (1, 0, [1, 2, 3]))
    assert ledger.entries() == [Entry(0, 0, (0,)), Entry(1, 0, (1, 2, 3))]
    assert ledger.check(4, epochs=1).steps == 2


@pytest.mark.parametrize(
    ("steps", "message", "step", "samples"),
    [
        ([(0, 0, [0, 1]), (2, 0, [2, 3])], "Step 0 is followed by step 2, expected 1", 1, ()),
        ([(0, 0, [0, 1]), (1, 0, [2, 1])], r"Step 1 used samples that epoch 0 had used already\. Namely: 1\.", 1, (1,)),
        ([(0, 0, [0, 1, 1])], r"Step 0 used samples that epoch 0 had used already\. Namely: 1\.", 0, (1,)),
        ([(0, 0, [0, 4])], r"Step 0 used samples that an epoch of 4 does not have\. Namely: 4\.", 0, (4,)),
        ([(0, 0, [0, 2]), (1, 1, [0])], r"Step 1 begins epoch 1, .* Not used: 1, 3\.", 1, (1, 3)),
        ([(0, 1, [0, 2])], "Step 0 begins epoch 1, expected epoch 0", 0, ()),
        ([(0, 0, [0, 1, 2, 3]), (1, 2, [0])], "Step 1 begins epoch 2, expected epoch 1", 1, ()),
    ],
    ids=["gap", "twice", "twice in a step", "beyond the epoch", "lost", "first epoch lost", "epoch lost"],
)
def test_what_is_wrong_is_named(
    ledger: Ledger, steps: list[tuple[int, int, list[int]]], message: str, step: int, samples: tuple[int, ...]
) -> None:
    with pytest.raises(LedgerError, match=message) as error:
        write(ledger, *steps).check(4)
    assert (error.value.step, error.value.samples) == (step, samples)


def test_a_torn_last_line_counts_as_not_written_and_does_not_spoil_the_next(ledger: Ledger) -> None:
    write(ledger, (0, 0, [0, 1]), (1, 0, [2, 3]))
    whole = ledger.path.read_bytes()
    second = whole.index(b"\n") + 1
    for size in range(second, len(whole)):
        ledger.path.write_bytes(whole[:size])
        again = Ledger(ledger.path)
        assert [entry.step for entry in again.entries()] == [0]
        assert write(again, (1, 0, [3, 2])).check(4, epochs=1).steps == 2


def test_a_spoilt_line_in_the_middle_is_an_error(ledger: Ledger) -> None:
    write(ledger, (0, 0, [0, 1]), (1, 0, [2, 3]))
    ledger.path.write_bytes(ledger.path.read_bytes().replace(b'"epoch":0', b'"epoch":', 1))
    with pytest.raises(LedgerError, match=r"Line 1 of ledger\.jsonl is not a step"):
        ledger.check(4)


@given(st.integers(1, 6), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_the_check_agrees_with_a_count(epoch_size: int, n_records: int, seed: int) -> None:
    """Random records, mostly right: the check must pass exactly when counting the samples that count says so."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger.jsonl")
        lines: list[tuple[int, int, int]] = []
        for number in range(n_records):
            epoch, sample = divmod(number, epoch_size)
            if rng.random() < 0.02:
                sample = int(rng.integers(epoch_size))
            lines.append((number, epoch, sample))
            ledger.record(number, epoch=epoch, samples=[sample])
        counts = Counter((epoch, sample) for _, epoch, sample in lines)
        wanted = Counter(divmod(number, epoch_size) for number in range(n_records))
        # Within the last epoch any order is right, as long as none is used twice.
        last = (n_records - 1) // epoch_size
        right = all(n == 1 for n in counts.values()) and all(key in counts for key in wanted if key[0] < last)
        if right:
            assert ledger.check(epoch_size).steps == n_records
        else:
            with pytest.raises(LedgerError, match="samples"):
                ledger.check(epoch_size)
