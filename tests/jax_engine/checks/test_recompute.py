"""Recomputed gradients: flips of every bit are named, clean checks are silent, programs that vary are found out."""

from __future__ import annotations

import hashlib
import warnings
from functools import cache
from itertools import combinations, count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import meshmend.jax as mmj
from jax_engine.checks.recompute_cases import (
    DATA,
    LAST,
    PARAMS,
    Bench,
    binomial_tail,
    by_hand,
    chip_name,
    fabric_of,
    fault,
    named,
    several_checks,
    simple,
    with_copy,
)
from jax_engine.two_processes import run_two
from meshmend.errors import ParameterError
from meshmend.jax.checks.recompute import Part, Recompute, choose_rows
from meshmend.jax.job.model import Model
from meshmend.quarantine.judge import judge

BITS = [("half", 0, bit) for bit in range(16)] + [("w", 1, bit) for bit in range(32)]


@cache
def holed() -> Bench:
    """Twelve chips; its first check is over, so that checks come in two rounds."""
    bench = Bench(fabric_of())
    assert bench.check() == ()
    return bench


@cache
def small() -> Bench:
    """Four chips; its first check caught a liar."""
    bench = Bench(fabric_of("2x2", []))
    assert named(bench.check(fault(4, [2], [30]))) == [["1,0"]]
    return bench


def inject(bench: Bench, injections: int, seed: int) -> None:
    """Flip one bit of the gradients of one chip, so many times, and find exactly that chip."""
    rng = np.random.default_rng(seed)
    for number in range(injections):
        name, leaf, bit = BITS[number % len(BITS)]
        chip = int(rng.integers(bench.n_chips))
        element = int(rng.integers(PARAMS[name].size))
        (observation,) = bench.check(fault(bench.n_chips, [chip], [bit], leaf=leaf, element=element))
        assert named([observation]) == [[chip_name(bench.fabric, chip)]], (name, bit, chip, element)
        assert observation.numbers == {"agree": min(4, bench.n_chips - 1), "differ": 1, "times": min(5, bench.n_chips)}
        assert "differs from that of chip" in observation.evidence
        assert not bench.recompute.why_off


def test_a_flip_of_every_bit_is_named_at_once_and_confirmed() -> None:
    inject(small(), len(BITS), seed=0)
    inject(holed(), 5, seed=1)
    (observation,) = holed().check(fault(12, [3], [7]))
    assert [str(verdict.suspect) for verdict in judge([observation])] == [chip_name(holed().fabric, 3)]


@pytest.mark.slow
def test_five_thousand_flips_of_every_bit_are_all_named() -> None:
    inject(holed(), 5000, seed=2)


def test_clean_checks_are_silent_at_the_ends_of_epochs_too() -> None:
    bench = holed()
    assert LAST % (4 * 12) == 10  # the last batch has rows of padding on each chip, and chips without any example
    for _ in range(6):
        assert bench.check() == ()


def flaky(checks: int, p: float, seed: int) -> None:
    """A chip that is wrong now and then is caught as often as promised, and nobody else is."""
    bench = small()
    caught = 0
    for number in range(checks):
        observations = bench.check(fault(4, [2], [20], p=p, seed=seed + number))
        assert named(observations) in ([], [["1,0"]])
        caught += len(observations)
    assert binomial_tail(checks, caught, 1 - (1 - p) ** 2) > 0.01, caught


def test_a_flaky_chip_is_caught_as_often_as_promised() -> None:
    flaky(40, 0.3, seed=1000)


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.02, 0.1, 0.3, 0.8])
def test_flaky_chips_of_all_kinds_are_caught_as_often_as_promised(p: float) -> None:
    flaky(2000, p, seed=5000)


def test_several_liars_are_named_each() -> None:
    bench = holed()
    for chips in ([1, 5], [2, 3, 11], [0, 6]):
        observations = bench.check(fault(12, chips, [3 + chip for chip in chips]))
        assert named(observations) == [[chip_name(bench.fabric, chip)] for chip in chips]
    # With the same wrong bits two agree where they meet, but not with those who are asked then.
    for other in (1, 4, 11):
        observations = bench.check(fault(12, [0, other], [9, 9]))
        assert named(observations) == [[chip_name(bench.fabric, chip)] for chip in (0, other)]


def test_the_first_check_catches_too_and_the_next_ones_still_do() -> None:
    assert named(small().check(fault(4, [2], [0]))) == [["1,0"]]
    assert small().check() == ()


