"""The table of docs/plans.md: a sharded weight update with the fused update, in two phases, and the all-reduce itself.

python benchmarks/fused_update.py

On ideal links, with 4,096 chunks. Every schedule is proven.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from meshmend import Collective, Mesh, Schedule, predict, verify
from meshmend.planning import Derived, Gather, Planner, Weave

CHUNKS = 4096
MESHES = [
    Mesh("8x8", failed=["2x2@2,2"]),
    Mesh("16x32", failed=["4x2@6,8"]),
    Mesh("32x32", failed=["4x2@6,8"]),
]


def units(*schedules: Schedule) -> float:
    """Return the time of schedules that run one after the other, in M/b, after proving them."""
    total = 0.0
    for schedule in schedules:
        verify(schedule)
        forecast = predict(schedule, 1e9, "ideal")
        total += forecast.seconds * forecast.hardware.link_bytes_per_s / 1e9
    return total


def main() -> None:
    table = Table(title=f"predicted time in M/b, ideal links, {CHUNKS:,} chunks", title_justify="left")
    for heading in ("mesh", "all-reduce", "with update", "ratio", "split from it", "ratio", "gather twice", "ratio"):
        table.add_column(heading, justify="left" if heading == "mesh" else "right")
    for mesh in MESHES:
        halves = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
        whole = units(Weave(CHUNKS).plan(mesh))
        made: dict[tuple[Planner, Mesh], Schedule] = {}
        fused, scattered, gathered = (
            Derived(Weave(CHUNKS), collective, made=made).plan(mesh)
            for collective in (Collective.ALL_REDUCE_WITH_UPDATE, *halves)
        )
        ways = [
            units(fused),
            units(scattered, gathered),
            units(*(Gather(collective=collective).plan(mesh) for collective in halves)),
        ]
        cells = [cell for way in ways for cell in (f"{way:.3f}", f"{way / whole:.2f}")]
        table.add_row(str(mesh), f"{whole:.3f}", *cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
