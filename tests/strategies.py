"""Random meshes and plans for Hypothesis."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from meshmend.planning import PLANNERS
from meshmend.schedule import Op, Schedule
from meshmend.topology import Mesh, all_placements


@st.composite
def survivors(draw: DrawFn, max_chips: int = 48) -> Mesh:
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
        turn = {chip: number for number, chip in enumerate(sorted(order, key=lambda chip: -depth[chip]))}
        for chip in order[1:]:
            rows.append((turn[chip], chip, parent[chip], chunk, Op.REDUCE))
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
def tree_plans(draw: DrawFn) -> Schedule:
    """A plan of random spanning trees for any survivors."""
    mesh = draw(survivors())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return tree_plan(mesh, draw(st.integers(1, 8)), rng)


@st.composite
def planner_plans(draw: DrawFn, max_side: int = 8) -> Schedule:
    """A plan of any planner that applies, for a mesh with or without a hole of whole blocks."""
    rows, columns = (2 * draw(st.integers(2, max_side // 2)) for _ in range(2))
    hole = draw(st.sampled_from([None, (2, 2), (4, 2), (2, 4)]))
    mesh = Mesh((rows, columns))
    if hole is not None:
        places = [at for at in all_placements(mesh.shape, hole) if mesh.fail(at).is_connected]
        if places:
            mesh = mesh.fail(draw(st.sampled_from(places)))
    able = [name for name, kind in PLANNERS.items() if kind().why_not(mesh) is None]
    if not able:
        return tree_plan(mesh, 4, np.random.default_rng(0))
    return PLANNERS[draw(st.sampled_from(sorted(able)))]().plan(mesh)


def plans() -> SearchStrategy[Schedule]:
    """A plan of any kind."""
    return st.one_of(tree_plans(), planner_plans())
