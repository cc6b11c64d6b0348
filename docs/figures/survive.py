"""Draw survive.svg and survive-narrow.svg: a mesh loses a host, and the loss curve goes on.

python docs/figures/survive.py             # draws them again, from survive.json
python docs/figures/survive.py --record    # runs the job of the README first, and writes survive.json

The record is what the hosts of a real job wrote into their timelines. The pictures are animated by CSS alone, so that
they also play where a page shows them by <img>; a reader who has asked for less motion sees the end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import meshmend as mm
from meshmend.launch.hosts import Hosts
from meshmend.launch.timeline import read_timeline, timeline_of

FOLDER = Path(__file__).parent
SCRIPT = FOLDER.parents[1] / "examples/jax/survive.py"
RECORD = FOLDER / "survive.json"
STYLE = (FOLDER / "survive.css").read_text(encoding="utf-8")
SHAPE, HOST, KILLED, AFTER = "4x6", "2x2", 1, 40
COMMAND = f"meshmend run --local {SHAPE} --host {HOST} --kill {KILLED}@{AFTER} train.py"
PLAYS_S, RESTS_S, TIMES = 11.0, 4.0, 5
"""How long the job's time is made to last, how long its end stays, and how often that is shown."""

Point = tuple[float, float]


def record() -> dict[str, Any]:
    """Run the job, and return what its hosts wrote down: times in seconds since the first step."""
    machine = Hosts.of(SHAPE, HOST)
    survivors = sorted(set(range(len(machine))) - {KILLED})
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "meshmend", *COMMAND.split()[1:-1], str(SCRIPT)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(  # noqa: S603  # the command that is above
            words, cwd=folder, env=env, capture_output=True, text=True, check=False
        )
        sys.stdout.write(done.stdout)
        if done.returncode:
            raise SystemExit(done.stderr)
        events = {host: read_timeline(timeline_of(Path(folder) / "shared", host)) for host in range(len(machine))}
    said = re.search(r"resumed from step (\d+) \((\w+)\), step \d+ is done ([\d.]+) s after", done.stdout)
    gone = re.search(rf"host {KILLED} is killed after step (\d+)", done.stdout)
    if said is None or gone is None:
        raise SystemExit("No host was killed, or none resumed: see above.")
    restored = {host: max(e["at"] for e in events[host] if e["event"] == "restore") for host in survivors}
    since = {
        host: [e["at"] for e in events[host] if e["event"] == "step" and e["at"] > restored[host]] for host in survivors
    }
    again = max(min(times) for times in since.values())
    killed_at = again - float(said[3])
    steps: dict[int, dict[str, Any]] = {}
    for event in sorted((e for host in survivors for e in events[host] if e["event"] == "step"), key=lambda e: e["at"]):
        steps.setdefault(event["step"], event)
    began = min(event["at"] for event in steps.values())
    holed = mm.Mesh(SHAPE, failed=machine.chips(KILLED))
    return {
        "command": COMMAND,
        "mesh": SHAPE,
        "host": HOST,
        "hosts": len(machine),
        "failed": str(holed.holes[0]),
        "killed": {"host": KILLED, "step": int(gone[1]), "at_s": round(killed_at - began, 2)},
        "resumed": {"step": int(said[1]), "source": said[2], "after_s": float(said[3])},
        "steps": [
            {"step": n, "at_s": round(e["at"] - began, 2), "loss": round(e["loss"], 4), "chips": e["chips"]}
            for n, e in sorted(steps.items())
        ],
        "trees": {"before": tree(mm.Mesh(SHAPE)), "after": tree(holed)},
    }


def tree(mesh: mm.Mesh) -> list[list[list[int]]]:
    """Return the cables that the first chunk of a weave plan takes: a tree that joins all chips."""
    plan = mm.plan(mesh, "weave")
    first = plan.first_chunk == 0
    ends = {tuple(sorted(pair)) for pair in zip(plan.src[first].tolist(), plan.dst[first].tolist(), strict=True)}
    return [[mesh.coords[end].tolist() for end in pair] for pair in sorted(ends)]


@dataclass(frozen=True)
class Layout:
    """Where things are: the mesh's first chip, the distance between chips, and the box of the curve."""

    width: int
    height: int
    corner: Point
    cell: float
    box: tuple[float, float, float, float]
    """Left, top, right, bottom."""
    status: Point
    command: Point
    ticks: int

    def chip(self, at: list[int]) -> Point:
        return self.corner[0] + at[1] * self.cell, self.corner[1] + at[0] * self.cell


WIDE = Layout(1000, 188, (36, 56), 31, (264, 42, 980, 140), (22, 30), (264, 177), 20)
NARROW = Layout(380, 376, (62, 58), 51, (40, 264, 364, 326), (16, 28), (16, 364), 40)


