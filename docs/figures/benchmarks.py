"""Draw the plots of docs/measured.md and docs/planners.md, and write the data that they show.

python docs/figures/benchmarks.py           # draws the plots again, from docs/data
python docs/figures/benchmarks.py --plan    # plans and predicts first, and writes docs/data; about a minute

docs/data/lab.csv is measured: by `sudo meshmend lab bench allreduce --lab … --rate 40mbit --payload 32MB --json`.
"""

from __future__ import annotations

import argparse
import csv
import math
from pathlib import Path

from sheet import sheet

import meshmend as mm
from meshmend_lab.mesh.description import hardware_of

FIGURES = Path(__file__).parent
DATA = FIGURES.parent / "data"
STYLE = (FIGURES / "benchmarks.css").read_text(encoding="utf-8")
Row = dict[str, str]

PARTS = ("bandwidth", "uneven load", "filling and draining", "latency", "engine and the rest")
"""Where a measured time goes: four parts that are predicted for the plan that was run, and what is left.

The first two are a lower bound, the time of the plan's busiest link. What is left may be negative: in the prediction a
link serves transfers in order of step, and TCP lets those go first that are ready.
"""
PAYLOADS = tuple(10.0**n for n in range(3, 11))
PLANNERS = ("row-pairs", "hamiltonian", "latency", "auto")
"""On this hardware `auto` chooses weave for every payload."""
MESH, HARDWARE = mm.Mesh("8x8", failed=["2x2@2,2"]), "tpu-v6e"


def read(name: str) -> list[Row]:
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(name: str, rows: list[Row]) -> None:
    with (DATA / name).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def gaps() -> list[Row]:
    """Return where the time of each measured case goes: the plan that was run is predicted on the lab's links."""
    found = []
    for row in read("lab.csv"):
        mesh = mm.Mesh(row["mesh"], failed=[row["failed"]] if row["failed"] else [])
        payload, rate, measured = (float(row[key]) for key in ("payload_bytes", "link_bytes_per_s", "seconds"))
        parts = dict.fromkeys(PARTS, 0.0)
        if row["case"] == "Gloo":
            parts["bandwidth"] = mm.bound(mesh).units * payload / rate
        else:
            lab = hardware_of(f"{8e-6 * rate:g}mbit", rate)
            schedule = mm.plan(mesh, row["case"], payload_bytes=payload, hardware=lab, mode="asynchronous")
            links = mm.Hardware("links", rate)
            predicted = mm.predict(schedule, payload, links, mode="asynchronous").gap.parts
            parts |= {name: seconds for name, seconds in predicted.items() if name in parts}
        parts["engine and the rest"] = measured - sum(parts.values())
        found.append(
            {key: row[key] for key in ("mesh", "failed", "case", "seconds")}
            | {name.replace(" ", "_") + "_s": f"{seconds:.3f}" for name, seconds in parts.items()}
        )
    return found


def payloads() -> list[Row]:
    """Return how long each planner's plan is predicted to take, for payloads from 1 kB to 10 GB."""
    found = []
    for payload in PAYLOADS:
        for name in PLANNERS:
            schedule = mm.plan(MESH, name, payload_bytes=payload, hardware=HARDWARE)
            forecast = mm.predict(schedule, payload, HARDWARE)
            found.append(
                {
                    "mesh": str(MESH),
                    "hardware": HARDWARE,
                    "payload_bytes": f"{payload:.0f}",
                    "planner": name,
                    "predicted_s": f"{forecast.seconds:.4g}",
                    "over_least": f"{forecast.seconds / forecast.least_seconds:.3f}",
                }
            )
    return found


