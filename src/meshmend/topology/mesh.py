"""The mesh: its chips, its holes, and the cables that are left, in arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshmend.errors import Coordinate, MeshError, name_chip
from meshmend.topology.rates import RateLike, cables_within, check_rate, name_cable_rates, parse_cable_rate
from meshmend.topology.region import Region, cut_into_boxes
from meshmend.topology.text import Cable, name_cable, name_shape, parse_chip, parse_shape, whole_numbers

if TYPE_CHECKING:
    from scipy.sparse import csr_array

MAX_CHIPS = 2**24
"""Ranks are 32-bit and a mesh has a few arrays of its size: a larger shape is a mistake."""

MAX_AXES = 8

CableLike = tuple[Sequence[int], Sequence[int]] | str
# The type of a mapping's keys is invariant, so that no narrower one than Any takes {"0,4-0,5": 0.5} and boxes alike.
CableRates = Mapping[Any, RateLike] | Iterable[tuple[Region | CableLike, RateLike]]
IntArray = NDArray[np.int32]


class Mesh:
    """A mesh or torus of chips in any number of dimensions, some of which may have failed. Immutable.

    `wrap` says which axes wrap, as in a torus (one bool for all, or one per axis). An axis of one or two chips has no
    wrap cable and counts as plain. `failed` lists regions, coordinates or their short forms; `failed_cables` lists
    pairs of neighbouring coordinates. Shapes may be given as `"16x32"`.

    `cable_rates` gives the rate of slow cables, as a fraction of the hardware's link rate: 1/2 for a cable that lost
    half of its wires. Its keys are cables, or boxes for all cables within them. Cables that are not named have rate 1,
    and rate 0 is a failed cable.

    >>> mesh = Mesh((16, 32), failed=[Region(at=(6, 8), shape=(4, 2))])
    >>> mesh
    Mesh(16x32 minus 4x2@6,8: 504 of 512 chips)
    >>> mesh.n_chips, mesh.n_cables, mesh.is_connected
    (504, 954, True)
    >>> Mesh("4x4", cable_rates={"0,1-0,2": 0.5, "4x1@0,3": "3/4"})
    Mesh(4x4 with 4 slow cables: 16 chips)
    """

    def __init__(
        self,
        shape: Sequence[int] | str,
        *,
        wrap: bool | Sequence[bool] = False,
        failed: Iterable[Region | Sequence[int] | str] = (),
        failed_cables: Iterable[CableLike] = (),
        cable_rates: CableRates = (),
    ) -> None:
        self._shape = _check_shape(shape)
        self._wrap = _check_wrap(wrap, self._shape)
        self._live = np.ones(self._shape, dtype=np.bool_)
        if isinstance(failed, str | Region):
            raise MeshError(f"failed is a list of holes, even of one: write failed=[{str(failed)!r}].")
        if isinstance(failed_cables, str):
            raise MeshError(f"failed_cables is a list, even of one: write failed_cables=[{failed_cables!r}].")
        for hole in failed:
            self._live[self._check_region(hole).slices] = False
        if not self._live.any():
            raise MeshError(f"All {self._live.size} chips of the {name_shape(self._shape)} mesh have failed.")
        self._live.flags.writeable = False
        cables = {self._check_cable(cable) for cable in failed_cables}
        rates = self._check_rates(cable_rates)
        cables |= {cable for cable, rate in rates.items() if rate == 0}
        # A cable of a failed chip is already gone; leaving it out makes equal machines equal values.
        self._failed_cables = tuple(sorted(c for c in cables if self._live[c[0]] and self._live[c[1]]))
        self._slow_once_repaired = tuple(sorted((cable, rate) for cable, rate in rates.items() if 0 < rate < 1))
        self._slow_cables = tuple(
            (c, rate)
            for c, rate in self._slow_once_repaired
            if self._live[c[0]] and self._live[c[1]] and c not in cables
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Chips along each axis, failed ones included."""
        return self._shape

    @property
    def wrap(self) -> tuple[bool, ...]:
        """For each axis, whether it wraps."""
        return self._wrap

    @property
    def n_axes(self) -> int:
        """Number of dimensions."""
        return len(self._shape)

    @property
    def n_directions(self) -> int:
        """Links that a chip in the middle of the mesh sends on: two per axis."""
        return 2 * len(self._shape)

    @property
    def size(self) -> int:
        """Number of chips, failed ones included."""
        return self._live.size

    @cached_property
    def n_chips(self) -> int:
        """Number of live chips, P."""
        return int(self._live.sum())

    @property
    def live(self) -> NDArray[np.bool_]:
        """An array of the mesh's shape, True where a chip is alive."""
        return self._live

    @property
    def is_full(self) -> bool:
        """Whether nothing has failed; cables may be slow."""
        return self.n_chips == self.size and not self._failed_cables

    @property
    def failed_cables(self) -> tuple[Cable, ...]:
        """Failed cables between live chips, each with its smaller coordinate first."""
        return self._failed_cables

    @property
    def cable_rates(self) -> Mapping[Cable, Fraction]:
        """The rate of each live cable that is slower than the hardware's links, as a fraction of theirs."""
        return MappingProxyType(dict(self._slow_cables))

    @property
    def has_slow_cables(self) -> bool:
        """Whether some live cable has a rate below 1."""
        return bool(self._slow_cables)

    @cached_property
    def holes(self) -> tuple[Region, ...]:
        """The failed chips as disjoint boxes: the same boxes however the failures were given."""
        return tuple(cut_into_boxes(~self._live))

    @cached_property
    def rank_of(self) -> IntArray:
        """An array of the mesh's shape: each live chip's rank, −1 for a failed one."""
        ranks = np.full(self._shape, -1, dtype=np.int32)
        ranks[self._live] = np.arange(self.n_chips, dtype=np.int32)
        return read_only(ranks)

    @cached_property
    def coords(self) -> IntArray:
        """Coordinates of the live chips, one row per rank."""
        return read_only(np.argwhere(self._live).astype(np.int32))

    @cached_property
    def neighbours(self) -> IntArray:
        """For each rank and direction the neighbour's rank, −1 where there is no live link."""
        table = np.empty((self.n_chips, self.n_directions), dtype=np.int32)
        for axis, (length, wrap) in enumerate(zip(self._shape, self._wrap, strict=True)):
            for direction, shift, edge in ((2 * axis, -1, length - 1), (2 * axis + 1, 1, 0)):
                beyond = np.roll(self.rank_of, shift, axis)
                if not wrap:
                    beyond[(slice(None),) * axis + (edge,)] = -1
                table[:, direction] = beyond[self._live]
        for a, b in self._failed_cables:
            rank_a, rank_b = self.rank_of[a], self.rank_of[b]
            table[rank_a, table[rank_a] == rank_b] = -1
            table[rank_b, table[rank_b] == rank_a] = -1
        return read_only(table)

    @cached_property
    def cables(self) -> IntArray:
        """Live cables as pairs of ranks, one row per cable, ordered by axis and then by rank."""
        ranks = np.arange(self.n_chips, dtype=np.int32)
        columns = [np.stack([ranks, self.neighbours[:, d]], axis=1) for d in range(0, self.n_directions, 2)]
        pairs = np.concatenate(columns)
        return read_only(pairs[pairs[:, 1] >= 0])

    @property
    def n_cables(self) -> int:
        """Number of live cables, E."""
        return len(self.cables)

    @cached_property
    def rates(self) -> NDArray[np.float64]:
        """The rate of each of `cables`, as a fraction of the hardware's link rate."""
        return read_only(self.link_rates[self.link(*self.cables.T)])

    @cached_property
    def link_rates(self) -> NDArray[np.float64]:
        """The rate of each link; 1 in the slots of links that do not exist."""
        rates = np.ones(self.n_link_slots)
        for (a, b), rate in self._slow_cables:
            rates[self.link([self.rank(a), self.rank(b)], [self.rank(b), self.rank(a)])] = float(rate)
        return read_only(rates)

    @property
    def n_link_slots(self) -> int:
        """Length of an array indexed by link; the slots of links that do not exist stay unused."""
        return self.n_chips * self.n_directions

    def link(self, src: ArrayLike, dst: ArrayLike) -> NDArray[np.int64]:
        """Return the link that joins each pair of ranks, −1 where they are not live neighbours."""
        src, dst = np.broadcast_arrays(np.asarray(src, np.int64), np.asarray(dst, np.int64))
        links = np.full(src.shape, -1, dtype=np.int64)
        for direction in range(self.n_directions):
            here = self.neighbours[src, direction] == dst
            links[here] = src[here] * self.n_directions + direction
        return links

    def link_ends(self, link: int) -> tuple[Coordinate, Coordinate]:
        """Return the coordinates that a link leaves and reaches."""
        rank, direction = divmod(int(link), self.n_directions)
        far = int(self.neighbours[rank, direction])
        if far < 0:
            raise MeshError(f"Link {link} does not exist: chip {name_chip(self.chip(rank))} has none that way.")
        return self.chip(rank), self.chip(far)

    def rank(self, chip: Sequence[int]) -> int:
        """Return a live chip's rank."""
        chip = whole_numbers(chip, "A chip's coordinate")
        self._check_chip(chip)
        rank = int(self.rank_of[chip])
        if rank < 0:
            raise MeshError(f"Chip {name_chip(chip)} has failed, so it has no rank.")
        return rank

    def chip(self, rank: int) -> Coordinate:
        """Return the coordinate of a rank."""
        return tuple(int(x) for x in self.coords[rank])

    @cached_property
    def graph(self) -> csr_array[np.int8]:
        """The live cables as a SciPy graph over ranks, each cable once: search it with `directed=False`."""
        # Importing SciPy would slow down `import meshmend`, so only callers that need the graph pay for it.
        from scipy.sparse import coo_array

        a, b = self.cables.T
        ones = np.ones(len(a), dtype=np.int8)
        return coo_array((ones, (a, b)), shape=(self.n_chips, self.n_chips)).tocsr()

    @cached_property
    def component_of(self) -> IntArray:
        """For each rank the number of its connected component, counted from 0."""
        from scipy.sparse.csgraph import connected_components

        _, labels = connected_components(self.graph, directed=False)
        return read_only(labels.astype(np.int32))

    @property
    def n_components(self) -> int:
        """Number of connected components of the survivors."""
        return int(self.component_of.max()) + 1

    @property
    def is_connected(self) -> bool:
        """Whether every live chip can reach every other."""
        return self.n_components == 1

    def fail(self, *failed: Region | Sequence[int] | str) -> Mesh:
        """Return this mesh with more chips failed.

        >>> Mesh("8x8").fail("2x2@2,2")
        Mesh(8x8 minus 2x2@2,2: 60 of 64 chips)
        """
        return self.with_failures(failed)

    def with_failures(
        self,
        failed: Iterable[Region | Sequence[int] | str] = (),
        failed_cables: Iterable[CableLike] = (),
        cable_rates: Iterable[tuple[Region | CableLike, RateLike]] = (),
    ) -> Mesh:
        """Return this mesh with more chips and cables failed, and more cables slow.

        >>> Mesh("4x4", failed=["0,0"]).with_failures(failed_cables=["1,1-1,2"], cable_rates=[("2,1-2,2", 0.5)])
        Mesh(4x4 minus 1x1@0,0, 1 cable with 1 slow cable: 15 of 16 chips)
        """
        return Mesh(
            self._shape,
            wrap=self._wrap,
            failed=[*self.holes, *failed],
            failed_cables=[*self._failed_cables, *failed_cables],
            cable_rates=[*self._slow_once_repaired, *cable_rates],
        )

    @property
    def whole(self) -> Mesh:
        """The same machine without failures; slow cables stay slow, failed ones and those of failed chips as well.

        A mesh that was read from a plan's file knows the rates of live cables alone: no others count for a plan.

        >>> Mesh("4x4", failed=["0,0"], cable_rates={"0,0-0,1": 0.5}).whole
        Mesh(4x4 with 1 slow cable: 16 chips)
        """
        return Mesh(self._shape, wrap=self._wrap, cable_rates=self._slow_once_repaired)

    def to_dict(self) -> dict[str, Any]:
        """Return the mesh as JSON can write it and `from_dict` reads it; without rates where no cable is slow.

        >>> Mesh("4x4", failed=["0,0"], cable_rates={"1,1-1,2": 0.5}).to_dict()["cable_rates"]
        ['1,1-1,2=1/2']
        """
        facts = {
            "shape": list(self._shape),
            "wrap": list(self._wrap),
            "failed": [str(hole) for hole in self.holes],
            "failed_cables": [name_cable(cable) for cable in self._failed_cables],
        }
        return facts | ({"cable_rates": name_cable_rates(self.cable_rates)} if self._slow_cables else {})

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Mesh:
        """Return the mesh that `to_dict` described; other entries of the mapping are left alone.

        >>> mesh = Mesh("4x4", wrap=True, failed=["0,0"], cable_rates={"1,1-1,2": 0.5})
        >>> Mesh.from_dict(mesh.to_dict()) == mesh
        True
        """
        return cls(
            facts["shape"],
            wrap=facts["wrap"],
            failed=facts["failed"],
            failed_cables=facts["failed_cables"],
            cable_rates=[parse_cable_rate(text) for text in facts.get("cable_rates", ())],
        )

    def _check_chip(self, chip: Coordinate) -> None:
        if len(chip) != self.n_axes:
            raise MeshError(
                f"Chip {name_chip(chip)} has {len(chip)} coordinates, but the {name_shape(self._shape)} mesh "
                f"has {self.n_axes} axes."
            )
        if any(not 0 <= x < n for x, n in zip(chip, self._shape, strict=True)):
            raise MeshError(
                f"Chip {name_chip(chip)} lies outside the {name_shape(self._shape)} mesh; coordinates count from 0."
            )

    def _check_region(self, hole: Region | Sequence[int] | str) -> Region:
        if isinstance(hole, str):
            hole = Region.parse(hole)
        elif not isinstance(hole, Region):
            hole = Region(at=tuple(hole), shape=(1,) * len(hole))
        self._check_chip(hole.at)
        if any(a + n > length for a, n, length in zip(hole.at, hole.shape, self._shape, strict=True)):
            last = tuple(a + n - 1 for a, n in zip(hole.at, hole.shape, strict=True))
            raise MeshError(
                f"The hole {hole} reaches chip {name_chip(last)}, outside the {name_shape(self._shape)} mesh."
            )
        return hole

    def _check_cable(self, cable: CableLike) -> Cable:
        if isinstance(cable, str):
            ends = [parse_chip(part) for part in cable.split("-")]
        else:
            ends = [whole_numbers(end, "A chip's coordinate") for end in cable]
        if len(ends) != 2:
            raise MeshError(f"{cable!r} is not a cable. Write its two chips, as in 6,8-6,9.")
        a, b = sorted(ends)
        self._check_chip(a)
        self._check_chip(b)
        apart = [axis for axis in range(self.n_axes) if a[axis] != b[axis]]
        if len(apart) == 1:
            distance, length = b[apart[0]] - a[apart[0]], self._shape[apart[0]]
            if distance == 1 or (self._wrap[apart[0]] and distance == length - 1):
                return a, b
        raise MeshError(
            f"No cable joins {name_chip(a)} and {name_chip(b)}: they are not neighbours in {name_shape(self._shape)}."
        )

    def _check_rates(self, given: CableRates) -> dict[Cable, Fraction]:
        """Return the rate of each cable that is named, alone or as part of a box."""
        if isinstance(given, str):
            raise MeshError(f"cable_rates gives each slow cable its rate, as in {{'0,4-0,5': 0.5}}: got {given!r}.")
        rates: dict[Cable, Fraction] = {}
        for key, value in given.items() if isinstance(given, Mapping) else given:
            rate = check_rate(value)
            if isinstance(key, Region) or (isinstance(key, str) and "@" in key):
                named = cables_within(self._check_region(key), self._shape, self._wrap)
            else:
                named = [self._check_cable(key)]
            for cable in named:
                if rates.setdefault(cable, rate) != rate:
                    raise MeshError(
                        f"Cable {name_cable(cable)} has two rates, {rates[cable]} and {rate}: name every cable once."
                    )
        return rates

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mesh):
            return NotImplemented
        return self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @cached_property
    def _key(self) -> tuple[object, ...]:
        return self._shape, self._wrap, np.packbits(self._live).tobytes(), self._failed_cables, self._slow_cables

    def __str__(self) -> str:
        name = name_shape(self._shape)
        if all(self._wrap):
            name += " torus"
        elif any(self._wrap):
            name += f" wrapped on axis {', '.join(str(a) for a, w in enumerate(self._wrap) if w)}"
        lost = [str(hole) for hole in self.holes[:4]]
        if len(self.holes) > 4:
            lost.append(f"{len(self.holes) - 4} more holes")
        if self._failed_cables:
            lost.append(f"{len(self._failed_cables)} cable{'s' * (len(self._failed_cables) > 1)}")
        if lost:
            name += f" minus {', '.join(lost)}"
        if self._slow_cables:
            name += f" with {len(self._slow_cables)} slow cable{'s' * (len(self._slow_cables) > 1)}"
        return name

    def __repr__(self) -> str:
        chips = f"{self.n_chips} of {self.size} chips" if self.n_chips < self.size else f"{self.size} chips"
        return f"Mesh({self}: {chips})"


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array that its caller has just made, such that nobody writes to it any more."""
    array.flags.writeable = False
    return array


def _check_shape(shape: Sequence[int] | str) -> tuple[int, ...]:
    checked = parse_shape(shape) if isinstance(shape, str) else whole_numbers(shape, "A shape")
    if not 1 <= len(checked) <= MAX_AXES or any(n < 1 for n in checked):
        raise MeshError(f"A mesh has 1 to {MAX_AXES} axes of at least one chip each: got {name_shape(checked)}.")
    size = math.prod(checked)
    if size > MAX_CHIPS:
        raise MeshError(f"A {name_shape(checked)} mesh has {size:,} chips; the limit is {MAX_CHIPS:,}.")
    return checked


def _check_wrap(wrap: bool | Sequence[bool], shape: tuple[int, ...]) -> tuple[bool, ...]:
    asked = (wrap,) * len(shape) if isinstance(wrap, bool) else tuple(wrap)
    if not all(isinstance(w, bool | np.bool_) for w in asked):
        # A string or a list of axis numbers is a sequence too, and would be read as one bool per axis.
        raise MeshError(f"wrap is True, False, or one of them per axis, as in (False, True): got {wrap!r}.")
    if len(asked) != len(shape):
        raise MeshError(f"wrap needs one value for each of {len(shape)} axes: got {len(asked)}.")
    return tuple(bool(w) and n > 2 for w, n in zip(asked, shape, strict=True))
