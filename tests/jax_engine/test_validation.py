"""What a step is given: sizes, weights and aux of every kind are used rightly or refused before anything runs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshmend.jax as mmj
from jax_engine.training_cases import BOTH, chips_of, program_of, train
from meshmend.errors import ParameterError


def linear(w: Any, batch: Any) -> Any:
    """Per example, with the example as gradient."""
    return batch * w


def one_step(batch: Any, weights: Any, *, kind: str = "replicated", loss: Any = linear, **more: Any) -> Any:
    """SGD at rate 1 from 0 on four chips: returns minus the gradient, the loss and aux if there is any."""
    more = {"per_example": True, "weights": weights, **more}
    (value,), new, _, aux = train(loss, jnp.zeros(()), optax.sgd(1.0), chips_of("2x2"), kind, [batch], **more)
    return new, value, *aux


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "bool"])
def test_weights_of_any_real_dtype_are_added_up_in_float32(dtype: str) -> None:
    """259 ones on each chip: in bfloat16 they would be 256, in int8 they would wrap."""
    new, value = one_step(jnp.ones(4 * 259), jnp.ones(4 * 259, dtype))
    assert (float(new), float(value)) == (-1.0, 0.0)


@pytest.mark.parametrize("kind", BOTH)
def test_negative_weights_count_as_the_formula_says(kind: str) -> None:
    batch, weights = np.arange(8.0, dtype=np.float32), np.array([1, -1, 1, 1, -2, 1, 1, 3], np.float32)
    new, _ = one_step(batch, weights, kind=kind)
    assert float(new) == -float((batch * weights).sum() / weights.sum())


@pytest.mark.parametrize(("kind", "microbatches"), [("replicated", 2), ("sharded", 1)])
@pytest.mark.parametrize("weights", [np.zeros(8, np.float32), np.array([1, -1] * 4, np.float32)], ids=["all 0", "±1"])
def test_weights_that_add_up_to_nothing_have_no_mean_and_change_nothing(
    weights: np.ndarray, kind: str, microbatches: int
) -> None:
    def loss(w: Any, batch: Any) -> Any:
        return batch * w, {"flag": batch > 3}

    new, value, aux = one_step(
        np.arange(8.0, dtype=np.float32), weights, kind=kind, loss=loss, has_aux=True, microbatches=microbatches
    )
    assert float(new) == 0.0
    assert np.isnan(value)
    assert np.isnan(aux["flag"])


def test_a_weight_that_is_no_number_makes_everything_nan() -> None:
    new, value = one_step(np.arange(8.0, dtype=np.float32), np.array([1, np.nan, *[1] * 6], np.float32))
    assert np.isnan(new)
    assert np.isnan(value)


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        (np.ones(4, np.float32), r"shape \(4,\), expected \(8,\): one for each example"),
        (np.ones(16, np.float32), r"shape \(16,\), expected \(8,\)"),
        (np.ones((8, 1), np.float32), r"shape \(8, 1\), expected \(8,\)"),
        (np.float32(1), r"shape \(\), expected \(8,\)"),
        (np.ones(8, np.complex64), r"dtype complex64, expected real numbers"),
    ],
)
def test_weights_that_are_not_one_real_number_per_example_are_refused(weights: Any, why: str) -> None:
    with pytest.raises(ParameterError, match=why):
        one_step(np.arange(8.0, dtype=np.float32), weights)


def test_arrays_with_different_numbers_of_examples_are_refused() -> None:
    batch = {"x": np.ones(8, np.float32), "y": np.ones(16, np.float32)}
    with pytest.raises(ParameterError, match=r"batch\['x'\] has 8 rows and batch\['y'\] has 16"):
        one_step(batch, None, loss=lambda w, b: b["x"] * w)


@pytest.mark.parametrize("per_example", [False, True])
@pytest.mark.parametrize(
    ("batch", "why"),
    [
        (np.ones(13, np.float32), r"^batch has 13 examples, .* 4 devices of .*nearest .* are 12 and 16\..*mmj\.Feed"),
        ({"x": np.ones(3, np.float32)}, r"batch\['x'\] has 3 examples.* are 4 and 8"),
        (np.ones((0, 2), np.float32), r"batch has 0 examples.* are 4 and 8"),
        ({"x": np.ones(4, np.float32), "t": 0.5}, r"batch\['t'\] is a single number"),
        ((), "The batch has no arrays"),
    ],
    ids=["13", "3", "none", "number", "nothing"],
)  # fmt: skip
def test_a_batch_that_does_not_split_over_the_devices_is_refused(batch: Any, why: str, per_example: bool) -> None:
    fabric = chips_of("2x2")
    program = program_of(fabric, "replicated")
    _, step = mmj.train_step(lambda w, b: w, optax.sgd(1.0), fabric, per_example=per_example)
    with pytest.raises(ParameterError, match=why):
        jax.jit(step)(jnp.zeros(()), (optax.EmptyState(),) * 2, batch, program)


def metrics(w: Any, batch: Any) -> Any:
    """A loss that is a mean, with aux of integers, bools and a plain number."""
    return jnp.mean(batch * w), {
        "correct": jnp.sum(batch, dtype=jnp.int32),
        "any": batch[0] > 0,
        "tokens": jnp.int32(400_000_000),
        "bytes": jnp.uint8(200),
        "number": 3,
    }


@pytest.mark.parametrize(("kind", "microbatches"), [("replicated", 1), ("replicated", 4), ("sharded", 2)])
def test_means_of_integers_and_bools_neither_wrap_nor_lose_their_fraction(kind: str, microbatches: int) -> None:
    batch = np.array([1, 0, 0, 0] * 3 + [1, 1, 1, 0], np.float32)
    more = {"per_example": False, "has_aux": True, "microbatches": microbatches}
    _, _, aux = one_step(batch, None, kind=kind, loss=metrics, **more)
    assert {leaf.dtype for leaf in aux.values()} == {jnp.dtype(jnp.float32)}
    pieces = batch.reshape(4 * microbatches, -1)
    assert float(aux["correct"]) == pieces.sum(axis=1).mean()
    assert float(aux["any"]) == (pieces[:, 0] > 0).mean()
    assert (float(aux["tokens"]), float(aux["bytes"]), float(aux["number"])) == (4e8, 200, 3)


@pytest.mark.parametrize("microbatches", [1.5, 0, -1, True, "2", 2.0])
def test_what_is_no_number_of_microbatches_is_refused(microbatches: Any) -> None:
    with pytest.raises(ParameterError, match=r"microbatches is .*, expected a whole number of at least 1"):
        mmj.train_step(linear, optax.sgd(1.0), chips_of("2x2"), microbatches=microbatches)
