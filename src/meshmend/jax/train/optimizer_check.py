"""Whether an optimizer is element-wise: only then may each chip run it on its own shard.

The optimizer's update is traced, and every operation in it must keep the elements apart. optax's LARS and LAMB, which
need the norm of a whole layer, do not; nor does its clipping by the global norm. Those of `optimizers` do, because they
receive their norms as an argument. And it must do the same to all layers: see `optimizer_formulas`.

To run it on a few numbers, whole and in shards, and compare the results would not do: a limit far above those numbers,
a step that is never reached, a layer larger than those tried all go unseen, and a wrong gradient is what follows. And
the same formula in arrays of other shapes rounds differently, so that even Adam's bits differ.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from meshmend.errors import ParameterError
from meshmend.jax.engine.collectives import Tree
from meshmend.jax.engine.jaxprs import equations, inner_jaxprs
from meshmend.jax.train.optimizer_formulas import Formulas, keeps_layers_apart

MIXING = frozenset(
    {"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "rev", "transpose", "fft", "gather"}
)
"""Operations that combine elements although they may keep the shape; most others that do so change it."""
POSITIONAL = frozenset({"iota", "random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"})
"""Operations whose results depend on an element's position in the array, which differs in a shard."""
STEADY_WITHIN = 4
"""Updates after which the dtypes of a state no longer change, in any optimizer seen so far; most need one."""
INSTEAD = "or install with update='replicated', to update all weights on every chip."
NEEDS_NORMS = (
    "This optimizer needs norms of layers before it updates the first weight, as LARS and LAMB do. But in a fused "
    "update each weight is updated as soon as its gradient is complete. Install with update='two-phase' instead."
)


def check_elementwise(
    optimizer: optax.GradientTransformation,
    shards: Tree,
    whole: Tree,
    *,
    own: Tree,
    with_update: bool = False,
) -> None:
    """Raise a `ParameterError` that says why, if the optimizer's update of shards is not that of whole layers.

    `shards`, `whole` (the layers as they are, in the dtypes of the shards) and `own` (the same in their own dtypes) are
    trees of shapes and dtypes. With a fused update, layers' norms are refused too: they are known only when all updates
    are over.
    """
    by_layer = (optax.MaskedState, optax.transforms.PartitionState)
    state, update = _traceable(optimizer, shards, whole, with_update)
    if any(isinstance(leaf, by_layer) for leaf in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, by_layer))):
        raise _by_layer()
    _check_operations(update, state, shards)
    formulas = Formulas()
    of_shards = formulas.of_update(update, state, shards)
    if of_shards != formulas.of_update(update, jax.eval_shape(optimizer.init, whole), whole):
        raise _by_layer()
    if not _ignores_dtypes(optimizer, update, own, whole):
        raise _by_layer()


def check_by_name(
    optimizer: optax.GradientTransformation, layers: Tree, whole: Tree, *, own: Tree, with_update: bool = False
) -> None:
    """Raise one that says why, if the update of `layers`, a tree of shards like `whole`, is not that of whole layers.

    That is asked of each layer, so that layers may be told apart by their names. What is computed for one must not
    depend on another: two layers of one shard are the same array here.
    """
    state, update = _traceable(optimizer, layers, whole, with_update)
    _check_operations(update, state, layers)
    if not keeps_layers_apart(update, state, layers):
        raise _by_layer()
    if not Formulas().are_alike(update, (state, layers), (jax.eval_shape(optimizer.init, whole), whole)):
        raise _by_layer()
    if not _ignores_dtypes(optimizer, update, own, whole):
        raise _by_layer()


def _check_operations(update: Callable[..., Tree], state: Tree, shards: Tree) -> None:
    """Raise a `ParameterError` that names an operation which does not keep elements apart."""
    traced = jax.make_jaxpr(update)(shards, state, shards)
    own_shapes = {shard.shape for shard in jax.tree.leaves(shards)}
    for equation in equations(traced.jaxpr):
        name = equation.primitive.name
        if name in POSITIONAL and any(v.aval.shape in own_shapes for v in equation.outvars):
            raise ParameterError(
                f"This optimizer cannot update shards of the weights: its {name} depends on a weight's position in its "
                f"layer, or draws random numbers, which would be the same on every chip. Use one without; {INSTEAD}"
            )
        shapes = {v.aval.shape for v in equation.invars if getattr(v.aval, "shape", ())}
        if not shapes or inner_jaxprs(equation):
            continue
        kept = all(v.aval.shape in shapes for v in equation.outvars)
        if len(shapes) > 1 or not kept or name in MIXING:
            raise ParameterError(
                f"This optimizer cannot update shards of the weights: its {name} combines values of several weights, "
                "and a chip has only some of them. Use one that treats each weight by itself, as optax.sgd, adam and "
                f"adamw do; or mmj.lars, mmj.lamb and mmj.clip_by_global_norm, which sum norms over chips; {INSTEAD}"
            )


def updates_of(
    optimizer: optax.GradientTransformation, gradients: Tree, state: Tree, params: Tree, *, value: Any, **more: Any
) -> tuple[Tree, Tree]:
    """Call an optimizer's update with everything a train step has; refuse by name any other argument it requires."""
    update = optax.with_extra_args_support(optimizer).update
    try:
        updates, state = update(gradients, state, params, value=value, grad=gradients, **more)
    except TypeError as error:
        if "required keyword-only argument" not in str(error):
            raise
        raise ParameterError(
            f"This optimizer requires something that a train step does not have: {error}. It gets the gradients (grad) "
            "and the mean loss (value), but cannot evaluate the loss again, as a line search does."
        ) from error
    return updates, state


