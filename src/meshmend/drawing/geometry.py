"""Geometry: where chips lie on the page, and the line of a transfer between them.

Nothing here draws; pictures, animations and pages all take their lines from here. The unit is the distance between
neighbouring chips; x grows to the right and y grows downwards, as columns and rows do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshmend import routing
from meshmend.errors import DrawingError, name_chip
from meshmend.topology import Mesh

Points = NDArray[np.float64]

STUB = 0.62
"""How far the line of a wrap cable reaches out of the mesh before it is cut."""
ASIDE = 0.085
"""How far the two directions of a cable are moved apart, each to its own right."""
MAX_OFFSET = 0.45
"""Lines beside a row or a column of chips stay this close to it."""


@dataclass(frozen=True)
class FigureLayout:
    """The positions of all chips of a mesh. A mesh of more than two axes is cut into planes, laid side by side."""

    mesh: Mesh

    @cached_property
    def positions(self) -> Points:
        """(x, y) of every chip, failed ones included, in row-major order."""
        shape = self.mesh.shape
        chips = np.stack(np.unravel_index(np.arange(self.mesh.size), shape), axis=1)
        plane_shape = (1, *shape)[-2:]
        row = chips[:, -2] if self.mesh.n_axes > 1 else np.zeros(len(chips))
        plane = np.arange(self.mesh.size) // (plane_shape[0] * plane_shape[1])
        n_planes = int(plane.max()) + 1
        across = n_planes if n_planes <= 4 else int(np.ceil(np.sqrt(n_planes)))
        x = chips[:, -1] + (plane % across) * (plane_shape[1] + 1)
        y = row + (plane // across) * (plane_shape[0] + 1)
        return np.stack([x, y], axis=1).astype(np.float64)

    @cached_property
    def live(self) -> Points:
        """(x, y) of each rank."""
        return self.positions[self.mesh.live.ravel()]

    @property
    def failed(self) -> Points:
        """(x, y) of the failed chips."""
        return self.positions[~self.mesh.live.ravel()]

    @cached_property
    def box(self) -> tuple[float, float, float, float]:
        """Left, right, top and bottom of the drawing, with room for the stubs of wrap cables."""
        wrap = (False, *self.mesh.wrap)[-2:]
        beside, above = (0.85 if wrapped else 0.58 for wrapped in (wrap[1], wrap[0]))
        (left, top), (right, bottom) = self.positions.min(axis=0), self.positions.max(axis=0)
        return float(left - beside), float(right + beside), float(top - above), float(bottom + above)

    @property
    def is_plane(self) -> bool:
        """Whether rows and columns can be numbered along the edges."""
        return self.mesh.n_axes <= 2

    def hop(self, src: int, dst: int) -> tuple[Points, Points] | None:
        """Return the two stubs (leaving, arriving) of a cable that leaves the picture, or None for any other."""
        a, b = self.mesh.coords[src].astype(np.int64), self.mesh.coords[dst].astype(np.int64)
        apart = np.flatnonzero(a != b)
        axis = int(apart[0])
        length = self.mesh.shape[axis]
        if len(apart) != 1 or not self.mesh.wrap[axis] or abs(b[axis] - a[axis]) != length - 1:
            return None
        if axis < self.mesh.n_axes - 2:
            return None  # joins two planes: drawn as an arc
        out = np.zeros(2)
        out[0 if axis == self.mesh.n_axes - 1 else 1] = 1.0 if a[axis] > b[axis] else -1.0
        start, end = self.live[src], self.live[dst]
        return np.array([start, start + STUB * out]), np.array([end - STUB * out, end])


@dataclass(frozen=True)
class Stroke:
    """The line of one pair of chips, in several pieces where it leaves the mesh at an edge and re-enters."""

    src: int
    dst: int
    pieces: tuple[Points, ...]
    n_hops: int


def cables(layout: FigureLayout, *, slow: bool = False) -> list[Points]:
    """Return the lines of the live cables of full rate, from centre to centre; or of the slow ones."""
    found: list[Points] = []
    for src, dst in layout.mesh.cables[(layout.mesh.rates < 1) == slow].tolist():
        found += _one_hop(layout, src, dst)
    return found


def failed_cable_marks(layout: FigureLayout) -> Points:
    """Return where failed cables are marked: in their middle, or where they leave the picture and re-enter it."""
    marks: list[Points] = []
    for a, b in layout.mesh.failed_cables:
        pieces = _one_hop(layout, layout.mesh.rank(a), layout.mesh.rank(b))
        if len(pieces) == 2:
            marks += [pieces[0][-1], pieces[1][0]]
        else:
            (piece,) = pieces
            marks.append(piece[[(len(piece) - 1) // 2, len(piece) // 2]].mean(axis=0))
    return np.array(marks).reshape(-1, 2)


def strokes(
    layout: FigureLayout,
    src: ArrayLike,
    dst: ArrayLike,
    *,
    chip: float,
    offsets: Literal["beside", "behind"] = "beside",
    aside: float = 0.0,
) -> list[Stroke]:
    """Return a line for each pair of ranks.

    Neighbours are joined by a straight line, moved `aside` to its right. Any other pair follows its route, `beside` the
    chips that it passes or `behind` them; routes that share a cable have separate offsets. Lines end at
    the edge of the chips, whose half-width is `chip`.
    """
    mesh = layout.mesh
    src, dst = (np.atleast_1d(np.asarray(end, dtype=np.int64)) for end in (src, dst))
    near = mesh.link(src, dst) >= 0
    found: dict[int, Stroke] = {}
    for i in np.flatnonzero(near).tolist():
        pieces = [_to_the_right(piece, aside) for piece in _one_hop(layout, int(src[i]), int(dst[i]))]
        pieces[0] = _cut_start(pieces[0], chip)
        pieces[-1] = _cut_end(pieces[-1], chip)
        found[i] = Stroke(int(src[i]), int(dst[i]), tuple(pieces), 1)
    far = np.flatnonzero(~near)
    if len(far):
        ways = _routes(mesh, src[far], dst[far])
        for i, way, offset in zip(far.tolist(), ways, _offsets(ways, chip, offsets), strict=True):
            pieces = _along(layout, way, offset, chip, beside=offsets == "beside")
            found[i] = Stroke(int(src[i]), int(dst[i]), tuple(pieces), len(way) - 1)
    return [found[i] for i in range(len(src))]


def same_way_back(mesh: Mesh, src: NDArray[np.int64], dst: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return, for each pair of ranks, whether the route back is the reverse of the route there."""
    same = np.ones(len(src), dtype=np.bool_)
    far = np.flatnonzero(mesh.link(src, dst) < 0)
    if len(far):
        there, back = _routes(mesh, src[far], dst[far]), _routes(mesh, dst[far], src[far])
        same[far] = [way == other[::-1] for way, other in zip(there, back, strict=True)]
    return same


