"""The largest healthy rectangle, for a job that needs a mesh without a hole."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import minimum_filter

from meshmend.topology import Region


def largest_box(healthy: NDArray[np.bool_]) -> Region | None:
    """Return a largest box of True cells, or None if there is no True cell. Exact, in any number of dimensions.

    Boxes are tried from the largest on, each at all its places at once. A box does not extend across the wrap of a
    torus.

    >>> grid = np.ones((4, 6), dtype=bool)
    >>> grid[0, 2] = False
    >>> largest_box(grid)
    Region(at=(1, 0), shape=(3, 6))
    """
    count = int(healthy.sum())
    boxes = product(*(range(1, side + 1) for side in healthy.shape))
    for shape in sorted((box for box in boxes if math.prod(box) <= count), key=math.prod, reverse=True):
        # The filter's window begins at the cell itself, and what is outside of the grid is not healthy.
        fits = minimum_filter(healthy, size=shape, origin=[-(n // 2) for n in shape], mode="constant", cval=0)
        if fits.any():
            at = np.unravel_index(int(fits.argmax()), healthy.shape)
            return Region(at=tuple(map(int, at)), shape=shape)
    return None
