"""Slow cables: weave's time over the weighted bound on 16x32 minus 4x2@6,8, and what other ways cost in lock-step.

    python benchmarks/rates.py                 4,096 chunks, as in docs/measured.md
    python benchmarks/rates.py --chunks 256    a quick look

Every ratio is a forecast for long payloads on ideal hardware over the bound of the mesh with its slow cables:
asynchronous and in lock-step for weave; then, in lock-step, "blind" (the plan of the mesh without slow cables, whose
steps wait for them), "left out" (the slow cables taken for failed) and "coarse" (steps of q chunks, so that a cable of
p/q takes p: the payload is cut into as many parts as without slow cables, and the pipeline is q times as coarse).
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from meshmend import Mesh, Schedule
from meshmend.cost import bound, predict
from meshmend.planning import Weave
from meshmend.schedule.verify import verify
from meshmend.topology import name_cable

SHAPE, HOLE = "16x32", "4x2@6,8"
PAYLOAD_BYTES = 1e9


def random_rates(mesh: Mesh, seed: int) -> dict[str, str]:
    """Draw a rate from 1/4, 1/2, 3/4 and 1 for 5 % of the cables."""
    rng = np.random.default_rng(seed)
    chosen = rng.choice(mesh.n_cables, mesh.n_cables // 20, replace=False)
    ends = [(mesh.chip(int(a)), mesh.chip(int(b))) for a, b in mesh.cables[chosen]]
    return {name_cable(cable): str(rng.choice(["1/4", "1/2", "3/4", "1"])) for cable in ends}


def cases() -> dict[str, dict[str, str]]:
    """Return the slow cables of each row of the table, here and in benchmarks/gather.py."""
    whole = Mesh(SHAPE, failed=[HOLE])
    return {
        "none": {},
        "one cable at 3/4": {"8,15-8,16": "3/4"},
        "one cable at 1/2": {"8,15-8,16": "1/2"},
        "a column at 1/2": {"16x1@0,16": "1/2"},
        "5 % of cables at random": random_rates(whole, 1),
    }


def on_mesh(schedule: Schedule, mesh: Mesh) -> Schedule:
    """Return a schedule made for other rates, to be priced on this mesh."""
    return schedule.replace(mesh=mesh)


def lock_step(schedule: Schedule, mesh: Mesh) -> float:
    """Return the ratio to the bound in lock-step."""
    return predict(on_mesh(schedule, mesh), PAYLOAD_BYTES, "ideal").ratio_to_bound


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=4096)
    chunks = parser.parse_args().chunks
    headings = ["slow cables", "bound, M/b", "pieces", "asynchronous", "lock-step", "blind", "left out", "coarse"]
    print("| " + " | ".join([*headings, "CPU seconds to plan"]) + " |")
    print("|---" + "|--:" * len(headings) + "|", flush=True)
    blind = Weave(chunks).plan(Mesh(SHAPE, failed=[HOLE]))
    for name, rates in cases().items():
        mesh = Mesh(SHAPE, failed=[HOLE], cable_rates=rates)
        started = time.process_time()
        schedule = Weave(chunks).plan(mesh)
        seconds = time.process_time() - started
        verify(schedule)
        pieces = schedule.total_chunks // chunks
        asynchronous = predict(schedule, PAYLOAD_BYTES, "ideal", mode="asynchronous").ratio_to_bound
        row = [asynchronous, lock_step(schedule, mesh)]
        if rates:
            left_out = Weave(chunks).plan(Mesh(SHAPE, failed=[HOLE], failed_cables=list(mesh.cable_rates)))
            coarse = Weave(chunks // pieces).plan(mesh)
            row += [lock_step(plan, mesh) for plan in (blind, left_out, coarse)]
        cells = [f"{ratio:.3f}" for ratio in row] + ["–"] * (5 - len(row))
        print(
            "| " + " | ".join([name, f"{bound(mesh).units:.4f}", str(pieces), *cells, f"{seconds:.1f}"]) + " |",
            flush=True,
        )


if __name__ == "__main__":
    main()
