"""Parameters sharded by owner: each chip keeps its own chunks, and a layer is whole only while it is needed (ZeRO-3).

`gather_params` returns the whole tree on every chip; its gradient is reduce-scattered, so that `jax.grad` returns
shards like those of the parameters. `scan_layers` does the same for a stack of layers.

`shard_params`, `init_sharded` and `unshard_params` lead from whole trees to shards and back: they work on whole arrays,
outside `jax.shard_map`. On tiles the arrays are split inside a tile first.

Any number of chips will do, and chips may own different numbers of chunks: all make room for as many as the chip that
owns most, and what one does not need is zero.

On chips alone gathering runs inside `jax.shard_map`. On tiles a loss runs under `jax.vmap` over tiles, whose inner
axes are XLA's, so that gathering and scattering are `shard_map`s of their own, over all axes: each chip exchanges its
own shards of the arrays with the chips in its place of the other tiles. vmap would refuse those; a rule of ours says
what they do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any, NoReturn, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from meshmend.errors import ParameterError
from meshmend.jax.engine.collectives import Shards, Tree, all_gather, reduce_scatter, shard_of, travel_dtype
from meshmend.jax.engine.fabric import Fabric
from meshmend.jax.engine.program import Program
from meshmend.jax.engine.tiles import TILE_AXIS, TiledFabric
from meshmend.jax.train.arguments import check_data_parallel, check_program
from meshmend.jax.train.shardings import is_spec, match_specs, shapes_inside, stacked_specs


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
    dtypes: tuple[np.dtype[np.generic], ...]
    """What the arrays are gathered as."""
    n_layers: int | None
    accumulate_dtype: np.dtype[np.generic] | None
    cut_by: str
    """A name for the chunks and owners of the plan."""
    inside: InsideTiles | None = None
    """None where there are no tiles."""

    @property
    def like(self) -> Tree:
        """The tree (of one layer), as shapes and dtypes."""
        leaves = [jax.ShapeDtypeStruct(*facts) for facts in zip(self.shapes, self.dtypes, strict=True)]
        return jax.tree.unflatten(self.structure, leaves)

    @property
    def own_like(self) -> Tree:
        """What one chip has of that tree before it is cut into chunks: all of it, or its part inside a tile."""
        if self.inside is None:
            return self.like
        return shapes_inside(self.like, self.specs_inside, self.inside.jax_mesh)

    @property
    def specs_inside(self) -> Tree:
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

    def gather(self, shards: Shards, program: Program, *, unroll: bool = False) -> Tree:
        """Return the tree (of one layer) on every chip, or split inside every tile."""
        outline = self.outline

        def local(shards: Shards, program: Program) -> Tree:
            return all_gather(
                shards, program, like=outline.own_like, accumulate_dtype=outline.accumulate_dtype, unroll=unroll
            )

        if outline.inside is None:
            return local(shards, program)
        mesh = outline.inside.jax_mesh
        in_specs = PartitionSpec(mesh.axis_names), program.spec
        mapped: Any = custom_vmap(_shard_mapped(local, mesh, in_specs, outline.specs_inside))

        def refuse(*_: Any) -> NoReturn:
            raise ParameterError("Shards are the same for all tiles: give vmap's in_axes None for sharded parameters.")

        mapped.def_vmap(refuse)
        return mapped(shards, program)

    def scatter(self, tree: Tree, program: Program, *, mean: bool, unroll: bool = False) -> Shards:
        """Sum a tree (of one layer) over all chips, or over tiles, and return this chip's shards of it."""
        outline = self.outline

        def local(tree: Tree, program: Program) -> Shards:
            return reduce_scatter(
                tree,
                program,
                mean=mean and not program.only_sums,
                accumulate_dtype=outline.accumulate_dtype,
                unroll=unroll,
            )

        if outline.inside is None:
            return local(tree, program)
        mesh = outline.inside.jax_mesh
        sum_rows: Callable[..., Shards] = _shard_mapped(
            lambda tree, program: local(jax.tree.map(lambda x: x[0], tree), program),
            mesh,
            (stacked_specs(outline.specs_inside), program.spec),
            PartitionSpec(mesh.axis_names),
        )

        def row_per_tile(x: Any) -> Tree:
            return jnp.broadcast_to(x, (mesh.shape[TILE_AXIS], *x.shape))

        def sum_same(tree: Tree, program: Program) -> Shards:
            """Sum what is the same on all tiles."""
            return sum_rows(jax.tree.map(row_per_tile, tree), program)

        def sum_batched(axis_size: int, in_batched: Any, tree: Tree, program: Program) -> tuple[Shards, Any]:
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
        if self.outline.cut_by != name_cut(program):
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
        dtypes = ", ".join(sorted({str(getattr(shard, "dtype", shard)) for shard in self.shards}))
        return f"ShardedParams({layers}{self.n_params:,} parameters in shards of {dtypes})"


