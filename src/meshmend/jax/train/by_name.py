"""Optimizers that treat layers by name, for weights that lie in shards: masks and labels, as of `optax.masked`.

A shard is a flat piece of layers without their names. So the optimizer is given a tree like the parameters, in which
each layer is the whole shard that it is part of. As every update is element-wise, what comes back for a layer is right
in this layer's elements, and of each element its own layer's is taken. Layers that are treated alike have the same
formula (`optimizer_formulas`), so that a layer's is taken per formula, not per layer; XLA computes each formula once.

An optimizer that goes by `ndim`, shape or dtype would see those of shards, and is refused (`optimizer_check`). A mask
that was made of the parameters before goes by name, however it was made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from meshmend.errors import ParameterError
from meshmend.jax.engine.collectives import Tree
from meshmend.jax.train.optimizer_check import NoLayers, check_by_name, check_elementwise, updates_of
from meshmend.jax.train.optimizer_formulas import Formulas
from meshmend.jax.train.optimizers import Mask, ShardedLayers


def for_shards(
    optimizer: optax.GradientTransformation,
    shards: Tree,
    members: Sequence[Sequence[int]],
    whole: Tree,
    *,
    own: Tree,
    with_update: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer as it updates shards: as it is, or by the names of layers; refuse what is neither.

    The trees are as in `check_elementwise`, and `members` are the numbers of the layers in each of the shards.
    """
    try:
        check_elementwise(optimizer, shards, whole, own=own, with_update=with_update)
    except ParameterError as error:
        named = ByName(optimizer, whole, shards, members)
        try:
            check_by_name(optimizer, named.layers_of(shards), whole, own=own, with_update=with_update)
            jax.eval_shape(named.init, shards)
        except Exception:
            # That of shards says more than one about a tree that nobody has made.
            raise error from None
        return optax.GradientTransformationExtraArgs(named.init, named.update)
    return optax.with_extra_args_support(optimizer)


@dataclass(frozen=True)
class _Found:
    """An array that an optimizer has returned for a layer; its formula is a number, equal for equal values."""

    value: Any
    formula: int

    @property
    def shape(self) -> tuple[int, ...]:
        return jnp.shape(self.value)


