"""Digests and recomputed gradients without processes: what is noticed, who is named, and what is left alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")
pytest.importorskip("torchft", reason="torchft is not installed: pip install 'meshmend[torch]'")

from meshmend.errors import MeshError, ParameterError  # noqa: E402
from meshmend.quarantine import Judge  # noqa: E402
from meshmend.torch import Checks  # noqa: E402
from meshmend.torch.checks import Found, weigh_gradients  # noqa: E402
from meshmend.torch.digests import _multipliers, compare, digest, pieces  # noqa: E402
from meshmend.torch.membership import Introduction, UndoneError  # noqa: E402
from meshmend.torch.membership import compare as compare_members  # noqa: E402
from meshmend.torch.snapshot import Snapshot  # noqa: E402

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.int64]
CHIPS = [(row, column) for row in range(3) for column in range(3)]


def bytes_of(tensor: Any) -> Any:
    return tensor.view(torch.uint8).numpy()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64], ids=str)
def test_a_digest_is_a_sum_of_words(dtype: Any) -> None:
    """Held against Python's own whole numbers."""
    values = (torch.randn(50, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)
    size = min(values.element_size(), 4)
    raw = bytes_of(values).tobytes()
    words = [int.from_bytes(raw[i : i + size], "little", signed=size > 1) for i in range(0, len(raw), size)]
    factors = _multipliers("cpu")[: len(words)].tolist()
    assert all(factor % 2 for factor in factors)
    assert digest(values) == sum(w * m for w, m in zip(words, factors, strict=True)) % 2**64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_flip_of_every_bit_is_noticed(dtype: Any) -> None:
    values = torch.ones(16, dtype=dtype)
    before = digest(values)
    raw = bytes_of(values)
    for place in range(len(raw)):
        for bit in range(8):
            raw[place] ^= 1 << bit
            assert digest(values) != before
            raw[place] ^= 1 << bit
    assert digest(values) == before


def test_what_changes_places_or_in_pairs_is_noticed() -> None:
    rng = np.random.default_rng(0)
    values = torch.tensor(rng.standard_normal(1000), dtype=torch.float32)
    before, words = digest(values), values.view(torch.int32)
    for _ in range(200):
        a, b = rng.choice(1000, 2, replace=False)
        kept = words.clone()
        words[[a, b]] = words[[b, a]]
        assert digest(values) != before
        words.copy_(kept)
        words[[a, b]] ^= -(2**31)  # two signs, which a plain sum would lose
        assert digest(values) != before
        words.copy_(kept)


def test_pieces_have_names_and_no_order_of_filling() -> None:
    large = torch.zeros(2**20 + 5)
    state = {"model": {"w": large, "b": torch.tensor(2.0)}, "sgd": {"state": {0: {"m": large[:3]}}, "lr": [0.1]}}
    other = {"sgd": state["sgd"], "model": dict(reversed(list(state["model"].items())))}
    names = [name for name, _ in pieces(state)]
    assert names == [
        "model.b, elements 0 to 0",
        "model.w, elements 0 to 1048575",
        "model.w, elements 1048576 to 1048580",
        "sgd.state.0.m, elements 0 to 2",
    ]
    assert [name for name, _ in pieces(other)] == names
    assert [digest(piece) for _, piece in pieces(state)] == [digest(piece) for _, piece in pieces(other)]
    assert [len(piece) for _, piece in pieces({"t": torch.ones(4, 3).T})] == [12]
    wide = torch.zeros(2**19 + 1, dtype=torch.float64)
    assert [len(piece) for _, piece in pieces([wide])] == [2**19, 1]
    assert len({digest(piece) for _, piece in pieces([wide + 1])}) == 2
    with pytest.raises(ParameterError, match=r"s is not a dense tensor.*Checks\(own=…\)"):
        list(pieces({"s": torch.ones(3).to_sparse()}))


def told(wrong: dict[int, bytes], received: tuple[int, ...] = (), n: int = 9) -> dict[Any, tuple[bool, bytes]]:
    """Return the digests of nine chips, one piece each, of which some differ."""
    return {CHIPS[rank]: (rank in received, wrong.get(rank, b"the same")) for rank in range(n)}


def test_the_minority_is_named() -> None:
    assert compare(told({}), ["w"], step=4) == []
    (sign,) = compare(told({2: b"another!"}), ["w"], step=4)
    assert (str(sign.suspects[0]), sign.step, dict(sign.numbers)) == ("0,2", 4, {"agree": 8, "chunk": 0, "differ": 1})
    assert Judge().add([sign]) == ()
    two = {chip: (False, word * 2) for chip, (_, word) in told({2: b"another!"}).items()}
    judge = Judge()
    assert judge.add(compare(two, ["v", "w"], step=4)) == (), "one flip may have changed both parameters"
    (verdict,) = judge.add(compare(two, ["v", "w"], step=5))
    assert str(verdict.suspect) == "0,2"


def test_without_a_majority_nobody_is() -> None:
    for found in (told({1: b"another!"}, n=2), told({rank: bytes([rank] * 8) for rank in range(9)})):
        (sign,) = compare(found, ["w"], step=4)
        assert len(sign.suspects) == len(found)
        assert sign.numbers["agree"] == 0
        assert Judge().add([sign, *compare(found, ["w"], step=5)]) == ()


def test_who_received_wrong_weights_is_not_named_for_them() -> None:
    wrong = dict.fromkeys((2, 5, 6, 7), b"another!")
    (sign,) = compare(told(wrong, received=(5, 6, 7)), ["w"], step=4)
    assert [str(one) for one in sign.suspects] == ["0,2"]
    assert (sign.numbers["agree"], sign.numbers["differ"]) == (5, 1)
    # With nobody else who differs, it has happened on the way or there.
    (sign,) = compare(told({5: b"another!"}, received=(5, 6)), ["w"], step=4)
    assert [str(one) for one in sign.suspects] == ["1,2"]
    # At the first step all have received from one.
    (sign,) = compare(told({2: b"another!"}, received=tuple(range(1, 9))), ["w"], step=0)
    assert [str(one) for one in sign.suspects] == ["0,2"]


def opinions(n: int, distances: tuple[int, ...], says: Any) -> Found:
    """Return what ranks found of the parts that are theirs at these distances: `says(rank, part)`, a set."""
    found: Found = {part: {} for part in range(n)}
    for rank in range(n):
        for distance in (0, *distances):
            part = (rank - distance) % n
            found[part][rank] = says(rank, part)
    return found


@pytest.mark.parametrize("n", [3, 4, 9])
@pytest.mark.parametrize("step", range(0, 80, 10))
def test_a_third_chip_decides(n: int, step: int) -> None:
    distances = Checks(recompute_every=10).distances(step, n)
    for liar in range(n):

        def says(rank: int, part: int, liar: int = liar) -> set[bytes]:
            return {bytes([part, rank == liar])}

        ruling = weigh_gradients(opinions(n, distances, says), CHIPS, step)
        (verdict,) = Judge().add(ruling.signs)
        assert verdict.suspect.ends == (CHIPS[liar],)


def test_who_does_not_repeat_itself_is_named_and_two_are_the_program() -> None:
    def says(rank: int, part: int) -> set[bytes]:
        return {b"a", b"b"} if rank in unsteady else {b"a"}

    unsteady = {4}
    ruling = weigh_gradients(opinions(9, (1, 2), says), CHIPS, step=3)
    (sign,) = ruling.signs
    assert str(sign.suspects[0]) == "1,1"
    assert "differs from the one that it computed from the same data before" in sign.evidence
    unsteady = {4, 5}
    ruling = weigh_gradients(opinions(9, (1, 2), says), CHIPS, step=3)
    assert (ruling.signs, ruling.unrepeatable) == ((), "2 of 9 chips do not find the same twice")


def test_chips_that_all_compute_something_else_are_the_program() -> None:
    ruling = weigh_gradients(opinions(9, (1, 2), lambda rank, part: {bytes([rank])}), CHIPS, step=3)
    assert not ruling.signs
    assert "9 of 9 chips find something else" in ruling.unrepeatable


def test_two_chips_cannot_tell() -> None:
    (sign,) = weigh_gradients(opinions(2, (1,), lambda rank, part: {bytes([rank])}), CHIPS, step=3).signs
    assert len(sign.suspects) == 2
    assert Judge().add([sign]) == ()


def test_partners_and_thirds_are_others_and_change() -> None:
    checks = Checks(recompute_every=5)
    for n in range(3, 20):
        pairs = [checks.distances(step, n) for step in range(0, 5 * (n - 1), 5)]
        assert sorted(first for first, _ in pairs) == list(range(1, n))
        assert all(first != second and 0 < second < n for first, second in pairs)
    assert [step for step in range(12) if Checks(4, 6).compares(step)] == [0, 4, 6, 8]


@pytest.mark.parametrize("options", [{"digests_every": -1}, {"digests_every": 0}, {"own": "model"}])
def test_checks_that_check_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match=r"expected numbers from 0|write own="):
        Checks(**options)