def draw(found: dict[str, Any], layout: Layout) -> str:
    """Return the picture of a record."""
    mesh = mm.Mesh(found["mesh"])
    holed = mm.Mesh(found["mesh"], failed=[found["failed"]])
    dead = {tuple(chip) for chip in mesh.coords.tolist()} - {tuple(chip) for chip in holed.coords.tolist()}
    points, at_s = curve(found, layout)
    parts = [f'<rect class="card" x=".5" y=".5" width="{layout.width - 1}" height="{layout.height - 1}" rx="10"/>']
    for ends in mesh.coords[mesh.cables].tolist():
        touched = any(tuple(end) in dead for end in ends)
        parts.append(line("cable" + " lost" * touched, *(layout.chip(end) for end in ends)))
    for name, shown in (("before", "before"), ("after", "after")):
        lines = "".join(line("tree", *(layout.chip(end) for end in ends)) for ends in found["trees"][name])
        parts.append(f'<g class="{shown}">{lines}</g>')
    radius = layout.cell * 0.26
    for chip in mesh.coords.tolist():
        x, y = layout.chip(chip)
        parts.append(f'<circle class="chip" cx="{x:g}" cy="{y:g}" r="{radius:.3g}"/>')
    for chip in sorted(dead):
        (x, y), arm = layout.chip(list(chip)), radius * 0.42
        cross = line("cross", (x - arm, y - arm), (x + arm, y + arm)) + line(
            "cross", (x - arm, y + arm), (x + arm, y - arm)
        )
        parts.append(f'<g class="gone"><circle class="dead" cx="{x:g}" cy="{y:g}" r="{radius:.3g}"/>{cross}</g>')
    parts += axes(found, layout)
    parts += [
        f'<path class="curve" pathLength="1" d="M{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>',
        f'<circle class="head" r="5" style="transform:translate({points[-1][0]:.1f}px,{points[-1][1]:.1f}px)"/>',
    ]
    parts += words(found, layout, mesh.n_chips, holed.n_chips)
    label = (
        f"Left, a {found['mesh'].replace('x', '×')} mesh of chips loses the {len(dead)} chips of a host. Right, the "
        "loss of the training job that runs on it: it falls, pauses where the host dies, and goes on falling on the "
        f"{holed.n_chips} chips that are left."
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {layout.width} {layout.height}" width="{layout.width}" '
        f'height="{layout.height}" role="img" aria-label="{label}">\n'
        f"<style>{STYLE}{motion(found, points, at_s)}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def curve(found: dict[str, Any], layout: Layout) -> tuple[list[Point], list[float]]:
    """Return where each step is in the picture, and its time."""
    left, top, right, bottom = layout.box
    steps = found["steps"]
    last, (least, most) = steps[-1]["step"], losses(found)
    points = [
        (left + (right - left) * one["step"] / last, bottom - (bottom - top) * (one["loss"] - least) / (most - least))
        for one in steps
    ]
    return points, [one["at_s"] for one in steps]


def losses(found: dict[str, Any]) -> tuple[int, int]:
    """Return the ends of the axis of losses."""
    every = [one["loss"] for one in found["steps"]]
    return int(min(every)), int(max(every)) + 1


def line(name: str, start: Point, end: Point) -> str:
    return f'<line class="{name}" x1="{start[0]:g}" y1="{start[1]:g}" x2="{end[0]:g}" y2="{end[1]:g}"/>'


def axes(found: dict[str, Any], layout: Layout) -> list[str]:
    left, top, right, bottom = layout.box
    last, (least, most) = found["steps"][-1]["step"], losses(found)
    parts = []
    for value in range(least, most + 1, 1 if layout is WIDE else 2):
        y = bottom - (bottom - top) * (value - least) / (most - least)
        parts.append(line("grid", (left, y), (right, y)))
        parts.append(f'<text class="soft" x="{left - 8:g}" y="{y + 4:g}" text-anchor="end">{value}</text>')
    for step in [*range(0, last - layout.ticks + 1, layout.ticks), last]:
        x = left + (right - left) * step / last
        words = f"step {step}" if step == last else str(step)
        anchor = "end" if step == last else "middle" if step else "start"
        parts.append(f'<text class="soft" x="{x:g}" y="{bottom + 18:g}" text-anchor="{anchor}">{words}</text>')
    x = left + (right - left) * found["killed"]["step"] / last
    parts.append(f'<g class="gone">{line("kill", (x, top), (x, bottom))}</g>')
    return parts


def words(found: dict[str, Any], layout: Layout, before: int, after: int) -> list[str]:
    left, top, right, _ = layout.box
    x = left + (right - left) * found["killed"]["step"] / found["steps"][-1]["step"]
    pause, copy = found["resumed"]["after_s"], found["resumed"]["source"]
    step = found["resumed"]["step"]
    sx, sy = layout.status
    beside = (
        f'x="{x + 8:g}" y="{top + 15:g}"'
        if layout is WIDE
        else f'x="{layout.width - 16:g}" y="{top - 10:g}" text-anchor="end"'
    )
    cx, cy = layout.command
    command = found["command"] if layout is WIDE else found["command"].removeprefix("meshmend ")
    return [
        f'<text class="big before" x="{sx}" y="{sy}">{before} chips train</text>',
        f'<text class="big bad during" x="{sx}" y="{sy}">A host dies</text>',
        f'<text class="big after" x="{sx}" y="{sy}">{after} chips keep training</text>',
        f'<text class="soft" x="{left:g}" y="{top - 14 if layout is WIDE else top - 10:g}">loss</text>',
        f'<text class="bad during" {beside}>host {found["killed"]["host"]} is killed</text>',
        f'<text class="after" {beside}>resumed at step {step} from {copy}, {pause:.0f} s later</text>',
        f'<text class="code" x="{cx}" y="{cy}">{command}</text>',
    ]


def motion(found: dict[str, Any], points: list[Point], at_s: list[float]) -> str:
    """Return the keyframes: the job's own times, made shorter."""
    total = PLAYS_S + RESTS_S
    share = PLAYS_S / total / at_s[-1]

    def percent(seconds: float) -> float:
        return 100 * share * seconds

    lengths = [0.0]
    for (x0, y0), (x1, y1) in pairwise(points):
        lengths.append(lengths[-1] + ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5)
    drawn, moved = [], []
    for (x, y), length, seconds in zip(points, lengths, at_s, strict=True):
        drawn.append(f"{percent(seconds):.2f}%{{stroke-dashoffset:{1 - length / lengths[-1]:.4f}}}")
        moved.append(f"{percent(seconds):.2f}%{{transform:translate({x:.1f}px,{y:.1f}px)}}")
    killed = percent(found["killed"]["at_s"])
    again = percent(found["killed"]["at_s"] + found["resumed"]["after_s"])
    # The head waits where it was until the job has resumed.
    waits = max(
        n
        for n, one in enumerate(found["steps"])
        if one["at_s"] <= found["killed"]["at_s"] or one["step"] <= found["resumed"]["step"]
    )
    drawn.append(f"{again:.2f}%{{stroke-dashoffset:{1 - lengths[waits] / lengths[-1]:.4f}}}")
    moved.append(f"{again:.2f}%{{transform:translate({points[waits][0]:.1f}px,{points[waits][1]:.1f}px)}}")
    show, hide = "opacity:1", "opacity:0"
    soon = 0.4
    frames = {
        "draw": "".join(drawn),
        "move": "".join(moved),
        "before": f"0%,{killed:.2f}%{{{show}}}{killed + soon:.2f}%,100%{{{hide}}}",
        "during": f"0%,{killed:.2f}%{{{hide}}}{killed + soon:.2f}%,{again:.2f}%{{{show}}}"
        f"{again + soon:.2f}%,100%{{{hide}}}",
        "after": f"0%,{again:.2f}%{{{hide}}}{again + soon:.2f}%,100%{{{show}}}",
        "gone": f"0%,{killed:.2f}%{{{hide}}}{killed + soon:.2f}%,100%{{{show}}}",
        "lost": f"0%,{killed:.2f}%{{{show}}}{killed + soon:.2f}%,100%{{opacity:.25}}",
    }
    rules = "".join(f"@keyframes {name}{{{body}}}\n" for name, body in frames.items())
    classes = {"draw": "curve", "move": "head"}
    moves = "".join(
        f".{classes.get(name, name)}{{animation:{name} {total:g}s linear {TIMES} both}}\n" for name in frames
    )
    return f".lost {{ opacity: .25; }}\n{rules}@media (prefers-reduced-motion: no-preference) {{\n{moves}}}\n"


def pictures() -> dict[Path, str]:
    """Return the pictures of the record that is kept, by file."""
    found = json.loads(RECORD.read_text(encoding="utf-8"))
    return {
        FOLDER / "survive.svg": draw(found, WIDE),
        FOLDER / "survive-narrow.svg": draw(found, NARROW),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="run the job first, and write survive.json")
    if parser.parse_args().record:
        RECORD.write_text(json.dumps(record(), indent=1) + "\n", encoding="utf-8")
    for path, text in pictures().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
