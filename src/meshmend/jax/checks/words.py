"""The bits of an array as words, and digests of them: integer arithmetic that every device does exactly."""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshmend.errors import ParameterError
from meshmend.jax.engine.collectives import Tree

GOLDEN = np.uint32(0x9E3779B9)
"""2³² over the golden ratio: its multiples are spread evenly."""


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
