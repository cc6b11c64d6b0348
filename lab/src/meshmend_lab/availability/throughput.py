"""Throughput: how fast a job trains on the remaining chips, relative to the whole machine.

The batch per chip stays the same, so a step is `compute_s` plus the all-reduce, and throughput is proportional to
chips / step. The all-reduce is predicted for the fastest plan (`auto`). A study goes through thousands of states and a
plan for a thousand chips takes seconds, so only these are planned in full:

- the whole machine, and a full mesh of half its sides; other full meshes lie on the line between these two, by the sum
  of their sides;
- the machine with one host lost, in its middle.

Slow cables of the machine are in all of them; of its halves, the one that they slow most stands for a full mesh.

The cost of other holes is estimated relative to that one from the spanning trees of `weave`, the plan for long
payloads: growing a few is cheap, and the all-reduce time grows with the load of their busiest cable. The position
matters much more than the size: near an edge a hole leaves a strip that few cables join to the rest. Of several holes
the worst counts: chunks that pass the others in time wait for it anyway. Where a chip does not drive all its links at
once, cables are not the bottleneck: neither the position of a hole nor its size matters much, but whether a ring can
still visit all chips does, which a single lost chip prevents. There one hole of each kind is planned, in the middle;
of several the worst counts again. `exact` plans a state in full, to check the estimates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshmend.planning.auto import Auto
from meshmend.planning.weave.trees import grow
from meshmend.topology import Mesh, Region, all_placements
from meshmend_lab.availability.assumptions import Assumptions
from meshmend_lab.availability.boxes import part_of

GAPS = (0, 1, 2, 4)
"""Distances to the edge that are distinguished, each up to the next."""

INSIDE = 6
"""At this distance from the edge a hole counts as in the middle: on 32x32 the rest varies by 1 %."""

N_TREES = 128
"""Trees for an estimate: they resolve the load of a cable to 1/128 of the payload."""

BUDGET_S = 2.0
"""CPU seconds for each plan: what a job takes for one that it has not prepared."""


class Throughput:
    """All-reduce times and rates of a machine's states, cached. Rates are relative to the whole machine."""

    def __init__(self, assumptions: Assumptions) -> None:
        self._assumptions = assumptions
        self._machine = assumptions.mesh
        self._times: dict[Mesh, float] = {}
        self._loads: dict[Region, float] = {}
        self._extras: dict[Region, float] = {}
        host = Region((0,) * self._machine.n_axes, assumptions.host)
        self._middle = self._in_the_middle(host)
        self._small = _slowest_half(self._machine)
        self._plain = part_of(self._machine, _all_of(self._machine), keeps_wrap=False)

    def rate(self, n_chips: int, all_reduce_s: float) -> float:
        """Return the throughput of `n_chips` chips relative to that of the whole machine."""
        compute = self._assumptions.compute_s
        return n_chips / self._machine.size * (compute + self.exact(self._machine)) / (compute + all_reduce_s)

    def holed_s(self, holes: Sequence[Region]) -> float:
        """Return the all-reduce time of the machine with these holes, estimated from the worst of them."""
        whole = self.exact(self._machine)
        if not holes or not self._assumptions.payload_bytes:
            return whole
        if self._assumptions.hardware.links_at_once is not None:
            return whole + max(self._planned_extra_s(self._in_the_middle(hole)) for hole in holes)
        return whole + max(self._extra_s(hole) for hole in holes)

    def full_s(self, shape: Sequence[int]) -> float:
        """Return the all-reduce time of a full mesh of this shape, cut from the machine."""
        if tuple(shape) == self._machine.shape:
            return self.exact(self._machine)
        low, high = sum(self._small.shape), sum(self._plain.shape)
        low_s, high_s = self.exact(self._small), self.exact(self._plain)
        if high == low:
            return high_s
        return max(0.0, low_s + (high_s - low_s) * (sum(shape) - low) / (high - low))

    def exact(self, mesh: Mesh) -> float:
        """Return the all-reduce time of the fastest plan for exactly this mesh."""
        if mesh not in self._times:
            payload = self._assumptions.payload_bytes
            if mesh.n_chips == 1 or not payload:
                self._times[mesh] = 0.0
            else:
                auto = Auto(payload_bytes=payload, hardware=self._assumptions.hardware, budget_s=BUDGET_S)
                self._times[mesh] = auto.choose(mesh).seconds
        return self._times[mesh]

    @property
    def n_planned(self) -> int:
        """How many meshes have been planned in full."""
        return len(self._times)

    def _extra_s(self, hole: Region) -> float:
        """Return what one hole adds to the all-reduce of the whole machine."""
        if hole not in self._extras:
            position = _moved(hole, self._machine, _gaps(hole, self._machine))
            more = self._load(position) - self._load(self._middle)
            unit_s = self._assumptions.payload_bytes / self._assumptions.hardware.link_bytes_per_s
            self._extras[hole] = self._middle_extra_s + more * unit_s
        return self._extras[hole]

    def _load(self, hole: Region) -> float:
        if hole not in self._loads:
            mesh = self._machine.fail(hole) if hole.n_chips < self._machine.size else None
            self._loads[hole] = 0.0
            if mesh is not None and mesh.is_connected and mesh.n_chips > 1:
                trees = grow(mesh, N_TREES, mesh.rates if mesh.has_slow_cables else None)
                uses = np.bincount(trees.cables.ravel(), minlength=mesh.n_cables)
                self._loads[hole] = float((uses / mesh.rates).max()) / N_TREES
        return self._loads[hole]

    def _in_the_middle(self, hole: Region) -> Region:
        return _moved(hole, self._machine, self._machine.shape)

    @cached_property
    def _middle_extra_s(self) -> float:
        return self._planned_extra_s(self._middle)

    def _planned_extra_s(self, hole: Region) -> float:
        """Return what this very hole adds, by the plan for it; nothing where no chips are left, or apart."""
        if hole.n_chips == self._machine.size:
            return 0.0
        holed = self._machine.fail(hole)
        return self.exact(holed) - self.exact(self._machine) if holed.is_connected else 0.0


