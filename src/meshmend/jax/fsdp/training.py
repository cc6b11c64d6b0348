"""A train step for parameters that are sharded by owner: `train_step` for models that do not fit on one chip whole.

The loss gathers what it needs (`gather_params`, `scan_layers`), and the gradients arrive as shards. The optimizer runs
on the shards, so that parameters, gradients and its state are all divided by the number of chips. Norms of layers and
of all gradients are sums over chips: `mmj.lamb`, `mmj.lars` and `mmj.clip_by_global_norm` take them from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from meshmend.errors import ParameterError
from meshmend.jax.collectives import all_reduce, travel_dtype
from meshmend.jax.differentiate import rows_by_tile
from meshmend.jax.elementwise import check_elementwise, update_weights, with_steady_dtypes
from meshmend.jax.fabric import Fabric
from meshmend.jax.fsdp.params import ShardedOutline, ShardedParams, is_sharded, sharded_specs
from meshmend.jax.layerwise import InsideTile, Mask, ShardedLayers, chosen_elements, squares_of
from meshmend.jax.ordering import in_order
from meshmend.jax.program import Program
from meshmend.jax.shardings import copies_in_tile
from meshmend.jax.tiles import TILE_AXIS, TiledFabric
from meshmend.jax.training import mean_gradients
from meshmend.jax.validation import check_batch, check_microbatches, check_program, check_tile_batch, check_weights
from meshmend.jax.weighted import divide_by_weight, weighted_sums

ShardedLoss = Callable[[Any, Any, Program], Any]
"""From sharded parameters, a device's part of the batch and the programs to a scalar (or, with `has_aux`, that and a
pytree of arrays)."""


@dataclass(frozen=True)
class ShardedTrainStep:
    """The two functions of a training loop with sharded parameters, both to be jitted. Made by `sharded_train_step`."""

    init: Callable[[Any, Program], Any]
    """From parameters and programs to the optimizer's state, sharded as the parameters are."""
    step: Callable[..., tuple[Any, ...]]
    """From parameters, state, a batch and programs to new parameters, state, loss (and aux).

    Keywords: `weights` (with `per_example`) and `scale`, by which the optimizer's updates are multiplied."""
    fabric: Fabric

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return iter((self.init, self.step))


