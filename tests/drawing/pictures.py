"""How drawing tests look at a figure: its artists by name, its words and their boxes, and what a schedule sends."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from meshmend import Mesh, Schedule, routing

Pair = tuple[int, int]


def named(figure: Figure, name: str) -> list[Any]:
    """All artists of that name in the panels, one a panel at most."""
    return [artist for axes in figure.axes for artist in axes.get_children() if artist.get_label() == name]


def failed_coordinates(figure: Figure) -> list[set[tuple[int, int]]]:
    """For each panel, the (row, column) of the squares that are drawn as failed; each must be red and crossed out."""
    found = []
    for squares in named(figure, "failed chips"):
        red, green, blue, _ = squares.get_facecolor()[0]
        assert red > 0.7
        assert max(green, blue) < 0.35
        found.append({(round(y), round(x)) for x, y in np.asarray(squares.get_offsets())})
    for arms, positions in zip(named(figure, "crosses"), found, strict=True):
        assert len(arms.get_paths()) == 2 * len(positions)
    return found


def lines_of(figure: Figure, name: str) -> LineCollection | None:
    found = [artist for artist in named(figure, name) if isinstance(artist, LineCollection)]
    assert len(found) <= 1
    return found[0] if found else None


def n_heads(figure: Figure, name: str) -> int:
    return sum(len(heads.get_paths()) for heads in named(figure, f"{name}: heads"))


def sent_pairs(schedule: Schedule, phase: str) -> set[Pair]:
    """Who sends to whom in a phase, by a plain loop over the transfers."""
    number = schedule.phase_names.index(phase)
    columns = (schedule.src.tolist(), schedule.dst.tolist(), schedule.phase.tolist())
    return {(src, dst) for src, dst, of in zip(*columns, strict=True) if of == number}


def retraced(mesh: Mesh, pairs: set[Pair]) -> set[Pair]:
    """The pairs whose way back is there too and crosses the same cables as the way there."""
    listed = sorted(pairs)
    walk = routing.trace(mesh, [a for a, _ in listed], [b for _, b in listed])
    hops: dict[Pair, list[Any]] = {pair: [] for pair in listed}
    for flow, _, link in sorted(zip(walk.flow.tolist(), walk.hop.tolist(), walk.link.tolist(), strict=True)):
        hops[listed[flow]].append(mesh.link_ends(link))
    return {(a, b) for a, b in pairs if hops.get((b, a)) == [(y, x) for x, y in reversed(hops[a, b])]}


def both_ways(mesh: Mesh, pairs: set[Pair]) -> int:
    """Pairs that are joined by one line without a head."""
    return len(retraced(mesh, pairs)) // 2


def one_way(mesh: Mesh, pairs: set[Pair]) -> int:
    """Pairs that are joined by an arrow."""
    return len(pairs) - len(retraced(mesh, pairs))


def assert_legible(figure: Figure) -> None:
    """Every word lies inside the sheet, no two overlap, and none is too small to read."""
    figure.canvas.draw()
    words: list[Any] = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        words += axes.texts
        if axes.axison:  # the colour bar
            words += [axes.yaxis.label, *axes.yaxis.get_majorticklabels()]
    boxes = [(t.get_text(), t.get_window_extent(), t.get_fontsize()) for t in words if t.get_text().strip()]
    assert boxes
    sheet = figure.bbox
    for name, box, size in boxes:
        assert size >= 4.5, name
        assert box.x0 >= sheet.x0 - 0.5, name
        assert box.x1 <= sheet.x1 + 0.5, name
        assert box.y0 >= sheet.y0 - 0.5, name
        assert box.y1 <= sheet.y1 + 0.5, name
    for (name, box, _), (other_name, other, _) in combinations(boxes, 2):
        apart = box.x1 <= other.x0 or other.x1 <= box.x0 or box.y1 <= other.y0 or other.y1 <= box.y0
        assert apart, f"{name!r} overlaps {other_name!r}"
