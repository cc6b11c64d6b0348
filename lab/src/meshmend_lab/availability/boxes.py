"""Boxes of chips: the largest healthy one, for a job that needs a mesh without a hole, and one as a mesh of its own."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
from numpy.typing import NDArray

from meshmend.topology.mesh import Mesh
from meshmend.topology.region import Region
from meshmend.topology.text import Cable


def largest_box(healthy: NDArray[np.bool_]) -> Region | None:
    """Return a largest box of True cells, or None if there is no True cell. Exact, in any number of dimensions.

    Boxes are tried from the largest on, each at all its places at once. A box does not extend across the wrap of a
    torus.

    >>> grid = np.ones((4, 6), dtype=bool)
    >>> grid[0, 2] = False
    >>> largest_box(grid)
    Region(at=(1, 0), shape=(3, 6))
    """
    from scipy.ndimage import minimum_filter

    count = int(healthy.sum())
    boxes = product(*(range(1, side + 1) for side in healthy.shape))
    for shape in sorted((box for box in boxes if math.prod(box) <= count), key=math.prod, reverse=True):
        # The filter's window begins at the cell itself, and what is outside of the grid is not healthy.
        fits = minimum_filter(healthy, size=shape, origin=[-(n // 2) for n in shape], mode="constant", cval=0)
        if fits.any():
            at = np.unravel_index(int(fits.argmax()), healthy.shape)
            return Region(at=tuple(map(int, at)), shape=shape)
    return None


def part_of(mesh: Mesh, box: Region, *, keeps_wrap: bool = True) -> Mesh:
    """Return a box of chips as a mesh of its own, with the failed and slow cables inside it.

    An axis that the box has all of still wraps, if `keeps_wrap`.

    >>> part_of(Mesh("4x8", wrap=True, cable_rates={"1,1-1,2": 0.5}), Region.parse("4x3@0,1"))
    Mesh(4x3 wrapped on axis 0 with 1 slow cable: 12 chips)
    """
    spans = zip(mesh.wrap, box.shape, mesh.shape, strict=True)
    wrap = [keeps_wrap and wraps and n == whole for wraps, n, whole in spans]
    part = Mesh(box.shape, wrap=wrap)
    own = {frozenset((part.chip(a), part.chip(b))) for a, b in part.cables.tolist()}

    def inside(cable: Cable) -> Cable | None:
        a, b = (tuple(x - low for x, low in zip(end, box.at, strict=True)) for end in cable)
        return (a, b) if frozenset((a, b)) in own else None

    failed = [moved for cable in mesh.failed_cables if (moved := inside(cable))]
    slow = [(moved, rate) for cable, rate in mesh.cable_rates.items() if (moved := inside(cable))]
    return Mesh(box.shape, wrap=wrap, failed_cables=failed, cable_rates=slow)