def test_between_two_chips_both_are_suspects() -> None:
    bench = Bench(fabric_of("1x2", []), simple)
    for step in (1, 2):
        (observation,) = bench.check(fault(2, [1], [12]))
        assert named([observation]) == [["0,0", "0,1"]]
        assert (observation.step, observation.numbers["agree"], observation.numbers["differ"]) == (step, 1, 1)
        assert judge([observation]) == []
    assert bench.check() == ()


def test_two_cores_per_chip_meet_other_chips() -> None:
    fabric = mmj.discover(jax.devices()[:8], shape="2x2", coords=[(i // 4, i // 2 % 2) for i in range(8)])
    seen: list[Any] = []

    def exchange(fact: Any) -> list[Any]:
        seen.extend(fact)
        return [fact]

    bench = Bench(fabric, simple, exchange=exchange)
    assert bench.check() == ()
    assert len(seen) == 3 * 8
    assert {one.part // 2 for one in seen if one.device == 3 and one.part != 3}.isdisjoint({1})
    assert named(bench.check(fault(4, [2], [5]))) == [["1,0"]]


def test_a_changed_copy_of_the_parameters_is_one_observation() -> None:
    bench = holed()
    broken = {**bench.params, "w": with_copy(bench.params["w"], 4, lambda w: w.at[0, 0].add(1.0))}
    (observation,) = bench.check(params=broken)
    assert named([observation]) == [[chip_name(bench.fabric, 4)]]
    assert observation.evidence == "its parameters or its model state differ from those of 11 of 12 devices"
    assert judge([observation]) == []


def on_callback(chips: Any) -> Any:
    """Gradients that have the next number of a counter added, on some chips."""
    numbers = count()

    def gradients(params: Any, state: Any, part: Any) -> Any:
        del state
        number = jax.pure_callback(
            lambda _: np.float32(next(numbers)), jax.ShapeDtypeStruct((), np.float32), part.weights
        )
        return params["w"].sum() + jnp.where(jnp.asarray(chips)[lax.axis_index("chip")], number, 0)

    return gradients


def test_a_program_that_gives_something_else_each_time_is_found_out_once() -> None:
    bench = Bench(fabric_of("2x2", []), on_callback([True] * 4))
    with pytest.warns(
        RuntimeWarning, match=r"4 of 4 chips computed other gradients .* the second time.*recompute_every=0"
    ):
        assert bench.check() == ()
    assert bench.recompute.why_off
    assert bench.check() == ()


def test_one_chip_that_does_not_reproduce_itself_is_a_suspect() -> None:
    bench = Bench(fabric_of("2x2", []), on_callback([False, True, False, False]))
    (observation,) = bench.check()
    assert named([observation]) == [["0,1"]]
    assert not bench.recompute.why_off
    pair = Bench(fabric_of("1x2", []), on_callback([True, False]))
    (observation,) = pair.check()
    assert named([observation]) == [["0,0"]]
    assert "computed from the same data before" in observation.evidence
    assert judge([observation]) == []


def test_a_program_that_depends_on_the_chip_is_found_out() -> None:
    def gradients(params: Any, state: Any, part: Any) -> Any:
        del state, part
        return params["w"] * lax.axis_index("chip")

    bench = Bench(fabric_of("2x3", ["0,1"]), gradients)
    with pytest.warns(RuntimeWarning, match=r"5 of 5 chips .* The loss depends on the chip: by lax.axis_index"):
        assert bench.check() == ()
    assert bench.recompute.why_off


def test_a_dataset_that_gives_something_else_when_read_again_is_found_out() -> None:
    numbers = count()

    class Source:
        def __len__(self) -> int:
            return 40

        def __getitem__(self, record: int) -> Any:
            return {"x": DATA["x"][record], "y": np.int64(next(numbers))}

    bench = Bench(fabric_of("2x2", []), simple, data=Source())
    with pytest.warns(RuntimeWarning, match="The samples of the batch were others when they were read again"):
        assert bench.check() == ()


def test_many_liars_after_a_clean_check_are_observations_not_the_program() -> None:
    bench = small()
    assert bench.check() == ()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        observations = bench.check(fault(4, [0, 1, 2], [1, 2, 3]))
    assert {name for names in named(observations) for name in names} >= {"0,0", "0,1", "1,0"}
    assert not bench.recompute.why_off


def test_partners_compute_each_others_examples_and_all_meet() -> None:
    """By NumPy's gradients of all halves that a check may be about: one half explains all votes."""
    fabric = fabric_of("2x3", ["0,1"])
    votes: list[Any] = []

    def exchange(fact: Any) -> list[Any]:
        votes.extend(fact)
        return [fact]

    def gradients(params: Any, state: Any, part: Any) -> Any:
        del state
        return jax.grad(lambda w: jnp.sum(part.weights * (part.data @ w)))(params["w"][:, 0])

    data = np.random.default_rng(0).integers(-9, 10, size=(43, 3)).astype(np.float32)
    bench = Bench(fabric, gradients, data, exchange=exchange)
    pairs = set()
    halves = set()
    for step in range(1, 9):
        votes.clear()
        batch = next(bench.batches)
        state = jax.device_put(fault(5), fabric.sharding())
        assert bench.recompute.check(step, bench.params, state, batch) == ()
        rows = np.zeros((5, 4, 3), np.float32)
        # The third batch of an epoch has 3 examples for 5 devices: a check is about the first one then.
        records = batch.indices if len(batch.indices) == 20 else bench.feed.records(batch.at.epoch, 0, 20)
        for number, record in enumerate(records):
            rows[number % 5, number // 5] = data[record]

        def digest(device: int, half: Any, rows: Any = rows) -> int:
            words = np.array(by_hand(rows[device, list(half)].sum(axis=0), 99), np.uint32)
            return int.from_bytes(hashlib.blake2b(words.tobytes(), digest_size=8).digest(), "big")

        found = [
            half for half in combinations(range(4), 2) if all(one.gradient == digest(one.part, half) for one in votes)
        ]
        assert len(found) == 1, (step, found)
        halves.add(found[0])
        shifts = {(one.part - one.device) % 5 for one in votes} - {0}
        assert len(shifts) == 1
        pairs |= {(step > 4, shift) for shift in shifts}
    assert len(pairs) == 8  # each other chip in four checks, and again in the next four
    assert len(halves) > 2


@pytest.mark.slow
def test_two_processes_find_what_one_finds() -> None:
    first, second = run_two("jax_engine.checks.recompute_cases", timeout_s=300)
    assert len(first) == 4
    assert first == second == several_checks(Bench(fabric_of()))


def test_a_models_gradients_are_those_of_its_steps() -> None:
    model = Model(lambda w, batch: (batch @ w) ** 2, optax.sgd(1.0), np.ones(3, np.float32), microbatches=3)
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    weights = np.array([1, 0, 1, 1], np.float32)
    part = Part(x, jnp.asarray(weights), jnp.zeros((4, 2), jnp.uint32))
    sums = jax.jit(model.gradients)(jnp.ones(3), None, part)
    np.testing.assert_array_equal(sums.gradients, (weights[:, None] * 2 * x.sum(axis=1, keepdims=True) * x).sum(axis=0))
    assert sums.weight == 3


def test_what_cannot_be_recomputed_is_refused() -> None:
    tiled = mmj.tile(fabric_of("4x4", []), "2x2", model=4)
    with pytest.raises(ParameterError, match="the chips of a tile compute them together"):
        Recompute(lambda *_: None, tiled, lambda fact: [fact], every=20)
    with pytest.raises(ParameterError, match="each from its shards of the parameters"):
        Model(lambda *_: None, optax.sgd(1.0), lambda *_: None).check_recomputable()
    alone = Recompute(lambda *_: None, fabric_of("1x1", []), lambda fact: [fact], every=20)
    assert alone.why_off == "One chip alone has no partner to compare gradients with."


def test_every_device_with_examples_has_some_in_a_half() -> None:
    """All sizes of batches on four devices, the chosen rows by brute force."""
    rng = np.random.default_rng(0)
    for n_rows in range(1, 8):
        for n_examples in range(4, 4 * n_rows + 1):
            seen = set()
            for _ in range(20):
                rows = choose_rows(n_rows, n_examples / 4, rng)
                assert len(set(rows.tolist())) == len(rows) == (n_rows + 1) // 2
                assert rows.max() < n_rows
                for device in range(4):
                    assert any(device + 4 * row < n_examples for row in rows.tolist())
                seen.add(tuple(rows))
            assert len(seen) > 1 or n_rows == 1 or n_examples <= 4 * ((n_rows + 1) // 2) + 3
