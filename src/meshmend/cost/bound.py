"""Bound: the least time of any collective on a mesh, in units of M/b, and what limits it.

**All-reduce.** Partition the live chips into k parts. For every element some part is the first to hold the full sum. By
then at least k − 1 messages have crossed between parts to bring the contributions there. Each of the other k − 1 parts
still lacks the sum and must receive at least one more. So 2(k − 1)·M bytes cross between parts, and the c cables
between them carry 2c·b bytes per second: the time is at least (k − 1)/c · M/b. Two parts joined by c cables give 1/c,
every chip its own part gives (P − 1)/E. The best of all partitions is what spanning trees can reach (Tutte and
Nash-Williams): its inverse is the strength of the graph, and `cuts` finds it exactly.

**All-gather.** A set T of chips that owns the share s(T) of the payload must receive the rest, (1 − s(T))·M bytes. Its
c(T) cables bring c(T)·b bytes per second, so the time is at least (1 − s(T))/c(T) · M/b. The best of all T is what
branchings reach that spread each share from its owner (Edmonds), so this bound is exact too. A **reduce-scatter** is an
all-gather backwards in time: what T does not own it must send. A corner alone, with an equal share and two cables,
gives (P − 1)/2P.

A cable of rate r carries r·b each way, and counts as r of a cable in all of this.

Where a chip drives only some of its links at once, a part sends no more than its chips can drive, and that replaces
its number of cables. Per part there is a second, simpler bound: everything must leave it once. Only the partitions that
are tightest without that limit are tried: the bound is valid, but a tighter one may exist.

**With latency.** Bandwidth says nothing of short payloads. On known hardware three more facts do, for every schedule:

- *Doubling.* A chip takes one message per chunk and step, and each adds at most as many contributions as its sender
  holds. So a sum of P contributions takes log₂ P steps at least, rounded up, each of a step's latency and one hop, and
  what the cables carry besides. An all-gather may do with one step, and so may an asynchronous engine, which waits for
  no step to end.
- *Distance.* A chip's contribution must come to the chip farthest from it. Each hop on its way costs a hop latency,
  whether it goes in one long step or in many short ones.
- *The last to leave.* A chip v that lies e hops from the farthest must send all it contributes over its own links.
  Take what leaves it in the last step in which anything leaves it for the first time, and of that a transfer with the
  fewest hops, h. All else that leaves in that step has h hops or more, so the step lasts for h hop latencies and these
  bytes over v's links, or longer. The steps before it last for the other bytes, and e − h hops follow. Together: e
  hops, and the payload over v's links.

Each is a line, seconds + units · M/b, and the highest of them binds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshmend.cost.cuts import narrowest_cut, narrowest_partition
from meshmend.cost.hardware import Hardware, Mode, find_hardware
from meshmend.errors import MeshError, ParameterError, name_chip
from meshmend.schedule import Collective
from meshmend.topology import Mesh

MAX_EXACT_CHIPS = 2**12
"""Exact partitions take a third of a second for 1,000 chips and some five for this many."""
MAX_TREES = 96
TREE_CABLES = 2**21
"""Beyond that trees are packed to find a partition: so many, or as many as use this number of cables in all, which
takes a second or two. More trees find a better partition; the bound holds with any number."""
MAX_SOURCES = 1024
"""Chips whose distance from all others is measured. Of more chips than that, those that are likely to be farthest."""
NARROWEST = 64
ROUNDING = 1e-9
"""Sums of the same rates in another order differ by less."""

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Line(NamedTuple):
    """No schedule takes less than `seconds` and `units` · M/b, because of what `why` says."""

    seconds: float
    units: float
    why: str


@dataclass(frozen=True)
class Bound:
    """The least time of a collective, in units of M/b. Returned by `bound`.

    M/b is the time of the payload over a link of full rate. `parts` and `cables` describe the tightest partition; `why`
    says it in words. Where `is_exact` is False, a tighter bound may exist: the mesh has more than `MAX_EXACT_CHIPS`
    chips, or chips drive only some of their links.
    """

    units: float
    parts: int
    cables: int
    why: str
    is_exact: bool = True
    with_latency: tuple[Line, ...] = ()
    """The least cost of steps and hops besides, where the bound was asked for `hardware`."""

    def seconds(self, payload_bytes: float, link_bytes_per_s: float) -> float:
        """Return the least time for a payload over links of that rate, by bandwidth alone."""
        return self.units * payload_bytes / link_bytes_per_s

    def least_seconds(self, payload_bytes: float, link_bytes_per_s: float) -> float:
        """Return the least time with what steps and hops cost, where the bound knows the hardware.

        >>> bound(Mesh("16x32", failed=["4x2@6,8"]), hardware="tpu-v4-xla").least_seconds(4e3, 50e9)  # 9 steps, 46 hops
        6.404e-05
        """
        highest = self.highest_line(payload_bytes, link_bytes_per_s)
        return highest.seconds + highest.units * payload_bytes / link_bytes_per_s

    def highest_line(self, payload_bytes: float, link_bytes_per_s: float) -> Line:
        """Return what binds a payload over links of that rate: one of the lines, or bandwidth alone."""
        unit = payload_bytes / link_bytes_per_s
        lines = self.with_latency or (Line(0.0, self.units, self.why),)
        return max(lines, key=lambda line: line.seconds + line.units * unit)

    def __str__(self) -> str:
        return f"{'' if self.is_exact else 'at least '}{self.units:.4f} M/b: {self.why}"


@lru_cache(maxsize=64)
def bound(
    mesh: Mesh,
    *,
    links_at_once: int | None = None,
    collective: Collective = Collective.ALL_REDUCE,
    shares: tuple[int, ...] | None = None,
    hardware: str | Hardware | None = None,
    mode: Mode = "lock-step",
) -> Bound:
    """Return the least time of any all-reduce over the live chips of `mesh`, in units of M/b.

    `links_at_once` is how many of its links a chip can drive at once, None for all. What a reduce-scatter or an
    all-gather takes depends on who owns how much: `shares` has one number per rank; None means equal shares.
    Told the `hardware`, it has that number from there, and knows the least time with latency as well
    (`Bound.least_seconds`), for engines that wait as `mode` says.

    >>> print(bound(Mesh("16x32", failed=["4x2@6,8"])))
    0.5278 M/b: the narrow places of the mesh: 153 parts are joined by only 288 cables
    >>> bound(Mesh("1x4")).why
    'a cable is the only way between two parts of the mesh, of 1 and 3 chips'
    >>> print(bound(Mesh("8x8"), collective=Collective.ALL_GATHER))
    0.4922 M/b: chip (0,0) must receive what it does not own over its 2 cables
    """
    if mesh.n_chips == 1:
        return Bound(0.0, 1, 0, "a single chip has nothing to exchange")
    if not mesh.is_connected:
        raise MeshError(
            f"The survivors of {mesh} are in {mesh.n_components} parts with no live cable between them, so no "
            f"{collective} joins them all. Plan for one part, or repair a cable."
        )
    if hardware is not None:
        chosen = find_hardware(hardware)
        if links_at_once not in (None, chosen.links_at_once):
            raise ParameterError(f"links_at_once is {links_at_once}, and the hardware has its own: {chosen}.")
        return _with_latency(mesh, chosen, mode, collective, shares)
    drives = _drives(mesh, links_at_once)
    if collective.is_all_reduce:
        return _bound_all_reduce(mesh, drives)
    owned = (1,) * mesh.n_chips if shares is None else shares
    if len(owned) != mesh.n_chips or min(owned) < 0 or not any(owned):
        raise ParameterError(
            f"shares has {len(owned)} numbers, expected one for each of {mesh.n_chips} chips, 0 or more."
        )
    return _bound_half(mesh, drives, owned, "send" if collective is Collective.REDUCE_SCATTER else "receive")


def _with_latency(
    mesh: Mesh, hardware: Hardware, mode: Mode, collective: Collective, shares: tuple[int, ...] | None
) -> Bound:
    """Return the bound with the lines of its hardware, of which the highest binds."""
    plain = bound(mesh, links_at_once=hardware.links_at_once, collective=collective, shares=shares)
    adds = collective is not Collective.ALL_GATHER
    steps = (mesh.n_chips - 1).bit_length() if adds and mode == "lock-step" else 1
    start, hop = steps * hardware.step_latency_s, hardware.hop_latency_s
    many = f"{steps} step{'s' * (steps != 1)}"
    lines = [Line(start + steps * hop, plain.units, f"{many}, and what the cables carry")]
    # An owner of a reduce-scatter or an all-gather is at one end of every way, and keeps its own share.
    owners = np.arange(mesh.n_chips) if shares is None else np.flatnonzero(shares)
    drives = _drives(mesh, hardware.links_at_once) if collective.is_all_reduce else np.full(mesh.n_chips, np.inf)
    outermost: dict[float, tuple[int, int]] = {}
    for rank, far in _eccentricities(mesh, owners):
        width = float(drives[rank])
        if width not in outermost or far > outermost[width][1]:
            outermost[width] = rank, far
    for width, (rank, far) in outermost.items():
        left = ", after all of its payload has left it" if collective.is_all_reduce else ""
        why = f"{many} and the {far} hops from chip {name_chip(mesh.chip(rank))}{left}"
        lines.append(Line(start + far * hop, 1 / width, why))
    return dataclasses.replace(plain, with_latency=tuple(lines))


def _eccentricities(mesh: Mesh, sources: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield chips and how many hops they are from the chip farthest from them; not of all chips if they are many."""
    from scipy.sparse.csgraph import shortest_path

    if len(sources) > MAX_SOURCES:
        # The farthest from the farthest of any chip is an end of the mesh, and so are its narrowest chips.
        from_first = shortest_path(mesh.graph, directed=False, unweighted=True, indices=int(sources[0]))
        ends = [int(sources[0]), int(sources[np.argmax(from_first[sources])])]
        narrow = sources[np.argsort((mesh.neighbours[sources] >= 0).sum(axis=1), kind="stable")[:NARROWEST]]
        sources = np.unique([*ends, *narrow.tolist()])
    hops = shortest_path(mesh.graph, directed=False, unweighted=True, indices=sources)
    yield from zip(sources.tolist(), hops.max(axis=1).astype(int).tolist(), strict=True)


