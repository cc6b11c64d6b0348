"""From what a peer plans, trees or timed sends, to a `Schedule`: proven by `verify`, priced by `predict`."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshmend import Hardware, Mesh, Op, Schedule, predict, verify

MESHES = {
    "4x4": Mesh("4x4"),
    "4x4 minus 2x2": Mesh("4x4", failed=["2x2@1,1"]),
    "8x8": Mesh("8x8"),
    "8x8 minus 2x2": Mesh("8x8", failed=["2x2@2,2"]),
    "16x16": Mesh("16x16"),
    "16x16 minus 2x2": Mesh("16x16", failed=["2x2@6,6"]),
    "16x32 minus 4x2": Mesh("16x32", failed=["4x2@6,8"]),
}
PAYLOAD_BYTES = 1e9
LINKS_ALONE = Hardware("links alone", 100e9)
WITH_LATENCY = Hardware("1 us per hop", 100e9, hop_latency_s=1e-6)
Send = tuple[int, int, int, int]
"""Step, source, destination, chunk."""
Tree = tuple[int, list[tuple[int, int]]]
"""A root, and the links (parent, child) in an order in which a broadcast from the root can use them."""


def breadth_first(root: int, links: list[tuple[int, int]]) -> Tree:
    """Put the links of a tree in the order in which a broadcast reaches them."""
    children = defaultdict(list)
    for parent, child in links:
        children[parent].append(child)
    found: list[tuple[int, int]] = []
    reached = [root]
    for parent in reached:
        found += [(parent, child) for child in children[parent]]
        reached += children[parent]
    if len(found) != len(links):
        raise ValueError(f"The tree of root {root} has {len(links)} links, but only {len(found)} can be reached.")
    return root, found


def from_gather(mesh: Mesh, sends: ArrayLike, owners: ArrayLike, planner: str) -> Schedule:
    """Make an all-reduce of an all-gather, whose sends are rows of (step, src, dst, chunk).

    The reduce-scatter before it is the all-gather backwards in time, as TACOS and MultiTree make theirs.
    """
    step, src, dst, chunk = np.asarray(sends, dtype=np.int64).T
    last = int(step.max())
    up = np.stack([last - step, dst, src, chunk])
    down = np.stack([last + 1 + step, src, dst, chunk])
    return _schedule(mesh, up, down, owners, planner)


def two_phases(mesh: Mesh, trees: list[Tree], planner: str) -> Schedule:
    """Broadcast a chunk down each tree, each as early as links are free; the same backwards before it."""
    slots = Slots()
    sends = [send for chunk, tree in enumerate(trees) for send in slots.broadcast(chunk, tree, 0)]
    return from_gather(mesh, sends, [root for root, _ in trees], planner)


def one_pipeline(mesh: Mesh, trees: list[Tree], planner: str) -> Schedule:
    """Reduce a chunk up each tree and broadcast it as soon as it is complete, while others are still reduced."""
    slots = Slots()
    up: list[Send] = []
    down: list[Send] = []
    for chunk, (root, links) in enumerate(trees):
        ready: dict[int, int] = defaultdict(int)
        for parent, child in reversed(links):
            step = slots.take((child, parent), ready[child])
            ready[parent] = max(ready[parent], step + 1)
            up.append((step, child, parent, chunk))
        down += slots.broadcast(chunk, (root, links), ready[root])
    return _schedule(mesh, np.array(up).T, np.array(down).T, [root for root, _ in trees], planner)


class Slots:
    """One chunk per link and step, first come, first served."""

    def __init__(self) -> None:
        self._taken: dict[tuple[int, int], set[int]] = defaultdict(set)
        self._first_free: dict[tuple[int, int], int] = defaultdict(int)

    def take(self, link: tuple[int, int], ready: int) -> int:
        """Take the first free step of a link from `ready` on."""
        taken, step = self._taken[link], max(ready, self._first_free[link])
        while step in taken:
            step += 1
        taken.add(step)
        while self._first_free[link] in taken:
            self._first_free[link] += 1
        return step

    def broadcast(self, chunk: int, tree: Tree, ready: int) -> list[Send]:
        root, links = tree
        arrived: dict[int, int] = {root: ready}
        sends: list[Send] = []
        for parent, child in links:
            step = self.take((parent, child), arrived[parent])
            arrived[child] = step + 1
            sends.append((step, parent, child, chunk))
        return sends


def _schedule(mesh: Mesh, up: NDArray[np.int64], down: NDArray[np.int64], owners: ArrayLike, planner: str) -> Schedule:
    step, src, dst, chunk = np.concatenate([up, down], axis=1)
    op = np.repeat([Op.REDUCE, Op.COPY], [up.shape[1], down.shape[1]])
    turn = _numbered(step, dst, chunk)
    return Schedule(
        mesh,
        total_chunks=len(np.asarray(owners)),
        step=np.unique(step * (int(turn.max()) + 1) + turn, return_inverse=True)[1],
        src=src,
        dst=dst,
        first_chunk=chunk,
        op=op,
        phase=np.repeat([0, 1], [up.shape[1], down.shape[1]]),
        phase_names=("reduce", "broadcast"),
        owners=owners,
        planner=planner,
    )


def _numbered(*key: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number the rows with the same key. A step of a schedule writes to a chunk of a chip once; peers sum several."""
    order = np.lexsort(key)
    rows = np.stack(key)[:, order]
    is_new = np.r_[True, (np.diff(rows) != 0).any(axis=0)]
    place = np.arange(len(order), dtype=np.int64)
    numbered = np.empty_like(place)
    numbered[order] = place - np.maximum.accumulate(np.where(is_new, place, 0))
    return numbered


def judge(schedule: Schedule, *, prove: bool = True) -> dict[str, object]:
    """Prove a schedule; predict it for an engine that waits for its data alone, in units of M/b."""
    unit = PAYLOAD_BYTES / LINKS_ALONE.link_bytes_per_s
    alone, late = (
        predict(schedule, PAYLOAD_BYTES, one, mode="asynchronous").seconds / unit for one in (LINKS_ALONE, WITH_LATENCY)
    )
    return {
        "proven": prove and verify(schedule) is not None,
        "chunks": schedule.total_chunks,
        "units": round(alone, 4),
        "units_1us": round(late, 4),
    }