def draw_gaps(rows: list[Row]) -> str:
    """A bar per measured case, of what its time is spent on."""
    left, right, height = 230, 850, 26
    longest = max(float(row["seconds"]) for row in rows)
    parts, y, before = [], 52.0, ""
    for name, index in zip(PARTS, range(len(PARTS)), strict=True):
        x = 20 + (0, 105, 220, 385, 470)[index]
        parts.append(f'<rect class="p{index}" x="{x}" y="18" width="12" height="12"/>')
        parts.append(f'<text class="soft" x="{x + 18}" y="29">{name}</text>')
    for row in rows:
        mesh = row["mesh"].replace("x", "×") + (f" minus {row['failed']}".replace("x", "×") if row["failed"] else "")
        if mesh != before:
            y += 12
            parts.append(f'<text class="bold" x="20" y="{y + 14:g}">{mesh}</text>')
            before = mesh
        parts.append(f'<text x="{left - 10}" y="{y + 14:g}" text-anchor="end">{row["case"]}</text>')
        x = float(left)
        end = left + (right - left) * float(row["seconds"]) / longest
        for index, name in enumerate(PARTS):
            width = max(0.0, min((right - left) * float(row[name.replace(" ", "_") + "_s"]) / longest, end - x))
            parts.append(f'<rect class="p{index}" x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="18"/>')
            x += width
        parts.append(f'<text class="soft" x="{x + 8:.1f}" y="{y + 14:g}">{float(row["seconds"]):.1f} s</text>')
        y += height
    label = "Measured seconds of an all-reduce of 32 MB by mesh and planner, split into what they are spent on."
    return sheet(920, round(y) + 10, parts, label, STYLE)


def draw_payloads(rows: list[Row]) -> str:
    """A curve per planner: predicted time over the least possible, by payload."""
    left, top, right, bottom, most = 60.0, 50.0, 780.0, 290.0, 16.0
    sizes = sorted({float(row["payload_bytes"]) for row in rows})

    def point_at(payload: float, ratio: float) -> tuple[float, float]:
        across = math.log(payload / sizes[0]) / math.log(sizes[-1] / sizes[0])
        up = math.log(min(ratio, most)) / math.log(most)
        return left + (right - left) * across, bottom - (bottom - top) * up

    parts = ['<text class="soft" x="20" y="28">predicted time ÷ the least possible with latency</text>']
    for ratio in (1, 2, 4, 8, 16):
        _, y = point_at(sizes[0], ratio)
        parts.append(f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        parts.append(f'<text class="soft" x="{left - 10}" y="{y + 4:.1f}" text-anchor="end">{ratio} ×</text>')
    for size, name in zip(sizes, ("1 kB", "10 kB", "100 kB", "1 MB", "10 MB", "100 MB", "1 GB", "10 GB"), strict=True):
        x, _ = point_at(size, 1)
        parts.append(f'<text class="soft" x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{name}</text>')
    ends = []
    for index, planner in enumerate(PLANNERS):
        mine = [row for row in rows if row["planner"] == planner]
        points = [point_at(float(row["payload_bytes"]), float(row["over_least"])) for row in mine]
        parts.append(f'<path class="l l{index}" d="M{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>')
        ends.append((points[-1][1], planner))
    at = -math.inf
    for y, planner in sorted(ends):
        at, said = max(at + 17, y + 4), "auto (weave)" if planner == "auto" else planner
        parts.append(f'<text class="{"bold" if planner == "auto" else ""}" x="{right + 12}" y="{at:.1f}">{said}</text>')
    label = "Predicted time of each planner over the least possible, by payload: auto is the lowest everywhere."
    return sheet(920, 326, parts, label, STYLE)


def pictures() -> dict[Path, str]:
    """Return the plots of the data that are kept, by file."""
    return {
        FIGURES / "benchmarks-lab.svg": draw_gaps(read("lab_gaps.csv")),
        FIGURES / "benchmarks-payloads.svg": draw_payloads(read("payloads.csv")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plan", action="store_true", help="plan and predict first, and write docs/data")
    if parser.parse_args().plan:
        write("lab_gaps.csv", gaps())
        write("payloads.csv", payloads())
    for path, text in pictures().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
