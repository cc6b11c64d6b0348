"""Layouts from cables: found up to symmetry or called ambiguous, never wrong."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter

import networkx as nx
import pytest

from descriptions import SAMPLES, Sample, removed
from meshmend.errors import LayoutError
from meshmend.machines import Grid, find_layout, machine_of, parse_description
from meshmend.planning import plan
from meshmend.schedule.verify import verify
from oracle import grid_graph, same_layout

LOSSES = [(1, 0), (2, 0), (0, 3), (1, 3), (2, 3)]
"""Chips and cables that are gone."""


def coordinates(sample: Sample) -> dict[str, tuple[int, ...]]:
    """Where the sample's tool would find its chips, by name."""
    machine = machine_of(parse_description(sample.text, sample.name))
    return {chip.name: coordinate for coordinate, chip in machine.chips.items()}


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES.keys())
def test_every_sample_is_laid_out(sample: Sample) -> None:
    machine = machine_of(parse_description(sample.text, sample.name))
    assert (machine.mesh.shape, machine.mesh.wrap) == (sample.shape, sample.wrap)
    assert machine.mesh.is_full
    assert not machine.mesh.has_slow_cables
    graph = grid_graph(sample.shape, sample.wrap)
    at = list(coordinates(sample).values())
    assert len(set(at)) == len(at) == len(sample.chips)
    by_number = dict(zip(sample.chips, at, strict=True))
    joined = {edge for edge in sample.cables if graph.has_edge(by_number[edge[0]], by_number[edge[1]])}
    assert joined == set(sample.cables) - sample.extra
    assert len(joined) == graph.number_of_edges()


def check(sample: Sample, rounds: int, seed: int) -> Counter[str]:
    """Remove chips and cables at random; the layout is the true one up to symmetry, or there is none."""
    truth, rng, seen = coordinates(sample), random.Random(seed), Counter[str]()
    for number in range(rounds):
        chips, cables = LOSSES[number % len(LOSSES)]
        hurt = removed(sample, rng, chips, cables)
        try:
            machine = machine_of(parse_description(hurt.text, sample.name))
        except LayoutError as error:
            if error.why not in ("ambiguous", "in parts"):
                raise
            seen[error.why] += 1
            continue
        here = {chip.name: coordinate for coordinate, chip in machine.chips.items() if not chip.failed}
        true = {name: truth[name] for name in here}
        found = (machine.mesh.shape, machine.mesh.wrap, here)
        assert same_layout(found, (sample.shape, sample.wrap, true)), (sample.name, seed, number)
        assert machine.mesh.n_chips == len(hurt.chips)
        kept = sum(1 for edge in hurt.cables if edge not in sample.extra)
        assert machine.mesh.n_cables == kept
        seen["found"] += 1
    return seen


QUICK = {"galaxy": 5, "blackhole galaxy": 1, "8 p150": 20, "t3000": 20, "2 n300": 20, "trainium2": 5}


@pytest.mark.parametrize("name", QUICK)
def test_a_hurt_machine_is_found_again_or_refused(name: str) -> None:
    assert check(SAMPLES[name], QUICK[name], seed=1)["found"]


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_500_hurt_machines_are_found_again_or_refused(name: str) -> None:
    assert check(SAMPLES[name], 500, seed=2)["found"] > 50


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_from_a_hurt_machines_file_to_a_proven_plan_in_three_seconds(name: str) -> None:
    rng, planned = random.Random(5), 0
    for number in range(10):
        hurt = removed(SAMPLES[name], rng, *LOSSES[number % len(LOSSES)])
        started = time.process_time()
        try:
            machine = machine_of(parse_description(hurt.text, name))
        except LayoutError:
            continue
        schedule = plan(machine.mesh, payload_bytes=1e8, hardware=machine.hardware)
        assert time.process_time() - started < 3, number
        assert verify(schedule).method
        planned += 1
    assert planned


@pytest.mark.parametrize(("shape", "wrap"), [((2, 3), (False, False)), ((1, 6), (False, True))])
def test_layouts_are_those_of_brute_force(shape: tuple[int, int], wrap: tuple[bool, bool]) -> None:
    graph, rng = grid_graph(shape, wrap), random.Random(3)
    every = [dict(match) for match in nx.isomorphism.GraphMatcher(graph, graph).isomorphisms_iter()]
    found = ambiguous = 0
    for _ in range(15):
        kept = graph.copy()
        kept.remove_nodes_from(rng.sample(sorted(graph), rng.choice((0, 1, 2))))
        kept.remove_edges_from(rng.sample(sorted(kept.edges), rng.choice((0, 0, 1))))
        if not kept or not nx.is_connected(kept):
            continue
        chips = sorted(kept)
        ways = set()
        for at in itertools.permutations(sorted(graph), len(chips)):
            where = dict(zip(chips, at, strict=True))
            if not all(graph.has_edge(where[a], where[b]) for a, b in kept.edges):
                continue
            if graph.subgraph(at).number_of_edges() - kept.number_of_edges() <= 3:
                ways.add(min(tuple(image[coordinate] for coordinate in at) for image in every))
        try:
            layout = find_layout(chips, kept.edges, [Grid.of(shape, wrap)])
        except LayoutError as error:
            if error.why != "ambiguous" or len(ways) < 2:
                raise
            ambiguous += 1
        else:
            at = tuple(layout.coordinate_of[chip] for chip in chips)
            assert ways == {min(tuple(image[coordinate] for coordinate in at) for image in every)}
            found += 1
    assert found + ambiguous > 1


def test_parts_without_a_cable_between_them_are_named() -> None:
    with pytest.raises(LayoutError, match=r"No cable joins the 2 parts \{a, b\} and \{c, d\}"):
        find_layout("abcd", [("a", "b"), ("c", "d")])


def test_what_is_no_mesh_is_refused() -> None:
    star = [(0, n) for n in range(1, 12)]
    with pytest.raises(LayoutError, match="chip 0 has 11 neighbours") as caught:
        find_layout(range(12), star)
    assert caught.value.why == "not a mesh"
    complete = list(itertools.combinations(range(9), 2))
    with pytest.raises(LayoutError, match="do not form a mesh"):
        find_layout(range(9), complete)


def test_a_machine_that_is_small_or_bare_is_ambiguous() -> None:
    with pytest.raises(LayoutError, match="a 2x2 mesh, complete; or") as caught:
        find_layout(range(4), [(0, 1), (1, 2), (2, 3), (3, 0)])
    assert caught.value.why == "ambiguous"
    with pytest.raises(LayoutError, match="ambiguous"):
        find_layout(range(9), list(itertools.pairwise(range(9))), [Grid.of((3, 3), (False, False))])


def test_the_cables_of_a_blackhole_galaxy_have_two_readings() -> None:
    sample = SAMPLES["blackhole galaxy"]
    galaxy = find_layout(sample.chips, sample.cables, [Grid.of((4, 8), (True, True))])
    assert frozenset(galaxy.extra) == sample.extra
    cube = find_layout(sample.chips, sample.cables, [Grid.of((2, 4, 4), (False, False, True))])
    assert cube.extra == ()