def gather_params(params: ShardedParams, program: Program, *, mean: bool = True, unroll: bool = False) -> Tree:
    """Return the whole tree on every chip; its gradient is the shards of the chips' mean.

    For what is not in a stack of layers: embeddings, heads, norms. Without `mean` the gradient is the sum. `unroll` is
    as in `all_reduce`. Call it inside `jax.shard_map` or, on tiles, in the loss of `sharded_train_step`.
    """
    if not is_sharded(params):
        raise ParameterError(f"Expected ShardedParams, as shard_params makes, got a {type(params).__name__}.")
    params.check(program, stacked=False)

    @jax.custom_vjp
    def gather(shards: Shards, program: Program) -> Tree:
        return params.gather(shards, program, unroll=unroll)

    def forward(shards: Shards, program: Program) -> tuple[Tree, Program]:
        return gather(shards, program), program

    def backward(program: Program, gradients: Tree) -> tuple[Shards, None]:
        return params.scatter(gradients, program, mean=mean, unroll=unroll), None

    gather.defvjp(forward, backward)
    return gather(params.shards, program)


def sharded_specs(tree: Tree, fabric: Fabric) -> Tree:
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


def check_pair(program: object) -> None:
    """Refuse what is no program of two phases."""
    if not isinstance(program, Program) or program.gather is None:
        got = f"update={program.update!r}" if isinstance(program, Program) else f"a {type(program).__name__}"
        raise ParameterError(
            f"Parameters are sharded by a program with update='two-phase', got {got}: make one with "
            "mmj.install(schedule, fabric, update='two-phase')."
        )


def name_cut(program: Program) -> str:
    """Return a name for the chunks and owners of a plan: shards of another name do not fit."""
    shape = program.layout.shape
    facts = (shape.n_chips, program.layout.n_cores, shape.total_chunks, shape.owned)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


class ShardOptions(TypedDict, total=False):
    """How parameters are cut: see `shard_params`."""

    stacked: bool
    shardings: Tree
    gather_dtype: DTypeLike | None
    accumulate_dtype: DTypeLike | None


def shard_params(params: Tree, fabric: Fabric, program: Program, **options: Unpack[ShardOptions]) -> ShardedParams:
    """Cut a tree of parameters so that each chip keeps the chunks that it owns; with `stacked`, layer by layer.

    `stacked` says that the first axis of every array is the layers of a stack, for `scan_layers`. The shards have the
    dtype of sums, which is the wider of a parameter's own and `accumulate_dtype`: bfloat16 parameters get float32
    master weights. They are gathered in the parameters' own dtype or, where that is given, as `gather_dtype`.

    On a fabric of tiles `shardings` says how each array (of one layer) is split inside a tile, as in `value_and_grad`.

    >>> import jax, jax.numpy as jnp, meshmend as mm, meshmend.jax as mmj
    >>> fabric = mmj.discover(jax.devices()[:16], shape="4x4", failed=["2x2@0,0"])
    >>> pair = mmj.install(mm.plan(fabric.mesh, "hamiltonian"), fabric, update="two-phase")
    >>> layers = {"w": jnp.ones((6, 8, 8)), "b": jnp.ones((6, 8))}
    >>> mmj.fsdp.shard_params(layers, fabric, pair, stacked=True)
    ShardedParams(6 layers, 432 parameters in shards of float32)
    """
    return init_sharded(lambda tree: tree, jax.tree.map(jnp.asarray, params), fabric, program, **options)


def init_sharded(
    make: Callable[[Tree], Tree], key: Any, fabric: Fabric, program: Program, **options: Unpack[ShardOptions]
) -> ShardedParams:
    """Make parameters as `make(key)` and keep only shards of them; with `stacked`, one layer per key of `key`.

    No more than one layer (or the one tree) is ever whole on a chip. The options are those of `shard_params`.
    """
    made, values, outline = sharder(make, key, fabric, program, **options)
    return ShardedParams(made(values, program), outline)


def sharder(
    make: Callable[[Tree], Tree],
    given: Tree,
    fabric: Fabric,
    program: Program,
    *,
    stacked: bool = False,
    shardings: Tree = None,
    gather_dtype: DTypeLike | None = None,
    accumulate_dtype: DTypeLike | None = jnp.float32,
) -> tuple[jax.stages.Wrapped, list[Any], ShardedOutline]:
    """Return the program behind `init_sharded`, what it is called with before the programs, and the shards' outline."""
    check_pair(program)
    check_program(program, fabric)
    n_layers = count_layers(given) if stacked else None
    one = jax.eval_shape(make, jax.tree.map(lambda x: x[0], given) if stacked else given)
    leaves, structure = jax.tree.flatten(one)
    outline = ShardedOutline(
        structure,
        tuple(tuple(leaf.shape) for leaf in leaves),
        tuple(_gather_dtype(leaf.dtype, gather_dtype, accumulate_dtype) for leaf in leaves),
        n_layers,
        None if accumulate_dtype is None else np.dtype(accumulate_dtype),
        name_cut(program),
        _inside(shardings, one, fabric),
    )

    def cut(tree: Tree, program: Program) -> Shards:
        return shard_of(tree, program, accumulate_dtype=accumulate_dtype)

    # Made by XLA, so that in a tile no chip has more of an array than its part of it.
    of_chip = _shard_mapped(cut, fabric.jax_mesh, (outline.specs_inside, program.spec), PartitionSpec(fabric.axes))

    def function(given: Tree, program: Program) -> Shards:
        found: Shards = _by_layer(lambda one: of_chip(make(one), program), given, outline)
        return found

    split = fabric.sharding(*spec_of(outline, fabric))
    values, restored = _on_every_process(given)
    made = fabric.jit(lambda values, program: function(restored(values), program), out_shardings=split)
    return made, values, outline


