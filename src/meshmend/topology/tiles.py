"""Tiles: the live chips of a mesh cut into equal boxes, each a chip of a coarser mesh.

A large model is split inside a tile (2×2 chips, a host, a board), and each chip exchanges its own shard with the chip
in the same slot of a neighbouring tile. So planners need a mesh of tiles: a tile that lost a chip is a hole, and a
cable between tiles is a bundle of straight paths.

How fast such a cable is. Vertical neighbours that are h chips high and w wide have w columns of links between them, and
in each column h messages share every link: together they carry w·b, and each shard gets b/h. Along the other axis
each shard gets b/w. Messages of two cables in line share the links of the tile between them, but never more than h
meet on one link. So each cable has a rate that does not depend on what the others carry.

Where tiles may lie. All tiles of a line share its position along that axis, so that corresponding chips of neighbours
are in one row or column, which is what the rates above rest on; but lines need not touch. A gap between two lines
skips a dead row, or makes holes fall into fewer tiles. Paths cross gaps, so a cable is lost if a chip of the gap under
it is. Shifting one line against the next is not allowed: its messages would turn a corner, and share links with those
of other cables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import islice, product
from math import prod

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import MeshError
from meshmend.topology.mesh import IntArray, Mesh, read_only
from meshmend.topology.rates import MAX_RATE_DENOMINATOR
from meshmend.topology.text import Cable, name_shape, parse_shape, whole_numbers

MAX_TRIED = 10_000
"""Placements of all lines but those of one axis that are tried one by one; where there are more, a search is done."""

Cuts = tuple[tuple[int, ...], ...]
"""For each axis, where its lines of tiles begin."""


@dataclass(frozen=True)
class Tiling:
    """A mesh cut into tiles. Made by `cut_into_tiles`."""

    chips: Mesh
    side: tuple[int, ...]
    """Chips of a tile along each axis."""
    cuts: Cuts
    """For each axis, where its lines of tiles begin. On an axis that wraps, a tile may cross the end."""
    tiles: Mesh
    """The mesh of tiles, for planners. A cable's rate is relative to the fastest: see `link_share`."""

    @property
    def chips_per_tile(self) -> int:
        """Chips per tile."""
        return prod(self.side)

    @cached_property
    def ranks(self) -> IntArray:
        """For each tile, in order of rank, the ranks of its chips in row-major order: (tiles, slots)."""
        offsets = np.argwhere(np.ones(self.side, dtype=np.bool_))
        corners = np.stack([np.array(c)[self.tiles.coords[:, a]] for a, c in enumerate(self.cuts)], axis=1)
        where = (corners[:, None, :] + offsets[None, :, :]) % np.array(self.chips.shape)
        return read_only(self.chips.rank_of[tuple(np.moveaxis(where, -1, 0))])

    @property
    def n_wasted(self) -> int:
        """Live chips that belong to no tile."""
        return self.chips.n_chips - self.tiles.n_chips * self.chips_per_tile

    @cached_property
    def link_share(self) -> Fraction:
        """The rate of a shard on the fastest cables between tiles, as a part of the rate of a chip's link."""
        return Fraction(1, min((n for n, cuts in zip(self.side, self.cuts, strict=True) if len(cuts) > 1), default=1))

    @cached_property
    def hops(self) -> int:
        """Links that a message between neighbouring tiles crosses, at most."""
        most = 1
        for axis, starts in enumerate(self.cuts):
            steps = [(b - a) % self.chips.shape[axis] for a, b in _neighbouring(starts, self.tiles.wrap[axis])]
            most = max([most, *steps])
        return most

    def __repr__(self) -> str:
        return f"Tiling({self.tiles!r} of {name_shape(self.side)} chips each, {self.n_wasted} live chips unused)"


