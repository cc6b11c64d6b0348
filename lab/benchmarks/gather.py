"""The tables of docs/planners.md: gather against the optimum, against what is split from weave, and over slow cables.

python lab/benchmarks/gather.py               # --chips 64: only small meshes
"""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table

from meshmend import Collective, Mesh, Schedule, bound, predict, verify
from meshmend.cost.hardware import Mode
from meshmend.planning import Derived, Gather, Weave
from meshmend.planning.weave.pieces import Pieces
from rates import MESH, cases, on_mesh
from tables import make_table, parser_of, up_to

MESHES = [
    Mesh("8x8", failed=["2x2@2,2"]),
    Mesh("8x8", failed=["3x1@0,3", "3x1@5,3"]),
    Mesh("16x16", failed=["2x2@6,6"]),
    Mesh("16x32", failed=["4x2@6,8"]),
    Mesh("32x32", failed=["4x2@6,8"]),
    Mesh("6x6x6", wrap=True, failed=["2x2x2@2,2,2"]),
]


PARTS = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)


def ratio(schedule: Schedule, mode: Mode = "lock-step") -> float:
    return predict(schedule, 1e9, "ideal", mode=mode).ratio_to_bound


def against_weave(meshes: list[Mesh]) -> Table:
    headings = ("chunks", "all-gather", "reduce-scatter", "split from weave", "to plan", "to prove")
    table = make_table("time over the optimum", "mesh", *headings)
    for mesh in meshes:
        started = time.process_time()
        gathered = Gather().plan(mesh)
        planned = time.process_time()
        verify(gathered)
        proven = time.process_time()
        scattered = Gather(collective=Collective.REDUCE_SCATTER).plan(mesh)
        parts = [Derived(Weave(1024), half).plan(mesh) for half in PARTS]
        table.add_row(
            str(mesh),
            f"{gathered.total_chunks:,}",
            f"{ratio(gathered):.3f}",
            f"{ratio(scattered):.3f}",
            " and ".join(f"{ratio(half):.2f}" for half in parts),
            f"{planned - started:.1f} s",
            f"{proven - planned:.1f} s",
        )
    return table


def over_slow_cables(whole: Mesh) -> Table:
    headings = ("bound, M/b", "chunks", "per step", "asynchronous", "lock-step", "blind", "to plan")
    table = make_table(f"time over the optimum, {whole}: reduce-scatter", "slow cables", *headings)
    planner = Gather(collective=Collective.REDUCE_SCATTER)
    blind = planner.plan(whole)
    for name, mesh in cases(whole).items():
        started = time.process_time()
        schedule = planner.plan(mesh)
        planned = time.process_time()
        verify(schedule)
        table.add_row(
            name,
            f"{bound(mesh, collective=planner.collective).units:.4f}",
            f"{schedule.total_chunks:,}",
            str(Pieces.of(mesh).per_chunk),
            f"{ratio(schedule, 'asynchronous'):.3f}",
            f"{ratio(schedule):.3f}",
            f"{ratio(on_mesh(blind, mesh)):.3f}",
            f"{planned - started:.1f} s",
        )
    return table


def main() -> None:
    console, chips = Console(width=140), parser_of(__doc__).parse_args().chips
    console.print(against_weave(up_to(chips, MESHES)))
    console.print(over_slow_cables(*up_to(chips, [MESH])))


if __name__ == "__main__":
    main()