def _on_every_process(given: Tree) -> tuple[list[Any], Callable[[list[Any]], Tree]]:
    """Return arrays as every process may give them to one program, and the way back from there.

    An array on a device of this process alone cannot be part of it; its values can. Random keys travel as bits.
    """
    leaves, structure = jax.tree.flatten(given)
    is_key = [jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key) for leaf in leaves]
    kinds = [jax.random.key_impl(leaf) if key else None for leaf, key in zip(leaves, is_key, strict=True)]
    bits = [jax.random.key_data(leaf) if key else leaf for leaf, key in zip(leaves, is_key, strict=True)]
    values = [np.asarray(leaf) if _is_local(leaf) else leaf for leaf in bits]

    def restored(values: list[Any]) -> Tree:
        found = [
            value if kind is None else jax.random.wrap_key_data(value, impl=kind)
            for value, kind in zip(values, kinds, strict=True)
        ]
        return jax.tree.unflatten(structure, found)

    return values, restored


def _is_local(leaf: Any) -> bool:
    is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return is_array and jax.process_count() > 1 and leaf.is_fully_addressable


def _by_layer(function: Callable[[Tree], Tree], given: Tree, outline: ShardedOutline) -> Tree:
    return function(given) if outline.n_layers is None else lax.map(function, given)


def _shard_mapped(function: Callable[..., Tree], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Tree]:
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _inside(shardings: Tree, like: Tree, fabric: Fabric) -> InsideTiles | None:
    if not isinstance(fabric, TiledFabric):
        check_data_parallel(fabric, shardings)
        return None
    specs = match_specs((shardings,), (like,), fabric)[0]
    return InsideTiles(fabric.jax_mesh, tuple(jax.tree.leaves(specs, is_leaf=is_spec)))


def unshard_params(tree: Tree, fabric: Fabric, program: Program) -> Tree:
    """Return a tree with all `ShardedParams` in it put together on every chip, in the dtypes of their shards.

    On tiles the arrays are split inside each tile, and every tile has them. Nothing is rounded, so that parameters cut
    again, for these or for other chips, have the same elements. In an optimizer's state those stay as they are that it
    leaves out, as a mask says.
    """

    def whole(params: ShardedParams) -> Tree:
        if params.shards and not jax.tree.leaves(params.shards):
            return params
        join = joined(params, fabric, program)

        def function(shards: Shards, program: Program) -> Tree:
            return _by_layer(lambda one: join(one, program), shards, params.outline)

        return fabric.jit(function)(params.shards, program)

    return jax.tree.map(lambda x: whole(x) if is_sharded(x) else x, tree, is_leaf=is_sharded)


def joined(params: ShardedParams, fabric: Fabric, program: Program) -> Callable[..., Tree]:
    """Return the function from one layer's shards and the programs to its tree, in the dtypes of the shards."""
    params.check(program, stacked=params.n_layers is not None)
    outline = params.outline
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, travel_dtype(x.dtype, outline.accumulate_dtype)), outline.own_like
    )
    return _shard_mapped(
        lambda one, program: all_gather(one, program, like=like),
        fabric.jax_mesh,
        (PartitionSpec(fabric.axes), program.spec),
        outline.specs_inside,
    )


def count_layers(params: Tree) -> int:
    """Return how many layers a stack has, the first axis of all of its arrays; refuse any other tree."""
    shapes = [tuple(jnp.shape(leaf)) for leaf in jax.tree.leaves(params)]
    counts = {shape[0] if shape else 0 for shape in shapes}
    if len(counts) != 1 or counts == {0}:
        raise ParameterError(
            f"The arrays of a stack have shapes {shapes}: expected the same first axis for all, the layers."
        )
    return int(counts.pop())


def _gather_dtype(own: Any, wanted: DTypeLike | None, accumulate_dtype: DTypeLike | None) -> np.dtype[np.generic]:
    """Return what a parameter is gathered as; refuse what has no gradient, and gradients of other sums than shards."""
    if not jnp.issubdtype(own, jnp.inexact):
        raise ParameterError(
            f"A parameter has dtype {own}, which has no gradient. Shard real numbers only, and close over the rest."
        )
    dtype: np.dtype[np.generic] = np.dtype(own if wanted is None else wanted)
    sums = travel_dtype(own, accumulate_dtype)
    if travel_dtype(dtype, accumulate_dtype) != sums:
        raise ParameterError(
            f"Parameters of {np.dtype(own)} have shards of {sums}, but their gradients as {dtype} would be summed in "
            f"{travel_dtype(dtype, accumulate_dtype)}. Give accumulate_dtype=jnp.{sums}."
        )
    return dtype
