"""Time and memory of all-pairs route tables with their proofs, and what the detours cost.

Run: python lab/benchmarks/routing.py [SHAPE ...]
"""

from __future__ import annotations

import resource
import sys
import time

import numpy as np

from meshmend import Mesh
from meshmend.routing import SCHEMES, choose, prove, report, trace

HOLE = "4x2@6,8"


def main(shapes: list[str]) -> None:
    for shape in shapes:
        mesh = Mesh(shape, failed=[HOLE])
        choose.cache_clear()
        started = time.perf_counter()
        routes, proof = choose(mesh)
        seconds = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(f"{mesh}: {routes.scheme} and its proof in {seconds:.2f} s, peak {peak:.2f} GB; {proof}")
        if mesh.n_chips < 2000:
            for name, build in SCHEMES.items():
                routes = build(mesh)
                found = report(routes)
                print(
                    f"  {name:16} channels {routes.n_channels}, deadlock free {prove(routes).deadlock_free}, "
                    f"without route {found.pairs_without_route}, mean detour {found.mean_detour:.4f}, "
                    f"longest detour {found.longest_detour_hops}, busiest link {found.busiest_link_flows}"
                )
    mesh = Mesh("256x256", failed=[HOLE])
    src, dst = np.random.default_rng(0).integers(0, mesh.n_chips, (2, 20_000))
    started = time.perf_counter()
    found_trace = trace(mesh, src, dst)
    print(f"{mesh}: 20,000 random flows, {len(found_trace.link):,} hops, in {time.perf_counter() - started:.2f} s")


if __name__ == "__main__":
    main(sys.argv[1:] or ["16x32", "32x32", "64x64"])
