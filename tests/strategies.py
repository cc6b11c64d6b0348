"""Hypothesis strategies, all in one place; grown with every feature."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from meshmend import Mesh, Op, Region, Schedule
from meshmend.planning import PLANNERS, make_planner
from meshmend.topology import all_placements


@st.composite
def meshes(draw: st.DrawFn, max_axes: int = 3, max_side: int = 6, connected: bool = False) -> Mesh:
    """Any mesh or torus with random failed chips and cables."""
    shape = draw(st.lists(st.integers(1, max_side), min_size=1, max_size=max_axes).map(tuple))
    wrap = draw(st.tuples(*(st.booleans() for _ in shape)))
    chip = st.tuples(*(st.integers(0, n - 1) for n in shape))
    whole = Mesh(shape, wrap=wrap)
    failed = draw(st.lists(chip, max_size=min(5, whole.size - 1), unique=True))
    mesh = Mesh(shape, wrap=wrap, failed=failed)
    cables = [tuple(mesh.chip(int(end)) for end in cable) for cable in mesh.cables]
    lost: list[Any] = draw(st.lists(st.sampled_from(cables), max_size=3)) if cables else []
    mesh = Mesh(shape, wrap=wrap, failed=failed, failed_cables=lost)
    if connected and not mesh.is_connected:
        # Keep the part of the first chip: filtering would throw most small meshes away.
        rest = mesh.coords[mesh.component_of != mesh.component_of[0]]
        mesh = mesh.fail(*(tuple(map(int, chip)) for chip in rest))
    return mesh


@st.composite
def block_meshes(draw: st.DrawFn, max_blocks: int = 5) -> Mesh:
    """A 2-D mesh of 2×2 blocks, some of which have failed: what the ring planners are for."""
    rows, columns = draw(st.integers(1, max_blocks)), draw(st.integers(1, max_blocks))
    block = st.tuples(st.integers(0, rows - 1), st.integers(0, columns - 1))
    dead = draw(st.lists(block, max_size=min(4, rows * columns - 1), unique=True))
    holes = [Region(at=(2 * r, 2 * c), shape=(2, 2)) for r, c in dead]
    return Mesh((2 * rows, 2 * columns), failed=holes)


@st.composite
def cut_block_meshes(draw: st.DrawFn, max_blocks: int = 4) -> Mesh:
    """A mesh or torus of 2×2 blocks, some of which have failed, and some cables: what ring planners may get wrong."""
    whole = draw(block_meshes(max_blocks))
    cables = [(whole.chip(int(a)), whole.chip(int(b))) for a, b in whole.cables]
    lost = draw(st.lists(st.sampled_from(cables), max_size=4))
    wrap = draw(st.sampled_from([(False, False), (True, False), (True, True)]))
    return Mesh(whole.shape, wrap=wrap, failed=whole.holes, failed_cables=lost)


@st.composite
def battered_meshes(draw: st.DrawFn, max_side: int = 12) -> Mesh:
    """The largest connected part of a 2-D mesh with up to a third of its chips and cables failed, at random."""
    shape = (draw(st.integers(1, max_side)), draw(st.integers(1, max_side)))
    share = draw(st.sampled_from([0.02, 0.1, 0.33]))
    random = draw(st.randoms(use_true_random=False))
    chips = [(r, c) for r in range(shape[0]) for c in range(shape[1])]
    failed = [chip for chip in chips[1:] if random.random() < share]
    whole = Mesh(shape, failed=failed)
    cables = [(whole.chip(int(a)), whole.chip(int(b))) for a, b in whole.cables]
    mesh = Mesh(shape, failed=failed, failed_cables=[cable for cable in cables if random.random() < share / 2])
    sizes = [int((mesh.component_of == part).sum()) for part in range(mesh.n_components)]
    rest = mesh.coords[mesh.component_of != sizes.index(max(sizes))]
    return mesh.fail(*(tuple(map(int, chip)) for chip in rest))


@st.composite
def survivors(draw: st.DrawFn, max_chips: int = 48) -> Mesh:
    """A connected mesh or torus of one to three axes, with any chips failed."""
    n_axes = draw(st.integers(1, 3))
    shape: list[int] = []
    for _ in range(n_axes):
        shape.append(draw(st.integers(1, max(1, min(8, max_chips // int(np.prod(shape or [1])))))))
    seed, share = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from([0.0, 0.1, 0.3]))
    wrap = draw(st.booleans())
    dead = np.random.default_rng(seed).random(shape) < share
    dead.flat[0] = False
    mesh = Mesh(shape, wrap=wrap, failed=[tuple(chip) for chip in np.argwhere(dead)])
    if mesh.is_connected:
        return mesh
    largest = np.bincount(mesh.component_of).argmax()
    apart = mesh.coords[mesh.component_of != largest]
    return mesh.fail(*[tuple(chip) for chip in apart])


def tree_plan(mesh: Mesh, chunks: int, rng: np.random.Generator) -> Schedule:
    """One random spanning tree a chunk, summed to its root and sent back; a step a level, all chunks together."""
    rows: list[tuple[int, int, int, int, Op]] = []
    owners = []
    for chunk in range(chunks):
        root = int(rng.integers(mesh.n_chips))
        parent, depth, order = {root: root}, {root: 0}, [root]
        frontier = [root]
        while frontier:
            at = frontier.pop(int(rng.integers(len(frontier))))
            for near in rng.permutation(mesh.neighbours[at]).tolist():
                if near >= 0 and near not in parent:
                    parent[near], depth[near] = at, depth[at] + 1
                    order.append(near)
                    frontier.append(near)
        owners.append(root)
        deepest = max(depth.values())
        # Children of one parent at different steps: no two writes of a chunk at a chip may share a step.
        slot = {chip: number for number, chip in enumerate(sorted(order, key=lambda chip: -depth[chip]))}
        for chip in order[1:]:
            rows.append((slot[chip], chip, parent[chip], chunk, Op.REDUCE))
            rows.append((len(order) + depth[chip] - 1, parent[chip], chip, chunk, Op.COPY))
        assert deepest < len(order)
    columns: list[tuple[int, ...]] = list(zip(*rows, strict=True)) if rows else [()] * 5
    step = np.unique(np.array(columns[0], dtype=np.int64), return_inverse=True)[1]
    return Schedule(
        mesh,
        total_chunks=chunks,
        step=step,
        src=columns[1],
        dst=columns[2],
        first_chunk=columns[3],
        op=[int(op) for op in columns[4]],
        owners=owners,
        planner="random trees",
    )


@st.composite
def tree_plans(draw: st.DrawFn) -> Schedule:
    """A plan of random spanning trees for any survivors."""
    mesh = draw(survivors())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return tree_plan(mesh, draw(st.integers(1, 8)), rng)


@st.composite
def planner_plans(draw: st.DrawFn, max_side: int = 8) -> Schedule:
    """A plan of any planner that applies, for a mesh with or without a hole of whole blocks."""
    rows, columns = (2 * draw(st.integers(2, max_side // 2)) for _ in range(2))
    hole = draw(st.sampled_from([None, (2, 2), (4, 2), (2, 4)]))
    mesh = Mesh((rows, columns))
    if hole is not None:
        places = [at for at in all_placements(mesh.shape, hole) if mesh.fail(at).is_connected]
        if places:
            mesh = mesh.fail(draw(st.sampled_from(places)))
    able = [name for name in PLANNERS if make_planner(name).unsupported_reason(mesh) is None]
    if not able:
        return tree_plan(mesh, 4, np.random.default_rng(0))
    return make_planner(draw(st.sampled_from(sorted(able)))).plan(mesh)


def plans() -> st.SearchStrategy[Schedule]:
    """A plan of any kind."""
    return st.one_of(tree_plans(), planner_plans())


SMALL_SHAPES = st.one_of(
    st.tuples(st.integers(1, 40)),
    st.tuples(st.integers(1, 16), st.integers(1, 16)),
    st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6)),
)


def tear(shape: tuple[int, ...], wrap: tuple[bool, ...], lost_chips: float, lost_cables: float, seed: int) -> Mesh:
    """Fail chips and cables at random, and with them all chips that are cut off from the largest part."""
    chance = np.random.default_rng(seed)
    dead = chance.random(shape) < lost_chips
    dead.flat[chance.integers(dead.size)] = False
    mesh = Mesh(shape, wrap=wrap, failed=[tuple(map(int, chip)) for chip in np.argwhere(dead)])
    cut = mesh.cables[chance.random(mesh.n_cables) < lost_cables]
    cables = [(mesh.chip(int(a)), mesh.chip(int(b))) for a, b in cut]
    mesh = Mesh(shape, wrap=wrap, failed=mesh.holes, failed_cables=cables)
    largest = np.bincount(mesh.component_of).argmax()
    lost = np.flatnonzero(mesh.component_of != largest)
    return Mesh(shape, wrap=wrap, failed=[*mesh.holes, *(mesh.chip(int(rank)) for rank in lost)], failed_cables=cables)


@st.composite
def torn_meshes(draw: st.DrawFn) -> Mesh:
    """Draw a connected mesh or torus of one to three axes that has lost up to a third of its chips and cables."""
    shape = draw(SMALL_SHAPES)
    wrap = tuple(draw(st.booleans()) for _ in shape)
    lost = st.sampled_from([0.0, 0.02, 0.1, 0.33])
    return tear(shape, wrap, draw(lost), draw(lost), draw(st.integers(0, 2**32 - 1)))
