"""Parameters sharded by owner: each chip keeps its own chunks, and a layer is whole only while it is needed (ZeRO-3).

`gather_params` returns the whole tree on every chip; its gradient is reduce-scattered, so that `jax.grad` returns
shards like those of the parameters. `scan_layers` does the same for a stack of layers; `cut_params` has the way from
whole trees to shards and back.

Any number of chips will do, and chips may own different numbers of chunks: all make room for as many as the chip that
owns most, and what one does not need is zero.

On chips alone this runs inside `jax.shard_map`. On tiles a loss runs under `jax.vmap` over tiles, whose inner axes are
XLA's, so that gathering and scattering are `shard_map`s of their own, over all axes: each chip exchanges its own shards
of the arrays with the chips in its place of the other tiles. vmap would refuse those; a rule of ours says what they do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshmend.errors import ParameterError
from meshmend.jax.collectives import Shards, all_gather, reduce_scatter
from meshmend.jax.fabric import Fabric
from meshmend.jax.program import Program, ProgramPair
from meshmend.jax.tiles import TILE_AXIS


class SummingPair(ProgramPair):
    """A pair with which gradients are sums over all devices, whatever a loss asks for: a train step divides them."""


@dataclass(frozen=True)
class InsideTiles:
    """How the arrays are split inside tiles, before each chip's part of them is cut into chunks."""

    jax_mesh: Mesh
    specs: tuple[PartitionSpec, ...]


@dataclass(frozen=True)
class ShardedOutline:
    """What all chips know of sharded parameters: the tree that they are shards of, and how it was cut."""

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    """Of one layer's arrays, where there is a stack of layers."""
    dtypes: tuple[np.dtype[Any], ...]
    """What the arrays are gathered as."""
    n_layers: int | None
    accumulate_dtype: np.dtype[Any] | None
    cut_by: str
    """A name for the chunks and owners of the plan."""
    inside: InsideTiles | None = None
    """None where there are no tiles."""

    @property
    def like(self) -> Any:
        """The tree (of one layer), as shapes and dtypes."""
        leaves = [jax.ShapeDtypeStruct(*facts) for facts in zip(self.shapes, self.dtypes, strict=True)]
        return jax.tree.unflatten(self.structure, leaves)

    @property
    def own_like(self) -> Any:
        """What one chip has of that tree before it is cut into chunks: all of it, or its part inside a tile."""
        if self.inside is None:
            return self.like
        mesh, specs = self.inside.jax_mesh, self.specs_inside
        return jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(x.shape), x.dtype),
            self.like,
            specs,
        )

    @property
    def specs_inside(self) -> Any:
        """How the tree (of one layer) is split inside a tile."""
        specs = [PartitionSpec()] * len(self.shapes) if self.inside is None else self.inside.specs
        return jax.tree.unflatten(self.structure, specs)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class ShardedParams:
    """A tree of parameters (or of anything like them: gradients, moments) of which each chip has its own chunks.

    It is a pytree whose leaves are the shards, one array per dtype of sums, so that element-wise optimizers work on it
    as it is. Made by `shard_params` and `init_sharded`.
    """

    shards: Shards
    outline: ShardedOutline = field(metadata={"static": True})

    @property
    def n_layers(self) -> int | None:
        """Layers of a stack; None where this is no stack."""
        return self.outline.n_layers

    @property
    def n_params(self) -> int:
        """Parameters, of all layers."""
        return (self.n_layers or 1) * sum(map(prod, self.outline.shapes))

    def layer(self, number: Any) -> Shards:
        """Return the shards of one layer of a stack."""
        return tuple(lax.dynamic_index_in_dim(shard, number, keepdims=False) for shard in self.shards)

    def gather(self, shards: Shards, program: ProgramPair, *, unroll: bool = False) -> Any:
        """Return the tree (of one layer) on every chip, or split inside every tile."""
        outline = self.outline

        def local(shards: Shards, program: ProgramPair) -> Any:
            return all_gather(
                shards, program.gather, like=outline.own_like, accumulate_dtype=outline.accumulate_dtype, unroll=unroll
            )

        if outline.inside is None:
            return local(shards, program)
        mesh = outline.inside.jax_mesh
        mapped: Any = custom_vmap(
            jax.shard_map(
                local,
                mesh=mesh,
                in_specs=(PartitionSpec(mesh.axis_names), program.spec),
                out_specs=outline.specs_inside,
                check_vma=False,
            )
        )

        def refuse(*_: Any) -> Any:
            raise ParameterError("Shards are the same for all tiles: give vmap's in_axes None for sharded parameters.")

        mapped.def_vmap(refuse)
        return mapped(shards, program)

    def scatter(self, tree: Any, program: ProgramPair, *, mean: bool, unroll: bool = False) -> Shards:
        """Sum a tree (of one layer) over all chips, or over tiles, and return this chip's shards of it."""
        outline = self.outline

        def local(tree: Any, program: ProgramPair) -> Shards:
            return reduce_scatter(
                tree,
                program.scatter,
                mean=mean and not isinstance(program, SummingPair),
                accumulate_dtype=outline.accumulate_dtype,
                unroll=unroll,
            )

        if outline.inside is None:
            return local(tree, program)
        mesh = outline.inside.jax_mesh
        stacked = jax.tree.map(
            lambda spec: PartitionSpec(TILE_AXIS, *spec),
            outline.specs_inside,
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )
        sum_rows: Callable[..., Shards] = jax.shard_map(
            lambda tree, program: local(jax.tree.map(lambda x: x[0], tree), program),
            mesh=mesh,
            in_specs=(stacked, program.spec),
            out_specs=PartitionSpec(mesh.axis_names),
            check_vma=False,
        )

        def row_per_tile(x: Any) -> Any:
            return jnp.broadcast_to(x, (mesh.shape[TILE_AXIS], *x.shape))

        def sum_same(tree: Any, program: ProgramPair) -> Shards:
            """Sum what is the same on all tiles."""
            return sum_rows(jax.tree.map(row_per_tile, tree), program)

        def sum_batched(axis_size: int, in_batched: Any, tree: Any, program: ProgramPair) -> tuple[Shards, Any]:
            del axis_size
            rows = jax.tree.map(lambda x, batched: x if batched else row_per_tile(x), tree, in_batched[0])
            shards = sum_rows(rows, program)
            return shards, jax.tree.map(lambda _: False, shards)

        over_tiles: Any = custom_vmap(sum_same)
        over_tiles.def_vmap(sum_batched)
        found: Shards = over_tiles(tree, program)
        return found

    def check(self, program: Any, *, stacked: bool) -> None:
        """Refuse a program that did not cut these, and a stack where one tree is expected or the reverse."""
        check_pair(program)
        if self.outline.cut_by != name_cut(program.scatter):
            raise ParameterError(
                "These parameters were cut by another plan, for other chunks or other owners. Put them together with "
                "unshard_params and the programs that cut them, and cut them again with shard_params."
            )
        if stacked and self.n_layers is None:
            raise ParameterError(
                "These parameters are one tree, expected a stack of layers: cut arrays whose first axis is the layers "
                "with shard_params(…, stacked=True), or use gather_params."
            )
        if not stacked and self.n_layers is not None:
            raise ParameterError(
                f"These parameters are a stack of {self.n_layers} layers, expected one tree: use scan_layers, which "
                "gathers one layer at a time, or unshard_params for all at once."
            )

    def __repr__(self) -> str:
        layers = f"{self.n_layers} layers, " if self.n_layers is not None else ""
        dtypes = ", ".join(sorted({str(shard.dtype) for shard in self.shards}))
        return f"ShardedParams({layers}{self.n_params:,} parameters in shards of {dtypes})"


