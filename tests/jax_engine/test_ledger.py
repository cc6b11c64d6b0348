from __future__ import annotations

import contextlib
import hashlib
import random
import resource
import signal
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.errors import LedgerError
from meshmend.jax import Ledger
from meshmend.jax.ledger import LedgerEntry


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
    assert ledger.entries() == [LedgerEntry(0, 0, (0,)), LedgerEntry(1, 0, (1, 2, 3))]
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


def test_a_ledger_cut_at_any_byte_has_the_whole_records_and_goes_on(ledger: Ledger) -> None:
    write(ledger, (0, 0, [0, 1]), (1, 0, [2, 3]), (2, 1, [1, 0]))
    whole = ledger.path.read_bytes()
    for size in range(len(whole) + 1):
        ledger.path.write_bytes(whole[:size])
        n_whole = whole[:size].count(b"\n")
        again = Ledger(ledger.path)
        assert [entry.step for entry in again.entries()] == list(range(n_whole))
        torn = size - (whole[:size].rfind(b"\n") + 1)
        with (
            pytest.warns(UserWarning, match=f"ended with {torn} bytes of a record that was never finished")
            if torn
            else contextlib.nullcontext()
        ):
            again.record(n_whole, epoch=n_whole // 2, samples=[3, 2] if n_whole % 2 else [0, 1])
        assert again.check(4).steps == n_whole + 1


def test_a_short_write_is_an_error_and_leaves_the_ledger_as_it_was(ledger: Ledger) -> None:
    write(ledger, (0, 0, [0, 1]))
    before = ledger.path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
        with pytest.raises(
            LedgerError, match=r"Step 1 is not in ledger\.jsonl: .*File too large.* record the step again"
        ):
            write(ledger, (1, 0, [2, 3]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert ledger.path.read_bytes() == before
    assert write(ledger, (1, 0, [2, 3])).check(4, epochs=1).steps == 2


def test_two_ledgers_of_one_file_see_each_others_records(ledger: Ledger) -> None:
    other = Ledger(ledger.path)
    write(ledger, (0, 0, [0]))
    write(other, (1, 0, [1]))
    write(ledger, (2, 0, [2]))
    assert other.check(4).steps == 3


def test_damage_in_the_middle_is_refused_by_its_offset_by_readers_and_writers(ledger: Ledger) -> None:
    write(ledger, (0, 0, [0, 1]), (1, 0, [2, 3]), (2, 1, [0]))
    whole = ledger.path.read_bytes()
    second = whole.index(b"\n") + 1
    ledger.path.write_bytes(whole[:second] + whole[second:].replace(b"[2,3]", b"[3,2]"))
    message = rf"ledger\.jsonl is damaged at byte {second} \(line 2\): expected a record whose checksum is right"
    with pytest.raises(LedgerError, match=message) as caught:
        ledger.check(4)
    assert caught.value.offset == second
    with pytest.raises(LedgerError, match=message):
        Ledger(ledger.path).record(3, epoch=1, samples=[1])
    ledger.path.write_bytes(b'{"step":0,"epoch":0,"samples":[0]}\n')
    with pytest.raises(LedgerError, match=r"at byte 0 .*Ledgers of meshmend 0\.1 have no checksums"):
        ledger.entries()


@pytest.mark.parametrize(
    "fields", [b'{"step":true,"epoch":0,"samples":[]', b'{"step":0', b'{"step":0,"epoch":0,"samples":"1"']
)
def test_a_record_of_something_else_is_refused_though_its_checksum_is_right(ledger: Ledger, fields: bytes) -> None:
    checksum = hashlib.blake2b(fields, digest_size=8).hexdigest().encode()
    ledger.path.write_bytes(fields + b',"checksum":"' + checksum + b'"}\n')
    with pytest.raises(LedgerError, match=r"at byte 0 .* expected an object with step, epoch and samples"):
        ledger.entries()


def damage(content: bytes, rng: random.Random) -> bytes:
    """Flip, lose, zero, insert, repeat or exchange bytes or whole lines: only a chain of checksums sees all of it."""
    spots = [0, len(content), *(i + 1 for i, byte in enumerate(content) if byte == ord("\n"))]
    a, b, c = sorted(rng.choice(spots) if rng.random() < 0.4 else rng.randrange(len(content) + 1) for _ in range(3))
    kind = rng.randrange(7)
    if kind == 0:
        at = rng.randrange(len(content))
        return content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]
    if kind == 1:
        return content[:a] + content[b:]
    if kind == 2:
        return content[:a] + bytes(b - a) + content[b:]
    if kind == 3:
        return content[:a] + rng.choice([b"\n", b"0", b"{}\n", rng.randbytes(9)]) + content[a:]
    if kind == 4:
        return content[:b] + content[a:b] + content[b:]
    if kind == 5:
        return content[:a] + content[b:c] + content[a:b] + content[c:]
    return content[:a]


@pytest.mark.parametrize("n", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_damage_is_read_as_a_record(ledger: Ledger, n: int) -> None:
    """Oracle: the whole lines that the damaged file still begins with; anything whole after them must be refused."""
    rng = random.Random(n)
    write(ledger, (0, 0, [0, 1]), (1, 0, [2, 3]), (2, 1, [1, 0]), (2, 1, [0, 1]), (3, 1, [2, 3]))
    whole = ledger.path.read_bytes()
    lines = whole.splitlines(keepends=True)
    steps = [0, 1, 2, 2, 3]
    outcomes = Counter[str]()
    for _ in range(n):
        damaged = damage(whole, rng)
        ledger.path.write_bytes(damaged)
        kept = max(k for k in range(len(lines) + 1) if damaged.startswith(b"".join(lines[:k])))
        offset = len(b"".join(lines[:kept]))
        if b"\n" in damaged[offset:]:
            with pytest.raises(LedgerError, match="damaged at byte") as caught:
                ledger.entries()
            assert caught.value.offset == offset
            outcomes["refused"] += 1
        else:
            assert [entry.step for entry in ledger.entries()] == sorted(set(steps[:kept]))
            outcomes["whole" if damaged == whole else "shorter"] += 1
    assert outcomes["refused"] > n / 2
    assert outcomes["shorter"] > n / 20


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