def _drives(mesh: Mesh, links_at_once: int | None) -> Floats:
    """Return how many links' worth of data each chip sends at once."""
    width = _chip_widths(mesh)
    return width if links_at_once is None else np.minimum(width, links_at_once)


def _chip_widths(mesh: Mesh) -> Floats:
    """Return the sum of the rates of each chip's cables."""
    return np.asarray((mesh.link_rates.reshape(mesh.neighbours.shape) * (mesh.neighbours >= 0)).sum(axis=1))


def _bound_all_reduce(mesh: Mesh, drives: Floats) -> Bound:
    is_small = mesh.n_chips <= MAX_EXACT_CHIPS
    partitions = [np.arange(mesh.n_chips), *([narrowest_partition(mesh)] if is_small else _loosest_partitions(mesh))]
    is_exact = is_small and bool((drives == _chip_widths(mesh)).all())
    found = [bound for labels in partitions for bound in _judge(mesh, labels, drives, is_exact=is_exact)]
    return max(found, key=lambda b: (round(b.units, 12), -b.parts))


def _bound_half(mesh: Mesh, drives: Floats, shares: Sequence[int], verb: str) -> Bound:
    """Return the bound of a reduce-scatter or an all-gather: every chip alone, and the tightest set of chips."""
    total = sum(shares)
    lacks = (total - np.asarray(shares)) / drives
    chip = int(np.argmax(lacks))
    cut = narrowest_cut(mesh, shares) if mesh.n_chips <= MAX_EXACT_CHIPS else None
    limited = drives < _chip_widths(mesh)
    is_exact = cut is not None and not bool(limited.any())
    own = (mesh.cables == chip).any(axis=1)
    why = _why_chip(mesh, chip, f"{verb} what it does not own", own, limited=bool(limited[chip]))
    single = Bound(float(lacks[chip]) / total, 2, int(own.sum()), why, is_exact)
    if cut is None or cut.sum() == 1:
        return single
    a, b = cut[mesh.cables.T]
    cables, inside = int((a != b).sum()), int(cut.sum())
    ways = min(float(mesh.rates[a != b].sum()), float(drives[cut].sum()), float(drives[~cut].sum()))
    lacking = total - int(np.asarray(shares)[cut].sum())
    whole = Bound(lacking / total / ways, 2, cables, _why_cut(mesh, inside, a != b), is_exact)
    return max(single, whole, key=lambda b: b.units)


