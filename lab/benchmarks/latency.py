"""The tables of docs/planners.md: short payloads by weave and latency, and Swing's distances against the butterfly's.

python lab/benchmarks/latency.py               # --chips 64: only small meshes
"""

from __future__ import annotations

from unittest.mock import patch

from rich.console import Console

from meshmend import Mesh, Schedule, bound, plan, predict
from meshmend.planning import Latency
from tables import make_table, parser_of, up_to

MACHINE = "tpu-v4-xla"
MESHES = [Mesh("16x32", failed=["4x2@6,8"]), Mesh("32x32", failed=["4x2@6,8"]), Mesh("16x32")]
PAYLOADS = [4e3, 64e3, 1e6]
TORI = [Mesh("8x8", wrap=True), Mesh("16x16", wrap=True), Mesh("8x8x8", wrap=True)]


def microseconds(schedule: Schedule, payload: float) -> float:
    return predict(schedule, payload, MACHINE).seconds * 1e6


def main() -> None:
    console, chips = Console(width=120), parser_of(__doc__).parse_args().chips
    least_of_all = "no schedule is faster than"
    short = make_table(f"µs, predicted, {MACHINE}", "mesh", "payload", "weave", "latency", least_of_all)
    for mesh in up_to(chips, MESHES):
        for payload in PAYLOADS:
            trees, few = (
                plan(mesh, name, payload_bytes=payload, hardware=MACHINE, verify=False) for name in ("weave", "latency")
            )
            least = bound(mesh, hardware=MACHINE).least_seconds(payload, 50e9) * 1e6
            figures = [microseconds(trees, payload), microseconds(few, payload), least]
            short.add_row(str(mesh), f"{payload / 1e3:,.0f} kB", *(f"{figure:.1f}" for figure in figures))
    console.print(short)
    title = f"µs for 4 kB on full tori, {MACHINE}"
    tori = make_table(title, "torus", "butterfly", "Swing's distances", least_of_all)
    for mesh in up_to(chips, TORI):
        swing = Latency().plan(mesh)
        with patch("meshmend.planning.latency.planner.swings", return_value=False):
            butterfly = Latency().plan(mesh)
        least = bound(mesh, hardware=MACHINE).least_seconds(4e3, 50e9) * 1e6
        figures = [microseconds(butterfly, 4e3), microseconds(swing, 4e3), least]
        tori.add_row(str(mesh), *(f"{figure:.1f}" for figure in figures))
    console.print(tori)


if __name__ == "__main__":
    main()
