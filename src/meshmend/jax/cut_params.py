"""From whole parameters to shards by owner, and back: cut, made layer by layer, put together, moved to other survivors.

All of it works on whole arrays, outside `jax.shard_map`, on chips alone and on tiles, where the arrays are split inside
a tile first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from meshmend.errors import ParameterError
from meshmend.jax.collectives import Shards, all_gather, shard_of, travel_dtype
from meshmend.jax.fabric import Fabric
from meshmend.jax.program import ProgramPair
from meshmend.jax.sharded_params import (
    InsideTiles,
    ShardedOutline,
    ShardedParams,
    check_pair,
    is_sharded,
    name_cut,
    spec_of,
)
from meshmend.jax.shardings import match_specs
from meshmend.jax.tiles import TiledFabric
from meshmend.jax.validation import check_data_parallel, check_program


def shard_params(
    params: Any,
    fabric: Fabric,
    program: ProgramPair,
    *,
    stacked: bool = False,
    shardings: Any = None,
    gather_dtype: DTypeLike | None = None,
    accumulate_dtype: DTypeLike | None = jnp.float32,
) -> ShardedParams:
    """Cut a tree of parameters so that each chip keeps the chunks that it owns; with `stacked`, layer by layer.

    `stacked` says that the first axis of every array is the layers of a stack, for `scan_layers`. The shards have the
    dtype of sums, which is the wider of a parameter's own and `accumulate_dtype`: bfloat16 parameters get float32
    master weights. They are gathered in the parameters' own dtype or, where that is given, as `gather_dtype`.

    On a fabric of tiles `shardings` says how each array (of one layer) is split inside a tile, as in `value_and_grad`.

    >>> import jax, jax.numpy as jnp, meshmend as mm, meshmend.jax as mmj
    >>> fabric = mmj.discover(jax.devices()[:16], shape="4x4", failed=["2x2@0,0"])
    >>> pair = mmj.install_pair(mm.plan(fabric.mesh, "hamiltonian"), fabric)
    >>> layers = {"w": jnp.ones((6, 8, 8)), "b": jnp.ones((6, 8))}
    >>> mmj.shard_params(layers, fabric, pair, stacked=True)
    ShardedParams(6 layers, 432 parameters in shards of float32)
    """
    params = jax.tree.map(jnp.asarray, params)
    return _made(
        lambda tree: tree,
        params,
        fabric,
        program,
        stacked=stacked,
        shardings=shardings,
        gather_dtype=gather_dtype,
        accumulate_dtype=accumulate_dtype,
    )


def init_sharded(
    make: Callable[[Any], Any],
    key: Any,
    fabric: Fabric,
    program: ProgramPair,
    *,
    stacked: bool = False,
    shardings: Any = None,
    gather_dtype: DTypeLike | None = None,
    accumulate_dtype: DTypeLike | None = jnp.float32,
) -> ShardedParams:
    """Make parameters as `make(key)` and keep only shards of them; with `stacked`, one layer per key of `key`.

    No more than one layer (or the one tree) is ever whole on a chip. The options are those of `shard_params`.
    """
    return _made(
        make,
        key,
        fabric,
        program,
        stacked=stacked,
        shardings=shardings,
        gather_dtype=gather_dtype,
        accumulate_dtype=accumulate_dtype,
    )


def _made(make: Callable[[Any], Any], given: Any, fabric: Fabric, program: ProgramPair, **cut: Any) -> ShardedParams:
    made, values, outline = sharder(make, given, fabric, program, **cut)
    return ShardedParams(made(values, program), outline)


def sharder(
    make: Callable[[Any], Any],
    given: Any,
    fabric: Fabric,
    program: ProgramPair,
    *,
    stacked: bool = False,
    shardings: Any = None,
    gather_dtype: DTypeLike | None = None,
    accumulate_dtype: DTypeLike | None = jnp.float32,
) -> tuple[jax.stages.Wrapped, list[Any], ShardedOutline]:
    """Return the program behind `init_sharded`, what it is called with before the programs, and the shards' outline."""
    check_pair(program)
    check_program(program, fabric)
    n_layers = _count_layers(given) if stacked else None
    one = jax.eval_shape(make, jax.tree.map(lambda x: x[0], given) if stacked else given)
    leaves, structure = jax.tree.flatten(one)
    outline = ShardedOutline(
        structure,
        tuple(tuple(leaf.shape) for leaf in leaves),
        tuple(_gather_dtype(leaf.dtype, gather_dtype, accumulate_dtype) for leaf in leaves),
        n_layers,
        None if accumulate_dtype is None else np.dtype(accumulate_dtype),
        name_cut(program.scatter),
        _inside(shardings, one, fabric),
    )

    def cut(tree: Any, program: ProgramPair) -> Shards:
        return shard_of(tree, program.scatter, accumulate_dtype=accumulate_dtype)

    if outline.inside is None:
        function = _shard_mapped(
            lambda given, program: _by_layer(lambda one: cut(make(one), program), given, outline),
            fabric,
            (PartitionSpec(), program.spec),
            spec_of(outline, fabric),
        )
    else:
        # Made by XLA, so that no chip has more of an array than its part of it.
        of_chip = _shard_mapped(cut, fabric, (outline.specs_inside, program.spec), PartitionSpec(fabric.axes))

        def function(given: Any, program: ProgramPair) -> Shards:
            found: Shards = _by_layer(lambda one: of_chip(make(one), program), given, outline)
            return found

    split = fabric.sharding(*spec_of(outline, fabric))
    values, restored = _on_every_process(given)
    made = fabric.jit(lambda values, program: function(restored(values), program), out_shardings=split)
    return made, values, outline


