"""A candidate grid for a layout: its positions, its cables, and its symmetries as a graph.

Two layouts are the same if a symmetry of the grid turns one into the other. The grid is a product of paths and cycles,
and such a product has only one decomposition into prime factors (Sabidussi, Vizing): its symmetries are those of the
factors and the exchanges of equal ones. All paths and cycles are prime except the cycle of four, which is a square of
two by two: a 4x4 torus is the hypercube of sixteen chips, with 384 symmetries where coordinates suggest 128.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from meshmend.topology import Mesh, name_shape

MOST_AXES = 3
"""Of grids that are guessed; a description may name any."""


@dataclass(frozen=True)
class Grid:
    """A mesh or torus in which nothing has failed; positions are numbered in row-major order.

    >>> torus = Grid((4, 4), (True, True))
    >>> torus.size, torus.n_cables, len(torus.orbits), len(torus.fixing(0))
    (16, 32, 1, 24)
    """

    shape: tuple[int, ...]
    wrap: tuple[bool, ...]

    @classmethod
    def of(cls, shape: Sequence[int], wrap: Sequence[bool]) -> Grid:
        """Return the grid; an axis of one or two chips has no wrap cable and counts as plain."""
        return cls(tuple(shape), tuple(w and n > 2 for n, w in zip(shape, wrap, strict=True)))

    def __str__(self) -> str:
        if not any(self.wrap):
            return f"a {name_shape(self.shape)} mesh"
        if all(w or n < 3 for n, w in zip(self.shape, self.wrap, strict=True)) and all(n > 2 for n in self.shape):
            return f"a {name_shape(self.shape)} torus"
        wrapped = ", ".join(str(axis) for axis, w in enumerate(self.wrap) if w)
        return f"{name_shape(self.shape)} wrapped on axis {wrapped}"

    @property
    def size(self) -> int:
        """Number of positions."""
        return math.prod(self.shape)

    @property
    def n_cables(self) -> int:
        """Number of cables, without building the grid."""
        pairs = zip(self.shape, self.wrap, strict=True)
        return sum(self.size // n * (n if w else n - 1) for n, w in pairs)

    @property
    def degree(self) -> int:
        """The most cables that a chip has."""
        return sum(2 if n > 2 else n - 1 for n in self.shape)

    @property
    def least_degree(self) -> int:
        """The fewest cables that a chip has."""
        return sum((2 if w else 1) if n > 1 else 0 for n, w in zip(self.shape, self.wrap, strict=True))

    @cached_property
    def near(self) -> tuple[int, ...]:
        """For each position, its neighbours as a set of bits."""
        mesh = Mesh(self.shape, wrap=self.wrap)
        found = [0] * self.size
        for a, b in mesh.cables.tolist():
            found[a] |= 1 << b
            found[b] |= 1 << a
        return tuple(found)

    def coordinate(self, position: int) -> tuple[int, ...]:
        """Return a position's coordinate."""
        found = []
        for n in reversed(self.shape):
            position, x = divmod(position, n)
            found.append(x)
        return tuple(reversed(found))

    @cached_property
    def factors(self) -> tuple[tuple[int, bool], ...]:
        """The prime factors in order of the axes, as (length, is it a cycle); axes of one chip have none."""
        found: list[tuple[int, bool]] = []
        for n, w in zip(self.shape, self.wrap, strict=True):
            found += [] if n == 1 else [(2, False), (2, False)] if (n, w) == (4, True) else [(n, w)]
        return tuple(found)

    @cached_property
    def _digits(self) -> list[tuple[int, ...]]:
        """For each position, its coordinate in the product of the prime factors."""
        square = {0: (0, 0), 1: (0, 1), 2: (1, 1), 3: (1, 0)}  # round the cycle of four
        found = []
        for position in range(self.size):
            digits: list[int] = []
            for x, n, w in zip(self.coordinate(position), self.shape, self.wrap, strict=True):
                digits += () if n == 1 else square[x] if (n, w) == (4, True) else (x,)
            found.append(tuple(digits))
        return found

    @cached_property
    def orbits(self) -> tuple[int, ...]:
        """One position of each class of positions that symmetries exchange."""
        first: dict[object, int] = {}
        for position, digits in enumerate(self._digits):
            places = zip(digits, self.factors, strict=True)
            # What symmetries do not change: how far from an end of each path, and nothing on a cycle.
            kind = sorted((n, cycle, 0 if cycle else min(x, n - 1 - x)) for x, (n, cycle) in places)
            first.setdefault(tuple(kind), position)
        return tuple(first.values())

    def fixing(self, position: int) -> list[tuple[int, ...]]:
        """Return the symmetries that leave a position where it is, each as the image of every position."""
        fixed = self._digits[position]
        where = {digits: number for number, digits in enumerate(self._digits)}
        found = []
        for order in _exchanges(self.factors):
            choices = [list(_moves(self.factors[i], fixed[j], fixed[i])) for i, j in enumerate(order)]
            for moves in itertools.product(*choices):
                image = [
                    where[tuple(move[digits[j]] for move, j in zip(moves, order, strict=True))]
                    for digits in self._digits
                ]
                found.append(tuple(image))
        return found


