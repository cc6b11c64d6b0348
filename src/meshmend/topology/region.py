"""Regions: boxes of chips, the form in which failures are given, and where holes may lie in a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import Coordinate, MeshError
from meshmend.topology.text import name_shape, parse_chip, parse_shape, whole_numbers


@dataclass(frozen=True, order=True)
class Region:
    """A box of chips: `shape` chips from corner `at`.

    >>> Region(at=(6, 8), shape=(4, 2))
    Region(at=(6, 8), shape=(4, 2))
    >>> print(Region.parse("4x2@6,8"))
    4x2@6,8
    """

    at: Coordinate
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", whole_numbers(self.at, "A region's corner"))
        object.__setattr__(self, "shape", whole_numbers(self.shape, "A region's shape"))
        if len(self.at) != len(self.shape):
            raise MeshError(
                f"A region's corner and shape need the same number of axes: got at={self.at}, shape={self.shape}."
            )
        if any(n < 1 for n in self.shape):
            raise MeshError(f"A region is at least one chip long on every axis: got shape={self.shape}.")

    @classmethod
    def parse(cls, text: str) -> Region:
        """Read `4x2@6,8` (rows × columns at row, column) or a single chip `6,8`."""
        shape_text, at_sign, at_text = text.strip().rpartition("@")
        try:
            at = parse_chip(at_text)
            shape = parse_shape(shape_text) if at_sign else (1,) * len(at)
        except MeshError:
            raise MeshError(
                f"{text!r} is not a hole. Write rows x columns @ row,column, as in 4x2@6,8, or one chip, as in 6,8."
            ) from None
        return cls(at, shape)

    def __str__(self) -> str:
        return f"{name_shape(self.shape)}@{','.join(map(str, self.at))}"

    @property
    def n_chips(self) -> int:
        """How many chips it holds."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into an array of the mesh's shape."""
        return tuple(slice(a, a + n) for a, n in zip(self.at, self.shape, strict=True))


def cut_into_boxes(mask: NDArray[np.bool_]) -> list[Region]:
    """Cut the True cells into disjoint boxes, each grown from its first cell along the last axis first."""
    left = mask.copy()
    boxes = []
    for cell in map(tuple, np.argwhere(mask)):
        if not left[cell]:
            continue
        extent = [1] * mask.ndim
        for axis in reversed(range(mask.ndim)):
            while cell[axis] + extent[axis] < mask.shape[axis]:
                face = [slice(c, c + n) for c, n in zip(cell, extent, strict=True)]
                face[axis] = slice(cell[axis] + extent[axis], cell[axis] + extent[axis] + 1)
                if not left[tuple(face)].all():
                    break
                extent[axis] += 1
        box = Region(at=tuple(int(c) for c in cell), shape=tuple(extent))
        left[box.slices] = False
        boxes.append(box)
    return boxes


def all_placements(
    mesh_shape: Sequence[int], hole_shape: Sequence[int], *, align: Sequence[int] | int = 2
) -> list[Region]:
    """Return every position of a hole in a mesh whose corner is a multiple of `align` on each axis.

    >>> [str(host) for host in all_placements((4, 4), (4, 2), align=(4, 2))]
    ['4x2@0,0', '4x2@0,2']
    """
    if len(mesh_shape) != len(hole_shape):
        raise MeshError(f"A {name_shape(hole_shape)} hole does not fit a mesh of {len(mesh_shape)} axes.")
    strides = (align,) * len(mesh_shape) if isinstance(align, int) else tuple(align)
    ranges = [range(0, n - h + 1, by) for n, h, by in zip(mesh_shape, hole_shape, strides, strict=True)]
    return [Region(at=at, shape=tuple(hole_shape)) for at in product(*ranges)]
