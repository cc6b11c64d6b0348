"""A true mean over the examples actually used: weighted sums of gradients, loss and aux, to be divided once.

Each device adds up its own examples, the sums are reduced, and only the total is divided, by the total weight. So it
does not matter which device had which example, nor how many each had; and integer-valued gradients, whose sums are
exact, give the same bits on any number of chips.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from meshmend.errors import ParameterError
from meshmend.jax.collectives import mean_dtype, travel_dtype


class Sums(NamedTuple):
    """One device's sums, in the dtypes that are sent."""

    gradients: Any
    extras: Any
    """Of the loss, and of aux."""
    weight: Annotated[jax.Array, "[]"]


def weighted_sums(
    loss: Callable[[Any, Any], tuple[Any, Any]],
    params: Any,
    batch: Any,
    weights: Annotated[jax.Array, "[B]"],
    microbatches: int,
    accumulate_dtype: DTypeLike | None,
    *,
    over_devices: bool = False,
) -> Sums:
    """Add up this device's examples, each times its weight. `loss` returns a value per example, and aux likewise.

    An example of weight 0 has no influence, not even if computing with it gives NaN. Weights are added up in float32
    (or wider) whatever their dtype: 257 ones are 256 in bfloat16.

    `over_devices` says that gradients come out of the loss summed over all devices, as those of sharded parameters do.
    Then a device without any example that counts computes with what it has, times 0, which must not be NaN: a feed's
    padding repeats a sample.
    """
    weights = weights.astype(jnp.promote_types(weights.dtype, jnp.float32))

    def widened(value: Any) -> jax.Array:
        x: jax.Array = jnp.asarray(value)
        return x.astype(travel_dtype(mean_dtype(x.dtype), accumulate_dtype))

    def piece_sums(batch: Any, weights: jax.Array) -> Sums:
        # A cotangent of 0 times a derivative of NaN is NaN, so examples that don't count must not be computed with.
        used = weights != 0
        first = jnp.argmax(used)

        def used_or_first(x: jax.Array) -> jax.Array:
            # Not a gather of rows: where the batch is split inside a tile, that would collect all of it on each chip.
            return jnp.where(used.reshape(-1, *[1] * (x.ndim - 1)), x, lax.dynamic_index_in_dim(x, first, 0))

        batch = jax.tree.map(used_or_first, batch)

        def total(params: Any) -> tuple[jax.Array, Any]:
            extras = jax.tree.map(
                lambda x: _weighted(widened(x), weights), _check_per_example(loss(params, batch), weights)
            )
            return extras[0], extras

        gradients, extras = jax.grad(total, has_aux=True)(params)
        sums = Sums(jax.tree.map(widened, gradients), extras, widened(jnp.sum(weights)))
        counted = Sums(*jax.tree.map(lambda x: jnp.where(jnp.any(used), x, jnp.zeros_like(x)), sums))
        return Sums(sums.gradients, counted.extras, counted.weight) if over_devices else counted

    if microbatches == 1:
        return piece_sums(batch, weights)
    n_rows = -(-len(weights) // microbatches)
    padding = n_rows * microbatches - len(weights)

    def cut(x: jax.Array, mode: str) -> jax.Array:
        padded = jnp.pad(x, [(0, padding), *[(0, 0)] * (x.ndim - 1)], mode=mode)
        return padded.reshape(microbatches, n_rows, *x.shape[1:])

    pieces = jax.tree.map(lambda x: cut(x, "edge"), batch), cut(weights, "constant")
    shapes = jax.eval_shape(piece_sums, *jax.tree.map(lambda x: x[0], pieces))
    start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    total, _ = lax.scan(lambda sums, piece: (jax.tree.map(jnp.add, sums, piece_sums(*piece)), None), start, pieces)
    return Sums(*total)


def divide_by_weight(
    total: Annotated[jax.Array, "[...]"], weight: Annotated[jax.Array, "[]"], *, empty: float
) -> Annotated[jax.Array, "[...]"]:
    """Divide by the total weight; where that is 0 there is no mean, and `empty` stands for it."""
    return jnp.where(weight == 0, jnp.asarray(empty, total.dtype), total / weight)


def _weighted(
    values: Annotated[jax.Array, "[B, ...]"], weights: Annotated[jax.Array, "[B]"]
) -> Annotated[jax.Array, "[...]"]:
    return jnp.tensordot(weights.astype(values.dtype), values, axes=1, precision=lax.Precision.HIGHEST)


def _check_per_example(extras: Any, weights: Annotated[jax.Array, "[B]"]) -> Any:
    """Return the loss and aux if they have one value per example; raise otherwise."""
    for name, tree, exactly in (("the loss", extras[0], True), ("a value of aux", extras[1], False)):
        for leaf in jax.tree.leaves(tree):
            shape = jnp.shape(leaf)
            if shape[:1] != weights.shape or (exactly and len(shape) != 1):
                raise ParameterError(
                    f"With per_example=True, {name} must have one value for each of the {len(weights)} examples of a "
                    f"device (and microbatch); it has shape {shape}. Leave out the mean over the batch."
                )
    return extras
