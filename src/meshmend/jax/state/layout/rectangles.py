"""Rectangles of an array: a range of its elements as rectangles, and rectangles cut along a grid of chunks.

Elements of a box are counted in row-major order, as NumPy and zarr have them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

Box = tuple[tuple[int, int], ...]
"""A rectangle of an array: first index and end along each axis."""
CHUNK_BYTES = 1 << 20
"""Bytes of a chunk on disk, at most. What two hosts have of one chunk, one of them sends to the other, so that chunks
are much smaller than what a host owns of a large array."""


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole array."""
    return tuple((0, n) for n in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the shape of a box.

    >>> shape_of(((2, 5), (0, 4)))
    (3, 4)
    """
    return tuple(end - first for first, end in box)


def size_of(box: Box) -> int:
    """Return the number of elements of a box."""
    return math.prod(shape_of(box))


def inside(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return where a box is in an array that is the outer box."""
    return tuple(slice(first - start, end - start) for (first, end), (start, _) in zip(box, outer, strict=True))


def overlap(box: Box, other: Box) -> Box | None:
    """Return what two boxes have in common; None if that is nothing."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True))
    return found if all(first < end for first, end in found) else None


def position(index: Sequence[int], box: Box) -> int:
    """Return which element of a box is at an index of the array.

    >>> position((3, 1), ((2, 5), (0, 4)))
    5
    """
    found = 0
    for at, (first, end) in zip(index, box, strict=True):
        found = found * (end - first) + at - first
    return found


def rectangles(box: Box, start: int, stop: int) -> Iterator[Box]:
    """Return elements `start` to `stop` of a box, one rectangle after the other.

    >>> list(rectangles(((0, 4), (0, 10)), 7, 33))
    [((0, 1), (7, 10)), ((1, 3), (0, 10)), ((3, 4), (0, 3))]
    """
    if start >= stop:
        return
    if not box:
        yield ()
        return
    (first, _), rest = box[0], box[1:]
    n = size_of(rest)
    begin, end = -(-start // n), stop // n
    if begin > end:  # all of it is in one row
        yield from (((first + end, first + end + 1), *one) for one in rectangles(rest, start % n, stop % n))
        return
    if start < begin * n:
        yield from (((first + begin - 1, first + begin), *one) for one in rectangles(rest, start % n, n))
    if begin < end:
        yield ((first + begin, first + end), *rest)
    if end * n < stop:
        yield from (((first + end, first + end + 1), *one) for one in rectangles(rest, 0, stop % n))


def chunk_shape(shape: Sequence[int], itemsize: int, limit: int = CHUNK_BYTES) -> tuple[int, ...]:
    """Return the shape of the chunks that an array is saved in: as many whole rows as fit, or a part of one.

    >>> chunk_shape((1000, 512), 4), chunk_shape((4, 1 << 20), 4), chunk_shape((0, 3), 4)
    ((512, 512), (1, 262144), (1, 3))
    """
    left, found = max(1, limit // itemsize), list[int]()
    for n in reversed(shape):
        found.insert(0, max(1, min(n, left)))
        left = max(1, left // max(1, n))
    return tuple(found)


class ChunkGrid:
    """An array cut into chunks, which are numbered in row-major order; those at its end may be smaller."""

    def __init__(self, shape: Sequence[int], chunk: Sequence[int]) -> None:
        self.shape, self.chunk = tuple(shape), tuple(chunk)
        self.counts = tuple(-(-n // step) for n, step in zip(self.shape, self.chunk, strict=True))
        self.n_chunks = math.prod(self.counts)

    def box(self, number: int) -> Box:
        """Return what a chunk has of the array."""
        found: list[tuple[int, int]] = []
        for n, step, count in zip(reversed(self.shape), reversed(self.chunk), reversed(self.counts), strict=True):
            number, at = divmod(number, count)
            found.insert(0, (at * step, min(n, (at + 1) * step)))
        return tuple(found)

    def chunks_of(self, box: Box) -> Iterator[int]:
        """Return the numbers of the chunks that have elements of a box.

        >>> list(ChunkGrid((4, 10), (2, 5)).chunks_of(((1, 3), (6, 8))))
        [1, 3]
        """
        every = whole(self.counts)
        spans = [range(a // step, -(-b // step)) for (a, b), step in zip(box, self.chunk, strict=True)]
        return (position(index, every) for index in product(*spans))
