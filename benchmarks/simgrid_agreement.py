"""How far `predict` in lock-step is from SimGrid: every planner, full and holed.

python benchmarks/simgrid_agreement.py               # --full adds 32x32 minus 4x2, --chips 16 leaves 4x4
"""

from __future__ import annotations

import contextlib
import time

from rich.console import Console
from rich.table import Table

from meshmend.cost import Hardware, find_hardware, predict
from meshmend.cost.simgrid import simulate
from meshmend.cost.units import format_bytes
from meshmend.errors import PlanError
from meshmend.planning import PLANNERS, Auto, plan
from meshmend.schedule import Schedule
from meshmend.topology import Mesh
from tables import parser_of, up_to

CASES = (
    (1e8, find_hardware("ideal")),
    (1e4, find_hardware("ethernet-10g")),
    (3e6, find_hardware("tpu-v3")),
    (1e6, Hardware("3 µs hops", 1e9, step_latency_s=1e-6, hop_latency_s=3e-6)),
    (1e6, Hardware("20 µs hops", 1e9, step_latency_s=1e-6, hop_latency_s=2e-5)),
)
NARROW = ((1e8, find_hardware("tpu-v3-xla")),)


MESHES = [
    Mesh("4x4"),
    Mesh("8x8", failed=["2x2@2,2"]),
    Mesh("8x12", failed=["4x2@2,4", "2x2@6,8"]),
    Mesh("16x16"),
    Mesh("16x16", failed=["4x2@6,8"]),
]


def schedules(chips: int | None, full: bool) -> list[tuple[str, Schedule]]:
    found = []
    for mesh in up_to(chips, MESHES):
        for name in PLANNERS:
            if name == Auto.name:  # it takes the plan of one of the others
                continue
            with contextlib.suppress(PlanError):  # where a planner does not serve the mesh
                found.append((f"{name} on {mesh}", plan(mesh, name, verify=False)))
    pipelined = plan(Mesh("8x8", failed=["2x2@2,2"]), "row-pairs", segments=3)
    found.append(("row-pairs, 3 segments, on 8x8 minus 2x2@2,2", pipelined))
    if full:
        large = Mesh("32x32", failed=["4x2@6,8"])
        found.append((f"row-pairs on {large}", plan(large, "row-pairs", verify=False)))
    return found


def main() -> None:
    table = Table("schedule", "payload", "hardware", "predicted / simulated", "SimGrid's time", box=None)
    table.columns[0].no_wrap = True
    parser = parser_of(__doc__)
    parser.add_argument("--full", action="store_true", help="32x32 minus 4x2, too")
    options = parser.parse_args()
    for name, schedule in schedules(options.chips, options.full):
        for payload, hardware in (*CASES, *NARROW):
            started = time.perf_counter()
            simulated = float(simulate(schedule, payload, hardware).sum())
            took = time.perf_counter() - started
            ratio = predict(schedule, payload, hardware).seconds / simulated
            table.add_row(name, format_bytes(payload), hardware.name, f"{ratio:.6f}", f"{took:.1f} s")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
