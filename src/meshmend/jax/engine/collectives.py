"""The collectives: `all_reduce`, `reduce_scatter` and `all_gather` of pytrees, inside `jax.shard_map`.

A pytree is packed into a matrix of chunks per dtype that travels, the program runs over it in place (`loops`), and the
leaves are cut out of the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from meshmend.errors import ParameterError
from meshmend.jax.engine.loops import Chunks, hidden_zero, run
from meshmend.jax.engine.private import varying_axes
from meshmend.jax.engine.program import TILE_WIDTH, TPU_TILE, ChunkLayout, Program
from meshmend.schedule import Collective

Tree = Any
"""A pytree of arrays, or of what there is one of for each of them: JAX has no type for it."""
Leaf = jax.Array | jax.ShapeDtypeStruct
MOST_LOOSE = 0.05
"""Share of a payload that may be in leaves that are not whole tiles, where leaves are joined tile by tile."""
MAX_CHUNK = 2**31 - 1
"""Elements of a chunk, at most. Chunks, and the elements of a chunk, are counted in 32 bits; elements never are."""
Shards = tuple[Annotated[jax.Array, "[R, ...]"], ...]
"""What a chip holds between reduce-scatter and all-gather: per dtype that travels, its own chunks, one per row.

A chunk has the shape that it travels in: see `Group.chunk_shape`."""


def all_reduce(
    tree: Tree,
    program: Program,
    *,
    mean: bool = False,
    accumulate_dtype: DTypeLike | None = None,
    unroll: bool = False,
    counts: Annotated[jax.Array, "[]"] | None = None,
) -> Tree:
    """Sum a pytree of arrays over all live chips; every chip ends with the same bits.

    Call it inside `jax.shard_map` over `fabric.jax_mesh`, with the program as an argument split by `program.spec` and
    `check_vma=False`. `mean` divides by the number of devices. `accumulate_dtype` is the dtype in which sums are sent
    and accumulated, as in `accumulate_dtype=jnp.float32` for bfloat16 gradients; results have their own dtypes. Sums of
    integers wrap as `lax.psum`'s do; means of integers are computed in float32 and cannot wrap. `unroll` writes the
    steps out one by one, so that a TPU's scheduler can put other computing beside each permute: for plans of few steps.
    A device where `counts` is false adds zeros, whatever it has.

    Leaves are packed together by the dtype that travels, so one loop serves all leaves of a dtype: a float32 loss
    beside float32 gradients costs nothing. Leaves of a dtype that have fewer elements together than the plan has
    chunks, as that loss has beside bfloat16 gradients, take `program.scalars` instead, in fewer steps.

    >>> import jax, jax.numpy as jnp, meshmend as mm, meshmend.jax as mmj
    >>> fabric = mmj.discover(jax.devices()[:16], shape="4x4", failed=["2x2@0,0"])
    >>> program = mmj.install(mm.plan(fabric.mesh, "row-pairs"), fabric)
    >>> total = jax.jit(jax.shard_map(mmj.all_reduce, mesh=fabric.jax_mesh, check_vma=False,
    ...                               in_specs=(fabric.sharding("chip").spec, program.spec), out_specs=program.spec))
    >>> total(jnp.arange(12 * 3), program).reshape(12, 3)[-1].tolist()
    [198, 210, 222]
    """
    _expect(program, Collective.ALL_REDUCE, "install(schedule, fabric)")
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))
    _check_varying(leaves, program)
    if mean:
        leaves = [leaf.astype(mean_dtype(leaf.dtype)) for leaf in leaves]
    results: list[jax.Array] = [leaf.astype(sum_dtype(leaf.dtype)) for leaf in leaves]
    for group, way in _ways(leaves, program, accumulate_dtype):
        chunks = run(sum_in_chip(group.pack(leaves, counts), way.layout), way, unroll=unroll)
        for i, total in group.unpack(join_in_chip(chunks, way.layout), leaves):
            results[i] = _divide(total, _divisor(program, mean)).astype(results[i].dtype)
    return jax.tree.unflatten(structure, results)


def _ways(
    leaves: Sequence[jax.Array], program: Program, accumulate_dtype: DTypeLike | None
) -> Iterator[tuple[Group, Program]]:
    """Return the groups of an all-reduce, each with the program that it takes: this one, or that for scalars.

    A plan with many chunks has as many steps as keep all links busy. A group that cannot fill its chunks with one
    element each would run through all of them with mostly padding, and has nothing to keep links busy with: what it
    costs is the number of steps. All others take the plan that was made for them.
    """
    scalars = program.scalars
    for group in groups_of(leaves, program.layout, accumulate_dtype):
        if scalars is not None and group.size < program.layout.n_cores * program.layout.shape.total_chunks:
            yield replace(group, layout=scalars.layout), scalars
        else:
            yield group, program


def reduce_scatter(
    tree: Tree,
    program: Program,
    *,
    mean: bool = False,
    accumulate_dtype: DTypeLike | None = None,
    unroll: bool = False,
) -> Shards:
    """Sum a pytree over all chips and leave each chip with its own chunks of the sum.

    Returns one array per dtype that is sent, with a row per chunk: (R, n), or on TPU (R, n/128, 128). Every chip has as
    many rows as the chip that owns most; the rows that it does not need are zero. `shard_of` cuts any pytree the same
    way. `unroll` is as in `all_reduce`.
    """
    _expect(program, Collective.REDUCE_SCATTER, "install(schedule, fabric, update='two-phase')")
    leaves = jax.tree.leaves(jax.tree.map(jnp.asarray, tree))
    _check_varying(leaves, program)
    whole = [str(leaf.dtype) for leaf in leaves if mean and not jnp.issubdtype(leaf.dtype, jnp.inexact)]
    if whole:
        raise ParameterError(
            f"Shards of a mean of {whole[0]} would not be cut as shards of {whole[0]} are. Convert the values first, "
            "as in x.astype(jnp.float32), or leave out mean=True and divide the sums."
        )
    shards = []
    for group in groups_of(leaves, program.layout, accumulate_dtype):
        chunks = run(sum_in_chip(group.pack(leaves), program.layout), program, unroll=unroll)
        shards.append(_divide(_take_owned(chunks, program), _divisor(program, mean)))
    return tuple(shards)


def shard_of(tree: Tree, program: Program, *, accumulate_dtype: DTypeLike | None = None) -> Shards:
    """Cut a pytree that is the same on all chips into shards, as `reduce_scatter` does, without communication."""
    has_update = getattr(program, "collective", None) is Collective.ALL_REDUCE_WITH_UPDATE
    expected = Collective.ALL_REDUCE_WITH_UPDATE if has_update else Collective.REDUCE_SCATTER
    _expect(program, expected, "install(schedule, fabric, update='two-phase')")
    leaves = jax.tree.leaves(jax.tree.map(jnp.asarray, tree))
    layout = program.layout
    shards = []
    for group in groups_of(leaves, layout, accumulate_dtype):
        packed = group.pack(leaves)
        if layout.core_axis is not None:
            packed = lax.dynamic_index_in_dim(packed, lax.axis_index(layout.core_axis), 0, keepdims=False)
        else:
            packed = packed[0]
        shards.append(_take_owned(packed, program))
    return tuple(shards)


def all_gather(
    shards: Shards,
    program: Program,
    *,
    like: Tree,
    accumulate_dtype: DTypeLike | None = None,
    unroll: bool = False,
) -> Tree:
    """Send every chip's shards to all chips and return them as a pytree with the shapes and dtypes of `like`.

    The program is that of the reduce-scatter, with two phases, or an all-gather alone. `accumulate_dtype` must be what
    the shards were cut with. They travel in the widest dtype of the leaves of `like`, not in `accumulate_dtype`:
    float32 master weights of a bfloat16 model are gathered as bfloat16. `unroll` is as in `all_reduce`.
    """
    program = getattr(program, "gather", None) or program
    _expect(program, Collective.ALL_GATHER, "install(schedule, fabric, update='two-phase')")
    leaves, structure = jax.tree.flatten(like)
    groups = groups_of(leaves, program.layout, accumulate_dtype)
    if len(shards) != len(groups):
        raise ParameterError(
            f"There are {len(shards)} shards, but a tree like this has {len(groups)}. "
            "Use the same tree and the same `accumulate_dtype` for all_gather as for reduce_scatter."
        )
    layout = program.layout
    # Leaves without elements are in no group, and `like` may have shapes only: they are made here.
    results: list[jax.Array | None] = [
        None if math.prod(leaf.shape) else jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves
    ]
    for shard, group in zip(shards, groups, strict=True):
        expected = group.shard_shape(program.owned.shape[-1])
        if shard.shape != expected:
            raise ParameterError(
                f"A shard has shape {shard.shape}, expected {expected}: it was cut from another tree or by another "
                "program. Cut it with shard_of, or reduce_scatter, and this program."
            )
        own = shard.astype(gather_dtype(group, leaves))
        empty = jnp.zeros((layout.shape.total_chunks, *group.chunk_shape), own.dtype)
        chunks = empty.at[program.owned[0]].set(own, mode="drop")
        for i, values in group.unpack(join_in_chip(run(chunks, program, unroll=unroll), layout), leaves):
            results[i] = values.astype(leaves[i].dtype)
    return jax.tree.unflatten(structure, results)


@dataclass(frozen=True)
class Group:
    """Leaves that travel together, in one dtype, as one matrix of chunks."""

    members: tuple[int, ...]
    """Leaves by their numbers, in the order in which they are joined."""
    dtype: np.dtype[np.generic]
    layout: ChunkLayout
    size: int
    n_in_tiles: int = 0
    """How many of the first members are whole tiles, and joined as such."""

    @property
    def chunk(self) -> int:
        """Elements of a chunk: a share of the payload, rounded up to whole tiles where that is not most of it."""
        exact = -(-self.size // (self.layout.n_cores * self.layout.shape.total_chunks))
        tile = self.layout.tile if exact >= self.layout.tile else min(self.layout.tile, TILE_WIDTH)
        return -(-exact // tile) * tile

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """A chunk's axes. On TPU the last two fill whole tiles, so that slices of chunks are slices of memory.

        Shards are stored so, too: with flat chunks, R would be the second-last axis, padded to a multiple of 2, 4 or 8.
        """
        return (self.chunk,) if self.layout.tile == 1 else (self.chunk // TILE_WIDTH, TILE_WIDTH)

    def shard_shape(self, n_rows: int) -> tuple[int, ...]:
        """Return the shape of so many chunks, as a chip that owns them stores them."""
        return (n_rows, *self.chunk_shape)

    def pack(
        self, leaves: Sequence[jax.Array], counts: Annotated[jax.Array, "[]"] | None = None
    ) -> Annotated[jax.Array, "[C, K, ...]"]:
        """Return leaves as chunks, of shape (cores, chunks, *chunk), padded with zeros; zeros only, unless `counts`."""
        parts = [jnp.ravel(leaves[i]).astype(self.dtype) for i in self.members[self.n_in_tiles :]]
        padding = self.layout.n_cores * self.layout.shape.total_chunks * self.chunk - self.size
        if padding:
            parts.append(jnp.zeros(padding, self.dtype))
        shape = (self.layout.n_cores, self.layout.shape.total_chunks, *self.chunk_shape)
        if self.n_in_tiles:
            tiles = [leaves[i].astype(self.dtype).reshape(-1, TILE_WIDTH) for i in self.members[: self.n_in_tiles]]
            joined = jnp.concatenate([*tiles, jnp.concatenate(parts).reshape(-1, TILE_WIDTH)] if parts else tiles)
            joined = joined if counts is None else jnp.where(counts, joined, jnp.zeros_like(joined))
            return joined.reshape(shape)
        is_small = self.size + padding <= np.iinfo(np.int32).max
        if self.layout.platform == "cpu" and is_small and (len(parts) > 1 or counts is not None):
            flat = _join_in_place(parts, counts)
        else:
            flat = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
            flat = flat if counts is None else jnp.where(counts, flat, jnp.zeros_like(flat))
        return flat.reshape(shape)

    def unpack(
        self, flat: Annotated[jax.Array, "[S]"], leaves: Sequence[Leaf]
    ) -> list[tuple[int, Annotated[jax.Array, "[...]"]]]:
        """Cut the leaves out of what `pack` made, still in the dtype that travelled: (number, values) of each."""
        tiles, found, start = flat.reshape(-1, TILE_WIDTH) if self.n_in_tiles else flat, [], 0
        for i in self.members[: self.n_in_tiles]:
            stop = start + math.prod(leaves[i].shape) // TILE_WIDTH
            found.append((i, lax.slice_in_dim(tiles, start, stop).reshape(leaves[i].shape)))
            start = stop
        if self.n_in_tiles:
            flat, start = lax.slice_in_dim(tiles, start, len(tiles)).reshape(-1), 0
        for i in self.members[self.n_in_tiles :]:
            stop = start + math.prod(leaves[i].shape)
            found.append((i, lax.slice(flat, (start,), (stop,)).reshape(leaves[i].shape)))
            start = stop
        return found


def _join_in_place(parts: Sequence[jax.Array], counts: jax.Array | None) -> Annotated[jax.Array, "[S]"]:
    """Return the parts one after the other, or zeros if they do not count: written in place, each once.

    XLA on CPU concatenates element by element, looking for each among the parts, and does so once for every use of
    the result. It writes into a slice as fast as memory copies, if it does not know where that is (it would pad the
    first part instead), and cannot move the writing into what uses the result: so that is a branch of a condition.
    """
    total, dtype = sum(map(len, parts)), parts[0].dtype
    zero = hidden_zero(parts[0])

    def write(zero: jax.Array, *parts: jax.Array) -> jax.Array:
        flat, start = nothing(zero), zero
        for part in parts:
            flat = lax.dynamic_update_slice_in_dim(flat, part, start, axis=0)
            start = start + len(part)
        return flat

    def nothing(zero: jax.Array, *_: jax.Array) -> jax.Array:
        return jnp.full(total, zero.astype(dtype))

    is_whole = zero == 0 if counts is None else (zero == 0) & counts
    flat: jax.Array = lax.cond(is_whole, write, nothing, zero, *parts)
    return flat


def groups_of(leaves: Sequence[Leaf], layout: ChunkLayout, accumulate_dtype: DTypeLike | None) -> list[Group]:
    """Sort leaves (or their shapes) by the dtype that travels; empty ones have nothing to send."""
    members: dict[np.dtype[np.generic], list[int]] = {}
    for i, leaf in enumerate(leaves):
        if math.prod(leaf.shape):
            members.setdefault(travel_dtype(leaf.dtype, accumulate_dtype), []).append(i)
    groups = [_group_of(which, dtype, leaves, layout) for dtype, which in members.items()]
    for group in groups:
        if group.chunk > MAX_CHUNK:
            raise ParameterError(
                f"{group.size:,} elements of {group.dtype} in {layout.shape.total_chunks} chunks are {group.chunk:,} "
                f"elements per chunk, but JAX counts to {MAX_CHUNK:,}. Plan with more chunks."
            )
    return groups


def _group_of(
    members: Sequence[int], dtype: np.dtype[np.generic], leaves: Sequence[Leaf], layout: ChunkLayout
) -> Group:
    """Return leaves as a group, on TPU joined tile by tile if most of their elements are in leaves of whole tiles.

    A leaf of whole tiles is then copied once, and not by way of an array of one axis, which is another order of its
    tiles. All other leaves, which come last, are copied once more than before. Which of both a group does depends on
    shapes and dtypes alone, so that the order of elements is the same for every plan.
    """
    sizes = {i: math.prod(leaves[i].shape) for i in members}
    size = sum(sizes.values())
    whole = [i for i in members if sizes[i] % TPU_TILE == 0 and leaves[i].shape[-1] % TILE_WIDTH == 0]
    if layout.tile == 1 or size - sum(sizes[i] for i in whole) > MOST_LOOSE * size:
        return Group(tuple(members), dtype, layout, size)
    return Group((*whole, *(i for i in members if i not in set(whole))), dtype, layout, size, len(whole))


def travel_dtype(own: DTypeLike, accumulate_dtype: DTypeLike | None) -> np.dtype[np.generic]:
    """Return the dtype of a leaf's sums: its own, or the wider of it and `accumulate_dtype`."""
    if jnp.issubdtype(own, jax.dtypes.prng_key):
        raise ParameterError(
            f"An array of the tree is a random key ({own}), expected numbers: keys cannot be trained or added up. In "
            "Flax NNX make nnx.Dropout(rate) without rngs, and give nnx.Rngs(dropout=key) to each call. Or split keys "
            "off, as in nnx.split(model, nnx.Param, ...). mmj.Job's train(…, rng=0) gives the loss a key per example."
        )
    if jnp.issubdtype(own, jnp.bool_):
        return np.dtype(np.int32)
    narrow = _is_narrow(own)
    for kind in (jnp.inexact, jnp.integer):
        if accumulate_dtype is not None and jnp.issubdtype(own, kind) and jnp.issubdtype(accumulate_dtype, kind):
            # JAX does not say what is the wider of float8 and anything else.
            own = accumulate_dtype if narrow else jnp.promote_types(own, accumulate_dtype)
    if _is_narrow(own):
        wider = "float32" if jnp.issubdtype(own, jnp.inexact) else "int32"
        raise ParameterError(
            f"{np.dtype(own)} is too narrow to add up in: give accumulate_dtype=jnp.{wider}, which widens the values "
            "while they travel, or convert them first."
        )
    dtype: np.dtype[np.generic] = np.dtype(own)
    return dtype


