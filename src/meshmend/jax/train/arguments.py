"""Checks of a train step's arguments before anything is traced, where the caller's own names are still known."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from meshmend.errors import ParameterError
from meshmend.jax.engine.collectives import Tree
from meshmend.jax.engine.fabric import Fabric
from meshmend.jax.engine.program import Program
from meshmend.jax.engine.tiles import TiledFabric


def check_microbatches(microbatches: Any) -> None:
    """Refuse what is no number of microbatches."""
    if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
        raise ParameterError(f"microbatches is {microbatches!r}, expected a whole number of at least 1.")


def check_program(program: object, fabric: Fabric) -> None:
    """Refuse what is no program, and those of another fabric."""
    if not isinstance(program, Program):
        raise ParameterError(
            f"Expected a Program, got a {type(program).__name__}: make one of a schedule with mmj.install(schedule, "
            "fabric, update=…), and pass it as an argument."
        )
    # Inside jit the tables have no devices: there only the number of chips can be compared.
    where = getattr(program.owned, "sharding", None)
    jax_mesh = where.mesh if isinstance(where, NamedSharding) and isinstance(where.mesh, Mesh) else fabric.jax_mesh
    if program.n_chips != fabric.mesh.n_chips or jax_mesh != fabric.jax_mesh:
        raise ParameterError(
            f"The program is for {program.n_chips} chips of another fabric than the train step's, which is {fabric!r}. "
            "Give train_step and install the same fabric."
        )


def check_data_parallel(fabric: Fabric, shardings: Tree) -> None:
    """Refuse shardings where each chip has the whole model."""
    if shardings is not None:
        raise ParameterError(
            f"shardings say how a model is split inside tiles, got {fabric!r}, whose chips each have all of it. Cut it "
            "into tiles first, with mmj.tile(fabric, '2x2', model=4), or leave out shardings."
        )


def check_batch(batch: dict[str, Any], fabric: Fabric, microbatches: int, *, instead: str) -> None:
    """Refuse a batch, in parts by their names, whose arrays do not split evenly over devices or tiles and microbatches.

    `instead` says what to do with a single number.
    """
    n_parts = fabric.n_parts * microbatches
    is_tiled = isinstance(fabric, TiledFabric)
    named = [
        (f"{name}{jax.tree_util.keystr(path)}", jnp.shape(leaf))
        for name, part in batch.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(part)
    ]
    over = f"{fabric.n_parts} tiles" if is_tiled else f"the {fabric.n_parts} devices of {fabric!r}"
    if not named:
        raise ParameterError(f"The batch has no arrays, so there is nothing to split over {over}.")
    for name, shape in named:
        if not shape:
            raise ParameterError(f"{name} is a single number, but a batch's first axis is split over {over}. {instead}")
        if shape[0] % n_parts or not shape[0]:
            below = shape[0] // n_parts * n_parts
            nearest = f"{below} and {below + n_parts}" if below else f"{n_parts} and {2 * n_parts}"
            pieces = f" and {microbatches} microbatches each" if microbatches > 1 else ""
            raise ParameterError(
                f"{name} has {shape[0]} examples, which do not split evenly over {over}{pieces}. The nearest sizes "
                f"that do are {nearest}. For a batch of any size use mmj.Feed, which pads it to one of these, and "
                "per_example=True with its weights."
            )


def weights_of(weights: Any, batch: Tree, maker: str, *, per_example: bool) -> jax.Array | None:
    """Return the weights of examples, by default all 1, or None where the loss is a mean; refuse any that do not fit.

    `maker` is the function that makes what is called with them.
    """
    if not per_example:
        if weights is not None:
            raise ParameterError(f"This does not take weights: make it with {maker}(…, per_example=True).")
        return None
    found = jnp.ones(jnp.shape(jax.tree.leaves(batch)[0])[0]) if weights is None else jnp.asarray(weights)
    check_weights(found, batch)
    return found


def check_weights(weights: Any, batch: Tree) -> None:
    """Refuse weights that are not one real number per example, and arrays with different numbers of examples."""
    (first, leaf), *others = jax.tree_util.tree_leaves_with_path(batch)
    n_examples = jnp.shape(leaf)[0]
    for path, other in others:
        if jnp.shape(other)[0] != n_examples:
            raise ParameterError(
                f"With per_example=True all arrays of a batch have one row per example, but "
                f"batch{jax.tree_util.keystr(first)} has {n_examples} rows and batch{jax.tree_util.keystr(path)} has "
                f"{jnp.shape(other)[0]}."
            )
    if jnp.shape(weights) != (n_examples,):
        raise ParameterError(
            f"The weights have shape {jnp.shape(weights)}, expected ({n_examples},): one for each example of the batch."
        )
    dtype = jnp.result_type(weights)
    if not any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
        raise ParameterError(f"The weights are of dtype {dtype}, expected real numbers, such as float32.")
