"""The table of docs/gather.md: gather against the optimum and against what is split from weave.

python benchmarks/gather.py
"""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table

from meshmend import Collective, Mesh, Schedule, predict, verify
from meshmend.planning import Derived, Gather, Weave

MESHES = [
    Mesh("8x8", failed=["2x2@2,2"]),
    Mesh("8x8", failed=["3x1@0,3", "3x1@5,3"]),
    Mesh("16x16", failed=["2x2@6,6"]),
    Mesh("16x32", failed=["4x2@6,8"]),
    Mesh("32x32", failed=["4x2@6,8"]),
    Mesh("6x6x6", wrap=True, failed=["2x2x2@2,2,2"]),
]


def ratio(schedule: Schedule) -> float:
    return predict(schedule, 1e9, "ideal").ratio_to_bound


def main() -> None:
    table = Table(title="time over the optimum", title_justify="left")
    headings = ("mesh", "chunks", "all-gather", "reduce-scatter", "split from weave", "to plan", "to prove")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "mesh" else "right")
    for mesh in MESHES:
        started = time.process_time()
        gathered = Gather().plan(mesh)
        planned = time.process_time()
        verify(gathered)
        proven = time.process_time()
        scattered = Gather(collective=Collective.REDUCE_SCATTER).plan(mesh)
        parts = [Derived(Weave(1024), half).plan(mesh) for half in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)]
        table.add_row(
            str(mesh),
            f"{gathered.total_chunks:,}",
            f"{ratio(gathered):.3f}",
            f"{ratio(scattered):.3f}",
            " and ".join(f"{ratio(half):.2f}" for half in parts),
            f"{planned - started:.1f} s",
            f"{proven - planned:.1f} s",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
