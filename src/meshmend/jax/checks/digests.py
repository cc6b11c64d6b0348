"""Replicas must agree: after an update all chips hold the same bits of the parameters, and their digests say if not.

Each chip digests its own copy, in pieces, with 32-bit integer arithmetic on the device: no parameter leaves it. The
digests of all chips are brought together by one small all-reduce, over the links that are alive. A piece on which a
chip differs from the majority names the chip and the place in the parameters.

A change of a single word is always noticed, whichever of its bits flip; changes to several, or words that change
places, go unnoticed with a probability of about 2⁻³² (see `mixed`).

What all chips have wrong in the same way is not seen here, and neither is state that has no second copy: the shards of
a sharded update's optimizer state, and parameters sharded over all chips.

What was found goes to the quarantine's judge as observations: its words and numbers (`digest_observations`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from numpy.typing import NDArray

from meshmend.errors import ParameterError
from meshmend.jax.engine.collectives import Tree, all_reduce
from meshmend.jax.engine.fabric import Fabric
from meshmend.jax.engine.program import Program
from meshmend.jax.engine.tiles import TiledFabric
from meshmend.jax.train.arguments import check_data_parallel, check_program
from meshmend.jax.train.shardings import match_specs
from meshmend.quarantine import Observation, Suspect
from meshmend.quarantine.observation import DIGEST, MAX_SUSPECTS

GOLDEN = np.uint32(0x9E3779B9)
"""2³² over the golden ratio: its multiples are spread evenly."""
PIECE = 2**20
"""Elements of a piece, at most: enough of them that digests cost nothing to send, few enough to find the place."""


class Disagreement(NamedTuple):
    """A chip whose copy of a piece of the parameters differs from that of the majority."""

    chip: tuple[int, ...]
    where: str
    """The parameter and its elements, counted in the chip's own shard of it."""
    agreeing: int
    """Chips that agree with each other on this piece, of `of` that hold it; 0 if no majority of them does."""
    of: int
    piece: int
    """Number of the piece among those of all parameters."""


def replica_digests(
    params: Tree, program: Program, fabric: Fabric, *, shardings: Tree = None
) -> Annotated[jax.Array, "uint32[I, D, Q]"]:
    """Return the digests of all copies of the parameters: for each slot of a tile (one without tiles), each device
    or tile that holds a copy, and each piece.

    Jit it, and call it at intervals, after an update: `compare_replicas` says what its result means. `program` is that
    of the train step, and `shardings` are those of a model that is split inside tiles.
    """
    check_program(program, fabric)
    scalars = program.for_scalars
    specs = _specs(params, fabric, shardings)
    inner = fabric.inner_axes
    over = tuple(axis for axis in fabric.axes if axis not in inner)
    n_copies = prod(fabric.jax_mesh.shape[axis] for axis in over)

    def local(params: Tree, scalars: Program) -> jax.Array:
        own = jnp.stack([digest for leaf in jax.tree.leaves(params) for digest in _digests(leaf)])
        rows = jnp.zeros((n_copies, len(own)), jnp.uint32).at[lax.axis_index(over)].set(own)
        found: jax.Array = all_reduce(rows, scalars)
        return found[None]

    mapped = jax.shard_map(
        local,
        mesh=fabric.jax_mesh,
        in_specs=(specs, scalars.spec),
        out_specs=PartitionSpec(inner or None),
        check_vma=False,
    )
    digests: jax.Array = mapped(params, scalars)
    return digests


def compare_replicas(
    digests: Annotated[Any, "uint32[I, D, Q]"], params: Tree, fabric: Fabric, *, shardings: Tree = None
) -> list[Disagreement]:
    """Return where the copies of the parameters differ, chip by chip; an empty list is how it should be.

    `digests` is what `replica_digests` returned, on every process the same; `params` may be their shapes only. Where no
    majority of the copies agrees, all of them are listed, each with `agreeing=0`: that something is wrong is certain
    then, and who it is remains open.
    """
    found = np.asarray(jax.device_get(digests))
    names = list(_pieces(params, fabric, shardings))
    if found.shape[2] != len(names):
        raise ParameterError(
            f"The digests are of {found.shape[2]} pieces, but these parameters have {len(names)}: give the parameters "
            "(and shardings) that replica_digests was given."
        )
    return [
        Disagreement(_chip(fabric, copy, position), names[piece], agreeing, found.shape[1], int(piece))
        for position, piece in zip(*np.nonzero((found != found[:, :1]).any(axis=1)), strict=True)
        for copy, agreeing in _minority(found[position, :, piece])
    ]


def _minority(copies: NDArray[np.uint32]) -> Iterator[tuple[int, int]]:
    """Return the copies that differ from the majority, and how many agree; all of them, and 0, if there is none."""
    (value, times), *_ = Counter(copies.tolist()).most_common(1)
    has_majority = 2 * times > len(copies)
    for copy, other in enumerate(copies.tolist()):
        if not has_majority or other != value:
            yield copy, times if has_majority else 0


