"""A job's state has the same dtypes in every step, and whole numbers in a model's state stay whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_engine.managed.managed_cases import DATASET, PARAMS, job, loss, train
from meshmend.errors import ParameterError

INJECTED = optax.inject_hyperparams(optax.adam)(learning_rate=0.02)
BFLOAT16 = PARAMS | {"w": PARAMS["w"].astype(jnp.bfloat16)}
"""The layer "out", which is the first, has float32, and with it all numbers of `INJECTED`: its moments become that."""


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHMEND_MEMORY", str(tmp_path / "memory"))


def plain_training(optimizer: Any, samples: Any, params: Any) -> tuple[list[float], Any, Any]:
    """With nothing but optax and jit, on one device."""
    state, losses = optimizer.init(params), []

    @jax.jit
    def update(params: Any, state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(lambda p: jnp.mean(loss(p, batch)))(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    for rows in samples:
        params, state, value = update(params, state, {name: array[rows] for name, array in DATASET.items()})
        losses.append(float(value))
    return losses, params, state


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
    wanted, expected, state = plain_training(INJECTED, samples, BFLOAT16)
    assert INJECTED.init(BFLOAT16).inner_state[0].mu["w"].dtype == jnp.bfloat16
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
