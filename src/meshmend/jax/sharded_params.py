"""Parameters sharded by owner: each chip keeps its own chunks, and a layer is whole only while it is needed (ZeRO-3).

`shard_params` cuts a tree, `init_sharded` makes one without ever having all of it, `unshard_params` puts it together
again. Inside `jax.shard_map`, `gather_params` returns the whole tree on every chip; its gradient is reduce-scattered,
so that `jax.grad` returns shards like those of the parameters. `scan_layers` does the same for a stack of layers.

Any number of chips will do, and chips may own different numbers of chunks: all make room for as many as the chip that
owns most, and what one does not need is zero.
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
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from meshmend.errors import ParameterError
from meshmend.jax.collectives import Shards, all_gather, reduce_scatter, shard_of, travel_dtype
from meshmend.jax.fabric import Fabric
from meshmend.jax.program import Program, ProgramPair
from meshmend.jax.validation import check_program


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

    @property
    def like(self) -> Any:
        """The tree (of one layer), as shapes and dtypes."""
        leaves = [jax.ShapeDtypeStruct(*facts) for facts in zip(self.shapes, self.dtypes, strict=True)]
        return jax.tree.unflatten(self.structure, leaves)


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
        """Return the tree (of one layer) on every chip; inside `jax.shard_map`."""
        outline = self.outline
        return all_gather(
            shards, program.gather, like=outline.like, accumulate_dtype=outline.accumulate_dtype, unroll=unroll
        )

    def scatter(self, tree: Any, program: ProgramPair, *, mean: bool, unroll: bool = False) -> Shards:
        """Sum a tree (of one layer) over all chips, and return this chip's shards of it; inside `jax.shard_map`."""
        return reduce_scatter(
            tree, program.scatter, mean=mean, accumulate_dtype=self.outline.accumulate_dtype, unroll=unroll
        )

    def check(self, program: Any, *, stacked: bool) -> None:
        """Refuse a program that did not cut these, and a stack where one tree is expected or the reverse."""
        _check_pair(program)
        if self.outline.cut_by != _name_cut(program.scatter):
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


def shard_params(
    params: Any,
    fabric: Fabric,
    program: ProgramPair,
    *,
    stacked: bool = False,
    gather_dtype: DTypeLike | None = None,
    accumulate_dtype: DTypeLike | None = jnp.float32,
) -> ShardedParams:
    """Cut a tree of parameters so that each chip keeps the chunks that it owns; with `stacked`, layer by layer.

    `stacked` says that the first axis of every array is the layers of a stack, for `scan_layers`. The shards have the
    dtype of sums, which is the wider of a parameter's own and `accumulate_dtype`: bfloat16 parameters get float32
    master weights. They are gathered in the parameters' own dtype or, where that is given, as `gather_dtype`.

    >>> import jax, jax.numpy as jnp, meshmend as mm, meshmend.jax as mmj
    >>> fabric = mmj.discover(jax.devices()[:16], shape="4x4", failed=["2x2@0,0"])
    >>> pair = mmj.install_pair(mm.plan(fabric.mesh, "hamiltonian"), fabric)
    >>> layers = {"w": jnp.ones((6, 8, 8)), "b": jnp.ones((6, 8))}
    >>> mmj.shard_params(layers, fabric, pair, stacked=True)
    ShardedParams(6 layers, 432 parameters in shards of float32)
    """
    params = jax.tree.map(jnp.asarray, params)
    return _made(lambda tree: tree, params, fabric, program, stacked, gather_dtype, accumulate_dtype)


def init_sharded(
    make: Callable[[Any], Any],
    key: Any,
    fabric: Fabric,
    program: ProgramPair,
    *,
    stacked: bool = False,
    gather_dtype: DTypeLike | None = None,
    accumulate_dtype: DTypeLike | None = jnp.float32,
) -> ShardedParams:
    """Make parameters as `make(key)` and keep only shards of them; with `stacked`, one layer per key of `key`.

    No more than one layer (or the one tree) is ever whole on a chip. The options are those of `shard_params`.
    """
    return _made(make, key, fabric, program, stacked, gather_dtype, accumulate_dtype)


def _made(
    make: Callable[[Any], Any],
    given: Any,
    fabric: Fabric,
    program: ProgramPair,
    stacked: bool,
    gather_dtype: DTypeLike | None,
    accumulate_dtype: DTypeLike | None,
) -> ShardedParams:
    _check_pair(program)
    check_program(program, fabric)
    n_layers = _count_layers(given) if stacked else None
    first = jax.tree.map(lambda x: x[0], given) if stacked else given
    leaves, structure = jax.tree.flatten(jax.eval_shape(make, first))
    outline = ShardedOutline(
        structure,
        tuple(tuple(leaf.shape) for leaf in leaves),
        tuple(_gather_dtype(leaf.dtype, gather_dtype, accumulate_dtype) for leaf in leaves),
        n_layers,
        None if accumulate_dtype is None else np.dtype(accumulate_dtype),
        _name_cut(program.scatter),
    )

    def local(given: Any, program: ProgramPair) -> Shards:
        def cut(one: Any) -> Shards:
            return shard_of(make(one), program.scatter, accumulate_dtype=accumulate_dtype)

        found: Shards = lax.map(cut, given) if stacked else cut(given)
        return found

    mapped = jax.shard_map(
        local,
        mesh=fabric.jax_mesh,
        in_specs=(PartitionSpec(), program.spec),
        out_specs=_spec(outline, fabric),
        check_vma=False,
    )
    return ShardedParams(jax.jit(mapped)(given, program), outline)


