"""Which hosts keep which parts of a state, so that as many hosts as possible may fail at once.

Every chip has the replicated arrays, so a host can keep any share of them without traffic. They are cut into *blocks*,
and each host keeps one: with one block every host keeps all of it, and one surviving host is enough. With more blocks a
host needs less memory and time, and fewer hosts may fail at once. The chips of a host cut its block together, a share
each.

Shards are on one device alone. Its host keeps them, and so does another one, far away: hosts are put in an order in
which those that one failure takes out together are neighbours, and the keeper is half of the way around it. One failure
takes out a domain, or a host and those that it cuts off from the larger part of the mesh. A second keeper would make
copies larger and slower, so that every failure would cost more steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshmend.jax.engine.fabric import Fabric
from meshmend.jax.state.layout.flat import Outline
from meshmend.topology import Mesh

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Ints = NDArray[np.int32]


class Held(NamedTuple):
    """A part that a host keeps, and where its devices have it."""

    part: int
    kind: Literal["share", "own", "kept"]
    device: int
    column: int = 0
    """Which of the shares that the device cuts."""


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
    kept: Annotated[Ints, "int32[N]"]
    """For each chip, the chip whose shards it is sent; itself where no other host keeps its own."""
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
        for device in mine if outline.sharded else ():
            chip, core = divmod(device, self.n_cores)
            part = outline.shards_part(int(self.kept[chip]) * self.n_cores + core)
            found.setdefault(part, Held(part, "kept", device))
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

    def describe(self, outline: Outline) -> str:
        """Say which failures copies survive, and why; "" if they survive none."""
        holders: dict[int, set[int]] = {part: set() for part in range(outline.n_parts)}
        for host in self.hosts:
            for held in self.parts_of(host, outline):
                holders[held.part].add(host)
        n_spares, n_hosts = min(map(len, holders.values())) - 1, len(self.hosts)
        if n_spares < 1:
            return ""
        domains = ""
        if len(set(self.domain_of.values())) < n_hosts:
            survives = all(len({self.domain_of[host] for host in held}) > 1 for held in holders.values())
            domains = ", and of any failure domain" if survives else ", but not of every domain"
        which = "" if self.n_blocks == 1 else f"one of {self.n_blocks} parts of "
        kept = [f"{which}the {'replicated arrays' if outline.sharded else 'whole state'}"] * bool(outline.replicated)
        if outline.sharded:
            kept.append("its own shards and those of 1 other host")
        return f"the failure of any {n_spares} of {n_hosts} hosts at once{domains}: each keeps {', '.join(kept)}"


def place(fabric: Fabric, *, n_blocks: int = 1, host_of_chip: Sequence[int] | None = None) -> Placement:
    """Place the parts of a state on a fabric's hosts; `host_of_chip` is for hosts that are not there."""
    hosts = hosts_of_chips(fabric) if host_of_chip is None else host_of_chip
    n_cores = fabric.jax_mesh.devices.size // len(hosts)
    return place_on(tuple(hosts), fabric.mesh, n_cores, fabric.domains, n_blocks)


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
    host_of_chip: tuple[int, ...], mesh: Mesh, n_cores: int = 1, domains: tuple[str, ...] = (), n_blocks: int = 1
) -> Placement:
    """Place parts on the hosts of a mesh's chips, whether there are devices or not.

    Chips are those of `host_of_chip`, in tiles one tile of `mesh` after the other.

    >>> place_on((0, 0, 1, 1, 2, 2, 3, 3), Mesh("2x4")).kept.tolist()
    [6, 7, 4, 5, 2, 3, 0, 1]
    >>> place_on((0, 1, 2, 3), Mesh("1x4"), domains=("a", "b", "a", "b")).kept.tolist()
    [1, 0, 3, 2]
    """
    chips = np.arange(len(host_of_chip)).reshape(mesh.n_chips, -1)
    names, hosts = np.unique(host_of_chip, return_inverse=True)
    hosts = hosts.reshape(chips.shape)
    domain_of = _domain_numbers(names.tolist(), domains)
    whole_order = _order(host_of_chip, mesh, tuple(domain_of))
    orders = [whole_order[np.isin(whole_order, slot)] for slot in hosts.T]
    largest = max(int(np.unique(slot, return_counts=True)[1].max()) for slot in hosts.T) * n_cores
    per_block = max(1, min(largest, mesh.n_chips * n_cores // n_blocks))
    shares: dict[int, list[int]] = {}
    kept = np.arange(len(host_of_chip), dtype=np.int32)
    for slot, order in enumerate(orders):
        column = hosts[:, slot]
        for position, host in enumerate(order.tolist()):
            mine = [int(chip) * n_cores + core for chip in chips[column == host, slot] for core in range(n_cores)]
            first = position % n_blocks * per_block
            for at, device in enumerate(mine):
                begin, end = (first + i * per_block // len(mine) for i in (at, at + 1))
                shares[device] = list(range(begin, max(end, begin + 1)))
        kept[chips[_keepers(column, order), slot]] = chips[:, slot]
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


def _keepers(hosts: NDArray[np.int64], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each chip the chip that is its keeper: every chip keeps the shards of one.

    Chips are taken host by host in that order, and moved on by half of the way around, by whole hosts where all are
    alike. Where one host has more than half of the chips, as may be when chips of the others are in quarantine, the
    others keep as many of its shards as they have chips, and nobody else keeps the rest.
    """
    keeper, sizes = np.arange(len(hosts)), np.bincount(hosts)[order]
    if len(order) < 2:
        return keeper
    place_of = np.zeros(order.max() + 1, int)
    place_of[order] = np.arange(len(order))
    around = np.argsort(place_of[hosts], kind="stable")
    unit = int(sizes.max()) if sizes.min() == sizes.max() else 1
    keeper[around] = np.roll(around, -unit * (len(hosts) // unit // 2))
    return keeper


def _domain_numbers(hosts: list[int], domains: tuple[str, ...]) -> list[int]:
    """Return the first host of each host's failure domain; one that names none is a domain of its own."""
    known = [domains[host] if host < len(domains) else "" for host in hosts]
    first = {name: host for host, name in reversed(list(enumerate(known)))}
    return [first[name] if name else host for host, name in enumerate(known)]


@lru_cache(maxsize=64)
def _order(host_of_chip: tuple[int, ...], mesh: Mesh, domain_of: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the hosts in an order in which those that one failure takes out together are not half-way from each other.

    In a depth-first order, hosts that are cut off together are next to each other, seen from most hosts: of two such
    orders, from either end, the one with fewer exceptions. Hosts of a domain follow its first one.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    _, hosts = np.unique(host_of_chip, return_inverse=True)
    # Chips (or tiles) of the same hosts fail together, and are one node of a graph.
    owners, node_of = np.unique(np.sort(hosts.reshape(mesh.n_chips, -1), axis=1), axis=0, return_inverse=True)
    sizes, (a, b) = np.bincount(node_of.reshape(-1)), node_of.reshape(-1)[mesh.cables.T]
    shape = (len(owners), len(owners))
    graph = coo_array((np.ones(len(a)), (a, b)), shape=shape).tocsr()
    ends = np.stack(graph.nonzero())
    n_hosts = len(domain_of)
    together = [np.equal(domain_of, domain) for domain in set(domain_of)]
    near = [set[int]() for _ in owners]
    for one, other in ends.T.tolist():
        near[one].add(other)
        near[other].add(one)
    owned: dict[int, set[int]] = {host: set() for host in range(n_hosts)}
    for node, of in enumerate(owners.tolist()):
        for host in of:
            owned[host].add(node)
    for host in range(n_hosts):
        if _leaves_its_surroundings_whole(near, owned[host]):
            continue
        gone = (owners == host).any(axis=1)
        left = ends[:, ~gone[ends].any(axis=0)]
        _, labels = connected_components(coo_array((np.ones(left.shape[1]), tuple(left)), shape=shape), directed=False)
        stays = (labels == np.bincount(labels, sizes * ~gone).argmax()) & ~gone
        together.append(~np.isin(np.arange(n_hosts), owners[stays]))
    orders = [_depth_first(graph, owners, root, domain_of) for root in (0, len(owners) - 1)]
    half = n_hosts // 2
    sets = np.array([one for one in together if one.sum() > 1], bool).reshape(-1, n_hosts)
    return min(orders, key=lambda order: int((sets[:, order] & sets[:, np.roll(order, -half)]).any(axis=0).sum()))


def _leaves_its_surroundings_whole(near: list[set[int]], gone: set[int]) -> bool:
    """Whether the neighbours of nodes that are gone reach each other over their own neighbours: most hosts cut nothing.

    `near` has the neighbours of each node. What is not seen here is looked at in the whole graph, which takes longer.
    """
    beside = set[int]().union(*(near[node] for node in gone)) - gone
    around = beside.union(*(near[node] for node in beside)) - gone
    reached, left = set[int](), [*beside][:1]
    while left:
        node = left.pop()
        if node not in reached:
            reached.add(node)
            left += near[node] & around
    return beside <= reached


def _depth_first(
    graph: csr_array, owners: NDArray[np.int64], root: int, domain_of: tuple[int, ...]
) -> NDArray[np.int64]:
    from scipy.sparse.csgraph import depth_first_order

    nodes = depth_first_order(graph, root, directed=False, return_predecessors=False)
    hosts = list(dict.fromkeys([*owners[nodes].ravel().tolist(), *range(len(domain_of))]))
    first = {domain_of[host]: at for at, host in reversed(list(enumerate(hosts)))}
    return np.array(sorted(hosts, key=lambda host: first[domain_of[host]]))