class ByName:
    """An optimizer of a tree like `params`, for a tree of shards, each of which has these of its layers.

    Its state has a tree of shards wherever that of `params` has a tree like it, as if it had been given the shards.
    """

    def __init__(
        self, optimizer: optax.GradientTransformation, params: Tree, shards: Tree, members: Sequence[Sequence[int]]
    ) -> None:
        self.optimizer = optax.with_extra_args_support(optimizer)
        self.leaves: list[Any]
        self.structure: Any
        self.leaves, self.structure = jax.tree.flatten(params)
        self.outer: Any = jax.tree.structure(shards)
        self.members = members

    def layers_of(self, shards: Tree, like: Tree = None) -> Tree:
        """Return a tree like the parameters of the shards that its layers are in; those that `like` lacks are left out.

        Layers without elements are in none, and stay as they are.
        """
        # Of layers without elements alone: an array of a whole layer would be made just to be replaced.
        found: list[Any] = [
            None if math.prod(leaf.shape) else jnp.zeros(leaf.shape, leaf.dtype) for leaf in self.leaves
        ]
        for shard, members in zip(jax.tree.leaves(shards, is_leaf=_is_left_out), self.members, strict=True):
            for i in members:
                found[i] = shard
        layers = jax.tree.unflatten(self.structure, found)
        if like is None:
            return layers
        return jax.tree.map(lambda one, own: one if _is_left_out(one) else own, like, layers, is_leaf=_is_left_out)

    def init(self, shards: Tree) -> Tree:
        """Return the state for shards."""
        state = self._tagged(lambda *args: self.optimizer.init(self.layers_of(*args)), None, shards)
        return self._joined(state, shards, None)

    def update(
        self, gradients: Tree, state: Tree, params: Tree, *, layers: ShardedLayers, **more: Any
    ) -> tuple[Tree, Tree]:
        """Return updates of shards and their state."""
        template = jax.eval_shape(self.optimizer.init, self.layers_of(params))

        def call(gradients: Tree, state: Tree, params: Tree, layers: Any, **more: Any) -> tuple[Tree, Tree]:
            split = self._split(state, template, params)
            return updates_of(
                self.optimizer, self.layers_of(gradients), split, self.layers_of(params), **more, layers=layers
            )

        def traced(gradients: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
            none = NoLayers(self.layers_of(params), with_update=False)
            return call(gradients, state, params, none, value=jnp.ones(()))

        numbers = [one for part in layers.parts for one in part.numbers]
        own = {"value": more["value"], "layers": _LayersByName(self, layers, params, numbers)}
        found = self._tagged(traced, call(gradients, state, params, **own), gradients, state, params)
        return self.join(found[0], numbers), self._joined(found[1], params, numbers)

    def join(self, tree: Tree, numbers: Sequence[jax.Array] | None) -> Tree:
        """Return shards in which each element is that of its own layer; of layers that were left out, 0.

        A shard all of whose layers were left out is left out.
        """
        by_layer = jax.tree.broadcast(tree, jax.tree.unflatten(self.structure, self.leaves), is_leaf=_is_left_out)
        leaves = jax.tree.leaves(by_layer, is_leaf=_is_left_out)
        found = [
            _merged([leaves[i] for i in members], None if numbers is None else numbers[which])
            for which, members in enumerate(self.members)
        ]
        return self.outer.unflatten(found)

    def _tagged(self, function: Any, values: Any, *args: Any) -> Any:
        """Return what a function returned, or returns, each array with the number of its formula."""
        values = function(*args) if values is None else values
        leaves, structure = jax.tree.flatten(values)
        formulas = Formulas().of_outputs(function, *args)
        return jax.tree.unflatten(structure, list(map(_Found, leaves, formulas)))

    def _joined(self, state: Tree, shards: Tree, numbers: Sequence[jax.Array] | None) -> Tree:
        nodes, outer = _flatten(state, self._likeness(shards))
        return outer.unflatten([node.value if isinstance(node, _Found) else self.join(node, numbers) for node in nodes])

    def _split(self, state: Tree, template: Tree, shards: Tree) -> Tree:
        """Return the state of a tree, of which this is that of shards."""
        is_like = self._likeness(shards)
        nodes, outer = _flatten(template, is_like)
        own = outer.flatten_up_to(state)
        return outer.unflatten(
            [self.layers_of(mine, node) if is_like(node) else mine for node, mine in zip(nodes, own, strict=True)]
        )

    def _likeness(self, shards: Tree) -> Callable[[Any], bool]:
        """Return whether a part of a state is a tree like the parameters, as a function.

        Layers may be left out of it, alone or all those of a branch, as by a mask that is a prefix of the tree.
        """
        layers = self.layers_of(shards)

        def is_like(node: Any) -> bool:
            def fits(one: Any, layer: Any) -> bool:
                return _is_left_out(one) or one.shape == getattr(layer, "shape", None)

            if all(map(_is_left_out, jax.tree.leaves(node, is_leaf=_is_left_out))):
                return False
            try:
                return all(jax.tree.leaves(jax.tree.map(fits, node, layers, is_leaf=_is_left_out)))
            except ValueError:  # another structure
                return False

        return is_like


class _LayersByName:
    """What a layer-wise transformation may ask, as `Layers`, of trees in which each layer is a shard."""

    def __init__(self, named: ByName, layers: ShardedLayers, params: Tree, numbers: Sequence[jax.Array]) -> None:
        self.named = named
        self.layers = layers
        self.params = params
        self.numbers = numbers

    def norms(self, *trees: Tree) -> list[Tree]:
        found = self.layers.norms(*map(self._shards, trees))
        return [self.named.layers_of(norms, tree) for norms, tree in zip(found, trees, strict=True)]

    def global_norm(self, tree: Tree, *, limit: ArrayLike | None = None) -> jax.Array:
        return self.layers.global_norm(self._shards(tree), limit=limit)

    def chosen(self, mask: Mask) -> Tree:
        return self.named.layers_of(self.layers.chosen(mask))

    def _shards(self, tree: Tree) -> Tree:
        """Return the shards of a tree, with zeros for what is left out: they add nothing to a norm."""
        found = self.named.join(jax.tree.map(lambda leaf: _Found(leaf, id(leaf)), tree), self.numbers)
        return jax.tree.map(lambda own, one: jnp.zeros_like(own) if _is_left_out(one) else one, self.params, found)


def _merged(found: Sequence[Any], numbers: jax.Array | None) -> Any:
    """Return an array of the elements of all layers of a group, from one array per layer."""
    places: dict[int, list[int]] = {}
    for place, one in enumerate(found):
        if not _is_left_out(one):
            places.setdefault(one.formula, []).append(place)
    if not places:
        return optax.MaskedNode()
    values = [found[of_formula[0]].value for of_formula in places.values()]
    is_whole = not any(map(_is_left_out, found))
    if len(values) == 1 and (is_whole or numbers is None):
        return values[0]
    if numbers is None:
        raise ParameterError("The first state of a layer must not depend on its name.")
    merged = values[0] if is_whole else jnp.zeros_like(values[0])
    for value, of_formula in list(zip(values, places.values(), strict=True))[is_whole:]:
        chosen = np.zeros(len(found) + 1, bool)
        chosen[of_formula] = True
        merged = jnp.where(jnp.asarray(chosen)[numbers], value, merged)
    return merged


def _flatten(state: Tree, is_like: Callable[[Any], bool]) -> tuple[list[Any], Any]:
    """Return the trees like the parameters that a state has, and what else it has, in order."""
    return jax.tree.flatten(state, is_leaf=is_like)


def _is_left_out(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
