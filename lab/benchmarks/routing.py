"""Time and memory of all-pairs route tables with their proofs, and what the detours cost.

Run: python lab/benchmarks/routing.py [SHAPE ...]
"""

from __future__ import annotations

import resource
import sys
import time

import numpy as np
from scipy.sparse.csgraph import shortest_path

from meshmend import Mesh
from meshmend.routing import Routes, all_pairs, trace

HOLE = "4x2@6,8"


def all_to_all(routes: Routes) -> tuple[int, int]:
    """Return the hops of all flows, and how many the busiest link carries, when every chip sends to every other."""
    mesh, everybody = routes.mesh, np.arange(routes.mesh.n_chips)
    load = np.zeros(mesh.n_link_slots, dtype=np.int64)
    for dst in range(mesh.n_chips):
        load += np.bincount(routes.follow(everybody, np.full_like(everybody, dst)).link, minlength=mesh.n_link_slots)
    return int(load.sum()), int(load.max())


def shortest_hops(mesh: Mesh) -> int:
    """Return the hops of all flows on shortest live paths."""
    return int(shortest_path(mesh.graph, directed=False, unweighted=True).sum())


def main(shapes: list[str]) -> None:
    for shape in shapes:
        mesh = Mesh(shape, failed=[HOLE])
        all_pairs.cache_clear()
        started = time.perf_counter()
        routes, proof = all_pairs(mesh)
        seconds = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(f"{mesh}: routes and their proof in {seconds:.2f} s, peak {peak:.2f} GB; {proof}")
        if mesh.n_chips < 2000:
            hops, busiest = all_to_all(routes)
            print(f"  hops over those of shortest paths {hops / shortest_hops(mesh):.4f}, busiest link {busiest} flows")
    mesh = Mesh("256x256", failed=[HOLE])
    src, dst = np.random.default_rng(0).integers(0, mesh.n_chips, (2, 20_000))
    started = time.perf_counter()
    found_trace = trace(mesh, src, dst)
    print(f"{mesh}: 20,000 random flows, {len(found_trace.link):,} hops, in {time.perf_counter() - started:.2f} s")


if __name__ == "__main__":
    main(sys.argv[1:] or ["16x32", "32x32", "64x64"])