def gather_params(params: ShardedParams, program: ProgramPair, *, mean: bool = True, unroll: bool = False) -> Any:
    """Return the whole tree on every chip; its gradient is the shards of the chips' mean.

    For what is not in a stack of layers: embeddings, heads, norms. Without `mean` the gradient is the sum. `unroll` is
    as in `all_reduce`. Call it inside `jax.shard_map` or, on tiles, in the loss of `sharded_train_step`.
    """
    if not is_sharded(params):
        raise ParameterError(f"Expected ShardedParams, as shard_params makes, got a {type(params).__name__}.")
    params.check(program, stacked=False)

    @jax.custom_vjp
    def gather(shards: Shards, program: ProgramPair) -> Any:
        return params.gather(shards, program, unroll=unroll)

    def forward(shards: Shards, program: ProgramPair) -> tuple[Any, ProgramPair]:
        return gather(shards, program), program

    def backward(program: ProgramPair, gradients: Any) -> tuple[Shards, None]:
        return params.scatter(gradients, program, mean=mean, unroll=unroll), None

    gather.defvjp(forward, backward)
    return gather(params.shards, program)


def sharded_specs(tree: Any, fabric: Fabric) -> Any:
    """Return how `jax.shard_map` splits a tree that has `ShardedParams` in it; other leaves are whole on each chip."""
    return jax.tree.map(
        lambda x: spec_of(x.outline, fabric) if is_sharded(x) else PartitionSpec(), tree, is_leaf=is_sharded
    )


def is_sharded(value: Any) -> bool:
    """Whether this is a `ShardedParams`, for `is_leaf`."""
    return isinstance(value, ShardedParams)


def spec_of(outline: ShardedOutline, fabric: Fabric) -> PartitionSpec:
    """Return how the shards are split over all devices."""
    return PartitionSpec(fabric.axes) if outline.n_layers is None else PartitionSpec(None, fabric.axes)


def check_pair(program: Any) -> None:
    """Refuse what is no pair of programs."""
    if not isinstance(program, ProgramPair):
        raise ParameterError(
            f"Parameters are sharded by a ProgramPair, got a {type(program).__name__}: make one with "
            "mmj.install_pair(schedule, fabric)."
        )


def name_cut(program: Program) -> str:
    """Return a name for the chunks and owners of a plan: shards of another name do not fit."""
    shape = program.layout.shape
    facts = (shape.n_chips, program.layout.n_cores, shape.total_chunks, shape.owned)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
