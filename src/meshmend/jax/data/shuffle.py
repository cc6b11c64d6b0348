"""The order of an epoch's samples: grain's shuffle, for many samples at once.

A permutation of n numbers that is stored nowhere: the block cipher Simon (Beaulieu et al., 2013) in four rounds, on
blocks of the fewest bits, even and at least 16, that hold n - 1. A number that is sent to n or beyond is sent on until
it is not ("cycle walking": Black and Rogaway, 2002). The keys of the rounds are those of C++'s `std::seed_seq`.

grain has this in C++, one call of Python per sample. Where n - 1 is a power of 4 from 4⁸ on, grain's blocks are too
short, so that one record comes twice in an epoch and another never; here each comes once for any n.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

SHORTEST_BLOCK = 16
"""Bits. Epochs that need no more are stored: with few samples, cycles are walked for long."""
LONGEST_TABLE = 16
"""Bits of a word, half a block, up to which a round looks words up, which is faster than to compute with them."""


def shuffled(offsets: NDArray[np.int64], n_samples: int, seed: int) -> NDArray[np.int64]:
    """Return the records at some offsets of an epoch of `n_samples`, as grain shuffles it with a 32-bit seed.

    >>> shuffled(np.arange(5), n_samples=5, seed=0)
    array([0, 4, 1, 2, 3])
    """
    bits = (n_samples - 1).bit_length()
    if bits <= SHORTEST_BLOCK:
        return _short_epoch(n_samples, seed)[offsets]
    word, keys = (bits + 1) // 2, _round_keys(seed)
    walked = found = _encrypt(offsets.ravel(), word, keys)
    where = np.arange(len(found))
    # As unsigned numbers: of a block of 64 bits, those from 2⁶³ on are beyond, too.
    while (beyond := np.flatnonzero(walked.view(np.uint64) >= np.uint64(n_samples))).size:
        where, walked = where[beyond], _encrypt(walked[beyond], word, keys)
        found[where] = walked
    return found.reshape(offsets.shape)


@lru_cache(maxsize=4)
def _short_epoch(n_samples: int, seed: int) -> NDArray[np.int64]:
    """Walk all cycles of the shortest block at once, twice as far each time."""
    found = _encrypt(np.arange(1 << SHORTEST_BLOCK), SHORTEST_BLOCK // 2, _round_keys(seed))
    while found[:n_samples].max() >= n_samples:
        found = np.where(found < n_samples, found, found[found])
    return found[:n_samples].copy()


def _encrypt(blocks: NDArray[np.int64], word: int, keys: tuple[int, ...]) -> NDArray[np.int64]:
    mask = (1 << word) - 1
    left, right = blocks >> word & mask, blocks & mask
    table = _mix_table(word) if word <= LONGEST_TABLE else None
    for key in keys:
        left ^= _mix(right, word) if table is None else table[right]
        left ^= key & mask
        left, right = right, left
    return left << word | right


def _mix(words: NDArray[np.int64], word: int) -> NDArray[np.int64]:
    """Simon's function of a word: its rotations by 1 and 8, bit by bit both, added to that by 2 without carry."""
    by_1, by_2, by_8 = (words << by | words >> (word - by) for by in (1, 2, 8))
    return (by_1 & by_8 ^ by_2) & ((1 << word) - 1)


@lru_cache(maxsize=4)
def _mix_table(word: int) -> NDArray[np.int64]:
    return _mix(np.arange(1 << word), word)


@lru_cache(maxsize=16)
def _round_keys(seed: int) -> tuple[int, ...]:
    """Return what `std::seed_seq{seed}` generates as four 32-bit numbers (C++17, [rand.util.seedseq])."""
    n, s, p, q, low = 4, 1, 1, 2, 0xFFFFFFFF
    keys = [0x8B8B8B8B] * n
    for k in range(n):
        mixed = keys[k] ^ keys[(k + p) % n] ^ keys[k - 1]
        first = 1664525 * (mixed ^ mixed >> 27) & low
        second = first + (s if k == 0 else k + seed if k == s else k) & low
        keys[(k + p) % n] = keys[(k + p) % n] + first & low
        keys[(k + q) % n] = keys[(k + q) % n] + second & low
        keys[k] = second
    for k in range(n):
        mixed = keys[k] + keys[(k + p) % n] + keys[k - 1] & low
        first = 1566083941 * (mixed ^ mixed >> 27) & low
        second = first - k & low
        keys[(k + p) % n] ^= first
        keys[(k + q) % n] ^= second
        keys[k] = second
    return tuple(keys)
