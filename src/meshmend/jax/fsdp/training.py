"""A train step for parameters that are sharded by owner: `train_step` for models that do not fit on one chip whole.

The loss gathers what it needs (`gather_params`, `scan_layers`), and the gradients arrive as shards. The optimizer runs
on the shards, so that parameters, gradients and its state are all divided by the number of chips. Norms of layers and
of all gradients are sums over chips: `mmj.lamb`, `mmj.lars` and `mmj.clip_by_global_norm` take them from here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from meshmend.errors import ParameterError
from meshmend.jax.collectives import all_reduce, travel_dtype
from meshmend.jax.elementwise import check_elementwise, update_weights, with_steady_dtypes
from meshmend.jax.fabric import Fabric
from meshmend.jax.fsdp.params import ShardedOutline, ShardedParams, is_sharded, sharded_specs
from meshmend.jax.gradients import PartLoss
from meshmend.jax.layerwise import Mask, ShardedLayers, chosen_elements, inside_tile, squares_of
from meshmend.jax.program import Program
from meshmend.jax.training import Before, Mean, Training, TrainStep
from meshmend.jax.validation import check_program

ShardedLoss = Callable[[Any, Any, Program], Any]
"""From sharded parameters, a device's part of the batch and the programs to a scalar (or, with `has_aux`, that and a
pytree of arrays)."""


def sharded_train_step(
    loss: ShardedLoss,
    optimizer: optax.GradientTransformation,
    fabric: Fabric,
    *,
    has_aux: bool = False,
    microbatches: int = 1,
    accumulate_dtype: DTypeLike | None = jnp.float32,
    per_example: bool = False,
) -> TrainStep:
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
    return _ShardedParams(
        loss, with_steady_dtypes(optimizer), fabric, has_aux, microbatches, accumulate_dtype, per_example
    ).train_step()


@dataclass(frozen=True, eq=False)
class _ShardedParams(Training):
    """A step for parameters of which each chip has its own chunks, and of which the loss gathers what it needs."""

    @property
    def is_fsdp(self) -> bool:
        return True

    def specs(self, params: Any, program: Program) -> tuple[Any, Any]:
        """Return how what is like the parameters is split, as they are; numbers not at all."""
        _check_params(params, program)
        check_program(program, self.fabric)
        n_devices = int(self.fabric.jax_mesh.size)

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
        check_elementwise(self.optimizer, shards, layer_shapes, own=as_given)
        state = jax.eval_shape(self.optimizer.init, shards)
        _check_state(state)
        return sharded_specs(params, self.fabric), sharded_specs(state, self.fabric)

    def loss_of(self, program: Program) -> PartLoss:
        only_sums = replace(program, only_sums=True)
        return lambda params, batch, _: self.loss(params, batch, only_sums)

    def cut(self, params: Any, program: Program) -> Any:
        del program
        return params

    def update(self, before: Before, gradients: Any, mean: Mean, program: Program) -> tuple[Any, Any]:
        means = jax.tree.map(lambda x, like: mean(x).astype(like.dtype), gradients, before.params)
        layers = LayersOfTrees(before.params, program, self.fabric)
        return update_weights(
            self.optimizer, before.params, before.state, means, before.scale, value=before.value, layers=layers
        )


class LayersOfTrees:
    """The layers of sharded parameters, for transformations that ask for norms or masks (`layerwise.Layers`)."""

    def __init__(self, params: Any, program: Program, fabric: Fabric) -> None:
        self.program = program
        self.structure: Any
        self.trees, self.structure = jax.tree.flatten(params, is_leaf=is_sharded)
        self.layers = [self._layers_of(one.outline, fabric) for one in self.trees]

    def _layers_of(self, outline: ShardedOutline, fabric: Fabric) -> ShardedLayers:
        tile = inside_tile(outline.like, outline.specs_inside, fabric)
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
