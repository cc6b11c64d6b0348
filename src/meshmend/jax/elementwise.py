"""Whether an optimiser treats every weight by itself: only then may each chip run it on its own shard.

The optimiser's update is traced, and every operation in it must keep the elements apart. optax's LARS and LAMB, which
need the norm of a whole layer, do not; nor does its clipping by the global norm. Those of `layerwise` do, because they
get their norms from outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from meshmend.errors import ParameterError

MIXING = frozenset(
    {"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "rev", "transpose", "fft", "gather"}
)
"""Operations that let elements meet although they may keep the shape; most others that do so change it."""


def check_elementwise(optimizer: optax.GradientTransformation, shards: Any) -> None:
    """Raise a `ParameterError` that names the operation if the optimiser's update lets elements meet."""
    state = jax.eval_shape(optimizer.init, shards)
    by_layer = (optax.MaskedState, optax.transforms.PartitionState)
    if any(isinstance(leaf, by_layer) for leaf in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, by_layer))):
        raise ParameterError(
            "This optimiser treats some layers differently (optax.masked, partition, or a mask of weight_decay), but a "
            "shard is a flat piece of all layers. Use the masks of mmj.add_decayed_weights, mmj.lars and mmj.lamb, or "
            "pass a Program from install() instead of Halves."
        )
    update = optax.with_extra_args_support(optimizer).update
    traced = jax.make_jaxpr(partial(update, layers=_NoLayers(shards)))(shards, state, shards)
    for equation in _equations(traced.jaxpr):
        shapes = {v.aval.shape for v in equation.invars if getattr(v.aval, "shape", ())}
        if not shapes or _inner(equation):
            continue
        kept = all(v.aval.shape in shapes for v in equation.outvars)
        if len(shapes) > 1 or not kept or equation.primitive.name in MIXING:
            raise ParameterError(
                f"This optimiser cannot update shards of the weights: its {equation.primitive.name} lets weights meet, "
                "and a chip has only some of them. Use one that treats each weight by itself, as optax.sgd, adam and "
                "adamw do; or mmj.lars, mmj.lamb and mmj.clip_by_global_norm, which sum norms over chips; or pass a "
                "Program from install() instead of Halves to update all weights on every chip."
            )


class _NoLayers:
    """Stands in for `ShardedLayers` while an update is traced: whatever it is asked, it keeps the elements apart."""

    def __init__(self, shards: Any) -> None:
        self.shards = shards

    def norms(self, *trees: Any) -> list[Any]:
        return list(trees)

    def global_norm(self, tree: Any) -> Any:
        del tree
        return jnp.ones(())

    def chosen(self, mask: Any) -> Any:
        del mask
        return jax.tree.map(lambda shard: jnp.ones(shard.shape, jnp.bool_), self.shards)


def _inner(equation: Any) -> list[Any]:
    """Return the jaxprs that an equation calls."""
    found = []
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(item, "jaxpr", item)
            if hasattr(jaxpr, "eqns"):
                found.append(jaxpr)
    return found


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in _inner(equation):
            yield from _equations(inner)
