"""Which hosts keep which parts, as values: every pair and triple of hosts, every domain, every host that cuts the mesh.

The oracle counts: a set of hosts may fail if each part is kept by a host outside of it.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

import meshmend as mm
from meshmend.jax.state.layout.flat import Outline, ShardedArray
from meshmend.jax.state.memory.placement import Placement, place_on
from meshmend.launch.hosts import Hosts

MACHINES = [
    ("4x6", "2x2"),
    ("4x8", "4x2"),
    ("2x12", "2x2"),
    ("8x8", "4x2"),
    ("4x4", "2x2"),
    ("2x10", "2x2"),
    ("6x6", "2x2"),
]


@dataclass(frozen=True)
class Case:
    """Hosts, what they keep of a state that is replicated, and sharded as well or not."""

    placement: Placement
    outline: Outline

    @property
    def hosts(self) -> list[int]:
        return self.placement.hosts

    def survives(self, lost: Iterable[int]) -> bool:
        """Whether every part is kept by a host that is left."""
        gone = set(lost)
        kept = [self.placement.parts_of(host, self.outline) for host in self.hosts if host not in gone]
        return {held.part for parts in kept for held in parts} == set(range(self.outline.n_parts))

    @property
    def spares(self) -> int:
        """How many hosts may fail at once, whichever they are: what a job says at its start."""
        said = re.match(r"the failure of any (\d+) of", self.placement.describe(self.outline))
        return int(said[1]) if said else 0


@cache
def hosts_of(shape: str, tile: str, failed: tuple[str, ...] = ()) -> tuple[mm.Mesh, tuple[int, ...]]:
    mesh, machine = mm.Mesh(shape, failed=failed), Hosts.of(shape, tile)
    host_of = {chip: number for number in range(len(machine)) for chip in machine.chips(number)}
    return mesh, tuple(host_of[chip] for chip in map(tuple, mesh.coords.tolist()))


def case(
    mesh: mm.Mesh,
    host_of_chip: tuple[int, ...],
    *,
    sharded: bool,
    domains: tuple[str, ...] = (),
    n_blocks: int = 1,
    n_cores: int = 1,
) -> Case:
    placement = place_on(host_of_chip, mesh, n_cores, domains, n_blocks)
    n_slots, n_devices = len(host_of_chip) // mesh.n_chips, len(host_of_chip) * n_cores
    owned = tuple((chip,) for chip in range(mesh.n_chips))
    arrays = (ShardedArray("float32", 10, 1),) if sharded else ()
    outline = Outline(n_devices, n_cores, mesh.n_chips, owned, {"float32": (100,)}, arrays, n_slots, placement.n_shares)
    return Case(placement, outline)


@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_one_host_has_all_that_is_replicated(machine: tuple[str, str]) -> None:
    found = case(*hosts_of(*machine), sharded=False)
    for left in found.hosts:
        assert found.survives(set(found.hosts) - {left})
    assert found.spares == len(found.hosts) - 1


@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_of_shards_only_hosts_that_keep_each_others_are_too_many(machine: tuple[str, str]) -> None:
    found = case(*hosts_of(*machine), sharded=True)
    n = len(found.hosts)
    fatal = [pair for pair in itertools.combinations(found.hosts, 2) if not found.survives(pair)]
    assert all(found.survives([host]) for host in found.hosts)
    assert found.spares == 1
    # Each host and its keeper: of an even number, two keep each other's.
    assert len(fatal) == (n if n % 2 else n // 2)


@pytest.mark.parametrize("n_blocks", [2, 3])
@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_with_blocks_as_many_hosts_may_fail_as_there_are_others_with_each(
    machine: tuple[str, str], n_blocks: int
) -> None:
    found = case(*hosts_of(*machine), sharded=False, n_blocks=n_blocks)
    n = len(found.hosts)
    if n_blocks > n // 2:
        pytest.skip("a block would be with one host")
    spares = n // n_blocks - 1
    assert found.spares == spares
    for n_lost in range(1, min(spares, 3) + 1):
        assert all(found.survives(lost) for lost in itertools.combinations(found.hosts, n_lost))
    assert not all(found.survives(lost) for lost in itertools.combinations(found.hosts, spares + 1))
    shares, _ = found.placement.host_bytes(found.outline)
    assert shares <= 4 * (100 / n_blocks + len(found.placement.host_of_chip))


CUT = [
    *((*machine, ()) for machine in [*MACHINES, ("2x16", "2x2"), ("1x8", "1x1"), ("4x12", "2x2")]),
    *((shape, "2x2", ("2x2@0,2",)) for shape in ("4x6", "4x4", "6x6", "4x12")),
    *((shape, "2x2", ("2x2@2,0", "2x2@0,4")) for shape in ("4x6", "6x6", "4x12")),
    *((shape, "2x2", ("2x2@0,0",)) for shape in ("2x12", "2x10", "2x16")),
]
"""Machines that the failure of one more host may cut in two."""


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("machine", CUT, ids=str)
def test_hosts_that_one_failure_takes_out_do_not_keep_each_others_parts(
    machine: tuple[str, str, tuple[str, ...]], sharded: bool
) -> None:
    mesh, host_of_chip = hosts_of(*machine)
    assert mesh.is_connected
    there = set(host_of_chip)
    n_blocks = 1 if sharded else max(1, len(there) // 2)
    found = case(mesh, host_of_chip, sharded=sharded, n_blocks=n_blocks)
    for lost in there:
        left = Hosts.of(*machine[:2]).largest_group(there - {lost})
        if 2 * len(left) >= len(there):  # fewer hosts cannot keep the shards of more
            assert found.survives(there - set(left)), f"host {lost} fails"


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    "domains",
    [
        "aabbcc",  # neighbours in the order of hosts
        "abcabc",  # half-way around: where their keepers would be without domains
        "abccba",
        "aaabbb",
        "aab.c.",  # some hosts do not say
        "aabc",  # hosts that say nothing at all come last
    ],
)
def test_a_domain_may_fail(domains: str, sharded: bool) -> None:
    names = tuple(name.replace(".", "") for name in domains)
    mesh, host_of_chip = hosts_of("4x6", "2x2")
    for n_blocks in (1, 2, 3):
        found = case(mesh, host_of_chip, sharded=sharded, domains=names, n_blocks=n_blocks)
        for name in set(names) - {""}:
            lost = [host for host, other in enumerate(names) if other == name]
            assert found.survives(lost), f"domain {name} with {n_blocks} blocks"


def test_a_domain_that_cannot_be_survived_is_told() -> None:
    mesh, host_of_chip = hosts_of("4x6", "2x2")
    for domains, end in (("aabbcc", "and of any failure domain"), ("aaaaab", "but not of every domain")):
        found = case(mesh, host_of_chip, sharded=True, domains=tuple(domains))
        assert f"any 1 of 6 hosts at once, {end}: each" in found.placement.describe(found.outline)
        lost = [host for host, name in enumerate(domains) if name == "a"]
        assert found.survives(lost) == (end != "but not of every domain")


def test_a_domain_of_most_hosts_costs_no_more_than_it_must() -> None:
    """Five of six hosts are in one: one pair can be apart, and the others are as far away as without domains."""
    mesh, host_of_chip = hosts_of("4x6", "2x2")
    found = case(mesh, host_of_chip, sharded=True, domains=("a",) * 5 + ("b",))
    assert all(found.survives([host]) for host in found.hosts)
    assert found.spares == 1


@pytest.mark.parametrize("sizes", [[4, 4], [4, 2, 3], [1, 1, 1, 1], [4, 4, 3, 1], [3, 4, 4, 4, 4]], ids=str)
@pytest.mark.parametrize("n_cores", [1, 2])
def test_hosts_of_different_sizes(sizes: list[int], n_cores: int) -> None:
    host_of_chip = tuple(host for host, size in enumerate(sizes) for _ in range(size))
    mesh = mm.Mesh([1, len(host_of_chip)], wrap=[False, True])
    for n_blocks in range(1, max(1, len(sizes) // 2) + 1):
        found = case(mesh, host_of_chip, sharded=True, n_cores=n_cores, n_blocks=n_blocks)
        assert all(found.survives([lost]) for lost in found.hosts)
        alone = case(mesh, host_of_chip, sharded=False, n_cores=n_cores, n_blocks=n_blocks)
        assert alone.spares == len(sizes) // n_blocks - 1
    keeper = found.placement.kept
    assert sorted(keeper.tolist()) == list(range(len(host_of_chip)))
    assert all(host_of_chip[chip] != host_of_chip[kept] for chip, kept in enumerate(keeper.tolist()))


@pytest.mark.parametrize("sizes", [[3, 1], [4, 3], [1, 2, 5], [2, 7, 1, 1]], ids=str)
def test_of_a_host_with_most_chips_the_others_keep_what_they_can(sizes: list[int]) -> None:
    host_of_chip = [host for host, size in enumerate(sizes) for _ in range(size)]
    np.random.default_rng(0).shuffle(host_of_chip)
    mesh = mm.Mesh([1, len(host_of_chip)])
    keeper = place_on(tuple(host_of_chip), mesh).kept.tolist()
    assert sorted(keeper) == list(range(len(host_of_chip)))
    kept = [chip for chip, by in enumerate(keeper) if host_of_chip[by] != host_of_chip[chip]]
    assert len(kept) == 2 * (sum(sizes) - max(sizes))
    replicated = case(mesh, tuple(host_of_chip), sharded=False)
    assert replicated.spares == len(sizes) - 1


def test_one_host_alone_keeps_its_own_once() -> None:
    found = case(*hosts_of("2x2", "2x2"), sharded=True)
    assert [held.kind for held in found.placement.parts_of(0, found.outline)] == ["share"] * 4 + ["own"] * 4
    assert found.spares == 0


@pytest.mark.parametrize("hosts_per_tile", [1, 2])
@pytest.mark.parametrize("sharded", [False, True])
def test_hosts_of_tiles(sharded: bool, hosts_per_tile: int) -> None:
    """Tiles of four devices: each on one host, or the first two slots on one host and the last two on another."""
    n_tiles, mesh = 6, mm.Mesh("2x3")
    if hosts_per_tile == 1:
        host_of_chip = tuple(tile for tile in range(n_tiles) for _ in range(4))
    else:
        host_of_chip = tuple(2 * tile + slot // 2 for tile in range(n_tiles) for slot in range(4))
    found = case(mesh, host_of_chip, sharded=sharded)
    n_hosts = n_tiles * hosts_per_tile
    assert found.spares == (1 if sharded else n_tiles - 1)
    lost_sets = list(itertools.combinations(range(n_hosts), 2))
    fatal = [lost for lost in lost_sets if not found.survives(lost)]
    assert len(fatal) == (3 * hosts_per_tile if sharded else 0)
    for lost in fatal:
        assert len({host % hosts_per_tile for host in lost}) == 1, "only hosts of the same slots keep each other's"


def test_what_it_costs_at_the_size_of_a_pod() -> None:
    mesh = mm.Mesh("16x20x28", wrap=True)
    host_of_chip = tuple((((x // 2) * 10 + y // 2) * 28 + z) for x, y, z in mesh.coords.tolist())
    begun = time.process_time()
    found = place_on(host_of_chip, mesh, domains=tuple(f"rack {host // 16}" for host in range(2240)))
    owned = tuple((chip,) for chip in range(mesh.n_chips))
    outline = Outline(mesh.n_chips, 1, mesh.n_chips, owned, {}, (ShardedArray("float32", mesh.n_chips, 1),))
    assert found.describe(outline).startswith("the failure of any 1 of 2240 hosts at once, and of any failure domain")
    assert time.process_time() - begun < 10  # 0.4 s; what looks at pairs of hosts takes minutes