def _exchanges(factors: Sequence[object]) -> Iterator[tuple[int, ...]]:
    """Yield the orders of the factors in which each takes the place of an equal one."""
    kinds = {kind: [i for i, other in enumerate(factors) if other == kind] for kind in factors}
    for arranged in itertools.product(*(itertools.permutations(coordinates) for coordinates in kinds.values())):
        order = list(range(len(factors)))
        for coordinates, new in zip(kinds.values(), arranged, strict=True):
            for coordinate, source in zip(coordinates, new, strict=True):
                order[coordinate] = source
        yield tuple(order)


def _moves(factor: tuple[int, bool], source: int, target: int) -> Iterator[tuple[int, ...]]:
    """Yield the symmetries of a path or cycle that take `source` to `target`, as the image of each place."""
    n, cycle = factor
    if cycle:
        yield tuple((x - source + target) % n for x in range(n))
        yield tuple((source - x + target) % n for x in range(n))
        return
    if source == target:
        yield tuple(range(n))
    if n - 1 - source == target:
        yield tuple(n - 1 - x for x in range(n))


def likely_grids(n_chips: int, most_missing: int) -> list[Grid]:
    """Return every mesh and torus of about that many chips, each graph once, with as few axes as describe it.

    >>> [str(grid) for grid in likely_grids(5, 0)]
    ['a 1x5 mesh', '1x5 wrapped on axis 1']
    >>> [str(grid) for grid in likely_grids(4, 0)]  # a ring of four is 2x2
    ['a 2x2 mesh', 'a 1x4 mesh']
    """
    found: dict[tuple[tuple[int, bool], ...], Grid] = {}
    for size in range(n_chips, n_chips + most_missing + 1):
        shapes = [(1, size), *(shape for shape in _products(size, MOST_AXES, 2) if len(shape) > 1)]
        for shape in sorted(shapes, key=lambda shape: (len(shape), 1 in shape)):
            for wrap in itertools.product((False, True), repeat=len(shape)):
                if all(n > 2 for n, w in zip(shape, wrap, strict=True) if w):
                    grid = Grid.of(shape, wrap)
                    # Grids with the same factors are the same graph, and no others are.
                    found.setdefault(tuple(sorted(grid.factors)), grid)
    return list(found.values())


def _products(size: int, most: int, least: int) -> list[tuple[int, ...]]:
    """Return the ways to write a number as a product of that many factors or fewer, in ascending order."""
    found: list[tuple[int, ...]] = [(size,)] if size >= least else []
    if most > 1:
        for n in range(least, math.isqrt(size) + 1):
            if size % n == 0:
                found += [(n, *rest) for rest in _products(size // n, most - 1, n)]
    return found