def unshard_params(tree: Any, fabric: Fabric, program: ProgramPair) -> Any:
    """Return a tree with all `ShardedParams` in it put together on every chip, in the dtypes of their shards.

    Nothing is rounded, so that `shard_params`, with these programs or with those of other chips, gives the same
    shards' elements again: this is how parameters and an optimizer's state move from one set of survivors to another.
    """

    def whole(params: ShardedParams) -> Any:
        params.check(program, stacked=params.n_layers is not None)
        outline, leaves = params.outline, jax.tree.leaves(params.outline.like)
        wide = [jax.ShapeDtypeStruct(leaf.shape, travel_dtype(leaf.dtype, outline.accumulate_dtype)) for leaf in leaves]
        like = jax.tree.unflatten(outline.structure, wide)

        def local(shards: Shards, program: ProgramPair) -> Any:
            def join(one: Shards) -> Any:
                return all_gather(one, program.gather, like=like)

            return join(shards) if outline.n_layers is None else lax.map(join, shards)

        mapped = jax.shard_map(
            local,
            mesh=fabric.jax_mesh,
            in_specs=(_spec(outline, fabric), program.spec),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        return jax.jit(mapped)(params.shards, program)

    return jax.tree.map(lambda x: whole(x) if is_sharded(x) else x, tree, is_leaf=is_sharded)


def reshard_params(whole: Any, like: Any, fabric: Fabric, program: ProgramPair) -> Any:
    """Cut what `unshard_params` put together as `like` was cut, for this fabric; `like` may be of other chips.

    Both are any trees, such as (parameters, optimizer's state). Where `like` has a `ShardedParams`, `whole` has the
    tree that it is of; everything else is returned as it is.
    """

    def cut(like: Any, whole: Any) -> Any:
        if not is_sharded(like):
            return whole
        found = shard_params(
            whole,
            fabric,
            program,
            stacked=like.n_layers is not None,
            accumulate_dtype=like.outline.accumulate_dtype,
        )
        outline = like.outline
        if (found.outline.structure, found.outline.shapes) != (outline.structure, outline.shapes):
            raise ParameterError(
                f"Expected parameters of shapes {outline.shapes} in {outline.structure}, got {found.outline.shapes} in "
                f"{found.outline.structure}: `whole` is not what `like` was cut from."
            )
        own = ShardedOutline(
            outline.structure,
            outline.shapes,
            outline.dtypes,
            found.n_layers,
            outline.accumulate_dtype,
            found.outline.cut_by,
        )
        return ShardedParams(found.shards, own)

    return jax.tree.map(cut, like, whole, is_leaf=is_sharded)


def gather_params(params: ShardedParams, program: ProgramPair, *, mean: bool = True, unroll: bool = False) -> Any:
    """Return the whole tree on every chip, inside `jax.shard_map`; its gradient is the shards of the chips' mean.

    For what is not in a stack of layers: embeddings, heads, norms. Without `mean` the gradient is the sum. `unroll` is
    as in `all_reduce`.
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
        lambda x: _spec(x.outline, fabric) if is_sharded(x) else PartitionSpec(), tree, is_leaf=is_sharded
    )


def is_sharded(value: Any) -> bool:
    """Whether this is a `ShardedParams`, for `is_leaf`."""
    return isinstance(value, ShardedParams)


def _spec(outline: ShardedOutline, fabric: Fabric) -> PartitionSpec:
    return PartitionSpec(fabric.axes) if outline.n_layers is None else PartitionSpec(None, fabric.axes)


def _check_pair(program: Any) -> None:
    if not isinstance(program, ProgramPair):
        raise ParameterError(
            f"Parameters are sharded by a ProgramPair, got a {type(program).__name__}: make one with "
            "mmj.install_pair(schedule, fabric)."
        )


def _count_layers(params: Any) -> int:
    shapes = [tuple(leaf.shape) for leaf in jax.tree.leaves(params)]
    counts = {shape[0] if shape else 0 for shape in shapes}
    if len(counts) != 1 or counts == {0}:
        raise ParameterError(
            f"The arrays of a stack have shapes {shapes}: expected the same first axis for all, the layers."
        )
    return int(counts.pop())


def _gather_dtype(own: Any, wanted: DTypeLike | None, accumulate_dtype: DTypeLike | None) -> np.dtype[Any]:
    """Return what a parameter is gathered as; refuse what has no gradient, and gradients of other sums than shards."""
    if not jnp.issubdtype(own, jnp.inexact):
        raise ParameterError(
            f"A parameter has dtype {own}, which has no gradient. Shard real numbers only, and close over the rest."
        )
    dtype: np.dtype[Any] = np.dtype(own if wanted is None else wanted)
    sums = travel_dtype(own, accumulate_dtype)
    if travel_dtype(dtype, accumulate_dtype) != sums:
        raise ParameterError(
            f"Parameters of {np.dtype(own)} have shards of {sums}, but their gradients as {dtype} would be summed in "
            f"{travel_dtype(dtype, accumulate_dtype)}. Give accumulate_dtype=jnp.{sums}."
        )
    return dtype


def _name_cut(program: Program) -> str:
    shape = program.layout.shape
    facts = (shape.n_chips, program.layout.n_cores, shape.total_chunks, shape.owned)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
