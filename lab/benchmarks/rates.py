"""Slow cables: weave's time over the weighted bound on 16x32 minus 4x2@6,8, and what other ways cost in lock-step.

    python lab/benchmarks/rates.py                 4,096 chunks, as in docs/planners.md
    python lab/benchmarks/rates.py --chips 64 --chunks 256    a quick look, on 8x8 minus 2x2@2,2

Every ratio is a forecast for long payloads on ideal hardware over the bound of the mesh with its slow cables:
asynchronous and in lock-step for weave; then, in lock-step, "blind" (the plan of the mesh without slow cables, whose
steps wait for them), "left out" (the slow cables taken for failed) and "coarse" (steps of q chunks, so that a cable of
p/q takes p: the payload is cut into as many parts as without slow cables, and the pipeline is q times as coarse).
"""

from __future__ import annotations

import time

import numpy as np

from meshmend import Mesh, Schedule
from meshmend.cost import bound, predict
from meshmend.planning import Weave
from meshmend.schedule.verify import verify
from meshmend.topology import name_cable
from tables import parser_of, up_to

MESH = Mesh("16x32", failed=["4x2@6,8"])
PAYLOAD_BYTES = 1e9


def random_rates(mesh: Mesh, seed: int) -> dict[str, str]:
    """Draw a rate from 1/4, 1/2, 3/4 and 1 for 5 % of the cables."""
    rng = np.random.default_rng(seed)
    chosen = rng.choice(mesh.n_cables, mesh.n_cables // 20, replace=False)
    ends = [(mesh.chip(int(a)), mesh.chip(int(b))) for a, b in mesh.cables[chosen]]
    return {name_cable(cable): str(rng.choice(["1/4", "1/2", "3/4", "1"])) for cable in ends}


def cases(whole: Mesh) -> dict[str, Mesh]:
    """Return the mesh of each row of the table, here and in lab/benchmarks/gather.py."""
    rows, columns = whole.shape
    cable = f"{rows // 2},{columns // 2 - 1}-{rows // 2},{columns // 2}"
    slow = {
        "none": {},
        "one cable at 3/4": {cable: "3/4"},
        "one cable at 1/2": {cable: "1/2"},
        "a column at 1/2": {f"{rows}x1@0,{columns // 2}": "1/2"},
        "5 % of cables at random": random_rates(whole, 1),
    }
    return {name: Mesh(whole.shape, failed=whole.holes, cable_rates=rates) for name, rates in slow.items()}


def on_mesh(schedule: Schedule, mesh: Mesh) -> Schedule:
    """Return a schedule made for other rates, to be priced on this mesh."""
    return schedule.replace(mesh=mesh)


def lock_step(schedule: Schedule, mesh: Mesh) -> float:
    """Return the ratio to the bound in lock-step."""
    return predict(on_mesh(schedule, mesh), PAYLOAD_BYTES, "ideal").ratio_to_bound


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--chunks", type=int, default=4096)
    options = parser.parse_args()
    chunks, (whole,) = options.chunks, up_to(options.chips, [MESH])
    headings = ["slow cables", "bound, M/b", "pieces", "asynchronous", "lock-step", "blind", "left out", "coarse"]
    print("| " + " | ".join([*headings, "CPU seconds to plan"]) + " |")
    print("|---" + "|--:" * len(headings) + "|", flush=True)
    blind = Weave(chunks).plan(whole)
    for name, mesh in cases(whole).items():
        started = time.process_time()
        schedule = Weave(chunks).plan(mesh)
        seconds = time.process_time() - started
        verify(schedule)
        pieces = schedule.total_chunks // chunks
        asynchronous = predict(schedule, PAYLOAD_BYTES, "ideal", mode="asynchronous").ratio_to_bound
        row = [asynchronous, lock_step(schedule, mesh)]
        if mesh.has_slow_cables:
            without = Mesh(whole.shape, failed=whole.holes, failed_cables=list(mesh.cable_rates))
            left_out = Weave(chunks).plan(without)
            coarse = Weave(chunks // pieces).plan(mesh)
            row += [lock_step(plan, mesh) for plan in (blind, left_out, coarse)]
        cells = [f"{ratio:.3f}" for ratio in row] + ["–"] * (5 - len(row))
        print(
            "| " + " | ".join([name, f"{bound(mesh).units:.4f}", str(pieces), *cells, f"{seconds:.1f}"]) + " |",
            flush=True,
        )


if __name__ == "__main__":
    main()
