"""What one device, or one tile, adds up of its part of a batch: gradients, the loss and aux, and the examples' weights.

Only sums travel, and they are divided when they are complete: by the number of means that were added up, or with
weights by the total weight, for a true mean over the examples actually used. Then it does not matter which device had
which example, nor how many each had; and integer-valued gradients, whose sums are exact, give the same bits on any
number of chips.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from meshmend.errors import ParameterError
from meshmend.jax.engine.collectives import Tree, mean_dtype, travel_dtype

PartLoss = Callable[[Tree, Tree, jax.Array | None], Tree]
"""From parameters, examples and the number of their microbatch (None for all at once) to what the loss returns."""


class Sums(NamedTuple):
    """What a device or a tile has added up, in the dtypes that are sent."""

    gradients: Tree
    extras: Tree
    """Of the loss, and of aux."""
    weight: Annotated[jax.Array, "[]"] | None
    """None where the loss is a mean: it counts as one example of weight 1."""


@dataclass(frozen=True)
class LossSums:
    """How a loss is differentiated on a device or a tile: its microbatches, and the dtype of their sums."""

    has_aux: bool
    microbatches: int
    accumulate_dtype: DTypeLike | None
    is_split_inside: bool = False
    """Whether the examples may be split over the devices of a tile."""
    over_devices: bool = False
    """Whether gradients come out of the loss summed over all devices, as those of sharded parameters do.

    Then a device without any example that counts computes with what it has, times 0, which must not be NaN: a feed's
    padding repeats a sample."""
    omits_unused: bool = True
    """Whether the sums of a microbatch without any example that counts are made zero here, not where they are added."""

    def of(self, loss: PartLoss, params: Tree, batch: Tree, weights: Annotated[jax.Array, "[B]"] | None) -> Sums:
        """Return the sums over the microbatches.

        With weights the loss returns a value per example, and aux likewise, and each counts times its weight. An
        example of weight 0 has no influence, not even if computing with it gives NaN. Weights are added up in float32
        (or wider) whatever their dtype: 257 ones are 256 in bfloat16.
        """
        one = partial(self._piece, loss, params)
        if self.microbatches == 1:
            return one(None, batch, weights)
        pieces = jnp.arange(self.microbatches), jax.tree.map(self._cut, batch), weights
        if weights is not None:
            pieces = *pieces[:2], self._cut(weights, "constant")
        shapes = jax.eval_shape(one, *jax.tree.map(lambda x: x[0], pieces))
        start: Sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        total, _ = lax.scan(lambda so_far, piece: (jax.tree.map(jnp.add, so_far, one(*piece)), None), start, pieces)
        return total

    def _cut(self, x: jax.Array, padding: str = "edge") -> jax.Array:
        """Return one row of examples per microbatch; the last are filled up where they do not divide."""
        n_rows = -(-len(x) // self.microbatches)
        missing = n_rows * self.microbatches - len(x)
        if missing:
            x = jnp.pad(x, [(0, missing), *[(0, 0)] * (x.ndim - 1)], mode=padding)
        if self.is_split_inside:
            # Every n-th example: a batch that is split inside the tile stays split as it is.
            return jnp.swapaxes(x.reshape(n_rows, self.microbatches, *x.shape[1:]), 0, 1)
        return x.reshape(self.microbatches, n_rows, *x.shape[1:])

    def _piece(
        self, loss: PartLoss, params: Tree, number: jax.Array | None, batch: Tree, weights: jax.Array | None
    ) -> Sums:
        """Return the sums over one microbatch."""
        used = None if weights is None else weights != 0
        if weights is not None:
            weights = weights.astype(jnp.promote_types(weights.dtype, jnp.float32))
            batch = _only_used(batch, used)

        def total(params: Tree) -> tuple[jax.Array, Tree]:
            found = loss(params, batch, number)
            extras = found if self.has_aux else (found, ())
            if weights is not None:
                _check_per_example(extras, weights)
                extras = jax.tree.map(lambda x: _weighted(self._widened(x), weights), extras)
            return extras[0], extras

        gradients, extras = jax.grad(total, has_aux=True)(params)
        weight = None if weights is None else jnp.sum(weights)
        sums = Sums(*jax.tree.map(self._widened, (gradients, extras, weight)))
        if used is not None and self.omits_unused:
            counted = Sums(*jax.tree.map(lambda x: jnp.where(jnp.any(used), x, jnp.zeros_like(x)), sums))
            sums = Sums(sums.gradients, counted.extras, counted.weight) if self.over_devices else counted
        return sums

    def _widened(self, value: Any) -> jax.Array:
        x: jax.Array = jnp.asarray(value)
        return x.astype(travel_dtype(mean_dtype(x.dtype), self.accumulate_dtype))


def count_of(weight: jax.Array | None, n_means: int) -> jax.Array:
    """Return what sums are divided by: their total weight, or the number of means that were added up."""
    return jnp.asarray(n_means, jnp.float32) if weight is None else weight


def divide_by_weight(
    total: Annotated[jax.Array, "[...]"], weight: Annotated[jax.Array, "[]"], *, empty: float
) -> Annotated[jax.Array, "[...]"]:
    """Divide by the total weight; where that is 0 there is no mean, and `empty` stands for it."""
    return jnp.where(weight == 0, jnp.asarray(empty, total.dtype), total / weight)


def _only_used(batch: Tree, used: Annotated[jax.Array, "[B]"] | None) -> Tree:
    """Return the examples with the first that counts in place of those that don't.

    A cotangent of 0 times a derivative of NaN is NaN, so examples that don't count must not be computed with.
    """
    assert used is not None  # noqa: S101  # there are weights
    first = jnp.argmax(used)

    def used_or_first(x: jax.Array) -> jax.Array:
        # Not a gather of rows: where the batch is split inside a tile, that would collect all of it on each chip.
        return jnp.where(used.reshape(-1, *[1] * (x.ndim - 1)), x, lax.dynamic_index_in_dim(x, first, 0))

    return jax.tree.map(used_or_first, batch)


def _weighted(
    values: Annotated[jax.Array, "[B, ...]"], weights: Annotated[jax.Array, "[B]"]
) -> Annotated[jax.Array, "[...]"]:
    return jnp.tensordot(weights.astype(values.dtype), values, axes=1, precision=lax.Precision.HIGHEST)


def _check_per_example(extras: Tree, weights: Annotated[jax.Array, "[B]"]) -> None:
    """Refuse a loss and aux that do not have one value per example."""
    for name, tree, exactly in (("the loss", extras[0], True), ("a value of aux", extras[1], False)):
        for leaf in jax.tree.leaves(tree):
            shape = jnp.shape(leaf)
            if shape[:1] != weights.shape or (exactly and len(shape) != 1):
                raise ParameterError(
                    f"With per_example=True, {name} must have one value for each of the {len(weights)} examples of a "
                    f"device (and microbatch); it has shape {shape}. Leave out the mean over the batch."
                )
