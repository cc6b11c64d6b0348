"""What a job trains on: anything that a feed takes, or arrays in memory, and a random key for each example."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from meshmend.errors import ParameterError
from meshmend.jax.data.feed import Batch, Feed
from meshmend.jax.data.policy import Policy
from meshmend.jax.engine.fabric import Fabric


def make_feed(dataset: Any, policy: Policy, *, seed: int, n_chips: int) -> Feed:
    """Return the feed of a dataset that has at least one whole batch."""
    feed = Feed(dataset, policy, seed=seed)
    batch = policy.global_batch(n_chips)
    if feed.epoch_size < batch:
        raise ParameterError(
            f"The dataset has {feed.epoch_size} samples, fewer than the {batch} of one global batch, so that no step "
            f"would be a whole one. Give Job a global_batch of at most {feed.epoch_size}, or a longer dataset."
        )
    return feed


def with_offsets(batch: Batch, fabric: Fabric) -> Batch:
    """Return a batch whose data has beside each example its epoch and its offset in it: what its random key is made of.

    Neither depends on the chips, so an example draws the same numbers wherever it is computed, and again when a step
    is repeated.
    """
    table = batch.feed.split(fabric).epochs_and_offsets(batch.at).reshape(-1, 2)
    sharding = fabric.sharding(fabric.batch_axes)
    put = jax.make_array_from_callback(table.shape, sharding, lambda index: table[index], dtype=table.dtype)
    return replace(batch, data=(batch.data, put))


class RandomKey(NamedTuple):
    """A random key by its bits: an array on one process's device cannot be part of a program of many processes."""

    bits: Annotated[NDArray[np.uint32], "uint32[...]"]
    kind: str

    @classmethod
    def of(cls, rng: jax.Array | int) -> RandomKey:
        """Describe a key; an int is a seed, as in `jax.random.key`."""
        key = jax.random.key(rng) if isinstance(rng, int) else rng
        return cls(np.asarray(jax.random.key_data(key)), str(jax.random.key_impl(key)))

    def of_examples(self, offsets: Annotated[jax.Array, "uint32[B, 2]"]) -> jax.Array:
        """Return a key for each example, from its epoch and its offset."""
        key, fold = jax.random.wrap_key_data(jnp.asarray(self.bits), impl=self.kind), jax.random.fold_in
        return jax.vmap(lambda offset: fold(fold(key, offset[0]), offset[1]))(offsets)