def _judge(mesh: Mesh, labels: NDArray[np.int64], drives: Floats, *, is_exact: bool) -> tuple[Bound, Bound]:
    """Return the bounds that a partition gives: by its narrowest part, and by all its parts together."""
    a, b = labels[mesh.cables.T]
    between = a != b
    cables, parts = int(between.sum()), int(labels.max()) + 1
    ends = np.concatenate([a[between], b[between]])
    leaving = np.bincount(ends, np.tile(mesh.rates[between], 2), parts)
    driven = np.bincount(labels, weights=drives, minlength=parts)
    ways = np.minimum(leaving, driven)
    narrow = int(np.argmin(ways))
    sizes = np.bincount(labels)
    why_whole = _why_whole(mesh, parts, between, limited=bool((driven < leaving - ROUNDING).any()))
    limited = bool(driven[narrow] < leaving[narrow] - ROUNDING)
    own = between & ((a == narrow) | (b == narrow))
    if limited or (own.sum() > 1 and sizes[narrow] == 1):
        chip = int(np.argmax(labels == narrow))
        why_single = _why_chip(mesh, chip, "send the whole payload", own, limited=limited)
    else:
        why_single = _why_cut(mesh, int(sizes[narrow]), own)
    return (
        Bound(1 / float(ways[narrow]), 2, int(own.sum()), why_single, is_exact),
        Bound(2 * (parts - 1) / float(ways.sum()), parts, cables, why_whole, is_exact),
    )


