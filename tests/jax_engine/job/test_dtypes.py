"""A job's state has the same dtypes in every step, and whole numbers in a model's state stay whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_engine.job.job_cases import PARAMS, job, plain_training, train
from meshmend.errors import ParameterError
from meshmend.jax.job.model_state import outputs_that_depend

INJECTED = optax.inject_hyperparams(optax.adam)(learning_rate=0.02)
BFLOAT16 = PARAMS | {"w": PARAMS["w"].astype(jnp.bfloat16)}
"""The layer "out", which is the first, has float32, and with it all numbers of `INJECTED`: its moments become that."""


@pytest.mark.parametrize("update", ["replicated", pytest.param("sharded", marks=pytest.mark.slow)])
def test_a_state_that_changes_its_dtypes_in_the_first_update_trains_and_resumes(update: Any, tmp_path: Path) -> None:
    losses, samples = [], []
    for steps in (2, 4):
        part = job(tmp_path / "shared", "2x2")
        more, rows, params = train(part, steps, optimizer=INJECTED, params=BFLOAT16, update=update)
        losses += more
        samples += rows
        part.close()
    assert (part.resumed.source, part.resumed.step) == ("memory", 2)
    wanted, expected = plain_training(samples, params=BFLOAT16, optimizer=INJECTED)
    assert INJECTED.init(BFLOAT16).inner_state[0].mu["w"].dtype == jnp.bfloat16
    _, state = INJECTED.update(BFLOAT16, INJECTED.init(BFLOAT16), BFLOAT16)
    assert state.inner_state[0].mu["w"].dtype == jnp.float32, "the oracle's state changes, too"
    # A bfloat16 weight has 8 bits; those of a sharded update are rounded once more, from their shards.
    np.testing.assert_allclose(losses, wanted, rtol=1e-2)
    assert params["w"].dtype == jnp.bfloat16
    for name in expected:
        ours, theirs = (np.asarray(tree[name], np.float32) for tree in (params, expected))
        np.testing.assert_allclose(ours, theirs, rtol=2.0**-6, atol=2.0**-8)


def narrowing() -> optax.GradientTransformation:
    """SGD with a momentum that is rounded to bfloat16 by the first update."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        state = jax.tree.map(lambda m, u: (0.5 * m + u).astype(jnp.bfloat16), state, updates)
        return jax.tree.map(lambda m: -0.1 * m, state), state

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def test_a_state_that_becomes_narrower_is_refused_before_the_first_step_by_name(tmp_path: Path) -> None:
    message = r"does not return .*: expected .*\['out'\].*float32.*, got .*\['out'\].*bfloat16.* cast the state in its"
    with pytest.raises(ParameterError, match=message):
        train(job(tmp_path / "shared", "2x2"), 1, optimizer=narrowing())


EXAMPLES = np.arange(12_000, dtype=np.float32) / 12_000
"""A mean over 4,000 of them in float32 is not exact from 4,194 on."""


def counting(w: Any, state: Any, batch: Any) -> Any:
    """A running mean, a counter of steps, one that wraps, and a flag."""
    n_steps, rows = state["steps"] + 1, batch.shape[0]
    new = {
        "mean": 0.5 * state["mean"] + 0.5 * batch,
        "steps": jnp.full(rows, n_steps),
        "small": jnp.broadcast_to(state["small"] + jnp.uint8(100), (rows, 2)),
        "late": jnp.broadcast_to(n_steps > 69_999, rows),
    }
    return (w * batch) ** 2, new


@pytest.mark.parametrize("start", [0, 69_998, 20_000_000, 2**31 - 4])
def test_whole_numbers_in_a_model_s_state_are_kept_exactly(start: int, tmp_path: Path) -> None:
    state = {"mean": np.float32(0), "steps": np.int32(start), "small": np.zeros(2, np.uint8), "late": np.bool_(False)}
    one = job(tmp_path / "shared", "2x2", 4000, memory_every=0)
    found, mean = [], 0.0
    for step in one.train(counting, optax.sgd(0.1), np.float32(1), EXAMPLES, steps=3, model_state=state):
        found.append(one.model_state)
        mean = 0.5 * mean + 0.5 * float(EXAMPLES[step.batch.indices].mean(dtype=np.float64))
        assert float(found[-1]["mean"]) == pytest.approx(mean, rel=1e-5)
    assert [int(now["steps"]) for now in found] == [start + 1, start + 2, start + 3]
    assert [now["small"].tolist() for now in found] == [[100, 100], [200, 200], [44, 44]]
    assert [bool(now["late"]) for now in found] == [start + n > 69_999 for n in (1, 2, 3)]
    assert {name: leaf.dtype for name, leaf in found[-1].items()} == {
        name: np.asarray(x).dtype for name, x in state.items()
    }