def bends(mesh: Mesh, src: NDArray[np.int64], dst: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return, for each pair of ranks, whether its route leaves the axis that both lie on."""
    return np.array([(np.ptp(mesh.coords[way], axis=0) > 0).sum() > 1 for way in _routes(mesh, src, dst)], np.bool_)


def head(stroke: Stroke, length: float, width: float) -> Points:
    """Return the triangle of an arrow head whose tip is the end of the line."""
    end = stroke.pieces[-1]
    tip, ahead = end[-1], _unit(end[-1] - end[-2])
    side = np.array([-ahead[1], ahead[0]]) * width / 2
    return np.array([tip, tip - length * ahead + side, tip - length * ahead - side])


def shorten(stroke: Stroke, by: float) -> tuple[Points, ...]:
    """Return the line without its last `by`, so that it ends inside its arrow head."""
    return *stroke.pieces[:-1], _cut_end(stroke.pieces[-1], by)


def _one_hop(layout: FigureLayout, src: int, dst: int) -> list[Points]:
    stubs = layout.hop(src, dst)
    if stubs is not None:
        return list(stubs)
    a, b = layout.live[src], layout.live[dst]
    if np.abs(b - a).sum() <= 1.5:
        return [np.array([a, b])]
    # Between planes: an arc, so that it does not cross the chips in between.
    t = np.linspace(0, 1, 13)[:, None]
    across = _unit(np.array([-(b - a)[1], (b - a)[0]]))
    return [a + t * (b - a) + 4 * t * (1 - t) * 0.45 * across]


def _routes(mesh: Mesh, src: NDArray[np.int64], dst: NDArray[np.int64]) -> list[list[int]]:
    """Return the ranks along each pair's route, both ends included."""
    ways = [path.tolist() for path in routing.trace(mesh, src, dst).paths(mesh, src)]
    for way, start, end in zip(ways, src, dst, strict=True):
        if way[-1] != end:
            raise DrawingError(
                f"There is no route from {name_chip(mesh.chip(int(start)))} to {name_chip(mesh.chip(int(end)))} "
                f"on {mesh}, so it cannot be drawn. Verify the schedule first."
            )
    return ways


def _offsets(ways: list[list[int]], chip: float, kind: Literal["beside", "behind"]) -> list[float]:
    """Give routes that share a cable different distances from it; a ring stays on one side where two share cables."""
    crossed = [{frozenset(pair) for pair in pairwise(way)} for way in ways]
    ring_of = components([(way[0], way[-1]) for way in ways])
    rings_on: defaultdict[frozenset[int], set[int]] = defaultdict(set)
    for ring, on in zip(ring_of, crossed, strict=True):
        for cable in on:
            rings_on[cable].add(ring)
    meets: defaultdict[int, set[int]] = defaultdict(set)
    for ring, on in zip(ring_of, crossed, strict=True):
        meets[ring] |= set().union(*(rings_on[cable] for cable in on)) - {ring}
    colour: dict[int, int] = {}
    for ring in dict.fromkeys(ring_of):
        colour[ring] = next(t for t in range(len(ways) + 1) if all(colour.get(other) != t for other in meets[ring]))
    used: defaultdict[frozenset[int], set[int]] = defaultdict(set)
    offsets = [0] * len(ways)
    for i in sorted(range(len(ways)), key=lambda i: (min(ways[i][0], ways[i][-1]), len(ways[i]))):
        taken = set().union(*(used[cable] for cable in crossed[i]))
        if kind == "behind":
            order = [0, *(side * n for n in range(1, len(ways) + 1) for side in (1, -1))]
        elif not meets[ring_of[i]]:
            order = [side * n for n in range(1, len(ways) + 1) for side in (1, -1)]
        else:
            side = -1 if colour[ring_of[i]] % 2 == 0 else 1
            order = [side * n for n in range(1, len(ways) + 1)]
        offsets[i] = next(offset for offset in order if offset not in taken)
        for cable in crossed[i]:
            used[cable].add(offsets[i])
    # Rings that share cables share the room beside them; others need not be as narrow.
    crowd_of = dict(zip(ring_of, components([(ring, min({ring, *meets[ring]})) for ring in ring_of]), strict=True))
    most: defaultdict[int, int] = defaultdict(int)
    for ring, offset in zip(ring_of, offsets, strict=True):
        most[crowd_of[ring]] = max(most[crowd_of[ring]], abs(offset))
    return [_distance(offset, most[crowd_of[ring]], chip, kind) for ring, offset in zip(ring_of, offsets, strict=True)]


def _distance(offset: int, most: int, chip: float, kind: Literal["beside", "behind"]) -> float:
    """Return how far an offset is from the cables, where `most` share a side."""
    if kind == "behind":
        return offset * min(0.11, 0.8 * chip / max(most, 1))
    nearest = chip + 0.07
    step = min(0.1, (MAX_OFFSET - nearest) / max(most - 1, 1))
    return float(np.sign(offset)) * (nearest + step * (abs(offset) - 1))


def components(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Return, for each pair, the number of its connected component in the graph of all pairs."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    a, b = np.array(pairs).T
    n = int(max(a.max(), b.max())) + 1
    _, labels = connected_components(coo_array((np.ones(len(a), np.int8), (a, b)), shape=(n, n)), directed=False)
    return [int(label) for label in labels[a]]


def _along(layout: FigureLayout, way: list[int], offset: float, chip: float, *, beside: bool) -> list[Points]:
    """Return the line of a route, moved off the cables by `offset` both in x and in y, its corners cut."""
    runs: list[list[Points]] = [[layout.live[way[0]]]]
    for a, b in pairwise(way):
        stubs = layout.hop(a, b)
        if stubs is not None:
            runs[-1].append(stubs[0][1])
            runs.append([stubs[1][0]])
        runs[-1].append(layout.live[b])
    pieces = []
    for number, run in enumerate(runs):
        points = _corners_only(np.array(run))
        first, last = _unit(points[1] - points[0]), _unit(points[-1] - points[-2])
        moved = points + offset
        # The ends move only perpendicular to their own direction.
        moved[0] = points[0] + offset * (1 - np.abs(first))
        moved[-1] = points[-1] + offset * (1 - np.abs(last))
        starts, ends = number == 0, number == len(runs) - 1
        if beside:
            # From the side of the chip out to the line, and back in at the other end.
            side = np.sign(offset)
            out = [points[0] + side * chip * (1 - np.abs(first))] if starts else []
            back = [points[-1] + side * chip * (1 - np.abs(last))] if ends else []
            if starts:
                moved[0] += 0.3 * first
            if ends:
                moved[-1] -= 0.3 * last
            line = np.array([*out, *moved, *back])
        else:
            line = moved
            if starts:
                line = _cut_start(line, chip)
            if ends:
                line = _cut_end(line, chip)
        pieces.append(_cut_corners(line, 0.1))
    return pieces


def _corners_only(points: Points) -> Points:
    ways = np.diff(points, axis=0)
    ways /= np.hypot(*ways.T)[:, None]
    bends = ~np.isclose(ways[1:], ways[:-1]).all(axis=1)
    return np.asarray(points[np.concatenate([[True], bends, [True]])])


def _cut_corners(points: Points, by: float) -> Points:
    line = [points[0]]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        room = min(by, *(0.45 * float(np.hypot(*(end - corner))) for end in (before, after)))
        line += [corner + room * _unit(before - corner), corner + room * _unit(after - corner)]
    return np.array([*line, points[-1]])


def _cut_end(points: Points, by: float) -> Points:
    """Take `by` off the end of a line, whole segments if necessary; something is always left."""
    while len(points) > 2 and (length := float(np.hypot(*(points[-1] - points[-2])))) <= by:
        points, by = points[:-1], by - length
    length = float(np.hypot(*(points[-1] - points[-2])))
    cut = points.copy()
    cut[-1] -= min(by, 0.9 * length) * _unit(points[-1] - points[-2])
    return cut


def _cut_start(points: Points, by: float) -> Points:
    return _cut_end(points[::-1], by)[::-1]


def _to_the_right(points: Points, by: float) -> Points:
    if not by:
        return points
    ahead = _unit(points[-1] - points[0])
    return np.asarray(points + by * np.array([-ahead[1], ahead[0]]))


def _unit(vector: Points) -> Points:
    length = float(np.hypot(*vector))
    return np.asarray(vector / length) if length else vector
