"""Spreading: in every step, every link carries a chunk that its target lacks.

No trees are made beforehand; who brought a chunk to whom is a tree for each chunk in the end. A link that has a choice
takes a chunk that no other link could bring its target, now or a step later: such a chunk is rare on that side. Where
few cables join two parts of the mesh, that keeps two of them from bringing the same chunk into the same part (1.02
instead of 1.09 times the optimum where there are two). Among equals it takes any, and each chip looks from another
place on, so that neighbours do not all ask for the same.

Where cables differ, a step is as long as a full link takes for q chunks, and a link of rate p/q carries p of them
(`weave.pieces` chooses q). So no step waits for a slow cable, and every link is as busy as any other. Filling is short
here, so that steps of several chunks cost less than chunks cut into pieces would.

A chip sends a chunk over one link per step only. So the same backwards in time is a reduce-scatter: no chip takes the
same chunk from two sides at once.

Who has what is kept as bits, 64 chunks per word, and all chips choose at once: 1,000 chips take a second.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from numpy.typing import NDArray

from meshmend.planning.build import bit_position
from meshmend.topology import Mesh

SEED = 0
"""The same mesh gives the same plan."""
WORD = 64

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]


def share_out(n_chips: int, chunks: int) -> Ints:
    """Return the owner of each chunk: runs of chunks, of lengths that differ by one at most.

    >>> share_out(3, 5).tolist()
    [0, 0, 1, 1, 2]
    """
    return np.asarray(np.arange(chunks, dtype=np.int64) * n_chips // chunks)


def spread(mesh: Mesh, owners: Ints, per_link: Ints | None = None) -> dict[str, Ints]:
    """Bring every chunk from its owner to all chips of `mesh`, whose survivors are connected.

    Returns columns of a schedule, with one row for each chunk and each chip that does not own it.
    `per_link` says how many chunks each link takes in a step, None for one; links that take some connect all chips.
    """
    n, chunks = mesh.n_chips, len(owners)
    words = -(-chunks // WORD)
    chunk = np.arange(chunks)
    # The last row is nobody: it has nothing, and stands where there is no link.
    has = np.zeros((n + 1, words), dtype=np.uint64)
    np.bitwise_or.at(has, (owners, chunk // WORD), np.uint64(1) << (chunk % WORD).astype(np.uint64))
    come_from = mesh.neighbours[:, np.arange(mesh.n_directions) ^ 1]
    sources = [np.where(column >= 0, column, n).astype(np.int64) for column in come_from.T]
    rounds = _rounds(mesh, sources, per_link)
    later = np.arange(words) >= np.arange(words)[:, None]
    rng = np.random.default_rng(SEED)
    missing, step, rows = chunks * (n - 1), 0, []
    while missing:
        held = [has[source] for source in sources]
        lacks = ~has[:n]
        keeps = np.full_like(has, ~np.uint64(0))  # what a chip has not yet sent in this step
        scarce = _scarce(has, held, sources)
        from_first = later[rng.integers(0, words, n)]
        first_bit = rng.integers(0, WORD, n).astype(np.uint64)
        order = rng.permutation(len(sources)).tolist()
        for idle, direction in product(rounds, order):
            source = sources[direction]
            able = held[direction] & lacks & keeps[source]
            able[idle[direction]] = 0
            dst, word, found = _take(able, scarce, from_first)
            bit = _lowest_from(found, first_bit[dst])
            src = source[dst]
            lacks[dst, word] ^= bit
            keeps[src, word] ^= bit
            missing -= len(dst)
            rows.append((np.full(len(dst), step), src, dst, word * WORD + bit_position(bit)))
        has[:n] = ~lacks
        step += 1
    nothing = (np.empty(0, dtype=np.int64),) * 4
    columns = (np.concatenate(column) for column in zip(nothing, *rows, strict=True))
    return dict(zip(("step", "src", "dst", "first_chunk"), columns, strict=True))


def _rounds(mesh: Mesh, sources: list[Ints], per_link: Ints | None) -> list[list[Ints]]:
    """Return, for each chunk that a link takes in a step and each direction, the chips whose link takes no more."""
    if per_link is None:
        return [[np.empty(0, dtype=np.int64)] * len(sources)]
    by_chip = per_link.reshape(mesh.n_chips, len(sources))
    # Where there is no link any number will do: nobody has nothing to send.
    takes = [by_chip[np.minimum(source, mesh.n_chips - 1), direction] for direction, source in enumerate(sources)]
    return [[np.flatnonzero(taken <= number) for taken in takes] for number in range(int(by_chip.max()))]


def _scarce(has: Words, held: list[Words], sources: list[Ints]) -> Words:
    """Return what at most one link could bring each chip, in this step and in the next.

    Where that link is asked for such a chunk, it is the one.
    """
    near = np.zeros_like(has)
    once, now = _count(held)
    near[:-1] = once | has[:-1]
    _, next_step = _count([near[source] for source in sources])
    return now & next_step


def _count(offers: list[Words]) -> tuple[Words, Words]:
    """Return the chunks that are offered at least once, and those that are offered at most once."""
    once = np.zeros_like(offers[0])
    twice = np.zeros_like(offers[0])
    for offer in offers:
        twice |= once & offer
        once |= offer
    return once, ~twice


def _take(able: Words, scarce: Words, later: NDArray[np.bool_]) -> tuple[Ints, Ints, Words]:
    """Choose a word for every chip that can be brought something: return (chip, word, the bits to choose from).

    What is scarce comes first, and among equals what is from the chip's own place on (`later`).
    """
    kinds = (able & scarce, able)
    wishes = np.empty((len(able), 2 * len(kinds), able.shape[1]), dtype=np.bool_)
    for rank, kind in enumerate(kinds):
        np.not_equal(kind, 0, out=wishes[:, 2 * rank + 1])
        np.logical_and(wishes[:, 2 * rank + 1], later, out=wishes[:, 2 * rank])
    flat = wishes.reshape(len(able), -1)
    wish = flat.argmax(axis=1)
    chip = np.flatnonzero(flat[np.arange(len(able)), wish])
    rank, word = np.divmod(wish[chip], able.shape[1])
    found = np.where(rank < 2, kinds[0][chip, word], able[chip, word])
    return chip, word, found


def _lowest_from(word: Words, start: Words) -> Words:
    """Return the lowest bit of each word that is not below `start`, or the lowest of all."""
    high = word & (~np.uint64(0) << start)
    chosen = np.where(high != 0, high, word)
    return np.asarray(chosen & (~chosen + np.uint64(1)))
