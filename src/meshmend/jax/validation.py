"""Checks of a train step's arguments before anything is traced, where the caller's own names are still known."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from meshmend.errors import ParameterError
from meshmend.jax.fabric import Fabric
from meshmend.jax.program import Program


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


def check_data_parallel(fabric: Fabric, shardings: Any) -> None:
    """Refuse shardings where each chip has the whole model."""
    if shardings is not None:
        raise ParameterError(
            f"shardings say how a model is split inside tiles, got {fabric!r}, whose chips each have all of it. Cut it "
            "into tiles first, with mmj.tile(fabric, '2x2', model=4), or leave out shardings."
        )


def check_batch(batch: Any, fabric: Fabric) -> None:
    """Refuse a batch whose arrays do not split evenly over the fabric's devices."""
    n_devices = int(fabric.jax_mesh.size)
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if not leaves:
        raise ParameterError("The batch has no arrays, so there is nothing to split over the devices.")
    for path, leaf in leaves:
        name, shape = f"batch{jax.tree_util.keystr(path)}", jnp.shape(leaf)
        if not shape:
            raise ParameterError(
                f"{name} is a single number, but the first axis of each array of a batch is split over the devices. "
                "Repeat it for each example, or make it a parameter."
            )
        if shape[0] % n_devices or not shape[0]:
            below = shape[0] // n_devices * n_devices
            nearest = f"{below} and {below + n_devices}" if below else f"{n_devices} and {2 * n_devices}"
            raise ParameterError(
                f"{name} has {shape[0]} examples, which do not split evenly over the {n_devices} devices of "
                f"{fabric!r}. The nearest sizes that do are {nearest}. For a batch of any size use mmj.Feed, which "
                "pads it, and train_step(…, per_example=True) with its weights."
            )


def check_tile_batch(batch: dict[int, Any], fabric: Fabric, microbatches: int) -> None:
    """Refuse arguments (by number) whose arrays do not split evenly over tiles and microbatches."""
    n_tiles = fabric.mesh.n_chips
    n_parts = n_tiles * microbatches
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if not leaves:
        raise ParameterError("The batch has no arrays, so there is nothing to split over tiles.")
    for path, leaf in leaves:
        number, shape = path[0].key, jnp.shape(leaf)
        name = f"Argument {number}{jax.tree_util.keystr(path[1:])}"
        if not shape:
            raise ParameterError(
                f"{name} is a single number, but it counts as a batch, whose first axis is split over tiles. List "
                f"{number} in shared_argnums if it is the same on all tiles, or in key_argnums if it is a random key."
            )
        if shape[0] % n_parts or not shape[0]:
            below = shape[0] // n_parts * n_parts
            nearest = f"{below} and {below + n_parts}" if below else f"{n_parts} and {2 * n_parts}"
            pieces = f" and {microbatches} microbatches each" if microbatches > 1 else ""
            raise ParameterError(
                f"{name} has {shape[0]} examples, which do not split evenly over {n_tiles} tiles{pieces}. The nearest "
                f"sizes that do are {nearest}. For a batch of any size use mmj.Feed, which pads it to one of these, "
                "and value_and_grad(…, per_example=True) with its weights."
            )


def check_weights(weights: Any, batch: Any) -> None:
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