def _gaps(hole: Region, machine: Mesh) -> list[int]:
    """Return how far the hole is from the nearer edge on each axis, up to where it no longer matters."""
    gaps = []
    for at, length, side, wrap in zip(hole.at, hole.shape, machine.shape, machine.wrap, strict=True):
        gap = min(at, side - at - length)
        gaps.append(INSIDE if wrap or gap >= INSIDE else max(known for known in GAPS if known <= gap))
    # Reflecting a square hole in the diagonal of a square machine changes nothing, if its cables are alike.
    is_square = len(set(zip(hole.shape, machine.shape, machine.wrap, strict=True))) == 1
    return sorted(gaps) if is_square and not machine.has_slow_cables else gaps


def _moved(hole: Region, machine: Mesh, gaps: Sequence[int]) -> Region:
    """Return the hole at these distances from the edge; at distances that no longer matter, in the middle."""
    at = []
    for gap, length, side in zip(gaps, hole.shape, machine.shape, strict=True):
        middle = (side - length) // 2 // length * length
        at.append(gap if gap < min(INSIDE, middle) else middle)
    return Region(at=tuple(at), shape=hole.shape)


def _all_of(machine: Mesh) -> Region:
    return Region(at=(0,) * machine.n_axes, shape=machine.shape)


def _slowest_half(machine: Mesh) -> Mesh:
    """Return a full mesh of half the machine's sides: where cables are slow, the one that loses most by them."""
    half = tuple(max(1, n // 2) for n in machine.shape)
    parts = [part_of(machine, box) for box in all_placements(machine.shape, half, align=half)]
    return max(parts, key=lambda part: float((1 / part.rates - 1).sum()))


def outermost(holes: Sequence[Region]) -> list[Region]:
    """Return the holes that lie in no other; the parts of a machine are nested, so these do not overlap."""
    kept: list[Region] = []
    for hole in sorted(set(holes), key=lambda hole: -hole.n_chips):
        if not any(_within(hole, other) for other in kept):
            kept.append(hole)
    return kept


def _within(inner: Region, outer: Region) -> bool:
    return all(
        a <= b and b + m <= a + n for a, n, b, m in zip(outer.at, outer.shape, inner.at, inner.shape, strict=True)
    )


def largest_part(live: NDArray[np.bool_], machine: Mesh) -> NDArray[np.bool_]:
    """Return the largest connected part of the live chips, as an array of the machine's shape."""
    from scipy.ndimage import label

    if not live.any():
        return live
    if any(machine.wrap):
        mesh = Mesh(machine.shape, wrap=machine.wrap, failed=[tuple(chip) for chip in np.argwhere(~live).tolist()])
        parts = np.full(live.shape, -1)
        parts[live] = mesh.component_of
        count = mesh.n_components
    else:
        labelled, count = label(live)
        parts = labelled - 1
    if count <= 1:
        return live
    sizes = np.bincount(parts[live], minlength=count)
    return np.asarray(parts == int(sizes.argmax()))


def whole_parts(live: NDArray[np.bool_], part: Sequence[int]) -> NDArray[np.bool_]:
    """Return a grid of parts, such as hosts, True where every chip of the part is live."""
    split = [n for side, length in zip(live.shape, part, strict=True) for n in (side // length, length)]
    inner = tuple(range(1, 2 * live.ndim, 2))
    return np.asarray(live.reshape(split).all(axis=inner))


def chips_of(box: Region, host: Sequence[int]) -> Region:
    """Return the chips of a box of hosts."""
    return Region(
        at=tuple(a * h for a, h in zip(box.at, host, strict=True)),
        shape=tuple(n * h for n, h in zip(box.shape, host, strict=True)),
    )


def step_error(assumptions: Assumptions, estimate_s: float, exact_s: float) -> float:
    """Return the relative error of a step with the estimated all-reduce."""
    if math.isclose(estimate_s, exact_s):
        return 0.0
    return (estimate_s - exact_s) / (assumptions.compute_s + exact_s)
