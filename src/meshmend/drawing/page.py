"""Page: the steps of a schedule as one HTML file that plays, pauses, steps and slides, and needs nothing else.

The file contains the mesh, one line per arrow, and for each step only the arrows that appear or disappear and the chips
that fill: rings repeat themselves, so even thousands of steps stay small. Stepping back undoes the same changes.
"""

from __future__ import annotations

import base64
import html
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshmend.drawing.film import LEVELS, Film
from meshmend.drawing.geometry import cables
from meshmend.drawing.style import FULL, INK, RED, SLOW_CABLE, YELLOW, chip_fills, phase_looks, phases_in_order
from meshmend.errors import DrawingError, name_chip
from meshmend.schedule import Collective, Op, Schedule

MAX_PAGE_BYTES = 32_000_000
"""Largest page that is written: browsers open this in about a second."""
CHIP_HALF = 0.24


def write_page(film: Film, path: Path, *, title: str | None = None, followed: int = -1) -> None:
    """Write a film as one HTML file.

    `followed` is the number of the chunk, among the film's, that is followed at first; -1 for none.
    """
    schedule = film.schedule
    heading = title or f"{schedule.planner} {schedule.collective} on {schedule.mesh}"
    facts = (
        f"{schedule.mesh.n_chips:,} live chips, {schedule.n_steps:,} steps, {schedule.n_transfers:,} transfers, "
        f"{schedule.total_chunks:,} chunks"
    )
    # No "<" inside the script element: a phase name from a file must not end it.
    data = json.dumps({"ink": INK, "followed": followed, "film": film_facts(film)}, separators=(",", ":"))
    own = files("meshmend.drawing")
    words = {
        "title": html.escape(heading),
        "facts": html.escape(facts),
        "data": data.replace("<", "\\u003c"),
        "player": (own / "player.js").read_text(encoding="utf-8").replace("export class", "class"),
    }
    text = (own / "page.html").read_text(encoding="utf-8")
    # All at once: a planner's name from a file must not be read as part of the template.
    text = re.sub(r"\{\{(\w+)\}\}", lambda found: words[found[1]], text)
    size = len(text.encode())
    if size > MAX_PAGE_BYTES:
        raise DrawingError(
            f"The page would have {size / 1e6:.0f} MB; the limit is {MAX_PAGE_BYTES / 1e6:.0f} MB. "
            f"Show fewer steps (this schedule has {schedule.n_steps:,}), as in --steps 0-100, or plan fewer chunks."
        )
    path.write_text(text, encoding="utf-8")


def film_facts(film: Film) -> dict[str, Any]:
    """Return what a page needs to show the film: the mesh, one line per arrow, and the changes of every step."""
    schedule = film.schedule
    fills = chip_fills(schedule)
    return {
        "name": schedule.planner,
        "title": f"{schedule.planner} {schedule.collective} on {schedule.mesh}",
        "first": film.first,
        "last": film.last,
        "steps": schedule.n_steps,
        "box": film.layout.box,
        "chip": CHIP_HALF,
        "live": film.layout.live.ravel().astype(int).tolist(),
        "failed": film.layout.failed.ravel().astype(int).tolist(),
        "fill": fills,
        "full": FULL,
        "levels": LEVELS,
        "gathers": schedule.collective is Collective.ALL_GATHER,
        "red": RED,
        "names": [name_chip(chip) for chip in schedule.mesh.coords.tolist()],
        "cables": [_short(line) for line in cables(film.layout)],
        "slow": [_short(line) for line in cables(film.layout, slow=True)],
        "slowColour": SLOW_CABLE,
        "broken": [[int(schedule.mesh.rank_of[end]) for end in cable] for cable in schedule.mesh.failed_cables],
        "colours": "Blue: its pair is intact. Yellow: its pair has a hole." if YELLOW in fills else "",
        "phases": _phases(film),
        "order": [phase for phase in phases_in_order(schedule) if (film.arrows[2] == phase).any()],
        **_arrows(film),
        "changes": base64.b64encode(_changes(film)).decode(),
        "filling": base64.b64encode(_filling(film)).decode(),
        "chunks": [_path(schedule, chunk) for chunk in film.chunks],
    }


