"""Which hosts keep which parts of a state, so that as many hosts as possible may fail at once.

Every chip has the replicated arrays, so a host can keep any share of them without traffic. They are cut into *blocks*,
and each host keeps one: with one block every host keeps all of it, and one surviving host is enough. With more blocks a
host needs less memory and time, and fewer hosts may fail at once. The chips of a host cut its block together, a share
each.

Shards are on one device alone. Its host keeps them, and so do others, far away: hosts are put in an order in which
those of a failure domain are neighbours, and keepers are a half of the way around it, or thirds if there are two. Two
hosts that the failure of one host takes out of the job together, as it cuts the mesh, do not keep each other's shards
where that can be helped.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from meshmend.jax.engine.fabric import Fabric
from meshmend.jax.state.layout.flat import Outline
from meshmend.topology import Mesh

KEEPERS = 1
"""Other hosts that keep a device's shards. A second one makes copies a third more expensive (docs/jobs.md), so that
every failure would cost a third more steps."""

MOST_VAIN = 8
"""Hosts for which no better place is found until no more are looked for: most hosts are then in one domain."""

Ints = NDArray[np.int32]


class Held(NamedTuple):
    """A part that a host keeps, and where its devices have it."""

    part: int
    kind: Literal["share", "own", "kept"]
    device: int
    column: int = 0
    """Which of the shares that the device cuts, or of the shards that it is sent."""


@dataclass(frozen=True, eq=False)
class Placement:
    """Which parts each host keeps. Made by `place`."""

    host_of_chip: tuple[int, ...]
    """Process of each chip; in tiles, of each device, one tile after the other."""
    n_cores: int
    n_blocks: int
    n_shares: int
    shares: Annotated[Ints, "int32[D, M]"]
    """Shares that each device cuts; some of them may be the same."""
    kept: Annotated[Ints, "int32[G, N]"]
    """For each keeper and chip, the chip whose shards it is sent; its own where no other host keeps them."""
    domain_of: dict[int, int]
    """The first host of each host's failure domain."""

    @cached_property
    def hosts(self) -> list[int]:
        """The hosts, in order."""
        return sorted(set(self.host_of_chip))

    def parts_of(self, host: int, outline: Outline) -> list[Held]:
        """Return the parts that a host keeps, each once; `outline` has `n_shares`."""
        mine = self._devices[host]
        found: dict[int, Held] = {}
        for device in mine:
            for column, share in enumerate(self.shares[device].tolist()):
                part = outline.share_part(device % outline.devices_per_tile, share)
                found.setdefault(part, Held(part, "share", device, column))
        for device in mine if outline.sharded else ():
            found[outline.shards_part(device)] = Held(outline.shards_part(device), "own", device)
        for column, kept in enumerate(self.kept if outline.sharded else ()):
            for device in mine:
                chip, core = divmod(device, self.n_cores)
                part = outline.shards_part(int(kept[chip]) * self.n_cores + core)
                found.setdefault(part, Held(part, "kept", device, column))
        return sorted(found.values())

    @cached_property
    def _devices(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {host: [] for host in self.hosts}
        for chip, host in enumerate(self.host_of_chip):
            found[host] += range(chip * self.n_cores, (chip + 1) * self.n_cores)
        return found

    def host_bytes(self, outline: Outline) -> tuple[int, int]:
        """Return the bytes of shares and of shards in a copy, on the hosts that keep most of each."""
        kept = [[held.part for held in self.parts_of(host, outline)] for host in self.hosts]
        n_shares = max(sum(part < outline.n_all_shares for part in parts) for parts in kept)
        n_shards = max(sum(part >= outline.n_all_shares for part in parts) for parts in kept)
        return n_shares * outline.share_bytes, n_shards * outline.shards_bytes

    def holders(self, outline: Outline) -> dict[int, set[int]]:
        """Return for each part the hosts that keep it."""
        found: dict[int, set[int]] = {part: set() for part in range(outline.n_parts)}
        for host in self.hosts:
            for held in self.parts_of(host, outline):
                found[held.part].add(host)
        return found

    def spares(self, outline: Outline) -> int:
        """Return how many hosts may fail at once, whichever they are, without the loss of a part."""
        return min(map(len, self.holders(outline).values())) - 1

    def survives_domains(self, outline: Outline) -> bool:
        """Whether any one failure domain may fail as a whole without the loss of a part."""
        return all(len({self.domain_of[host] for host in held}) > 1 for held in self.holders(outline).values())

    def describe(self, outline: Outline) -> str:
        """Say which failures copies survive, and why; "" if they survive none."""
        n_spares, n_hosts, n_keepers = self.spares(outline), len(self.hosts), len(self.kept)
        if n_spares < 1:
            return ""
        domains = ""
        if len(set(self.domain_of.values())) < n_hosts:
            domains = ", and of any failure domain" if self.survives_domains(outline) else ", but not of every domain"
        which = "" if self.n_blocks == 1 else f"one of {self.n_blocks} parts of "
        kept = [f"{which}the {'replicated arrays' if outline.sharded else 'whole state'}"] * bool(outline.replicated)
        if outline.sharded:
            kept.append(f"its own shards and those of {n_keepers} other host{'s' * (n_keepers > 1)}")
        return f"the failure of any {n_spares} of {n_hosts} hosts at once{domains}: each keeps {', '.join(kept)}"


def place(
    fabric: Fabric, *, n_blocks: int = 1, host_of_chip: Sequence[int] | None = None, n_keepers: int = KEEPERS
) -> Placement:
    """Place the parts of a state on a fabric's hosts; `host_of_chip` is for hosts that are not there."""
    hosts = hosts_of_chips(fabric) if host_of_chip is None else host_of_chip
    n_cores = fabric.jax_mesh.devices.size // len(hosts)
    return place_on(tuple(hosts), fabric.mesh, n_cores, fabric.domains, n_blocks, n_keepers)


def hosts_of_chips(fabric: Fabric) -> list[int]:
    """Return for each chip the process that drives it; in tiles, for each device, one tile after the other."""
    devices = fabric.jax_mesh.devices.reshape(fabric.mesh.n_chips * fabric.devices_per_tile, -1)
    return [int(device.process_index) for device in devices[:, 0]]


def most_blocks(fabric: Fabric, host_of_chip: Sequence[int] | None = None) -> int:
    """Return into how many blocks the replicated arrays may be cut, so that two hosts keep each where there are two."""
    hosts = np.reshape(hosts_of_chips(fabric) if host_of_chip is None else host_of_chip, (fabric.mesh.n_chips, -1))
    return max(1, min(len(np.unique(slot)) for slot in hosts.T) // 2)


@lru_cache(maxsize=64)
def place_on(
    host_of_chip: tuple[int, ...],
    mesh: Mesh,
    n_cores: int = 1,
    domains: tuple[str, ...] = (),
    n_blocks: int = 1,
    n_keepers: int = KEEPERS,
) -> Placement:
    """Place parts on the hosts of a mesh's chips, whether there are devices or not.

    Chips are those of `host_of_chip`, in tiles one tile of `mesh` after the other.

    >>> place_on((0, 0, 1, 1, 2, 2, 3, 3), Mesh("2x4")).kept.tolist()
    [[4, 5, 6, 7, 0, 1, 2, 3]]
    >>> place_on((0, 1, 2, 3), Mesh("1x4"), domains=("a", "b", "a", "b")).kept.tolist()
    [[3, 2, 1, 0]]
    """
    chips = np.arange(len(host_of_chip)).reshape(mesh.n_chips, -1)
    names, host_of = np.unique(host_of_chip, return_inverse=True)
    hosts = host_of.reshape(chips.shape)
    domain_of = _domain_numbers(names.tolist(), domains)
    together = _taken_out_together(hosts, len(names), mesh, domain_of)
    orders = [_spread(np.unique(slot), together) for slot in hosts.T]
    largest = max(int(np.unique(slot, return_counts=True)[1].max()) for slot in hosts.T) * n_cores
    per_block = max(1, min(largest, mesh.n_chips * n_cores // n_blocks))
    shares: dict[int, list[int]] = {}
    n_keepers = min(n_keepers, len(names) - 1)
    kept = np.tile(chips.reshape(-1).astype(np.int32), (n_keepers, 1))
    for slot, order in enumerate(orders):
        column = hosts[:, slot]
        for position, host in enumerate(order.tolist()):
            mine = [int(chip) * n_cores + core for chip in chips[column == host, slot] for core in range(n_cores)]
            first = position % n_blocks * per_block
            for at, device in enumerate(mine):
                begin, end = (first + i * per_block // len(mine) for i in (at, at + 1))
                shares[device] = list(range(begin, max(end, begin + 1)))
        for k in range(n_keepers):
            keeper = _keepers(column, order, k, n_keepers)
            kept[k, chips[keeper, slot]] = chips[:, slot]
    n_columns = max(map(len, shares.values()))
    table = np.array([(row + row[-1:] * n_columns)[:n_columns] for _, row in sorted(shares.items())], np.int32)
    for array in (table, kept):
        array.flags.writeable = False
    return Placement(
        host_of_chip,
        n_cores,
        n_blocks,
        n_blocks * per_block,
        table,
        kept,
        dict(zip(names.tolist(), domain_of, strict=True)),
    )


def _keepers(hosts: NDArray[np.int64], order: NDArray[np.int64], number: int, of: int) -> NDArray[np.int64]:
    """Return for each chip the chip that is its keeper with this number: every chip keeps the shards of one.

    Chips are taken host by host in that order, and moved on by a part of the way around, by whole hosts where all are
    alike. Where one host has more than half of the chips, as may be when chips of the others are in quarantine, the
    others keep as many of its shards as they have chips, and the rest of its chips are kept by nobody else.
    """
    keeper, sizes = np.arange(len(hosts)), np.bincount(hosts)[order]
    if len(order) < 2 + number:
        return keeper
    if 2 * sizes.max() > len(hosts):
        inside = np.flatnonzero(hosts == order[sizes.argmax()])
        outside = np.setdiff1d(keeper, inside)
        inside = inside[: len(outside)]
        if not number:
            keeper[inside], keeper[outside] = outside, inside
        return keeper
    place_of = np.zeros(order.max() + 1, int)
    place_of[order] = np.arange(len(order))
    around = np.argsort(place_of[hosts], kind="stable")
    unit = int(sizes.max()) if sizes.min() == sizes.max() else 1
    keeper[around] = np.roll(around, -unit * (len(hosts) // unit * (number + 1) // (of + 1)))
    return keeper


def _domain_numbers(hosts: list[int], domains: tuple[str, ...]) -> list[int]:
    """Return the first host of each host's failure domain; one that names none is a domain of its own."""
    known = [domains[host] if host < len(domains) else "" for host in hosts]
    first = {name: host for host, name in reversed(list(enumerate(known)))}
    return [first[name] if name else host for host, name in enumerate(known)]


def _taken_out_together(
    hosts: Annotated[NDArray[np.int64], "[N, I]"], n_hosts: int, mesh: Mesh, domain_of: list[int]
) -> NDArray[np.bool_]:
    """Return the sets of hosts that one failure takes out of the job: what the failure of one cuts off, and domains.

    A row per set, the largest first, and a column per host.
    """
    found = [cut_off for _, cut_off in _cut_off(hosts, n_hosts, mesh)]
    found += [np.equal(domain_of, domain) for domain, n in Counter(domain_of).items() if n > 1]
    several = sorted((one for one in found if 1 < one.sum() < n_hosts), key=np.sum, reverse=True)
    return np.array(several, bool).reshape(len(several), n_hosts)


def _cut_off(
    hosts: Annotated[NDArray[np.int64], "[N, I]"], n_hosts: int, mesh: Mesh
) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """Return the hosts whose failure cuts the mesh in two, each with the hosts that have no chip in the larger part.

    Neighbouring chips (or tiles) of the same hosts fail together, and are one node of a graph. A host that is one node
    cuts off what a depth-first search finds; others, as in tiles, are tried one by one.
    """
    a, b = mesh.cables.T
    owners = np.sort(hosts, axis=1)
    node_of = _components((owners[a] == owners[b]).all(axis=1), a, b, mesh.n_chips)
    _, firsts = np.unique(node_of, return_index=True)
    sizes, owned = np.bincount(node_of), hosts[firsts]
    ends = np.unique(np.sort(np.stack([node_of[a], node_of[b]]), axis=0), axis=1)
    ends = ends[:, ends[0] != ends[1]]
    parts_without = _articulation(ends, sizes)
    for host in range(n_hosts):
        lost = (owned == host).any(axis=1)
        nodes = np.flatnonzero(lost)
        if len(nodes) == 1 and nodes[0] not in parts_without:
            continue
        if len(nodes) == 1:
            stays = parts_without[int(nodes[0])]
        else:
            label_of = _components(~(lost[ends[0]] | lost[ends[1]]), ends[0], ends[1], len(sizes))
            weights = np.bincount(label_of, sizes * ~lost)
            if np.count_nonzero(weights) < 2:
                continue
            stays = (label_of == weights.argmax()) & ~lost
        yield host, ~np.isin(np.arange(n_hosts), owned[stays])


def _components(keep: NDArray[np.bool_], a: NDArray[np.int64], b: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """Return the connected component of each of `n` nodes, over the edges that are kept."""
    graph = coo_array((np.ones(int(keep.sum()), np.int8), (a[keep], b[keep])), shape=(n, n))
    return np.asarray(connected_components(graph.tocsr(), directed=False)[1], np.int64)


def _articulation(ends: NDArray[np.int64], sizes: NDArray[np.int64]) -> dict[int, NDArray[np.bool_]]:
    """Return the nodes without which a connected graph falls apart, each with the nodes of the largest part then.

    Tarjan's algorithm: a node cuts off the subtrees of its search tree from which no edge leads above it.
    """
    neighbours: list[list[int]] = [[] for _ in sizes]
    for a, b in ends.T.tolist():
        neighbours[a].append(b)
        neighbours[b].append(a)
    number, low, end = ([-1] * len(sizes) for _ in range(3))
    order, cut = [0], dict[int, list[int]]()
    number[0] = low[0] = 0
    path = [(0, -1, iter(neighbours[0]))]
    while path:
        node, parent, rest = path[-1]
        following = next((other for other in rest if number[other] < 0 or low[node] > number[other]), None)
        if following is not None and number[following] >= 0:
            low[node] = number[following]
        elif following is not None:
            number[following] = low[following] = len(order)
            order.append(following)
            path.append((following, node, iter(neighbours[following])))
        else:
            path.pop()
            end[node] = len(order)
            if parent >= 0:
                low[parent] = min(low[parent], low[node])
                if low[node] >= number[parent]:
                    cut.setdefault(parent, []).append(node)
    found, nodes = {}, np.array(order)
    for node, children in cut.items():
        parts = [nodes[number[child] : end[child]] for child in children]
        parts.append(np.setdiff1d(nodes, [node, *itertools.chain(*parts)]))
        if sum(map(bool, map(len, parts))) > 1:
            largest = max(parts, key=lambda part: (sizes[part].sum(), -part.min(initial=len(nodes))))
            found[node] = np.isin(np.arange(len(sizes)), largest)
    return found


def _spread(hosts: NDArray[np.int64], together: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return hosts in an order in which those that one failure takes out together are not half-way from each other.

    The hosts of a set come one after the other, so that half-way around is another one, unless it has more than half of
    the hosts. Where a pair is still in one set, one of the two changes places with a host where both fit.
    """
    if not len(together) or len(hosts) < 3:
        return hosts
    largest = np.where(together.any(axis=0), together.argmax(axis=0), len(together))
    smallest = np.where(together.any(axis=0), together[::-1].argmax(axis=0), len(together))
    order = hosts[np.lexsort((hosts, smallest[hosts], largest[hosts]))]
    n, shift = len(hosts), len(hosts) // 2

    def conflicts(at: NDArray[np.int64]) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = np.any(together[:, order[at]] & together[:, order[(at + shift) % n]], axis=0)
        return found

    n_vain = 0
    for at in np.flatnonzero(conflicts(np.arange(n))):
        if not conflicts(np.array([at]))[0] or n_vain == MOST_VAIN:
            continue
        for other in (at + 1 + np.arange(n - 1)) % n:
            pairs = np.array([at, (at - shift) % n, other, (other - shift) % n])
            before = conflicts(pairs).sum()
            order[[at, other]] = order[[other, at]]
            if conflicts(pairs).sum() < before:
                break
            order[[at, other]] = order[[other, at]]
        else:
            n_vain += 1
    return order
