"""A train step for parameters that are sharded by owner: `train_step` for models that do not fit on one chip whole.

The loss gathers what it needs (`gather_params`, `scan_layers`), and the gradients arrive as shards. The optimizer runs
on the shards, so that parameters, gradients and its state are all divided by the number of chips. Norms of layers and
of all gradients are sums over chips: `mmj.lamb`, `mmj.lars` and `mmj.clip_by_global_norm` take them from here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from meshmend.errors import ParameterError
from meshmend.jax.engine.collectives import Shards, Tree, groups_of, travel_dtype
from meshmend.jax.engine.fabric import Fabric
from meshmend.jax.engine.program import Program
from meshmend.jax.train.arguments import check_program
from meshmend.jax.train.by_name import for_shards
from meshmend.jax.train.fsdp.params import ShardedParams, is_sharded, sharded_specs
from meshmend.jax.train.optimizer_check import Before, update_weights, with_steady_dtypes
from meshmend.jax.train.optimizers import LayerPart, ShardedLayers, inside_tile
from meshmend.jax.train.part_sums import PartLoss
from meshmend.jax.train.step import Mean, Training, TrainStep

ShardedLoss = Callable[[Tree, Tree, Program], Tree]
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
    of a stack has norms of its own. Masks and labels of optax may go by the names of layers: they are trees of these,
    with one layer's names for a stack.

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

    is_fsdp = True

    checked: dict[Any, optax.GradientTransformationExtraArgs] = field(default_factory=dict, repr=False)
    """The optimizer as it updates shards, for parameters that have been traced."""

    def specs(self, params: Tree, program: Program) -> tuple[Tree, Tree]:
        """Return how what is like the parameters is split, as they are; numbers not at all."""
        _check_params(params, program)
        check_program(program, self.fabric)
        state = jax.eval_shape(self.optimizer_of(params, program).init, self._shards(params))
        _check_state(state)
        return sharded_specs(params, self.fabric), sharded_specs(state, self.fabric)

    def optimizer_of(self, params: Tree, program: Program) -> optax.GradientTransformationExtraArgs:
        leaves, structure = jax.tree.flatten(params)
        key = structure, tuple((x.shape, x.dtype) for x in leaves), program.layout
        if key not in self.checked:

            def layers(one: ShardedParams) -> Tree:
                sums = one.outline.accumulate_dtype
                return jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct(x.shape, travel_dtype(x.dtype, sums)), one.outline.like
                )

            members, n_before = list[list[int]](), 0
            for one in jax.tree.leaves(params, is_leaf=is_sharded):
                own = jax.tree.leaves(one.outline.own_like)
                groups = groups_of(own, program.layout, one.outline.accumulate_dtype)
                members += [[n_before + i for i in group.members] for group in groups]
                n_before += len(own)
            whole, as_given = (
                jax.tree.map(f, params, is_leaf=is_sharded) for f in (layers, lambda one: one.outline.like)
            )
            self.checked[key] = for_shards(self.optimizer, self._shards(params), members, whole, own=as_given)
        return self.checked[key]

    def _shards(self, params: Tree) -> Tree:
        """Return what a device has of parameters, as shapes and dtypes."""
        n_devices = int(self.fabric.jax_mesh.size)

        def own(one: ShardedParams) -> ShardedParams:
            n_stack = 0 if one.n_layers is None else 1

            def of_device(x: Any) -> Any:
                *stack, rows = x.shape[: n_stack + 1]
                return jax.ShapeDtypeStruct((*stack, rows // n_devices, *x.shape[n_stack + 1 :]), x.dtype)

            return ShardedParams(tuple(map(of_device, one.shards)), one.outline)

        return jax.tree.map(own, params, is_leaf=is_sharded)

    def loss_of(self, program: Program) -> PartLoss:
        program = replace(program, only_sums=self.per_example)
        return lambda params, batch, _: self.loss(params, batch, program)

    def cut(self, params: Tree, program: Program) -> Tree:
        del program
        return params

    def update(self, before: Before, gradients: Tree, mean: Mean, program: Program) -> tuple[Tree, Tree]:
        means = jax.tree.map(lambda x, like: mean(x).astype(like.dtype), gradients, before.params)
        optimizer = self.optimizer_of(before.whole, program)
        return update_weights(optimizer, before, means, layers=_layers_of(before.params, program, self.fabric))


def _layers_of(params: Tree, program: Program, fabric: Fabric) -> ShardedLayers:
    """Return the layers of sharded parameters; each layer of a stack has norms of its own."""
    trees, structure = jax.tree.flatten(params, is_leaf=is_sharded)
    parts = [
        LayerPart.of_shards(
            one.outline.own_like,
            program,
            one.outline.accumulate_dtype,
            inside_tile(one.outline.specs_inside, fabric),
            is_stack=one.n_layers is not None,
        )
        for one in trees
    ]

    def split(tree: Tree) -> list[Shards]:
        return [one.shards for one in jax.tree.leaves(tree, is_leaf=is_sharded)]

    def join(shards: list[Shards]) -> Tree:
        found = [ShardedParams(own, one.outline) for own, one in zip(shards, trees, strict=True)]
        return jax.tree.unflatten(structure, found)

    whole = jax.tree.unflatten(structure, [one.outline.like for one in trees])
    return ShardedLayers(parts, program, whole, split=split, join=join)


def _check_params(params: Tree, program: Any) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_sharded)
    for path, leaf in leaves:
        if not is_sharded(leaf):
            raise ParameterError(
                f"params{jax.tree_util.keystr(path)} is a {type(leaf).__name__}, expected ShardedParams: cut it with "
                "mmj.fsdp.shard_params. Small arrays are best cut together, as one tree."
            )
        leaf.check(program, stacked=leaf.n_layers is not None)
    if not leaves:
        raise ParameterError("There are no parameters, expected ShardedParams: make them by mmj.fsdp.init_sharded.")


def _check_state(state: Tree) -> None:
    """Refuse an array of the state that is not like the parameters: nobody knows how it is split."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_sharded):
        if not is_sharded(leaf) and leaf.ndim:
            raise ParameterError(
                f"The optimizer's state has at {jax.tree_util.keystr(path)} an array of shape {leaf.shape} that is not "
                "sharded as the parameters are. Use an optimizer whose state is made of numbers and of trees like them."
            )