def test_a_snapshot_is_put_back_as_it_was_as_often_as_needed() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    adam = torch.optim.Adam(model.parameters(), lr=0.1)

    def load(state: Any) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])

    parts: Any = {"all": (load, lambda: {"model": model.state_dict(), "adam": adam.state_dict()})}

    def train(n_steps: int) -> list[int]:
        for _ in range(n_steps):
            adam.zero_grad()
            model(torch.arange(6.0).reshape(2, 3)).square().sum().backward()
            adam.step()
        return [digest(piece) for _, piece in pieces(parts["all"][1]())]

    train(2)
    kept = Snapshot.take({"step": 2, "batches_committed": 8}, parts)
    now = train(0)
    ends = train(3)
    for _ in range(2):
        kept.put_back(parts)
        assert train(0) == now
        assert train(3) == ends
    assert (kept.step, kept.torchft["batches_committed"]) == (2, 8)


def test_members_exchange_cables_and_notice_who_has_not_gone_back() -> None:
    rng = random.Random(0)
    cable, other = ((0, 0), (0, 1)), ((1, 0), (2, 0))
    said = [Introduction(chip, "terms | of all", frozenset(), None, 5) for chip in CHIPS]
    said[3] = Introduction(CHIPS[3], "terms | of all", frozenset({cable, other}), 2, 6)
    said[4] = Introduction(CHIPS[4], "terms | of all", frozenset({other}), 2, 6)
    rng.shuffle(said)
    read = [Introduction.read(str(one)) for one in said]
    assert read == said
    assert compare_members(read[0], read) == {cable, other}
    with pytest.raises(UndoneError, match="have gone back") as caught:
        compare_members(read[0], [*read, Introduction(CHIPS[0], "terms | of all", frozenset(), 3, 6)])
    assert caught.value.undone == 3
    with pytest.raises(MeshError, match=r"chip \(1,1\) runs meshmend 0.1, 3x3\. Every member needs"):
        compare_members(read[0], [Introduction.read("17|1,1|meshmend 0.1, 3x3")])
