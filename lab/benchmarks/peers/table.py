"""Print the tables of docs/related.md from results.jsonl, and with --readme that of the README.

    python lab/benchmarks/peers/table.py

Of several runs of a peer on a mesh, the one with the shortest plan counts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from meshmend import Collective, bound
from peer_plans import MESHES

RESULTS = Path(__file__).with_name("results.jsonl")
PEERS = ("meshmend", "TACOS", "ForestColl, two phases", "ForestColl, one pipeline", "MultiTree", "TTO")
README_MESH = "8x8 minus 2x2"
BOARD_DIES = {
    "meshmend": "plans for the chips that are left, and proves it",
    "TACOS": "plans for any topology: a reduce-scatter, then an all-gather",
    "ForestColl": "plans trees that are optimal in each of these phases; then, the same trees in one pipeline of ours",
    "MultiTree": "plans one tree per chip, for the same two phases",
    "TTO": "has no plan: its three trees are those of full square meshes",
}
Line = dict[str, Any]


def read(path: Path = RESULTS) -> list[Line]:
    """Read the results, one line per plan or per run that was given up."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def shortest(lines: list[Line], peer: str, mesh: str, units: str) -> Line | None:
    """Find the run with the shortest plan, and of those the one that took the fewest CPU seconds."""
    runs = [line for line in lines if (line["peer"], line["mesh"]) == (peer, mesh) and units in line]
    return min(runs, key=lambda line: (line[units], line.get("cpu_seconds", 0)), default=None)


def times(lines: list[Line], units: str) -> list[list[str]]:
    """Make the rows of plans' times, in M/b. A star marks a plan that is not proven."""
    made = []
    for mesh in _meshes(lines):
        halves = [bound(MESHES[mesh], collective=one).units for one in Collective if not one.is_all_reduce]
        cells = [f"{bound(MESHES[mesh]).units:.3f}", f"{sum(halves):.3f}"]
        for peer in PEERS:
            found = shortest(lines, peer, mesh, units)
            cells.append(f"{found[units]:.3f}{'' if found['proven'] else '*'}" if found else "–")
        made.append([_name(mesh), *cells])
    return made


def cpu_seconds(lines: list[Line]) -> list[list[str]]:
    """Make the rows of CPU seconds, each of the plan in the table of times over links alone."""
    made = []
    for mesh in _meshes(lines):
        cells = []
        for peer in PEERS:
            found = shortest(lines, peer, mesh, "units")
            limits = [line["gave_up_after"] for line in _given_up(lines, peer, mesh)]
            if found:
                cells.append(_seconds(found["cpu_seconds"]) if "cpu_seconds" in found else "saved")
            else:
                cells.append(f"> {max(limits):,}" if limits else "–")
        made.append([_name(mesh), *cells])
    return made


def commits(lines: list[Line]) -> list[list[str]]:
    """Make the rows of what was run."""
    found = {line["peer"].partition(",")[0]: line["commit"] for line in lines if line["peer"] in PEERS}
    return [[peer, f"`{commit[:12]}`"] for peer, commit in found.items()]


def readme(lines: list[Line]) -> str:
    """Make the table of the README: each peer, what it does when a board fails, and the time of its shortest plan."""
    rows = []
    for peer, answer in BOARD_DIES.items():
        named = [one for one in PEERS if one.partition(",")[0] == peer]
        found = [line for one in named if (line := shortest(lines, one, README_MESH, "units"))]
        rows.append([peer, answer, " / ".join(f"{line['units']:.3f}" for line in found) or "–"])
    return markdown(["", "when a board dies", f"M/b on {_name(README_MESH)}"], rows, n_words=2)


def tables(lines: list[Line]) -> str:
    """Make all tables of the page."""
    columns = ["mesh", "bound", "two phases, at least", *PEERS]
    return "\n\n".join(
        [
            "Links alone, M/b (predicted):",
            markdown(columns, times(lines, "units")),
            "With 1 µs per hop, 1 GB, M/b (predicted):",
            markdown(columns, times(lines, "units_1us")),
            "CPU seconds to plan (measured):",
            markdown(["mesh", *PEERS], cpu_seconds(lines)),
            "The versions:",
            markdown(["", "commit"], commits(lines), n_words=2),
        ]
    )


def markdown(headings: list[str], rows: list[list[str]], n_words: int = 1) -> str:
    """Write a table; its first columns are words, the others numbers."""
    rule = ["---"] * n_words + ["--:"] * (len(headings) - n_words)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headings, rule, *rows))


def _meshes(lines: list[Line]) -> list[str]:
    return [mesh for mesh in MESHES if any(line["mesh"] == mesh for line in lines)]


def _given_up(lines: list[Line], peer: str, mesh: str) -> list[Line]:
    command = peer.partition(",")[0].lower()
    return [line for line in lines if "gave_up_after" in line and (line["peer"], line["mesh"]) == (command, mesh)]


def _name(mesh: str) -> str:
    return mesh.replace("x", "×")


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 9.95 else f"{seconds:,.0f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readme", action="store_true", help="the table of the README")
    print((readme if parser.parse_args().readme else tables)(read()))
