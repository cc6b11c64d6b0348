"""Data-parallel training over a holed mesh: a train step for any loss function and optax optimizer.

Three ways to update the weights, chosen by how the program was installed:

- `update="replicated"`: gradients are all-reduced, and every chip updates all weights.
- `update="two-phase"`: gradients are reduce-scattered, each chip updates the weights that it owns, with its
  share of the optimizer's state, and the new weights are all-gathered. The same bytes travel, and the optimizer's
  memory and work are divided by the number of chips. Chips that own nothing (for example beside a hole) are supported.
- `update="fused"`: the same within one all-reduce: the owner updates a chunk between its way up and
  its way down. See `streaming`.

The parts are plain functions of pytrees: jit them, donate to them, scan over them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from meshmend.errors import ParameterError
from meshmend.jax.collectives import all_reduce, mean_dtype, shard_of, travel_dtype
from meshmend.jax.elementwise import check_elementwise, update_weights, with_steady_dtypes
from meshmend.jax.fabric import Fabric
from meshmend.jax.ordering import in_order
from meshmend.jax.program import Program
from meshmend.jax.tiled_training import tiled_train_step
from meshmend.jax.tiles import TiledFabric
from meshmend.jax.updates import TrainStep, abstract_shards, sharded_update
from meshmend.jax.validation import (
    check_batch,
    check_data_parallel,
    check_microbatches,
    check_program,
    check_weights,
)
from meshmend.jax.weighted import divide_by_weight, weighted_sums

LossFunction = Callable[[Any, Any], Any]
"""From parameters and a batch to a scalar (or, with `has_aux`, to a scalar and a pytree of arrays).

