"""How parameters are split inside a tile: what a caller gives, checked and matched to the parameters."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshmend.errors import ParameterError
from meshmend.jax.engine.collectives import Tree
from meshmend.jax.engine.fabric import Fabric
from meshmend.jax.engine.tiles import TILE_AXIS


def match_specs(shardings: Tree, params: Tree, fabric: Fabric) -> Tree:
    """Return one PartitionSpec for each parameter, in a tree like theirs.

    `shardings` has PartitionSpecs, NamedShardings or None (one copy per chip) in a tree like the parameters', or in a
    prefix of one. A tree of another kind with as many leaves, such as another library's, is matched in order.
    """
    leaves, structure = jax.tree.flatten(params)
    given = jax.tree.leaves(shardings, is_leaf=_is_sharding)
    if len(given) != len(leaves):
        try:
            spread = jax.tree.map(
                lambda one, part: [one] * len(jax.tree.leaves(part)), shardings, params, is_leaf=_is_sharding
            )
        except ValueError as error:
            raise ParameterError(
                f"There are {len(given)} shardings for {len(leaves)} parameters, and they are no prefix of the "
                f"parameters' tree: {error}"
            ) from None
        given = jax.tree.leaves(spread, is_leaf=_is_sharding)
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    specs = [
        _check_spec(one, jnp.shape(leaf), f"parameter {jax.tree_util.keystr(path[1:])}".rstrip(), fabric)
        for one, leaf, path in zip(given, leaves, paths, strict=True)
    ]
    return jax.tree.unflatten(structure, specs)


def shapes_inside(tree: Tree, specs: Tree, jax_mesh: jax.sharding.Mesh) -> Tree:
    """Return what one device has of arrays, or of their shapes, that are split by these specs: shapes and dtypes."""

    def inside(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(NamedSharding(jax_mesh, spec).shard_shape(tuple(leaf.shape)), leaf.dtype)

    return jax.tree.map(inside, tree, specs)


def copies_in_tile(specs: Tree, fabric: Fabric) -> tuple[int, ...]:
    """Return, for each of the specs in a tree, how many devices of a tile have the same elements."""

    def parts(spec: PartitionSpec) -> int:
        names = [one for names in spec if names is not None for one in ((names,) if isinstance(names, str) else names)]
        return prod(fabric.jax_mesh.shape[one] for one in names)

    return tuple(fabric.devices_per_tile // parts(spec) for spec in jax.tree.leaves(specs, is_leaf=is_spec))


def stacked_specs(specs: Tree) -> Tree:
    """Return the specs of arrays that have one row per tile, each split inside its tile by `specs`."""
    return jax.tree.map(lambda spec: PartitionSpec(TILE_AXIS, *spec), specs, is_leaf=is_spec)


def specs_of_state(state: Tree, params: Tree, specs: Tree) -> Tree:
    """Return one PartitionSpec for each array of an optimizer's state: that of the parameter that it belongs to.

    An array belongs to the parameter whose path its own ends with, if it has the same shape, as a moment in optax does;
    anything else has one copy per chip.
    """
    known = {
        (path, jnp.shape(leaf)): spec
        for (path, leaf), spec in zip(
            jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(specs, is_leaf=is_spec), strict=True
        )
    }

    def spec_of(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        suffixes = (path[start:] for start in range(len(path) + 1))
        return next((known[end, leaf.shape] for end in suffixes if (end, leaf.shape) in known), PartitionSpec())

    return jax.tree_util.tree_map_with_path(spec_of, state)


def is_spec(value: object) -> bool:
    """Whether this is a PartitionSpec, for `is_leaf`."""
    return isinstance(value, PartitionSpec)


def _is_sharding(value: Any) -> bool:
    return value is None or isinstance(value, PartitionSpec | NamedSharding)


def _check_spec(given: Any, shape: tuple[int, ...], name: str, fabric: Fabric) -> PartitionSpec:
    """Return a sharding as a spec of the axes inside a tile that divides the parameter's axes."""
    if not _is_sharding(given):
        raise ParameterError(
            f"The sharding of {name} is a {type(given).__name__}, expected a PartitionSpec or a NamedSharding."
        )
    spec = PartitionSpec() if given is None else given.spec if isinstance(given, NamedSharding) else given
    if len(spec) > len(shape):
        raise ParameterError(f"The sharding of {name} is {spec}, but its shape is {shape}: it has fewer axes.")
    for axis, names in enumerate(spec):
        split = () if names is None else (names,) if isinstance(names, str) else tuple(names)
        unknown = [one for one in split if one not in fabric.inner_axes]
        if unknown:
            why = "parameters are the same on all tiles" if TILE_AXIS in unknown else "there is no such axis"
            raise ParameterError(
                f"The sharding of {name} is {spec}, but {why}: expected axes inside a tile, of {fabric.inner_axes}."
            )
        parts = prod(fabric.jax_mesh.shape[one] for one in split)
        if shape[axis] % parts:
            raise ParameterError(
                f"Axis {axis} of {name} has {shape[axis]} elements, which do not divide by the {parts} devices of "
                f"{split}. Pad it to {-(-shape[axis] // parts) * parts}, or leave that axis of it whole."
            )
    return spec