def sharded_train_step(
    loss: ShardedLoss,
    optimizer: optax.GradientTransformation,
    fabric: Fabric,
    *,
    has_aux: bool = False,
    microbatches: int = 1,
    accumulate_dtype: DTypeLike | None = jnp.float32,
    per_example: bool = False,
) -> ShardedTrainStep:
    """Return `init(params, pair)` and `step(params, state, batch, pair)` for parameters that are sharded by owner.

    `loss(params, batch, pair)` is the mean over its part of the batch, as in `train_step`; it runs inside
    `jax.shard_map` and gathers what it needs of the parameters with `gather_params` and `scan_layers`. On a fabric of
    tiles it sees one tile's part of the batch, under `jax.vmap`, and the model's own sharding works inside it. All
    parameters are `ShardedParams`, in any tree. Gradients are means over devices and over `microbatches`, each of which
    gathers the parameters again. The loss and `aux` are averaged, in `accumulate_dtype` where that is wider.

    With `per_example` the loss has one value per example, and everything is a true mean over examples, as in
    `train_step`, with `step(…, weights=w)`. Where a device has only examples of weight 0, they must not give NaN.

    The optimizer must be element-wise, or get norms from here, as for any sharded update: use `mmj.lamb`, `mmj.lars`,
    `mmj.clip_by_global_norm` and `mmj.add_decayed_weights`, whose masks see one layer's arrays of a stack. Each layer
    of a stack has norms of its own.

    >>> import jax, jax.numpy as jnp, optax, meshmend as mm, meshmend.jax as mmj
    >>> fabric = mmj.discover(jax.devices()[:16], shape="4x4", failed=["2x2@0,0"])
    >>> pair = mmj.install(mm.plan(fabric.mesh, "hamiltonian"), fabric, update="two-phase")
    >>> params = mmj.fsdp.shard_params({"w": jnp.zeros((3, 1))}, fabric, pair)
    >>> def loss(params, batch, pair):
    ...     return jnp.mean((batch["x"] @ mmj.fsdp.gather_params(params, pair)["w"] - batch["y"]) ** 2)
    >>> init, step = mmj.fsdp.sharded_train_step(loss, optax.adam(0.1), fabric)
    >>> state = jax.jit(init)(params, pair)
    >>> batch = {"x": jnp.ones((24, 3)), "y": jnp.ones((24, 1))}
    >>> params, state, value = jax.jit(step, donate_argnums=(0, 1))(params, state, batch, pair)
    >>> float(value), params
    (1.0, ShardedParams(3 parameters in shards of float32))
    """
    check_microbatches(microbatches)
    optimizer = with_steady_dtypes(optimizer)
    whole, by_device = PartitionSpec(), PartitionSpec(fabric.axes)

    def state_specs(params: Any, program: Program) -> Any:
        """Return how the optimizer's state is split: what is like the parameters as they are, numbers not at all."""
        _check_params(params, program)
        check_program(program, fabric)
        n_devices = int(fabric.jax_mesh.size)

        def own(one: ShardedParams) -> ShardedParams:
            shards: Any = [
                jax.ShapeDtypeStruct((*x.shape[:-2], x.shape[-2] // n_devices, x.shape[-1]), x.dtype)
                for x in one.shards
            ]
            return ShardedParams(tuple(shards), one.outline)

        def layers(one: ShardedParams) -> Any:
            sums = one.outline.accumulate_dtype
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, travel_dtype(x.dtype, sums)), one.outline.like)

        shards, layer_shapes, as_given = (
            jax.tree.map(f, params, is_leaf=is_sharded) for f in (own, layers, lambda one: one.outline.like)
        )
        check_elementwise(optimizer, shards, layer_shapes, own=as_given)
        state = jax.eval_shape(optimizer.init, shards)
        _check_state(state)
        return sharded_specs(state, fabric)

    def shard_mapped(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(function, mesh=fabric.jax_mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def init(params: Any, program: Program) -> Any:
        specs = state_specs(params, program)
        return shard_mapped(optimizer.init, (sharded_specs(params, fabric),), specs)(params)

    def differentiate(params: Any, batch: Any, weights: Any, program: Program) -> tuple[Any, Any, Any]:
        """Return the shards of everybody's gradients, and of this device's part of the batch loss, aux and weight.

        All are means, and there is no weight; or, with `per_example`, all are sums.
        """
        pair = replace(program, only_sums=per_example)

        def with_aux(params: Any, batch: Any) -> tuple[Any, Any]:
            found = loss(params, batch, pair)
            return found if has_aux else (found, ())

        if per_example:
            sums = weighted_sums(with_aux, params, batch, weights, microbatches, accumulate_dtype, over_devices=True)
            return sums.gradients, sums.extras, sums.weight
        extras, gradients = mean_gradients(with_aux, params, batch, microbatches, accumulate_dtype)
        return gradients, extras, None

    def update(
        params: Any, state: Any, gradients: Any, own: tuple[Any, Any], scale: Any, program: Program
    ) -> tuple[Any, ...]:
        extras, weight = own
        if per_example:
            (value, aux), weight = all_reduce((extras, weight), program.for_scalars)
            value, aux = jax.tree.map(lambda x: divide_by_weight(x, weight, empty=jnp.nan), (value, aux))
            gradients = jax.tree.map(lambda x: divide_by_weight(x, weight, empty=0.0).astype(x.dtype), gradients)
        else:
            value, aux = all_reduce(extras, program.for_scalars, mean=True, accumulate_dtype=accumulate_dtype)
        layers = LayersOfTrees(params, program, fabric)
        params, state = update_weights(optimizer, params, state, gradients, scale, value=value, layers=layers)
        return params, state, value, aux

    def on_chips(params: Any, state: Any, batch: Any, weights: Any, scale: Any, program: Program) -> tuple[Any, ...]:
        def local(params: Any, state: Any, batch: Any, weights: Any, scale: Any, program: Program) -> tuple[Any, ...]:
            gradients, extras, weight = differentiate(params, batch, weights, program)
            return update(params, state, gradients, (extras, weight), scale, program)

        check_batch(batch, fabric)
        specs = sharded_specs(params, fabric), state_specs(params, program)
        mapped = shard_mapped(local, (*specs, by_device, by_device, whole, program.spec), (*specs, whole, whole))
        found: tuple[Any, ...] = mapped(params, state, batch, weights, scale, program)
        return found

    def on_tiles(
        params: Any, state: Any, batch: Any, weights: Any, scale: Any, program: Program, fabric: TiledFabric
    ) -> tuple[Any, ...]:
        def local(params: Any, state: Any, gradients: Any, own: Any, *others: Any) -> tuple[Any, ...]:
            return update(params, state, gradients, jax.tree.map(lambda x: x[0], own), *others)

        check_tile_batch({2: batch}, fabric, microbatches)
        by_tile = PartitionSpec(TILE_AXIS)
        specs = sharded_specs(params, fabric), state_specs(params, program)
        # The shards of the gradients are the same for all tiles, or rather for none: they are split over all devices.
        by_vmap = jax.vmap(differentiate, in_axes=(None, 0, 0, None), out_axes=(None, 0, 0), spmd_axis_name=TILE_AXIS)
        rows, row_weights = rows_by_tile((batch, weights), fabric)
        gradients, extras, weight = by_vmap(params, rows, row_weights, program)
        mapped = shard_mapped(local, (*specs, specs[0], by_tile, whole, program.spec), (*specs, whole, whole))
        found: tuple[Any, ...] = mapped(params, state, gradients, (extras, weight), scale, program)
        return found

    def step(
        params: Any, state: Any, batch: Any, program: Program, *, weights: Any = None, scale: Any = None
    ) -> tuple[Any, ...]:
        if per_example:
            n_examples = jnp.shape(jax.tree.leaves(batch)[0])[0]
            weights = jnp.ones(n_examples) if weights is None else jnp.asarray(weights)
            check_weights(weights, batch)
        elif weights is not None:
            raise ParameterError(
                "This step does not take weights: make it with sharded_train_step(…, per_example=True)."
            )
        if isinstance(fabric, TiledFabric):
            params, state, value, aux = on_tiles(params, state, batch, weights, scale, program, fabric)
        else:
            params, state, value, aux = on_chips(params, state, batch, weights, scale, program)
        return (params, state, value, aux) if has_aux else (params, state, value)

    return ShardedTrainStep(init, in_order(step, fabric), fabric)


class LayersOfTrees:
    """The layers of sharded parameters, for transformations that ask for norms or masks (`layerwise.Layers`)."""

    def __init__(self, params: Any, program: Program, fabric: Fabric) -> None:
        self.program = program
        self.structure: Any
        self.trees, self.structure = jax.tree.flatten(params, is_leaf=is_sharded)
        self.layers = [self._layers_of(one.outline, fabric) for one in self.trees]

    def _layers_of(self, outline: ShardedOutline, fabric: Fabric) -> ShardedLayers:
        tile = None
        if isinstance(fabric, TiledFabric):
            tile = InsideTile(outline.like, fabric.inner_axes, copies_in_tile(outline.specs_inside, fabric))
        return ShardedLayers(outline.own_like, self.program, outline.accumulate_dtype, tile)

    def norms(self, *trees: Any) -> list[Any]:
        """Return, as arrays like the shards, the norm of the array (of its own layer) that each element belongs to."""
        return [
            self._spread(
                lambda squares, layers: tuple(
                    jnp.sqrt(per_array)[..., numbers]
                    for per_array, numbers in zip(squares, layers.layer_of, strict=True)
                ),
                squares,
            )
            for squares in self._sums_of_squares(*trees)
        ]

    def global_norm(self, tree: Any, *, limit: Any = None) -> Any:
        """Return the norm over everything."""
        del limit
        (squares,) = self._sums_of_squares(tree)
        return jnp.sqrt(sum(jnp.sum(per_array) for per_array in jax.tree.leaves(squares)))

    def chosen(self, mask: Mask) -> Any:
        """Return whether each element's array is chosen by the mask, which sees one layer of a stack."""
        like = jax.tree.unflatten(self.structure, [one.outline.like for one in self.trees])
        if mask is None:
            masks = [None] * len(self.trees)
        else:
            masks = self.structure.flatten_up_to(mask(like) if callable(mask) else mask)
        return self._spread(
            lambda mask, layers: chosen_elements(mask, layers.params, layers.groups, layers.layer_of), masks
        )

    def _spread(self, function: Callable[[Any, ShardedLayers], Any], given: list[Any]) -> Any:
        found = [
            ShardedParams(function(one, layers), tree.outline)
            for one, layers, tree in zip(given, self.layers, self.trees, strict=True)
        ]
        return jax.tree.unflatten(self.structure, found)

    def _sums_of_squares(self, *trees: Any) -> list[Any]:
        """Return, for each tree and each part of it, the sums over all chips: one per array, or per layer and array."""

        def local(one: ShardedParams, layers: ShardedLayers) -> list[Any]:
            found = []
            for shard, numbers, group in zip(one.shards, layers.layer_of, layers.groups, strict=True):
                n_arrays = len(group.members)
                flat = squares_of(shard).reshape(-1, numbers.size)
                sums = jax.vmap(lambda x: jax.ops.segment_sum(x, numbers.ravel(), n_arrays + 1))(flat)  # noqa: B023
                # The last is what is padding.
                sums = sums.at[:, n_arrays].set(0)
                if layers.tile is not None:
                    sums = sums * layers.tile.shares(group).astype(sums.dtype)
                found.append(sums if one.n_layers is not None else sums[0])
            return found if layers.tile is None else layers.tile.total(found)

        parts = [
            [
                local(one, layers)
                for one, layers in zip(jax.tree.leaves(tree, is_leaf=is_sharded), self.layers, strict=True)
            ]
            for tree in trees
        ]
        found: list[Any] = all_reduce(parts, self.program.for_scalars)
        return found


def _check_params(params: Any, program: Any) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_sharded)
    for path, leaf in leaves:
        if not is_sharded(leaf):
            raise ParameterError(
                f"params{jax.tree_util.keystr(path)} is a {type(leaf).__name__}, expected ShardedParams: cut it with "
                "mmj.fsdp.shard_params. Small arrays are best cut together, as one tree."
            )
        leaf.check(program, stacked=leaf.n_layers is not None)
    if not leaves:
        raise ParameterError("There are no parameters.")


def _check_state(state: Any) -> None:
    """Refuse an array of the state that is not like the parameters: nobody knows how it is split."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_sharded):
        if not is_sharded(leaf) and leaf.ndim:
            raise ParameterError(
                f"The optimizer's state has at {jax.tree_util.keystr(path)} an array of shape {leaf.shape} that is not "
                "sharded as the parameters are. Use an optimizer whose state is made of numbers and of trees like them."
            )