With `per_example`, to one value for each example of the batch (and arrays whose first axis is the examples)."""


def train_step(
    loss: LossFunction,
    optimizer: optax.GradientTransformation,
    fabric: Fabric,
    *,
    shardings: Any = None,
    has_aux: bool = False,
    microbatches: int = 1,
    accumulate_dtype: DTypeLike | None = jnp.float32,
    per_example: bool = False,
) -> TrainStep:
    """Return `init(params, program)` and `step(params, state, batch, program)` for data-parallel training.

    `loss(params, batch)` is the mean over its batch. A batch is a pytree of arrays whose first axis is split over all
    devices; `microbatches` cuts each device's part into so many equal pieces, whose gradients are added up before
    anything is sent. Gradients, the loss and (with `has_aux`) `aux` are averaged over devices, summed in
    `accumulate_dtype` where that is wider than their own dtype. With a replicated update, all that is summed in one
    dtype travels together; a few numbers in another dtype take `program.scalars`, as the loss and norms do in a sharded
    update. Integers and bools in `aux` come back as their means in float32.

    With `per_example`, `loss(params, batch)` has one value per example, and everything is a true mean over examples,
    however they are spread: `step(…, weights=w)` says how much each counts, such as 0 for padding (by default all
    count once): one real number per example, added up in float32. The mean of values v is Σ w·v / Σ w, for negative
    weights too; where Σ w is 0 there is no mean, so that the loss and aux are NaN and the gradients are 0. Only sums
    travel, and they are divided once, so that integer-valued gradients give the same bits on any number of chips. The
    loss of an example must not depend on others in its batch, as batch normalisation does.

    `step(…, scale=factor)` multiplies the optimizer's updates, which scales the learning rate; the factor may
    change from step to step without compiling again. Optimizers that take the loss (`value`) get its mean.

    With an update of two phases the optimizer must be element-wise, as SGD, momentum, Adam and AdamW do, or get
    the norms of layers from here: use `mmj.lars`, `mmj.lamb` and `mmj.clip_by_global_norm`. Others are refused. With a
    fused update likewise, but without LARS and LAMB, which need their norms before the first update.

    On a fabric of tiles (`mmj.tile`) a batch is split over tiles, and `shardings` says how each parameter is split
    inside one, as in `value_and_grad`; the optimizer's state is split as its parameters are. Where the
    update is sharded, each chip updates its part of its own shards, for the chips in the same place of all tiles.

    >>> import jax, jax.numpy as jnp, optax, meshmend as mm, meshmend.jax as mmj
    >>> fabric = mmj.discover(jax.devices()[:16], shape="4x4", failed=["2x2@0,0"])
    >>> program = mmj.install(mm.plan(fabric.mesh, "hamiltonian"), fabric, update="two-phase")
    >>> loss = lambda w, batch: jnp.mean((batch["x"] @ w - batch["y"]) ** 2)
    >>> init, step = mmj.train_step(loss, optax.adam(0.1), fabric)
    >>> w = jnp.zeros((3, 1))
    >>> state = jax.jit(init)(w, program)
    >>> batch = {"x": jnp.ones((24, 3)), "y": jnp.ones((24, 1))}
    >>> w, state, value = jax.jit(step, donate_argnums=(0, 1))(w, state, batch, program)
    >>> float(value)
    1.0
    """
    check_microbatches(microbatches)
    optimizer = with_steady_dtypes(optimizer)
    if isinstance(fabric, TiledFabric):
        return tiled_train_step(
            loss,
            optimizer,
            fabric,
            shardings,
            has_aux=has_aux,
            microbatches=microbatches,
            accumulate_dtype=accumulate_dtype,
            per_example=per_example,
        )
    check_data_parallel(fabric, shardings)
    replicated, by_device = PartitionSpec(), PartitionSpec(fabric.axes)

    def with_aux(params: Any, batch: Any) -> tuple[Any, Any]:
        return loss(params, batch) if has_aux else (loss(params, batch), ())

    def shard_mapped(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        # With check_vma JAX would itself sum the gradients of replicated weights.
        return jax.shard_map(function, mesh=fabric.jax_mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def state_specs(params: Any, program: Program) -> Any:
        """Return how the optimizer's state is split: arrays by owner if the update is sharded, numbers not at all."""
        check_program(program, fabric)
        if not program.is_sharded:
            return replicated
        shards = abstract_shards(params, program, accumulate_dtype)
        whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, travel_dtype(x.dtype, accumulate_dtype)), params)
        check_elementwise(optimizer, shards, whole, own=params, with_turn=program.update == "fused")
        state = jax.eval_shape(optimizer.init, shards)
        return jax.tree.map(lambda leaf: by_device if leaf.ndim else replicated, state)

    def init(params: Any, program: Program) -> Any:
        def local(params: Any, program: Program) -> Any:
            if not program.is_sharded:
                return optimizer.init(params)
            return optimizer.init(shard_of(params, program, accumulate_dtype=accumulate_dtype))

        params = jax.tree.map(jnp.asarray, params)
        specs = state_specs(params, program)
        return shard_mapped(local, (replicated, program.spec), specs)(params, program)

    def cut_own(params: Any, batch: Any, program: Program) -> tuple[Any, Any]:
        """Return this chip's shard of the parameters if the update is sharded, and the batch.

        To be cut, the parameters are packed. That is over, and its buffer free, before anything is made of the batch.
        """
        if not program.is_sharded:
            return None, batch
        own_params = shard_of(params, program, accumulate_dtype=accumulate_dtype)
        found: tuple[Any, Any] = lax.optimization_barrier((own_params, batch))
        return found

    def mean_update(params: Any, state: Any, batch: Any, scale: Any, program: Program) -> tuple[Any, ...]:
        own_params, batch = cut_own(params, batch, program)
        extras, gradients = mean_gradients(with_aux, params, batch, microbatches, accumulate_dtype)
        if not program.is_sharded:
            gradients, extras = all_reduce((gradients, extras), program, mean=True, accumulate_dtype=accumulate_dtype)
            params, state = update_weights(optimizer, params, state, gradients, scale, value=extras[0])
        else:
            extras = all_reduce(extras, program.for_scalars, mean=True, accumulate_dtype=accumulate_dtype)
            n_devices = int(fabric.jax_mesh.size)
            params, state = sharded_update(
                optimizer,
                params,
                own_params,
                state,
                gradients,
                lambda total: total / n_devices,
                scale,
                extras[0],
                program,
                accumulate_dtype,
            )
        return params, state, *extras

    def true_mean_update(
        params: Any, state: Any, batch: Any, weights: Any, scale: Any, program: Program
    ) -> tuple[Any, ...]:
        own_params, batch = cut_own(params, batch, program)
        sums = weighted_sums(with_aux, params, batch, weights, microbatches, accumulate_dtype)
        own = jax.eval_shape(with_aux, params, batch)

        def means(extras: Any, weight: Any) -> Any:
            return jax.tree.map(
                lambda x, like: divide_by_weight(x, weight, empty=jnp.nan).astype(mean_dtype(like.dtype)), extras, own
            )

        if not program.is_sharded:
            gradients, extras, weight = all_reduce(sums, program)
            extras = means(extras, weight)
            gradients = jax.tree.map(
                lambda x, like: divide_by_weight(x, weight, empty=0.0).astype(like.dtype), gradients, params
            )
            params, state = update_weights(optimizer, params, state, gradients, scale, value=extras[0])
        else:
            extras, weight = all_reduce((sums.extras, sums.weight), program.for_scalars)
            extras = means(extras, weight)
            params, state = sharded_update(
                optimizer,
                params,
                own_params,
                state,
                sums.gradients,
                lambda total: divide_by_weight(total, weight, empty=0.0).astype(total.dtype),
                scale,
                extras[0],
                program,
                accumulate_dtype,
            )
        return params, state, *extras

    def step(
        params: Any, state: Any, batch: Any, program: Program, *, weights: Any = None, scale: Any = None
    ) -> tuple[Any, ...]:
        params = jax.tree.map(jnp.asarray, params)
        specs = state_specs(params, program)
        check_batch(batch, fabric)
        update: Callable[..., tuple[Any, ...]]
        if per_example:
            n_examples = jnp.shape(jax.tree.leaves(batch)[0])[0]
            weights = jnp.ones(n_examples) if weights is None else jnp.asarray(weights)
            check_weights(weights, batch)
            update, inputs = true_mean_update, [batch, weights]
        elif weights is None:
            update, inputs = mean_update, [batch]
        else:
            raise ParameterError("This step does not take weights: make it with train_step(…, per_example=True).")
        mapped = shard_mapped(
            update,
            (replicated, specs, *[by_device] * len(inputs), replicated, program.spec),
            (replicated, specs, replicated, replicated),
        )
        params, state, value, aux = mapped(params, state, *inputs, scale, program)
        return params, state, value, *([aux] if has_aux else [])

    return TrainStep(init, in_order(step, fabric), fabric, accumulate_dtype)