def one_example(w: Any, count: Any, x: Any, key: Any) -> Any:
    jax.debug.callback(lambda _: None, x)
    return (w * x + jax.random.uniform(key)) ** 2, (count + 1, x)


@pytest.mark.slow
@pytest.mark.parametrize("tile", [None, "1x2"])
def test_a_counter_in_a_mapped_loss_with_keys_aux_microbatches_and_tiles(tile: str | None, tmp_path: Path) -> None:
    more: Any = {} if tile is None else {"shardings": jax.sharding.PartitionSpec()}
    one = job(tmp_path / "shared", "2x4", 100, tile=tile, planner="auto")
    mapped = jax.jit(jax.vmap(one_example, in_axes=(None, None, 0, 0)))
    given: Any = {"rng": 0, "has_aux": True, "microbatches": 1 if tile else 2, "model_state": np.int32(16_777_216)}
    for step in one.train(mapped, optax.sgd(0.1), np.float32(1), EXAMPLES, steps=3, **given, **more):
        assert step.aux == pytest.approx(EXAMPLES[step.batch.indices].mean(), rel=1e-5)
        assert int(one.model_state) == 16_777_216 + step.number


@pytest.mark.parametrize(
    ("start", "new", "message"),
    [
        (np.int32(0), lambda s, x: s + x.astype(jnp.int32), r"model_state\['n'\] is int32, .* depends on the examples"),
        (np.bool_(False), lambda s, x: s | (x > 0.5), r"model_state\['n'\] is bool, .* depends on the examples"),
        (
            np.int32(0),
            lambda s, x: jnp.full(x.shape, s + 0.5),
            r"\['n'\] is int32, and the loss returns float32 for it",
        ),
        (np.uint8(0), lambda s, x: jnp.full(x.shape, s + jnp.int32(1)), r"is uint8, and the loss returns int32 for it"),
        (np.int32(0), lambda s, _: s + 1, "another model state than it was given.* one row per example"),
        (np.int64(2**40), lambda s, x: jnp.full(x.shape, s), r"model_state\['n'\] has int64 numbers that int32"),
    ],
)
def test_whole_numbers_that_have_no_exact_next_state_are_refused(
    start: Any, new: Any, message: str, tmp_path: Path
) -> None:
    def counted(w: Any, state: Any, batch: Any) -> Any:
        return (w * batch) ** 2, {"n": new(state["n"], batch)}

    one = job(tmp_path / "shared", "2x2", 40, memory_every=0)
    with pytest.raises(ParameterError, match=message):
        one.train(counted, optax.sgd(0.1), np.float32(1), EXAMPLES, steps=1, model_state={"n": start})


def in_scan(x: Any, y: Any) -> Any:
    """The third carried number depends on y from the second round on, through the second."""
    first = jnp.int32(0), jnp.float32(0), jnp.float32(0)
    (count, _, late), seen = jax.lax.scan(lambda c, v: ((c[0] + 1, c[1] + v, c[1]), c[0]), first, y)
    return count, late, seen, x


DEPENDENCE: dict[str, tuple[Any, list[bool]]] = {
    "plain": (lambda x, y: (x + 1, x * y, 3.0), [False, True, False]),
    "jit": (jax.jit(lambda x, y: (x + 1, y, x * y.sum())), [False, True, True]),
    "scan": (in_scan, [False, True, False, False]),
    "cond": (lambda x, y: jax.lax.cond(x > 0, lambda: (x, y), lambda: (x + 1, 2 * y)), [False, True]),
    "cond on it": (lambda x, y: jax.lax.cond(y[0] > 0, lambda: (3 * x, x), lambda: (x, 2 * x)), [True, True]),
    "a value and its derivative": (jax.value_and_grad(lambda x, y: jnp.sum(x * y), has_aux=False), [True, True]),
    "remat": (jax.checkpoint(lambda x, y: (x + 1, jnp.sum(y))), [False, True]),
    "a loop of unknown length": (
        lambda x, y: jax.lax.while_loop(lambda c: c[1] < 9, lambda c: (c[0] + 1, c[1] + 1), (x, y[0])),
        [True, True],
    ),
}


@pytest.mark.parametrize("name", DEPENDENCE)
def test_what_depends_on_examples_is_known_from_the_trace(name: str) -> None:
    function, wanted = DEPENDENCE[name]
    traced = jax.make_jaxpr(function)(jnp.float32(1), jnp.ones(3))
    assert outputs_that_depend(traced.jaxpr, [False, True]) == wanted