@dataclass(frozen=True)
class Before:
    """What a device updates, and what else an optimizer may look at."""

    whole: Tree
    """The parameters as they are outside of `jax.shard_map`, with the shapes that masks may look at."""
    params: Tree
    own: Tree
    """What of the parameters this device updates."""
    state: Tree
    scale: Any
    """A factor of the updates, or None."""
    value: Any = None
    """The mean loss, once it is known."""


def update_weights(
    optimizer: optax.GradientTransformation, before: Before, gradients: Tree, **more: Any
) -> tuple[Tree, Tree]:
    """Apply the optimizer's updates, times the scale if there is one; return what is updated, and the state."""
    updates, state = updates_of(optimizer, gradients, before.state, before.own, value=before.value, **more)
    if before.scale is not None:
        updates = jax.tree.map(lambda update: update * jnp.asarray(before.scale, update.dtype), updates)
    return optax.apply_updates(before.own, updates), state


def with_steady_dtypes(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer with an `init` whose state has the dtypes that updates leave it with, where those are wider.

    Of bfloat16 weights, `optax.inject_hyperparams` begins with moments in bfloat16, and its first update returns them
    in float32. A compiled step, a copy in memory and a checkpoint have one dtype per array, from the first step on.
    Widening changes no number. What becomes narrower is left as it is: `compile_train_step` refuses it.
    """
    plain = optax.with_extra_args_support(optimizer)

    def after(gradients: Tree, state: Tree, weights: Tree) -> Tree:
        layers = NoLayers(weights, with_update=False)
        return updates_of(plain, gradients, state, weights, value=jnp.ones(()), layers=layers)[1]

    def widened(leaf: jax.Array, new: jax.ShapeDtypeStruct) -> jax.Array:
        old = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
        try:
            is_wider = old != new.dtype and jnp.promote_types(old, new.dtype) == new.dtype
        except jax.dtypes.TypePromotionError:
            is_wider = False
        return jnp.asarray(leaf, new.dtype) if is_wider and jnp.shape(leaf) == new.shape else leaf

    def init(params: Tree) -> Tree:
        state = plain.init(params)
        for _ in range(STEADY_WITHIN):
            new = jax.eval_shape(after, params, state, params)
            structures: list[Any] = [jax.tree.structure(tree) for tree in (state, new)]
            if structures[0] != structures[1]:
                break
            wider = jax.tree.map(widened, state, new)
            if all(map(operator.is_, jax.tree.leaves(wider), jax.tree.leaves(state))):
                break
            state = wider
        return state

    return optax.GradientTransformationExtraArgs(init, plain.update)


def _traceable(
    optimizer: optax.GradientTransformation, shards: Tree, whole: Tree, with_update: bool
) -> tuple[Tree, Callable[..., Tree]]:
    """Return the state for shards, and an update that can be traced; raise if the optimizer needs layers instead."""

    def traced(gradients: Tree, state: Tree, weights: Tree) -> Tree:
        layers = NoLayers(weights, with_update)
        return updates_of(optimizer, gradients, state, weights, value=jnp.ones(()), layers=layers)

    def works(tree: Tree) -> Tree:
        state = jax.eval_shape(optimizer.init, tree)
        jax.eval_shape(traced, tree, state, tree)
        return state

    try:
        return works(shards), traced
    except ParameterError:
        raise
    except Exception as error:
        works(whole)  # an optimizer that is wrong for whole layers too fails with its own error
        raise _by_layer() from error


def _ignores_dtypes(
    optimizer: optax.GradientTransformation, update: Callable[..., Tree], own: Tree, whole: Tree
) -> bool:
    """Whether an update does the same to layers in their own dtypes as in those of the shards."""

    def facts(tree: Tree) -> list[tuple[tuple[int, ...], object]]:
        return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]

    if facts(own) == facts(whole):
        return True
    ways = []
    for tree in (own, whole):
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), leaf.dtype), tree)
        try:
            ways.append((jax.eval_shape(optimizer.init, shapes), shapes))
            jax.eval_shape(update, shapes, *ways[-1])
        except jax.dtypes.TypePromotionError:
            return True  # JAX does no arithmetic in float8: on one device there is nothing to be compared with
    return Formulas(any_width=True).are_alike(update, *ways)


def _by_layer() -> ParameterError:
    return ParameterError(
        "This optimizer treats some layers differently (by a mask, by labels as in optax.partition, by name, ndim, "
        "shape or dtype). But a shard is a flat piece of all layers, in the dtype of sums. Make a mask or labels "
        "before, as in mask=jax.tree.map(lambda x: x.ndim > 1, params): of whole parameters, or of "
        "jax.eval_shape(make, key) where init_sharded makes them. Or use the masks of mmj.add_decayed_weights, "
        f"mmj.lars and mmj.lamb; {INSTEAD}"
    )


class NoLayers:
    """Stands in for `ShardedLayers` while an update is traced: all of its results are element-wise."""

    def __init__(self, shards: Tree, with_update: bool) -> None:
        self.shards = shards
        self.with_update = with_update

    def norms(self, *trees: Tree) -> list[Tree]:
        """Return real numbers."""
        if self.with_update:
            raise ParameterError(NEEDS_NORMS)
        return [jax.tree.map(jnp.abs, tree) for tree in trees]  # norms are real, of complex weights too

    def global_norm(self, tree: Tree, *, limit: ArrayLike | None = None) -> jax.Array:
        """Return a number."""
        del tree
        if self.with_update and limit is None:
            raise ParameterError(NEEDS_NORMS)
        return jnp.ones(())

    def chosen(self, mask: Any) -> Tree:
        """Return bools."""
        del mask
        return jax.tree.map(lambda shard: jnp.ones(shard.shape, jnp.bool_), self.shards)