def _chip(fabric: Fabric, copy: int, position: int) -> tuple[int, ...]:
    """Return the chip of the machine that holds a copy: the `copy`-th in order, in this slot of its tile."""
    if isinstance(fabric, TiledFabric):
        cores = fabric.devices_per_tile // fabric.tiling.chips_per_tile
        return fabric.chips.mesh.chip(int(fabric.tiling.ranks[copy, position // cores]))
    return fabric.mesh.chip(copy // (int(fabric.jax_mesh.size) // fabric.mesh.n_chips))


def _specs(params: Tree, fabric: Fabric, shardings: Tree) -> Tree:
    if isinstance(fabric, TiledFabric):
        return match_specs(shardings, params, fabric)
    check_data_parallel(fabric, shardings)
    return jax.tree.map(lambda _: PartitionSpec(), params)


def _pieces(params: Tree, fabric: Fabric, shardings: Tree) -> Iterator[str]:
    """Return the name of each piece, in the order of the digests."""
    specs = jax.tree.leaves(_specs(params, fabric, shardings), is_leaf=lambda x: isinstance(x, PartitionSpec))
    for (path, leaf), spec in zip(jax.tree_util.tree_leaves_with_path(params), specs, strict=True):
        size = prod(jax.sharding.NamedSharding(fabric.jax_mesh, spec).shard_shape(jnp.shape(leaf)))
        for start in range(0, size, PIECE):
            yield f"params{jax.tree_util.keystr(path)}, elements {start} to {min(start + PIECE, size) - 1}"


def _digests(leaf: jax.Array) -> Sequence[jax.Array]:
    """Return the digest of each piece of an array."""
    words = mixed(words_of(leaf))
    piece = PIECE * max(1, len(words) // max(1, leaf.size))
    return [jnp.sum(words[start : start + piece], dtype=jnp.uint32) for start in range(0, len(words), piece)]


SIGNS_PER_CHIP = 4
"""Observations against one chip from one check, at most: a few pieces that differ say as much as all of them."""


def digest_observations(found: Sequence[Disagreement], step: int) -> list[Observation]:
    """Return the observations of replicas that differ after a step.

    >>> found = Disagreement((2, 1), "params['w'], elements 0 to 299", 11, 12, 0)
    >>> digest_observations([found], 400)[0].evidence
    "params['w'], elements 0 to 299: 11 of 12 replicas agree, and this one differs"
    """
    observations, told = [], Counter[tuple[int, ...]]()
    for one in found:
        told[one.chip] += 1
        if one.agreeing and told[one.chip] <= SIGNS_PER_CHIP:
            numbers = {"chunk": one.piece, "agree": one.agreeing, "differ": one.of - one.agreeing}
            evidence = f"{one.where}: {one.agreeing} of {one.of} replicas agree, and this one differs"
            observations.append(Observation(DIGEST, (Suspect.chip(one.chip),), step, evidence, numbers))
    open_pieces = {one.piece: one for one in found if not one.agreeing}
    for piece, one in list(open_pieces.items())[:SIGNS_PER_CHIP]:
        chips = sorted({other.chip for other in found if other.piece == piece})
        evidence = f"{one.where}: no majority of the {one.of} replicas agrees"
        suspects = tuple(Suspect.chip(chip) for chip in chips[:MAX_SUSPECTS])
        observations.append(
            Observation(DIGEST, suspects, step, evidence, {"chunk": piece, "agree": 0, "differ": one.of})
        )
    return observations


def words_of(array: jax.Array) -> Annotated[jax.Array, "uint32[S]"]:
    """Return an array's bits, flat, as 32-bit words: one for each element, or several for a wide one."""
    flat = jnp.ravel(array)
    if jnp.iscomplexobj(flat):
        flat = jnp.stack([jnp.real(flat), jnp.imag(flat)], axis=-1).reshape(-1)
    if not jnp.issubdtype(flat.dtype, jnp.floating):
        narrow = flat.dtype.itemsize <= 4
        return flat.astype(jnp.uint32) if narrow else lax.bitcast_convert_type(flat, jnp.uint32).reshape(-1)
    bits = jnp.finfo(flat.dtype).bits
    if bits < 8:
        raise ParameterError(f"{flat.dtype} has no digest: widen it to 8 bits or more first.")
    same = {8: jnp.uint8, 16: jnp.uint16}.get(bits, jnp.uint32)
    return lax.bitcast_convert_type(flat, same).astype(jnp.uint32).reshape(-1)


def mixed(words: jax.Array) -> jax.Array:
    """Return mix(word + place · GOLDEN) of each word, by its place along the last axis.

    `mix` is the last stage of MurmurHash3: a bijection of words, in which each bit depends on all others. A sum of
    mixed words is a digest. Whatever happens to one word always changes it; changes to several, or words that change
    places, go unnoticed with a probability of about 2⁻³².
    """
    word = words + lax.iota(jnp.uint32, words.shape[-1]) * GOLDEN
    word = (word ^ (word >> 16)) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * np.uint32(0xC2B2AE35)
    return word ^ (word >> 16)


def digest_leaves(tree: Tree) -> Annotated[jax.Array, "uint32[Q]"]:
    """Return the digest of each array of a tree."""
    return jnp.stack([jnp.sum(mixed(words_of(leaf)), dtype=jnp.uint32) for leaf in jax.tree.leaves(tree)])


def digest_tree(tree: Tree) -> Annotated[jax.Array, "uint32[]"]:
    """Return one digest of all arrays of a tree: a change of one word in any of them always changes it."""
    return jnp.sum(mixed(digest_leaves(tree)), dtype=jnp.uint32)
