"""The largest healthy rectangle, for a job that needs a mesh without a hole."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from meshmend.topology import Region


def largest_box(healthy: NDArray[np.bool_]) -> Region | None:
    """Return a largest box of True cells, or None if there is no True cell. Exact, in any number of dimensions.

    In two dimensions, each row is the base of a histogram of the True cells above it, and a stack finds the
    largest rectangle of a histogram in one pass. More axes are reduced to two by trying every range of the first
    axis. A box does not extend across the wrap of a torus.

    >>> grid = np.ones((4, 6), dtype=bool)
    >>> grid[0, 2] = False
    >>> largest_box(grid)
    Region(at=(1, 0), shape=(3, 6))
    """
    if healthy.ndim == 1:
        inner = _largest_rectangle(healthy[np.newaxis, :])
        return None if inner is None else Region(at=inner.at[1:], shape=inner.shape[1:])
    if healthy.ndim == 2:
        return _largest_rectangle(healthy)
    best: Region | None = None
    for first in range(len(healthy)):
        through = healthy[first]
        for last in range(first, len(healthy)):
            through = through & healthy[last]
            inner = largest_box(through)
            if inner is None:
                break
            if best is None or math.prod(inner.shape) * (last - first + 1) > best.n_chips:
                best = Region(at=(first, *inner.at), shape=(last - first + 1, *inner.shape))
    return best


def _largest_rectangle(healthy: NDArray[np.bool_]) -> Region | None:
    best, found = 0, None
    heights = [0] * healthy.shape[1]
    for row, line in enumerate(healthy.tolist()):
        heights = [height + 1 if ok else 0 for height, ok in zip(heights, line, strict=True)]
        # Columns whose bars are still open, in order of increasing height; −1 marks the left edge.
        standing = [-1]
        for column, height in enumerate([*heights, 0]):
            while standing[-1] >= 0 and heights[standing[-1]] >= height:
                tall = heights[standing.pop()]
                width = column - standing[-1] - 1
                if tall * width > best:
                    best = tall * width
                    found = Region(at=(row - tall + 1, standing[-1] + 1), shape=(tall, width))
            standing.append(column)
    return found
