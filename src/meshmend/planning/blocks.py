"""A 2-D mesh seen as aligned 2×2 blocks, each wholly live or wholly failed: the basis of the ring planners."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import name_chip
from meshmend.planning.base import CannotServe
from meshmend.topology import Mesh, name_shape


def check_blocks(mesh: Mesh) -> None:
    """Refuse a mesh that does not fall into 2×2 blocks that are wholly live or wholly failed."""
    if mesh.n_axes != 2:
        raise CannotServe(f"it needs a mesh of two axes, and {name_shape(mesh.shape)} has {mesh.n_axes}.")
    if any(n % 2 for n in mesh.shape):
        raise CannotServe(f"it pairs chips into 2×2 blocks, and {name_shape(mesh.shape)} has an odd side.")
    counts = _cells(mesh.live).sum(axis=(1, 3))
    broken = np.argwhere((counts > 0) & (counts < 4))
    if len(broken):
        row, column = (2 * int(x) for x in broken[0])
        cells = [(r, c) for r in (row, row + 1) for c in (column, column + 1)]
        dead = next(cell for cell in cells if not mesh.live[cell])
        live = next(cell for cell in cells if mesh.live[cell])
        raise CannotServe(
            f"it needs holes made of whole 2×2 blocks at even rows and columns, and in the block at "
            f"{name_chip((row, column))} chip {name_chip(dead)} has failed while {name_chip(live)} lives."
        )


def live_blocks(mesh: Mesh) -> NDArray[np.bool_]:
    """Return which 2×2 blocks are live; the mesh must fall into blocks."""
    return mesh.live[::2, ::2]


def _cells(grid: NDArray[np.bool_]) -> NDArray[np.bool_]:
    rows, columns = grid.shape
    return grid.reshape(rows // 2, 2, columns // 2, 2)
