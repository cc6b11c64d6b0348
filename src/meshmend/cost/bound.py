"""Bound: the least time of any all-reduce on a mesh, in units of M/b, and what it is that limits it.

Why a partition bounds the time. Put the live chips into k parts. For every element some part is the first to hold
the whole sum, and k − 1 messages between parts were needed to bring the contributions there; each of the other
k − 1 parts lacks something at that moment and must still receive a message. So 2(k − 1)·M bytes cross between
parts, and c cables between parts carry 2c·b bytes a second: the time is at least (k − 1)/c · M/b.

Two parts joined by c cables give 1/c, every chip its own part gives (P − 1)/E, and any partition in between is
as good a bound. The best of all partitions is also what spanning trees can reach (Tutte and Nash-Williams), so it
is worth looking for: trees are packed greedily, each where the cables are least loaded, and the cables that stay
least loaded are those inside the parts. Whatever partition this finds, the bound that it gives holds.

Where a chip drives only some of its links at once, a part sends no more than its chips can drive, and that takes
the place of the cables it has. Per part there is a second, simpler bound: everything must leave it once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import MeshError, name_chip
from meshmend.schedule import Collective
from meshmend.topology import Mesh

N_TREES = 96
"""Spanning trees packed to find a partition. More trees find a better one; the bound holds with any number."""
MAX_PACKED_CABLES = 2**15
"""Beyond this the packing takes more than a second or two, and only the plain bounds are computed."""


@dataclass(frozen=True)
class Bound:
    """The least time of a collective, in units of M/b. Returned by `bound`.

    `parts` and `cables` describe the partition that binds; `why` says it in words.
    """

    units: float
    parts: int
    cables: int
    why: str

    def seconds(self, payload_bytes: float, link_bytes_per_s: float) -> float:
        """Return the least time for a payload over links of that rate. Latency comes on top."""
        return self.units * payload_bytes / link_bytes_per_s

    def __str__(self) -> str:
        return f"{self.units:.4f} M/b: {self.why}"


@lru_cache(maxsize=64)
def bound(mesh: Mesh, *, links_at_once: int | None = None, collective: Collective = Collective.ALL_REDUCE) -> Bound:
    """Return the least time of any all-reduce over the live chips of `mesh`, in units of M/b.

    `links_at_once` is how many of its links a chip can drive at once, None for all. A reduce-scatter or an
    all-gather moves half as much: every element crosses between parts k − 1 times instead of 2(k − 1).

    >>> print(bound(Mesh("16x32", failed=["4x2@6,8"])))
    0.5273 M/b: every element needs 503 of the 954 cables on its way up, and as many down
    >>> bound(Mesh("1x4")).why
    'a cable is the only way between two parts of the mesh, of 1 and 3 chips'
    """
    if mesh.n_chips == 1:
        return Bound(0.0, 1, 0, "a single chip has nothing to exchange")
    if not mesh.is_connected:
        raise MeshError(
            f"The survivors of {mesh} are in {mesh.n_components} parts with no live cable between them, so no "
            f"all-reduce joins them all. Plan for one part, or repair a cable."
        )
    degree = (mesh.neighbours >= 0).sum(axis=1)
    drives = degree if links_at_once is None else np.minimum(degree, links_at_once)
    partitions = [np.arange(mesh.n_chips)]
    if mesh.n_cables <= MAX_PACKED_CABLES:
        partitions += _loosest_partitions(mesh)
    found = [_judge(mesh, labels, drives) for labels in partitions]
    best = max((b for pair in found for b in pair), key=lambda b: (round(b.units, 12), -b.parts))
    if collective is not Collective.ALL_REDUCE:
        return Bound(best.units / 2, best.parts, best.cables, f"half of an all-reduce's: {best.why}")
    return best


def _judge(mesh: Mesh, labels: NDArray[np.int64], drives: NDArray[np.int64]) -> tuple[Bound, Bound]:
    """Return the bounds that a partition gives: by all its parts together, and by its narrowest part."""
    a, b = labels[mesh.cables.T]
    between = a != b
    cables, parts = int(between.sum()), int(labels.max()) + 1
    leaving = np.bincount(a[between], minlength=parts) + np.bincount(b[between], minlength=parts)
    driven = np.bincount(labels, weights=drives, minlength=parts)
    ways = np.minimum(leaving, driven)
    whole = Bound(2 * (parts - 1) / float(ways.sum()), parts, cables, "")
    narrow = int(np.argmin(ways))
    single = Bound(1 / float(ways[narrow]), 2, int(leaving[narrow]), "")
    sizes = np.bincount(labels)
    limited = bool((driven < leaving).any())
    return (
        Bound(whole.units, parts, cables, _why_whole(mesh, parts, cables, limited=limited)),
        Bound(
            single.units,
            2,
            single.cables,
            _why_single(mesh, labels, narrow, sizes, single.cables, limited=bool(driven[narrow] < leaving[narrow])),
        ),
    )


def _why_whole(mesh: Mesh, parts: int, cables: int, *, limited: bool) -> str:
    if limited:
        return (
            f"every element is sent at least {2 * (parts - 1):,} times between {parts:,} parts, and a chip drives "
            f"only some of its links at once"
        )
    if parts == mesh.n_chips:
        return f"every element needs {parts - 1:,} of the {cables:,} cables on its way up, and as many down"
    return f"the narrow places of the mesh: {parts:,} parts are joined by only {cables:,} cables"


def _why_single(
    mesh: Mesh, labels: NDArray[np.int64], part: int, sizes: NDArray[np.int64], cables: int, *, limited: bool
) -> str:
    chip = name_chip(mesh.chip(int(np.flatnonzero(labels == part)[0])))
    if limited:
        return f"chip {chip} must send the whole payload and drives only some of its links at once"
    inside, outside = sorted((int(sizes[part]), mesh.n_chips - int(sizes[part])))
    if cables == 1:
        return f"a cable is the only way between two parts of the mesh, of {inside:,} and {outside:,} chips"
    if sizes[part] == 1:
        return f"chip {chip} must send the whole payload over its {cables} cables"
    return f"{cables} cables are all that joins two parts of the mesh, of {inside:,} and {outside:,} chips"


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
    for _ in range(N_TREES):
        # Weights differ slightly, so that ties fall in no particular pattern, and are never 0, which means no edge.
        graph = number.astype(np.float64)
        graph.data = (1 + load + 0.5 * noise)[rows]
        tree = minimum_spanning_tree(graph).tocoo()
        load[np.asarray(number[tree.row, tree.col]).ravel() - 1] += 1
        noise = np.roll(noise, 1)
    partitions = []
    for limit in np.unique(load)[1:]:
        inside = load < limit
        graph = coo_array((np.ones(int(inside.sum()), np.int8), (a[inside], b[inside])), shape=(n, n)).tocsr()
        parts, labels = connected_components(graph, directed=False)
        if parts > 1:
            partitions.append(labels.astype(np.int64))
    return partitions
