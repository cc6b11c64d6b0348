"""The table of docs/variants.md: a sharded weight update, fused and in two phases, and the all-reduce itself.

    python lab/benchmarks/fused_update.py
    python lab/benchmarks/fused_update.py --chips 64 --chunks 256

On ideal links, by default with 4,096 chunks. Every schedule is proven.
"""

from __future__ import annotations

from rich.console import Console

from meshmend import Collective, Mesh, Schedule, predict, verify
from meshmend.planning import Derived, Gather, Weave
from tables import make_table, parser_of, up_to

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
    parser = parser_of(__doc__)
    parser.add_argument("--chunks", type=int, default=4096)
    options = parser.parse_args()
    weave = Weave(options.chunks)
    headings = ("all-reduce", "with update", "ratio", "split from it", "ratio", "gather twice", "ratio")
    table = make_table(f"predicted time in M/b, ideal links, {options.chunks:,} chunks", "mesh", *headings)
    for mesh in up_to(options.chips, MESHES):
        halves = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
        whole = units(weave.plan(mesh))
        fused, scattered, gathered = (
            Derived(weave, collective).plan(mesh) for collective in (Collective.ALL_REDUCE_WITH_UPDATE, *halves)
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
