"""Style: the colours and strokes that a phase is drawn with, the same in every picture, animation and page.

Colours are those of Okabe and Ito, which readers with any of the common colour blindnesses can distinguish
(https://jfly.uni-koeln.de/color/). Nothing differs by colour alone: additions are solid lines with filled
arrow heads, copies are dashed lines with open ones, and a failed chip is crossed out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from meshmend.errors import DrawingError
from meshmend.schedule import Op, Schedule

BLUE = "#0072B2"
VERMILION = "#D55E00"
GREEN = "#00B888"
"""Their bluish green, lighter, so that it differs from the blue in lightness too."""
ORANGE = "#E69F00"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
YELLOW = "#F0E442"
INK = "#1A1A1A"
GREY = "#6B6B6B"
CABLE = "#C9CDD2"
SLOW_CABLE = "#C9A66B"
"""A light brown that stands out from the grey of other cables, and stays behind the colours of transfers."""
CHIP = "#F2F3F5"
CHIP_EDGE = "#4A4F55"
BLUE_CHIP = "#CFE3F1"
RED = "#CC3311"
"""Failed chips. A red that looks darker than every other fill to readers who do not see red."""

FULL = "#7FDBC3"
"""What fills a chip as its sums become complete: light enough for the chip's name on it."""

AT_BOUND = "#9AA0A6"
"""A link that is as busy as the bound says; less busy ones are blue and busier ones vermilion."""

DETOURS = (VERMILION, BLUE, PURPLE, INK)
"""For rings that go round a hole, in turn: all of them differ from the green of the rings of shards."""

SEQUENCE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, INK)
"""For things without a fixed colour, in this order."""

DASHES: tuple[tuple[float, ...], ...] = ((), (5, 1.6), (1.2, 1.2), (6, 1.4, 1.2, 1.4))
"""Dash patterns in line widths, for things that share a picture; the first is a solid line."""

COPY_DASH = (2.4, 1.4)

OTHER_HALF = {"along X": "along Y", "along Y": "along X"}
"""Whose shards a phase of two-color moves: what went along one axis first is a shard along the other."""


def lighter(colour: str, by: float) -> str:
    """Return a colour mixed with white.

    >>> lighter("#000000", 0.5)
    '#808080'
    """
    return "#" + "".join(f"{round(int(colour[i : i + 2], 16) * (1 - by) + 255 * by):02X}" for i in (1, 3, 5))


@dataclass(frozen=True)
class Look:
    """How the transfers of a phase are drawn. `dash` is in line widths, empty for a solid line."""

    colour: str
    dash: tuple[float, ...] = ()
    open_head: bool = False


def phase_looks(schedule: Schedule) -> tuple[Look, ...]:
    """Return the style of each of `phase_names`.

    The part of a phase's name before the colon is its family, which shares a colour: the rings of the first phase
    are blue and rings of shards green, the yellow blocks orange, and transfers between yellow and blue black. Of the
    two halves of two-color's payload, the one that goes along X first is red and the other blue, as in the paper.
    Other families take colours in turn.
    """
    copies = {*schedule.phase.tolist()} - {*schedule.phase[schedule.op == Op.REDUCE].tolist()}
    taken: dict[str, str] = {}
    looks = []
    for index, name in enumerate(schedule.phase_names):
        family = name.split(":")[0].strip()
        half = OTHER_HALF.get(family, family) if "of shards" in name else family
        colour = _own_colour(half) or taken.setdefault(family, SEQUENCE[len(taken) % len(SEQUENCE)])
        dash = DASHES[1] if half == "along Y" else ()
        looks.append(Look(colour, COPY_DASH if index in copies else dash, index in copies))
    return tuple(looks)


def chip_fills(schedule: Schedule) -> list[str]:
    """Return the fill of each live chip: yellow for those that work in yellow blocks, then blue for all others."""
    inside = [i for i, name in enumerate(schedule.phase_names) if name.startswith("yellow blocks")]
    rows = np.isin(schedule.phase, inside)
    yellow = {*schedule.src[rows].tolist(), *schedule.dst[rows].tolist()}
    other = BLUE_CHIP if yellow else CHIP
    return [YELLOW if rank in yellow else other for rank in range(schedule.mesh.n_chips)]


def phases_in_order(schedule: Schedule) -> list[int]:
    """Return the phases that have transfers, by number, in order of their first and last step."""
    spans = []
    for phase in np.unique(schedule.phase).tolist():
        steps = schedule.step[schedule.phase == phase]
        spans.append((int(steps[0]), int(steps[-1]), int(phase)))
    return [phase for _, _, phase in sorted(spans)]


def _own_colour(family: str) -> str | None:
    for words, colour in (
        ("of shards", GREEN),
        ("yellow blocks", ORANGE),
        ("yellow", INK),
        ("along X", VERMILION),
        ("along Y", BLUE),
        ("ring", BLUE),
    ):
        if words in family:
            return colour
    return None


def some_chunks(schedule: Schedule, asked: Iterable[int] | None, n: int) -> tuple[int, ...]:
    """Return the chunks asked for, if the schedule has them; by default up to `n`, evenly spread over the payload."""
    total = schedule.total_chunks
    n = min(n, total)
    chosen = [total * i // n for i in range(n)] if asked is None else list(asked)
    for chunk in chosen:
        if not 0 <= chunk < total:
            raise DrawingError(f"There is no chunk {chunk}: the schedule has chunks 0 to {total - 1}.")
    return tuple(chosen)


def describe(schedule: Schedule) -> str:
    """Return what is under a title: what the schedule does, where, and its size."""
    mesh = schedule.mesh
    return (
        f"{schedule.collective} on {mesh}: {count(mesh.n_chips, 'live chip')}, "
        f"{count(schedule.n_steps, 'step')}, {count(schedule.total_chunks, 'chunk')}"
    )


def count(n: int, noun: str) -> str:
    """Write a number of things.

    >>> count(1, "chunk"), count(1200, "step")
    ('1 chunk', '1,200 steps')
    """
    return f"{n:,} {noun}{'s' * (n != 1)}"
