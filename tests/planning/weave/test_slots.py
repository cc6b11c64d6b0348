from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend import Mesh
from meshmend.planning.weave.slots import Slots, _Network, assign_steps
from meshmend.planning.weave.trees import Rooted, grow, measure, reroot
from slots_reference import Reference, Transfer
from strategies import torn_meshes


def rooted_trees(mesh: Mesh, n_chunks: int, seed: int) -> Rooted:
    chance = np.random.default_rng(seed)
    _, somewhere = measure(grow(mesh, 8))
    return reroot(somewhere, chance.integers(0, 8, n_chunks), chance.integers(0, mesh.n_chips, n_chunks))


def assert_in_order(mesh: Mesh, rooted: Rooted, slots: Slots) -> None:
    """Check by plain loops: one way up and one down a cell, after what they wait for, one chunk per link."""
    n_chunks, n = rooted.parent.shape
    up = {int(c): int(t) for t, c, d in zip(slots.step, slots.cell, slots.down, strict=True) if not d}
    down = {int(c): int(t) for t, c, d in zip(slots.step, slots.cell, slots.down, strict=True) if d}
    links: set[tuple[int, int, int]] = set()
    arrivals: set[tuple[int, int, int]] = set()
    assert len(slots.step) == len(up) + len(down) == 2 * n_chunks * (n - 1)
    for chunk in range(n_chunks):
        for rank in range(n):
            parent, cell = int(rooted.parent[chunk, rank]), chunk * n + rank
            if parent < 0:
                continue
            above = chunk * n + parent
            if rooted.parent[chunk, parent] >= 0:
                assert up[cell] < up[above]
                assert down[above] < down[cell]
            assert up[cell] < down[cell]
            links |= {(rank, parent, up[cell]), (parent, rank, down[cell])}
            arrivals |= {(chunk, parent, up[cell]), (chunk, rank, down[cell])}
        root = int(np.flatnonzero(rooted.parent[chunk] < 0)[0])
        children = [chunk * n + int(rank) for rank in np.flatnonzero(rooted.parent[chunk] == root)]
        assert not children or max(up[c] for c in children) < min(down[c] for c in children)
    assert len(links) == len(arrivals) == len(slots.step)


@settings(max_examples=40, deadline=None)
@given(
    mesh=torn_meshes().filter(lambda mesh: 1 < mesh.n_chips < 80),
    n_chunks=st.integers(1, 12),
    seed=st.integers(0, 1000),
    pace=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
)
def test_order_and_links_are_kept(mesh: Mesh, n_chunks: int, seed: int, pace: float) -> None:
    rooted = rooted_trees(mesh, n_chunks, seed)
    slots = assign_steps(mesh, rooted, pace)
    assert_in_order(mesh, rooted, slots)
    assert (np.diff(slots.step) >= 0).all()


@pytest.mark.parametrize(("limit", "pace"), [("QUICK_CELLS", 0.0), ("QUICK_CELLS", 0.6), ("MAX_POSITIONS", 0.6)])
def test_fewer_passes_keep_order_too(monkeypatch: pytest.MonkeyPatch, limit: str, pace: float) -> None:
    mesh = Mesh("5x4", failed=["2,2"])
    rooted = rooted_trees(mesh, 60, seed=1)
    three = assign_steps(mesh, rooted, pace)
    monkeypatch.setattr(f"meshmend.planning.weave.slots.{limit}", 0)
    fewer = assign_steps(mesh, rooted, pace)
    assert_in_order(mesh, rooted, fewer)
    assert three.n_steps <= fewer.n_steps


def test_one_chunk_takes_the_way_to_the_root_and_back() -> None:
    mesh = Mesh("1x9")
    rooted = Rooted(
        parent=np.array([[1, 2, 3, 4, -1, 4, 5, 6, 7]], dtype=np.int32),
        depth=np.array([[4, 3, 2, 1, 0, 1, 2, 3, 4]], dtype=np.int32),
    )
    # Both arms are four long, and the root takes one of them a step later than the other.
    assert assign_steps(mesh, rooted, pace=1.0).n_steps == 4 + 1 + 4


def transfers(slots: Slots, n_chips: int) -> list[set[Transfer]]:
    steps: list[set[Transfer]] = [set() for _ in range(slots.n_steps)]
    for step, cell, down in zip(slots.step.tolist(), slots.cell.tolist(), slots.down.tolist(), strict=True):
        steps[step].add(("down" if down else "up", *divmod(cell, n_chips)))
    return steps


@settings(max_examples=30, deadline=None)
@given(
    mesh=torn_meshes().filter(lambda mesh: 1 < mesh.n_chips < 30),
    n_chunks=st.integers(1, 40),
    seed=st.integers(0, 1000),
    pace=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
)
def test_every_step_is_that_of_the_plain_rule(mesh: Mesh, n_chunks: int, seed: int, pace: float) -> None:
    """Forth, back and forth again, from queues that are made here by plain sorting."""
    rooted = rooted_trees(mesh, n_chunks, seed)
    n = mesh.n_chips
    links = {
        (rank, int(beyond)): int(mesh.link(np.array([rank]), np.array([beyond]))[0])
        for rank in range(n)
        for beyond in mesh.neighbours[rank]
        if beyond >= 0
    }
    plain = Reference(rooted.parent, links)
    network = _Network(mesh, rooted)
    due: dict[Transfer, tuple[int, int, int]] = {}
    for number, (chunk, rank) in enumerate(divmod(int(cell), n) for cell in network.cells):
        depth, root = int(rooted.depth[chunk, rank]), int(chunk * pace)
        due["up", chunk, rank] = (root - depth, 0, number)
        due["down", chunk, rank] = (root + depth - 1, 1, number)
    queues: dict[int, list[Transfer]] = {}
    for transfer in sorted(due, key=due.__getitem__):
        queues.setdefault(plain.link(transfer), []).append(transfer)
    position = {transfer: i for queue in queues.values() for i, transfer in enumerate(queue)}
    at_root = (np.arange(n_chunks) * pace).astype(np.int32)[:, None]
    run = network.run(*network.queue_by_due(at_root - rooted.depth, at_root + rooted.depth - 1))
    steps = plain.run(position, backwards=False)
    assert transfers(run, n) == steps
    for backwards in (True, False):
        flip = {"up": "down", "down": "up"}
        position = {
            (flip[way], chunk, rank): len(steps) - 1 - step
            for step, now in enumerate(steps)
            for way, chunk, rank in now
        }
        run = network.run(*network.queue_reversed(run), backwards=backwards)
        steps = plain.run(position, backwards=backwards)
        assert transfers(run, n) == steps
