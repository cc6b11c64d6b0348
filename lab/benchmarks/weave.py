"""Weave's figures: time and busiest link over the bound, steps, seconds to plan and peak memory.

    python lab/benchmarks/weave.py           the meshes of docs/planners.md with 4,096 chunks, and with the default
    python lab/benchmarks/weave.py --scale   8×8 to 256×256 with the default number of chunks
    python lab/benchmarks/weave.py --auto    what `auto` plans for long payloads, by budget, and 256×256
    python lab/benchmarks/weave.py --chips 64   only small meshes; with the others, too
    python lab/benchmarks/weave.py --repeat 5   plan each mesh five times; the best time counts

Every run is cold: a new process, including the import of SciPy's graph module. Planning uses one core, so on a busy
machine its CPU time is the better measure.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from math import prod
from typing import Any

from rich.console import Console
from rich.progress import track

from tables import make_table, parser_of

Case = tuple[str, str, int | None]

HOLED: list[Case] = [
    (shape, f"4x2@{at}", chunks)
    for chunks in (4096, None)
    for shape, places in (("16x32", ("0,0", "0,14", "6,14", "6,8")), ("32x32", ("0,0", "0,14", "14,14", "6,8")))
    for at in places
]
FULL: list[Case] = [(f"{n}x{n}", "", chunks) for chunks in (4096, None) for n in (8, 16, 32)]
SCALE: list[Case] = [
    *((f"{n}x{n}", f"4x2@{n // 4},{n // 4}", None) for n in (8, 16, 32, 64, 128)),
    ("256x256", "4x2@64,64 2x4@128,30 8x8@200,200", None),
]
PLACES = {
    "16x32": ("0,0", "0,14", "0,30", "6,0", "6,8", "6,14", "6,30", "12,14"),
    "32x32": ("0,0", "0,14", "0,30", "14,0", "6,8", "14,14", "14,30", "28,14"),
}
Long = tuple[str, str, str, float, float]
"""Mesh, holes, hardware, payload in bytes and the budget in seconds."""
AUTO: list[Long] = [
    *(
        (shape, f"4x2@{at}", "ideal", 1.34e9, budget_s)
        for shape, places in PLACES.items()
        for at in places
        for budget_s in (10, 2)
    ),
    ("32x32", "", "ideal", 1.34e9, 10),
    *((shape, "4x2@6,8", "tpu-v4", 1.34e9, 10) for shape in PLACES),
    ("256x256", "4x2@64,64 2x4@128,30 8x8@200,200", "ideal", 64e9, 60),
]
SMALL: Long = ("8x8", "2x2@2,2", "ideal", 1.34e9, 1)
"""In place of these where all of them are too large."""


def measure_auto(shape: str, holes: str, hardware: str, payload_bytes: float, budget_s: float) -> dict[str, Any]:
    """Let `auto` plan once in this process, prove it, and return the figures."""
    from meshmend import Mesh, predict, verify
    from meshmend.planning import Auto

    mesh = Mesh(shape, failed=holes.split())
    started = time.process_time()
    schedule = Auto(payload_bytes, hardware, budget_s=budget_s).plan(mesh)
    planned = time.process_time()
    verify(schedule)
    proven = time.process_time()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    forecast = predict(schedule, payload_bytes, hardware)
    return {
        "mesh": str(mesh),
        "hardware": hardware,
        "budget": f"{budget_s:g}",
        "chunks": f"{schedule.total_chunks:,}",
        "template": f"{schedule.template.total_chunks} chunks, {schedule.period} steps" if schedule.period else "–",
        "milliseconds": f"{1e3 * forecast.seconds:.2f}",
        "over bound": f"{forecast.ratio_to_bound:.3f}",
        "CPU s to plan": f"{planned - started:.2f}",
        "to prove": f"{proven - planned:.2f}",
        "peak GB": f"{memory / 1e9:.2f}",
    }


def print_auto(cases: list[Long]) -> None:
    """Print what `auto` plans, line by line as a table of Markdown: the largest takes a minute."""
    for number, case in enumerate(cases):
        command = [sys.executable, __file__, "--auto", "--case", json.dumps(case)]
        found = json.loads(subprocess.check_output(command))
        if not number:
            print("| " + " | ".join(found) + " |")
            print("|" + "---|" * len(found))
        print("| " + " | ".join(found.values()) + " |", flush=True)


def measure(shape: str, holes: str, chunks: int | None) -> dict[str, Any]:
    """Plan once in this process and return the figures."""
    from meshmend import Mesh
    from meshmend.cost import bound, busiest_link_load
    from meshmend.planning import Weave

    mesh = Mesh(shape, failed=holes.split())
    started, cpu_started = time.perf_counter(), time.process_time()
    schedule = Weave(chunks).plan(mesh)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    least = bound(mesh).units
    return {
        "mesh": str(mesh),
        "chunks": schedule.total_chunks,
        "bound": least,
        "time": schedule.n_steps / schedule.total_chunks / least,
        "link": busiest_link_load(schedule) / least,
        "steps": schedule.n_steps,
        "transfers": schedule.n_transfers,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "memory_bytes": memory,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--scale", action="store_true", help="grow the mesh to 256x256")
    parser.add_argument("--auto", action="store_true", help="what auto plans for long payloads, by budget")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each mesh; the best time counts")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps((measure_auto if arguments.auto else measure)(*json.loads(arguments.case))))
        return

    def is_small(shape: str) -> bool:
        return arguments.chips is None or prod(map(int, shape.split("x"))) <= arguments.chips

    if arguments.auto:
        print_auto([case for case in AUTO if is_small(case[0])] or [SMALL])
        return
    sizes = ("chunks", "bound, M/b", "time / bound", "busiest link / bound", "steps", "transfers")
    table = make_table("weave", "mesh", *sizes, "seconds", "of the CPU", "peak GB")
    cases = [case for case in (SCALE if arguments.scale else HOLED + FULL) if is_small(case[0])]
    for case in track(cases, console=Console(stderr=True), transient=True):
        command = [sys.executable, __file__, "--case", json.dumps(case)]
        runs = [json.loads(subprocess.check_output(command)) for _ in range(arguments.repeat)]
        best = min(runs, key=lambda run: float(run["seconds"]))
        table.add_row(
            best["mesh"],
            f"{best['chunks']:,}",
            f"{best['bound']:.4f}",
            f"{best['time']:.3f}",
            f"{best['link']:.4f}",
            f"{best['steps']:,}",
            f"{best['transfers']:,}",
            f"{best['seconds']:.2f}",
            f"{best['cpu_seconds']:.2f}",
            f"{best['memory_bytes'] / 1e9:.2f}",
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