def _path(schedule: Schedule, chunk: int) -> dict[str, Any]:
    """Return the transfers of a chunk, in order of step."""
    first = schedule.first_chunk.astype(np.int64)
    rows = np.flatnonzero((first <= chunk) & (chunk < first + schedule.n_chunks))
    adds = (schedule.op[rows] == Op.REDUCE).astype(int)
    ends = {"step": schedule.step[rows], "src": schedule.src[rows], "dst": schedule.dst[rows], "adds": adds}
    owner = int(schedule.owners[chunk])
    return {"chunk": chunk, "owner": owner, **{name: column.tolist() for name, column in ends.items()}}


def _arrows(film: Film) -> dict[str, Any]:
    """Return ends, phase and line of each arrow; arrows of different phases between the same chips share a line."""
    src, dst, phase = film.arrows
    lines, line_of = film.strokes(CHIP_HALF)
    return {
        "src": src.tolist(),
        "dst": dst.tolist(),
        "phase": phase.tolist(),
        "line": line_of,
        "lines": [[_short(piece) for piece in line.pieces] for line in lines],
    }


def _short(points: NDArray[np.float64]) -> list[float]:
    return [int(x) if x == int(x) else x for x in np.round(points.ravel(), 2).tolist()]


def _phases(film: Film) -> list[dict[str, Any]]:
    """Return name, style and active ranges of steps of every phase, by its number."""
    schedule = film.schedule
    found = []
    for index, (name, look) in enumerate(zip(schedule.phase_names, phase_looks(schedule), strict=True)):
        rows = schedule.phase == index
        active = np.unique(schedule.step[rows])
        active = active[(active >= film.first) & (active <= film.last)]
        breaks = np.flatnonzero(np.diff(active) > 1)
        stretches: list[list[int]] = []
        if len(active):
            # A phase that stops and starts hundreds of times is shown as one range.
            breaks = breaks if len(breaks) < 200 else breaks[:0]
            stretches = np.stack([active[np.r_[0, breaks + 1]], active[np.r_[breaks, -1]]], axis=1).tolist()
        found.append(
            {
                "name": name,
                "colour": look.colour,
                "dash": list(look.dash),
                "open": look.open_head,
                "does": "replaces" if (schedule.op[rows] == Op.COPY).all() else "adds",
                "active": stretches,
            }
        )
    return found


def _changes(film: Film) -> bytes:
    """Return, for every step, how many arrows change and which, as differences of their numbers in LEB128."""
    numbers: list[NDArray[np.int64]] = []
    before = np.empty(0, dtype=np.int64)
    for step in range(film.first, film.last + 1):
        now = film.frame(step)
        changed = np.setxor1d(before, now, assume_unique=True)
        numbers += [np.array([len(changed)]), np.diff(changed, prepend=0)]
        before = now
    return leb128(np.concatenate(numbers))


def _filling(film: Film) -> bytes:
    """Return, for every step, how many chips change their level, and for each its number and the bits that change."""
    numbers: list[NDArray[np.int64]] = []
    before = np.zeros(film.schedule.mesh.n_chips, dtype=np.int64)
    for now in film.levels.astype(np.int64):
        chips = np.flatnonzero(now != before)
        numbers += [np.array([len(chips)]), np.diff(chips, prepend=0) * 32 + (now ^ before)[chips]]
        before = now
    return leb128(np.concatenate(numbers))


def leb128(numbers: NDArray[np.int64]) -> bytes:
    """Write numbers of up to 28 bits in as few bytes as they need, 7 bits per byte, low bits first.

    >>> leb128(np.array([5, 300])).hex()
    '05ac02'
    """
    parts = np.stack([(numbers >> shift) & 0x7F for shift in (0, 7, 14, 21)], axis=1).astype(np.uint8)
    length = 1 + (numbers >= 1 << 7) + (numbers >= 1 << 14) + (numbers >= 1 << 21)
    position = np.arange(4)
    parts[position < length[:, None] - 1] |= 0x80
    return parts[position < length[:, None]].tobytes()