def mean_dtype(own: DTypeLike) -> np.dtype[np.generic]:
    """Return the dtype of a mean: that of the values, or float32 for integers and bools."""
    dtype: np.dtype[np.generic] = np.dtype(own if jnp.issubdtype(own, jnp.inexact) else np.float32)
    return dtype


def sum_dtype(own: DTypeLike) -> np.dtype[np.generic]:
    """Return the dtype of a leaf's sum, as `lax.psum` has it: bools are counted."""
    dtype: np.dtype[np.generic] = np.dtype(np.int32 if jnp.issubdtype(own, jnp.bool_) else own)
    return dtype


def gather_dtype(group: Group, leaves: Sequence[Leaf]) -> np.dtype[np.generic]:
    """Return the widest dtype of a group's leaves; that of the group where they are too narrow to compare."""
    dtypes = [leaves[i].dtype for i in group.members]
    return group.dtype if any(map(_is_narrow, dtypes)) else jnp.result_type(*dtypes)


def _is_narrow(dtype: DTypeLike) -> bool:
    """Whether this is one of the types of 8 and fewer bits (float8, int4, …) that JAX does no arithmetic between."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits < 16
    return jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8


def sum_in_chip(packed: Annotated[jax.Array, "[C, K, ...]"], layout: ChunkLayout) -> Chunks:
    """Add up a chip's cores and give each core its part of the chunks; with one core, just that core's chunks."""
    if layout.core_axis is None:
        return packed[0]
    chunks: Chunks = lax.psum_scatter(packed, layout.core_axis, scatter_dimension=0, tiled=False)
    return chunks


def join_in_chip(chunks: Chunks, layout: ChunkLayout) -> Annotated[jax.Array, "[S]"]:
    """Return the whole payload, flat, from the chunks that this core has."""
    flat = chunks.reshape(-1)
    return flat if layout.core_axis is None else lax.all_gather(flat, layout.core_axis, tiled=True)


def _take_owned(chunks: Chunks, program: Program) -> Annotated[jax.Array, "[R, ...]"]:
    """Return this chip's own chunks, one per row, and zeros where it owns fewer than others."""
    mine = jnp.take(chunks, program.owned[0], axis=0, mode="clip")
    return jnp.where(rows_in_use(program, mine.ndim), mine, jnp.zeros((), mine.dtype))