def _on_every_process(given: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return arrays as every process may give them to one program, and the way back from there.

    An array on a device of this process alone cannot be part of it; its values can. Random keys travel as bits.
    """
    leaves, structure = jax.tree.flatten(given)
    is_local = [
        jax.process_count() > 1
        and isinstance(leaf, jax.Array)
        and not isinstance(leaf, jax.core.Tracer)
        and leaf.is_fully_addressable
        for leaf in leaves
    ]
    is_key = [
        local and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf, local in zip(leaves, is_local, strict=True)
    ]
    kinds = [jax.random.key_impl(leaf) if key else None for leaf, key in zip(leaves, is_key, strict=True)]
    bits = [jax.random.key_data(leaf) if key else leaf for leaf, key in zip(leaves, is_key, strict=True)]
    values = [np.asarray(leaf) if local else leaf for leaf, local in zip(bits, is_local, strict=True)]

    def restored(values: list[Any]) -> Any:
        found = [
            value if kind is None else jax.random.wrap_key_data(value, impl=kind)
            for value, kind in zip(values, kinds, strict=True)
        ]
        return jax.tree.unflatten(structure, found)

    return values, restored


def _by_layer(function: Callable[[Any], Any], given: Any, outline: ShardedOutline) -> Any:
    return function(given) if outline.n_layers is None else lax.map(function, given)


def _shard_mapped(function: Callable[..., Any], fabric: Fabric, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    return jax.shard_map(function, mesh=fabric.jax_mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _inside(shardings: Any, like: Any, fabric: Fabric) -> InsideTiles | None:
    if not isinstance(fabric, TiledFabric):
        check_data_parallel(fabric, shardings)
        return None
    specs = match_specs((shardings,), (like,), fabric)[0]
    is_spec = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return InsideTiles(fabric.jax_mesh, tuple(is_spec))


def unshard_params(tree: Any, fabric: Fabric, program: ProgramPair) -> Any:
    """Return a tree with all `ShardedParams` in it put together on every chip, in the dtypes of their shards.

    On tiles the arrays are split inside each tile, and every tile has them. Nothing is rounded, so that cutting them
    again (`reshard_params`), for these or for other chips, gives the same elements: this is how parameters and an
    optimizer's state move from one set of survivors to another.
    """

    def whole(params: ShardedParams) -> Any:
        join = joined(params, fabric, program)

        def function(shards: Shards, program: ProgramPair) -> Any:
            return _by_layer(lambda one: join(one, program), shards, params.outline)

        return fabric.jit(function)(params.shards, program)

    return jax.tree.map(lambda x: whole(x) if is_sharded(x) else x, tree, is_leaf=is_sharded)


def joined(params: ShardedParams, fabric: Fabric, program: ProgramPair) -> Callable[..., Any]:
    """Return the function from one layer's shards and the programs to its tree, in the dtypes of the shards."""
    params.check(program, stacked=params.n_layers is not None)
    outline = params.outline
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, travel_dtype(x.dtype, outline.accumulate_dtype)), outline.own_like
    )
    return _shard_mapped(
        lambda one, program: all_gather(one, program.gather, like=like),
        fabric,
        (PartitionSpec(fabric.axes), program.spec),
        outline.specs_inside,
    )


def reshard_params(whole: Any, like: Any, fabric: Fabric, program: ProgramPair) -> Any:
    """Cut what `unshard_params` put together as `like` was cut, for this fabric; `like` may be of other chips.

    Both are any trees, such as (parameters, optimizer's state), on any devices or on none. Where `like` has a
    `ShardedParams`, `whole` has the tree that it is of; everything else is copied to every device.
    """

    def cut(like: Any, whole: Any) -> Any:
        whole = jax.device_put(whole, fabric.sharding())
        if not is_sharded(like):
            return whole
        outline = like.outline
        specs = None if outline.inside is None else outline.specs_inside
        found = shard_params(
            whole,
            fabric,
            program,
            stacked=outline.n_layers is not None,
            shardings=specs,
            accumulate_dtype=outline.accumulate_dtype,
        )
        if (found.outline.structure, found.outline.shapes) != (outline.structure, outline.shapes):
            raise ParameterError(
                f"Expected parameters of shapes {outline.shapes} in {outline.structure}, got {found.outline.shapes} in "
                f"{found.outline.structure}: `whole` is not what `like` was cut from."
            )
        return ShardedParams(found.shards, dataclasses.replace(found.outline, dtypes=outline.dtypes))

    return jax.tree.map(cut, like, whole, is_leaf=is_sharded)


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
