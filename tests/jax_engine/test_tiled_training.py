"""`train_step` on tiles trains as one device does; with a sharded update, a chip has a T-th of the state.

Norms of layers on tiles are in `test_layerwise`, arguments in `test_differentiate`, refusals in `test_elementwise`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jax_engine.training_cases import BOTH, check_close, normal, tiles_of, train, train_alone
from meshmend.jax.engine.tiles import TiledFabric
from meshmend.jax.train.shardings import specs_of_state

SPECS = {"up": P(None, "model"), "down": P("model"), "scale": P()}
STEPS = 4
ADAMW = optax.adamw(1e-2)


def params_tree() -> dict[str, Any]:
    return normal({"up": (8, 16), "down": (16, 4), "scale": (4,)}, spread=0.5)


def mean_loss(params: Any, batch: Any) -> Any:
    """The loss, and a metric."""
    hidden = jnp.tanh(batch @ params["up"])
    return jnp.mean((hidden @ params["down"] * params["scale"] - 1) ** 2), {"hidden": jnp.mean(hidden, axis=0)}


def batches(n_examples: int) -> Any:
    rng = np.random.default_rng(1)
    return [rng.normal(size=(n_examples, 8)).astype(np.float32) for _ in range(STEPS)]


def three_tiles() -> TiledFabric:
    return tiles_of("4x4", "0,1", model=4)


@pytest.mark.parametrize("kind", ["fused", *(pytest.param(kind, marks=pytest.mark.slow) for kind in BOTH)])
def test_a_step_on_tiles_is_that_of_one_device(kind: str) -> None:
    options: Any = {"shardings": SPECS, "has_aux": True, "microbatches": 2}
    losses, params, state, aux = train(mean_loss, params_tree(), ADAMW, three_tiles(), kind, batches(24), **options)
    assert aux[-1]["hidden"].shape == (16,)
    wanted = train_alone(lambda params, batch: mean_loss(params, batch)[0], params_tree(), ADAMW, batches(24))
    np.testing.assert_allclose(losses, wanted.losses, rtol=1e-6)
    check_close(params, wanted.params, rtol=2e-6, atol=2e-6)
    assert {name: leaf.sharding.spec for name, leaf in params.items()} == SPECS
    if kind == "replicated":
        assert {name: leaf.sharding.spec for name, leaf in state[0].mu.items()} == SPECS
    else:
        (moment,) = state[0].mu
        # A chip's shards are 8·4 + 4·4 + 4 elements in 7 chunks, of which a tile owns at most three.
        assert moment.addressable_shards[0].data.shape == (3, -(-52 // 7))


def test_state_is_split_as_the_parameter_that_it_belongs_to() -> None:
    params = {"a": {"w": np.zeros((2, 4))}, "w": np.zeros((4, 2)), "b": np.zeros(3)}
    specs = {"a": {"w": P(None, "model")}, "w": P("model"), "b": P()}
    state = optax.chain(optax.adam(0.1), optax.ema(0.9)).init(params)
    found = specs_of_state(state, params, specs)
    adam = found[0][0]
    assert adam.mu == adam.nu == found[1].ema == specs
    assert adam.count == P()
    # The same name with another shape is not the parameter's: optax.adafactor keeps sums of rows and columns.
    assert specs_of_state({"w": np.zeros(4)}, params, specs) == {"w": P()}
    assert specs_of_state((np.zeros(3), np.zeros(5)), np.zeros(3), P("model")) == (P("model"), P())
