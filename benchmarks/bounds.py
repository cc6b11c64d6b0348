"""The bounds of docs/cost.md for each collective: the tightest partition, and the CPU seconds to find it.

python benchmarks/bounds.py               # --chips 64: only the smallest
"""

from __future__ import annotations

import time

from rich.console import Console

from meshmend import Mesh
from meshmend.cost import bound
from meshmend.schedule import Collective
from tables import make_table, parser_of, up_to

MESHES = [
    Mesh("8x8", failed=["2x2@2,2"]),
    Mesh("16x16", failed=["4x2@4,4"]),
    Mesh("16x32", failed=["4x2@6,8"]),
    Mesh("32x32", failed=["4x2@6,8"]),
    Mesh("32x32"),
    Mesh("32x32", wrap=True),
    Mesh("8x24", failed=["3x8@0,8", "3x8@5,8"]),
    Mesh("64x64", failed=["4x2@16,16"]),
]


def main() -> None:
    headings = ("all-reduce", "parts", "cables", "reduce-scatter, all-gather", "CPU seconds")
    table = make_table("bounds, M/b", "mesh", *headings)
    for mesh in up_to(parser_of(__doc__).parse_args().chips, MESHES):
        started = time.process_time()
        whole, half = bound(mesh), bound(mesh, collective=Collective.ALL_GATHER)
        seconds = time.process_time() - started
        table.add_row(
            str(mesh),
            f"{whole.units:.4f}",
            f"{whole.parts:,}",
            f"{whole.cables:,}",
            f"{half.units:.4f}",
            f"{seconds:.2f}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
