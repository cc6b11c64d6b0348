"""A train step over tiles: the model is split inside a tile, and tiles share the batch.

Each tile differentiates its part of the batch (`differentiate`). With a replicated update the gradients are summed over
tiles, and every tile updates all weights, each chip its own shards. With two phases or a fused update it is
sharded over tiles as well: each chip sums its shards with the chips in its place of the other tiles, updates the chunks
of them that its tile owns, and the new weights come back the same way. So a chip has the optimizer's state of one
T-th of its shards, where there are T tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from meshmend.jax.collectives import all_reduce, shard_of, travel_dtype
from meshmend.jax.differentiate import (
    Roles,
    TileLoss,
    TileSums,
    stacked_specs,
    sums_by_tile,
    value_and_grad,
    weight_of,
)
from meshmend.jax.elementwise import check_elementwise, update_weights
from meshmend.jax.layerwise import InsideTile
from meshmend.jax.ordering import in_order
from meshmend.jax.program import Program
from meshmend.jax.shardings import copies_in_tile, match_specs, specs_of_state
from meshmend.jax.tiles import TILE_AXIS, TiledFabric
from meshmend.jax.updates import TrainStep, abstract_shards, sharded_update
from meshmend.jax.validation import check_program
from meshmend.jax.weighted import divide_by_weight


def tiled_train_step(
    loss: Callable[[Any, Any], Any],
    optimizer: optax.GradientTransformation,
    fabric: TiledFabric,
    shardings: Any,
    *,
    has_aux: bool,
    microbatches: int,
    accumulate_dtype: DTypeLike | None,
    per_example: bool,
) -> TrainStep:
    """Return `train_step` for a fabric of tiles."""
    whole, by_device, by_tile = PartitionSpec(), PartitionSpec(fabric.axes), PartitionSpec(TILE_AXIS)
    part = TileLoss(loss, Roles((0,), (), ()), has_aux, microbatches, per_example, accumulate_dtype)
    differentiate = value_and_grad(
        loss,
        fabric,
        shardings,
        has_aux=has_aux,
        microbatches=microbatches,
        per_example=per_example,
        accumulate_dtype=accumulate_dtype,
    )

    def specs(params: Any, program: Program) -> tuple[Any, Any]:
        """Return how parameters and the optimizer's state are split."""
        check_program(program, fabric)
        inside = match_specs((shardings,), (params,), fabric)[0]
        if not program.is_sharded:
            return inside, specs_of_state(jax.eval_shape(optimizer.init, params), params, inside)

        def shard(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            shape = NamedSharding(fabric.jax_mesh, spec).shard_shape(tuple(leaf.shape))
            return jax.ShapeDtypeStruct(shape, leaf.dtype)

        own = abstract_shards(jax.tree.map(shard, params, inside), program, accumulate_dtype)
        wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, travel_dtype(x.dtype, accumulate_dtype)), params)
        check_elementwise(optimizer, own, wide, own=params, with_turn=program.update == "fused")
        state = jax.eval_shape(optimizer.init, own)
        return inside, jax.tree.map(lambda leaf: by_device if leaf.ndim else whole, state)

    def placed(tree: Any, specs: Any) -> Any:
        def constrain(leaf: Any, spec: PartitionSpec) -> Any:
            return lax.with_sharding_constraint(leaf, NamedSharding(fabric.jax_mesh, spec))

        return jax.tree.map(constrain, tree, specs)

    def init(params: Any, program: Program) -> Any:
        params = jax.tree.map(jnp.asarray, params)
        inside, of_state = specs(params, program)
        if not program.is_sharded:
            return placed(optimizer.init(params), of_state)

        def local(params: Any, program: Program) -> Any:
            return optimizer.init(shard_of(params, program, accumulate_dtype=accumulate_dtype))

        return jax.shard_map(
            local, mesh=fabric.jax_mesh, in_specs=(inside, program.spec), out_specs=of_state, check_vma=False
        )(params, program)

    def step(
        params: Any, state: Any, batch: Any, program: Program, *, weights: Any = None, scale: Any = None
    ) -> tuple[Any, ...]:
        params = jax.tree.map(jnp.asarray, params)
        inside, of_state = specs(params, program)
        if not program.is_sharded:
            found, gradients = differentiate(params, batch, program=program, weights=weights)
            value, aux = found if has_aux else (found, None)
            params, state = update_weights(optimizer, params, state, gradients, scale, value=value)
            params, state = placed(params, inside), placed(state, of_state)
        else:
            sums = sums_by_tile(part, fabric, (shardings,), (params, batch), weights).sums
            tile = InsideTile(params, fabric.inner_axes, copies_in_tile(inside, fabric))
            params, state, value, aux = jax.shard_map(
                partial(update_own, tile),
                mesh=fabric.jax_mesh,
                in_specs=(inside, of_state, ((stacked_specs(inside),), by_tile, by_tile), whole, program.spec),
                out_specs=(inside, of_state, whole, whole),
                check_vma=False,
            )(params, state, sums, scale, program)
        return (params, state, value, aux) if has_aux else (params, state, value)

    def update_own(
        tile: InsideTile, params: Any, state: Any, sums: TileSums, scale: Any, program: Program
    ) -> tuple[Any, Any, Any, Any]:
        """Update this chip's part of its shards, and return all of them as their owners have updated them."""
        (gradients,), extras, weight = jax.tree.map(lambda x: x[0], sums)
        extras, weight = all_reduce((extras, weight), program.for_scalars)
        count = weight_of(weight, fabric, microbatches)
        value, aux = jax.tree.map(lambda x: divide_by_weight(x, count, empty=jnp.nan), extras)
        params, state = sharded_update(
            optimizer,
            params,
            shard_of(params, program, accumulate_dtype=accumulate_dtype),
            state,
            gradients,
            lambda total: divide_by_weight(total, count, empty=0.0).astype(total.dtype),
            scale,
            value,
            program,
            accumulate_dtype,
            tile,
        )
        return params, state, value, aux

    return TrainStep(init, in_order(step, fabric), fabric, accumulate_dtype, specs)