def rows_in_use(program: Program, ndim: int) -> Annotated[jax.Array, "[R, ...]"]:
    """Return which rows of this chip's shards hold a chunk, with so many axes: a chip that owns less has spare rows."""
    in_use = program.owned[0] < program.layout.shape.total_chunks
    return jnp.expand_dims(in_use, tuple(range(1, ndim)))


def _divisor(program: Program, mean: bool) -> int | None:
    return program.n_chips * program.layout.n_cores if mean else None


def _divide(values: jax.Array, divisor: int | None) -> jax.Array:
    return values if divisor is None else values / divisor


def _expect(program: Any, collective: Collective, how: str) -> None:
    """Refuse what is no program, a program for something else, and one whose tables are not this chip's own."""
    if not isinstance(program, Program):
        raise ParameterError(
            f"Expected a Program for {collective}, got a {type(program).__name__}: make one with mmj.{how}."
        )
    both_sum = collective.is_all_reduce and program.collective.is_all_reduce
    if program.collective is not collective and not both_sum:
        raise ParameterError(
            f"This program is for {program.collective}, expected one for {collective}: make it with mmj.{how}."
        )
    _check_split(program)


def _check_split(program: Program) -> None:
    """Refuse tables that are not split by chip: every chip would run the first chip's."""
    rows, axes = program.owned.shape[0], varying_axes(program.owned)
    if rows != 1 or (axes and axes != {program.layout.axis}):
        raise ParameterError(
            f"A chip received {rows} rows of the program's tables{f', split over {sorted(axes)}' if axes else ''}; "
            f"expected its own row only, split over {program.layout.axis!r}. Call this inside jax.shard_map with the "
            "program as an argument (not closed over) and program.spec as its in_specs."
        )


def _check_varying(leaves: Sequence[jax.Array], program: Program) -> None:
    """Refuse values that JAX knows to be equal on some devices: under check_vma=True it has summed gradients itself."""
    if not varying_axes(program.owned):
        return
    sizes = {program.layout.axis: program.n_chips, program.layout.core_axis: program.layout.n_cores}
    for leaf in leaves:
        missing = set(program.axes) - varying_axes(leaf)
        if missing:
            times = math.prod(sizes[axis] for axis in missing)
            raise ParameterError(
                f"A value of shape {leaf.shape} is the same along {' and '.join(sorted(missing))}, so summing it over "
                f"all devices would count it {times} times. With check_vma=True, jax.grad already sums the gradients "
                "of replicated parameters: give shard_map check_vma=False, or apply jax.lax.pcast(…, "
                f"{program.axes}, to='varying') before jax.grad."
            )