def cut_into_tiles(mesh: Mesh, side: Sequence[int] | str) -> Tiling:
    """Cut a mesh into tiles of `side` chips, placed so that as many as possible are whole and can reach each other.

    Optimal among all placements in straight lines (with or without gaps) if there are at most `MAX_TRIED`, as for 16×16
    chips in tiles of 2×2. All are tried, and among equally many tiles the placement with more cables is preferred. If
    only all axes but one have so few, as on 32×32 chips, those are tried, and the lines of the last axis are placed by
    dynamic programming. That is optimal too, unless tiles have to be given up because they cannot reach the others. On
    larger meshes the best is searched for axis by axis, from every aligned start, and a better one may exist. Only the
    largest connected group of tiles is kept.

    >>> cut_into_tiles(Mesh("8x8", failed=["2x2@2,2"]), "2x2")
    Tiling(Mesh(4x4 minus 1x1@1,1: 15 of 16 chips) of 2x2 chips each, 0 live chips unused)
    >>> cut_into_tiles(Mesh("5x5", failed=["2,2"]), "2x2").cuts
    ((0, 3), (0, 3))
    """
    sides = parse_shape(side) if isinstance(side, str) else whole_numbers(side, "A tile's shape")
    if len(sides) != mesh.n_axes or any(n < 1 for n in sides):
        example = name_shape([2, 2, *[1] * mesh.n_axes][: mesh.n_axes])
        raise MeshError(
            f"A tile of a {name_shape(mesh.shape)} mesh has one length of at least 1 for each of its {mesh.n_axes} "
            f"axes, as in {example}: got {name_shape(sides)}."
        )
    most = prod(n // s for n, s in zip(mesh.shape, sides, strict=True))
    best: Tiling | None = None
    for n_whole, cuts in _candidates(mesh, sides):
        if best is not None and n_whole < best.tiles.n_chips:
            continue
        found = _tiling(mesh, sides, cuts)
        if found is not None and (best is None or _merit(found) > _merit(best)):
            best = found
        if best is not None and best.tiles.is_full and best.tiles.n_chips == most:
            break
    if best is None:
        raise MeshError(f"{mesh!r} has no {name_shape(sides)} tile of live chips. Choose a smaller tile.")
    return best


def _merit(tiling: Tiling) -> tuple[int, int]:
    return tiling.tiles.n_chips, tiling.tiles.n_cables


def _candidates(mesh: Mesh, side: tuple[int, ...]) -> Iterator[tuple[int, Cuts]]:
    """Return placements of lines and how many whole tiles they have: all that matter, or the promising ones."""
    if any(n < s for n, s in zip(mesh.shape, side, strict=True)):
        return
    whole = _whole(mesh, side)
    axes = range(mesh.n_axes)
    counts = [bound_on_cuts(mesh.shape[a], side[a], mesh.wrap[a]) for a in axes]
    last = max(axes, key=lambda a: counts[a])
    enumerated = [a for a in axes if prod(counts) <= MAX_TRIED or a != last]
    cuts: Cuts
    if prod(counts[a] for a in enumerated) <= MAX_TRIED:
        sets = [list(_maximal_cuts(mesh.shape[a], side[a], mesh.wrap[a])) if a in enumerated else [(0,)] for a in axes]
        for cuts in product(*sets):
            if last not in enumerated:
                cuts = _with_best_lines(whole, cuts, last, mesh, side)
            yield int(whole[np.ix_(*cuts)].sum()), cuts
        return
    starts = [range(s if mesh.wrap[a] else min(s, mesh.shape[a] - s + 1)) for a, s in enumerate(side)]
    for offset in islice(product(*starts), MAX_TRIED):
        cuts = tuple(
            tuple(sorted(p % n for p in range(at, at + (n if wrap else n - at) // s * s, s)))
            for at, n, s, wrap in zip(offset, mesh.shape, side, mesh.wrap, strict=True)
        )
        count = -1
        while (now := int(whole[np.ix_(*cuts)].sum())) > count:
            count = now
            yield count, cuts
            for axis in axes:
                cuts = _with_best_lines(whole, cuts, axis, mesh, side)


def bound_on_cuts(length: int, side: int, wrap: bool) -> int:
    """Return how many sets of lines `_maximal_cuts` has, at most; on an axis that wraps it meets some of them twice."""
    ways = [0] * side + [1] * side
    for left in range(2 * side, length + 1):
        ways.append(sum(ways[max(side, left - 2 * side + 1) : left - side + 1]))
    return ways[length] * min(2 * side - 1, length) if wrap else sum(ways[length - side + 1 : length + 1])


def _maximal_cuts(length: int, side: int, wrap: bool) -> Iterator[tuple[int, ...]]:
    """Return every set of lines to which no line can be added; a set that has fewer lines has no more tiles."""

    def extend(first: int, end: int) -> Iterator[tuple[int, ...]]:
        """Continue up to `end`, where the first line begins again, or the axis ends."""
        stack: list[tuple[int, ...]] = [(first,)]
        while stack:
            line = stack.pop()
            if end - line[-1] < 2 * side:
                yield line
                continue
            after = range(line[-1] + side, min(line[-1] + 2 * side, end - side + 1))
            stack += [(*line, at) for at in reversed(after)]

    if not wrap:
        for first in range(min(side, length - side + 1)):
            yield from extend(first, length)
        return
    seen = set()
    # Neighbouring lines begin at most 2·side − 1 apart, so one of them begins here.
    for first in range(min(2 * side - 1, length)):
        for line in extend(first, first + length):
            cuts = tuple(sorted(at % length for at in line))
            if cuts not in seen:
                seen.add(cuts)
                yield cuts


def _with_best_lines(whole: NDArray[np.bool_], cuts: Cuts, axis: int, mesh: Mesh, side: tuple[int, ...]) -> Cuts:
    """Return the cuts with those of one axis placed so that most tiles are whole: of equally many tiles, most lines."""
    length, s = mesh.shape[axis], side[axis]
    chosen = [np.arange(n) if a == axis else np.array(cuts[a]) for a, n in enumerate(whole.shape)]
    others = tuple(a for a in range(mesh.n_axes) if a != axis)
    tiles_at = whole[np.ix_(*chosen)].sum(axis=others).tolist()
    found: tuple[int, tuple[int, ...]] = (-1, ())
    # On a ring, one of any `side` consecutive boundaries between chips has no tile across it.
    for shift in range(s if mesh.wrap[axis] else 1):
        values = [length * tiles_at[(shift + i) % length] + 1 for i in range(length - s + 1)]
        best = [0] * (length + 1)
        for i in range(length - s, -1, -1):
            best[i] = max(best[i + 1], values[i] + best[i + s])
        if best[0] > found[0]:
            lines, i = [], 0
            while i <= length - s:
                if values[i] + best[i + s] == best[i]:
                    lines.append((shift + i) % length)
                    i += s
                else:
                    i += 1
            found = best[0], tuple(sorted(lines))
    return (*cuts[:axis], found[1], *cuts[axis + 1 :])


def _whole(mesh: Mesh, side: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return for each position that a tile's first chip can have whether all of its chips are alive."""
    windows = [
        (np.arange(n if wrap else n - s + 1)[:, None] + np.arange(s)) % n
        for n, s, wrap in zip(mesh.shape, side, mesh.wrap, strict=True)
    ]
    whole: NDArray[np.bool_] = _least(mesh.live, windows).astype(np.bool_)
    return whole


def _windows(mesh: Mesh, side: tuple[int, ...], cuts: Cuts) -> list[NDArray[np.int64]]:
    return [(np.array(c)[:, None] + np.arange(s)) % n for c, s, n in zip(cuts, side, mesh.shape, strict=True)]


def _least(values: NDArray[np.generic], windows: Sequence[NDArray[np.int64]]) -> NDArray[np.generic]:
    """Return the least value in each box; `windows[axis]` has one row of coordinates per line of boxes."""
    for axis, window in enumerate(windows):
        values = np.take(values, window, axis=axis).min(axis=axis + 1)
    return values


def _tiling(mesh: Mesh, side: tuple[int, ...], cuts: Cuts) -> Tiling | None:
    """Return the tiling with these cuts, without tiles that cannot reach the others; None if no tile is whole."""
    live = _least(mesh.live, _windows(mesh, side, cuts)).astype(np.bool_)
    if not live.any():
        return None
    shape = live.shape
    wrap = [w and n > 2 for w, n in zip(mesh.wrap, shape, strict=True)]
    slowest = min((s for s, n in zip(side, shape, strict=True) if n > 1), default=1)
    rates: dict[Cable, Fraction] = {}
    for axis in range(mesh.n_axes):
        onward = onward_rates(mesh, axis)
        for i, (first, second) in enumerate(_neighbouring(cuts[axis], wrap[axis])):
            windows = _windows(mesh, side, cuts)
            length = (second - first) % mesh.shape[axis] + side[axis] - 1
            windows[axis] = (first + np.arange(length)[None, :]) % mesh.shape[axis]
            crossed = _least(onward, windows)
            for other in map(tuple, np.argwhere(crossed * slowest != side[axis]).tolist()):
                a = (*other[:axis], i, *other[axis + 1 :])
                b = (*other[:axis], (i + 1) % shape[axis], *other[axis + 1 :])
                rate = Fraction(float(crossed[other])).limit_denominator(MAX_RATE_DENOMINATOR)
                rates[min(a, b), max(a, b)] = rate * Fraction(slowest, side[axis])
    tiles = Mesh(shape, wrap=wrap, failed=np.argwhere(~live).tolist(), cable_rates=rates)
    if not tiles.is_connected:
        kept = np.bincount(tiles.component_of).argmax()
        tiles = tiles.fail(*tiles.coords[tiles.component_of != kept].tolist())
    return Tiling(mesh, side, cuts, tiles)


def _neighbouring(starts: tuple[int, ...], wrap: bool) -> list[tuple[int, int]]:
    """Return where each line begins and where the next one does."""
    return list(zip(starts, [*starts[1:], *starts[:1]] if wrap else starts[1:], strict=False))


def onward_rates(mesh: Mesh, axis: int) -> NDArray[np.float64]:
    """Return the rate of each chip's cable towards larger coordinates on an axis; 0 where there is none."""
    rates = np.zeros(mesh.shape)
    links = np.arange(mesh.n_chips) * mesh.n_directions + 2 * axis
    rates[mesh.live] = np.where(mesh.neighbours[:, 2 * axis] >= 0, mesh.link_rates[links], 0.0)
    return rates