def mean_gradients(
    with_aux: LossFunction, params: Any, batch: Any, microbatches: int, accumulate_dtype: DTypeLike | None
) -> tuple[Any, Any]:
    """Return the mean loss with its aux, and the mean gradients, over this device's microbatches."""
    differentiate = jax.value_and_grad(with_aux, has_aux=True)
    if microbatches == 1:
        return differentiate(params, batch)
    for leaf in jax.tree.leaves(batch):
        if leaf.shape[0] % microbatches:
            raise ParameterError(
                f"A device's part of the batch has {leaf.shape[0]} examples, which do not divide into {microbatches} "
                "microbatches."
            )
    pieces = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)

    def sum_dtype(own: Any) -> Any:
        return travel_dtype(mean_dtype(own), accumulate_dtype)

    def widened(tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.asarray(x).astype(sum_dtype(jnp.asarray(x).dtype)), tree)

    def add(total: Any, piece: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, widened(differentiate(params, piece))), None

    shapes = jax.eval_shape(differentiate, params, jax.tree.map(lambda x: x[0], pieces))
    start = jax.tree.map(lambda x: jnp.zeros(x.shape, sum_dtype(x.dtype)), shapes)
    total, _ = lax.scan(add, start, pieces)
    value, gradients = jax.tree.map(lambda x, like: (x / microbatches).astype(mean_dtype(like.dtype)), total, shapes)
    return value, gradients
