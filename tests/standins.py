"""Schedules that stand in for planners in tests and benchmarks: simple, slow to plan, and proven by `verify`."""

from __future__ import annotations

import heapq
from collections import defaultdict

import numpy as np

import meshmend as mm
from meshmend.planning.hamiltonian import find_ring


def one_way_ring(mesh: mm.Mesh) -> mm.Schedule:
    """One ring through all chips, one way round: what a bare ring of `lax.ppermute` does."""
    ring = find_ring(mesh)
    n = len(ring)
    rows = []
    for t in range(n - 1):
        for i in range(n):
            rows.append((t, ring[i], ring[(i + 1) % n], (i - t) % n, mm.Op.REDUCE))
            rows.append((n - 1 + t, ring[i], ring[(i + 1) % n], (i + 1 - t) % n, mm.Op.COPY))
    step, src, dst, chunk, op = map(np.array, zip(*rows, strict=True))
    owners = ring[(np.arange(n) - 1) % n]
    schedule = mm.Schedule(mesh, total_chunks=n, step=step, src=src, dst=dst, first_chunk=chunk, op=op, owners=owners)
    mm.verify(schedule)
    return schedule


def tree_schedule(mesh: mm.Mesh, chunks: int, seed: int = 0) -> mm.Schedule:
    """A random breadth-first tree a chunk, reduced to its root and copied back; any connected mesh.

    A link carries one chunk per step, and a chip receives a chunk from one neighbour per step,
    the earliest chunk first.
    """
    rng = np.random.default_rng(seed)
    roots = rng.permutation(np.resize(np.arange(mesh.n_chips), chunks))
    parent = np.full((chunks, mesh.n_chips), -1)
    for k, root in enumerate(roots):
        seen, frontier = {int(root)}, [int(root)]
        while frontier:
            reached = []
            for chip in frontier:
                for other in rng.permutation(mesh.neighbours[chip]):
                    if other >= 0 and int(other) not in seen:
                        seen.add(int(other))
                        parent[k, other] = chip
                        reached.append(int(other))
            frontier = reached
    children = [[np.flatnonzero(parent[k] == chip).tolist() for chip in range(mesh.n_chips)] for k in range(chunks)]
    waiting = [[len(children[k][chip]) for chip in range(mesh.n_chips)] for k in range(chunks)]
    ready: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)

    def offer(k: int, src: int, dst: int, op: int) -> None:
        heapq.heappush(ready[src, dst], (k, op))

    def summed(k: int, chip: int) -> None:
        if parent[k, chip] >= 0:
            offer(k, chip, int(parent[k, chip]), mm.Op.REDUCE)
        else:
            for child in children[k][chip]:
                offer(k, chip, child, mm.Op.COPY)

    for k in range(chunks):
        for chip in range(mesh.n_chips):
            if waiting[k][chip] == 0:
                summed(k, chip)
    rows, step = [], 0
    while any(ready.values()):
        fired, taken = [], set()
        for (src, dst), queue in ready.items():
            if queue and (dst, queue[0][0]) not in taken:
                k, op = heapq.heappop(queue)
                taken.add((dst, k))
                fired.append((step, src, dst, k, op))
        for _, _, dst, k, op in fired:
            if op == mm.Op.REDUCE:
                waiting[k][dst] -= 1
                if waiting[k][dst] == 0:
                    summed(k, dst)
            else:
                for child in children[k][dst]:
                    offer(k, dst, child, mm.Op.COPY)
        rows += fired
        step += 1
    table = np.array(rows).T
    columns = dict(zip(("step", "src", "dst", "first_chunk", "op"), table, strict=True))
    schedule = mm.Schedule(mesh, total_chunks=chunks, owners=roots, planner="trees", **columns)
    mm.verify(schedule)
    return schedule
