"""What train steps are made of: the two functions of a loop, and an update of the weights that is sharded by owner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.typing import DTypeLike

from meshmend.jax.collectives import all_gather, groups_of, reduce_scatter
from meshmend.jax.elementwise import update_weights
from meshmend.jax.fabric import Fabric
from meshmend.jax.layerwise import InsideTile, ShardedLayers
from meshmend.jax.program import Program
from meshmend.jax.streaming import streamed_update


@dataclass(frozen=True)
class TrainStep:
    """The two functions of a training loop, both to be jitted, and what they were made for. Made by `train_step`.

    Unpack it (`init, step = mmj.train_step(…)`) where the functions are all you need. `StateLayout.of` and
    `compile_train_step` take it whole: what they must know of it is said nowhere else.
    """

    init: Callable[[Any, Program], Any]
    """From parameters and a program to the optimizer's state."""
    step: Callable[..., tuple[Any, ...]]
    """From parameters, state, a batch and a program to new parameters, state, loss (and aux).

    Keywords: `weights` (with `per_example`) and `scale`, by which the optimizer's updates are multiplied."""
    fabric: Fabric
    accumulate_dtype: DTypeLike | None
    specs: Callable[[Any, Program], tuple[Any, Any]] | None = None
    """From parameters and a program to the PartitionSpecs of parameters and state inside tiles; None without tiles."""

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return iter((self.init, self.step))


def sharded_update(
    optimizer: optax.GradientTransformation,
    params: Any,
    own_params: Any,
    state: Any,
    gradients: Any,
    mean: Callable[[Any], Any],
    scale: Any,
    value: Any,
    program: Program,
    accumulate_dtype: DTypeLike | None,
    tile: InsideTile | None = None,
) -> tuple[Any, Any]:
    """Sum the gradients, update the weights that this chip owns with their mean, and send the result to all.

    With tiles, `params` and `gradients` are this chip's shards of them, and `tile` says of what.
    """

    def means(sums: Any) -> Any:
        return jax.tree.map(mean, sums)

    if program.update == "fused":
        return streamed_update(
            optimizer, params, own_params, state, gradients, means, scale, value, program, accumulate_dtype, tile
        )
    own_gradients = means(reduce_scatter(gradients, program, accumulate_dtype=accumulate_dtype))
    layers = ShardedLayers(params, program, accumulate_dtype, tile)
    own_params, state = update_weights(optimizer, own_params, state, own_gradients, scale, value=value, layers=layers)
    assert program.gather is not None  # noqa: S101  # it has two phases
    return all_gather(own_params, program.gather, like=params, accumulate_dtype=accumulate_dtype), state


def abstract_shards(
    params: Any, program: Program, accumulate_dtype: DTypeLike | None
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the shapes of one device's shards of the parameters."""
    n_rows = program.owned.shape[-1]
    groups = groups_of(jax.tree.leaves(params), program.layout, accumulate_dtype)
    return tuple(jax.ShapeDtypeStruct((n_rows, group.chunk), group.dtype) for group in groups)