def _why_whole(mesh: Mesh, parts: int, between: Bools, *, limited: bool) -> str:
    if limited:
        return (
            f"every element is sent at least {2 * (parts - 1):,} times between {parts:,} parts, and a chip drives "
            f"only some of its links at once"
        )
    if parts == mesh.n_chips:
        return f"every element needs {parts - 1:,} of the {_name(mesh, between)} on its way up, and as many down"
    return f"the narrow places of the mesh: {parts:,} parts are joined by only {_name(mesh, between)}"


def _why_cut(mesh: Mesh, n_chips: int, between: Bools) -> str:
    inside, outside = sorted((n_chips, mesh.n_chips - n_chips))
    name = _name(mesh, between)
    joins = f"{name} is the only way between" if between.sum() == 1 else f"{name} are all that joins"
    return f"{joins} two parts of the mesh, of {inside:,} and {outside:,} chips"


def _why_chip(mesh: Mesh, rank: int, task: str, own: Bools, *, limited: bool) -> str:
    does = f"chip {name_chip(mesh.chip(rank))} must {task}"
    if limited:
        return f"{does} and drives only some of its links at once"
    if own.sum() > 1:
        return f"{does} over its {_name(mesh, own)}"
    return f"{does} over its only cable{', which is slow' * bool(mesh.rates[own] < 1)}"


def _name(mesh: Mesh, cables: Bools) -> str:
    n_cables, n_slow = int(cables.sum()), int((mesh.rates[cables] < 1).sum())
    if n_cables == 1:
        return "a slow cable" if n_slow else "a cable"
    slow = "" if not n_slow else " (all slow)" if n_slow == n_cables else f" ({n_slow:,} slow)"
    return f"{n_cables:,} cables{slow}"


def _loosest_partitions(mesh: Mesh) -> list[NDArray[np.int64]]:
    """Return partitions whose parts are joined by few cables for their number.

    Every tree of the packing takes the cables that the trees before it used least. A cable that few trees can do
    without ends with a high load; contracting the others, up to some load, leaves the narrow places.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components, minimum_spanning_tree

    n, (a, b) = mesh.n_chips, mesh.cables.T
    load = np.zeros(len(a))
    noise = np.random.default_rng(0).random(len(a))
    number = coo_array((np.arange(1, len(a) + 1), (a, b)), shape=(n, n)).tocsr()
    rows = number.data - 1
    for _ in range(min(MAX_TREES, TREE_CABLES // len(a))):
        # Weights differ slightly, so that ties fall in no particular pattern, and are never 0, which means no edge.
        graph = number.astype(np.float64)
        graph.data = (1 + load / mesh.rates + 0.5 * noise)[rows]
        tree = minimum_spanning_tree(graph).tocoo()
        load[np.asarray(number[tree.row, tree.col]).ravel() - 1] += 1
        noise = np.roll(noise, 1)
    partitions = []
    load /= mesh.rates
    for limit in np.unique(load)[1:]:
        inside = load < limit
        graph = coo_array((np.ones(int(inside.sum()), np.int8), (a[inside], b[inside])), shape=(n, n)).tocsr()
        parts, labels = connected_components(graph, directed=False)
        if parts > 1:
            partitions.append(labels.astype(np.int64))
    return partitions
