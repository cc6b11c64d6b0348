"""Where each chip of a machine lies, from its cables alone.

Most descriptions list chips and cables and no coordinates. A layout puts each chip on a position of a grid such that
cables join neighbours. The search places chips one by one, next to those that are placed, and counts what does not
fit: cables of the grid between two chips that have none (**missing** cables), and cables between chips that are not
neighbours (**extra** cables, which some machines have for other purposes). What remains of the grid are missing chips.

A wrong layout is worse than none: plans would use cables that are not there. So a layout is returned only if it is
the only one, up to the symmetries of the grid. Another one is a rival if it explains the same cables with up to
`SLACK_CHIPS` missing chips and `SLACK_CABLES` missing cables: a machine on which no more than that has failed since it
was whole is therefore never laid out wrongly.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from meshmend.errors import LayoutError
from meshmend.machines.grid import Grid, likely_grids
from meshmend.machines.search import Budget, Fit, GaveUp, Search

SLACK_CHIPS, SLACK_CABLES = 2, 3
MOST_MISSING_CABLES = 24
MOST_EXTRA_CABLES = 12
MOST_CHIPS = 1024
"""Larger machines say where their chips are."""

Chip = TypeVar("Chip", bound=Hashable)


@dataclass(frozen=True)
class ChipLayout(Generic[Chip]):
    """A grid, the coordinate of each chip on it, and the cables that join no neighbours."""

    grid: Grid
    coordinate_of: Mapping[Chip, tuple[int, ...]]
    extra: tuple[tuple[Chip, Chip], ...]


def find_layout(
    chips: Sequence[Chip], cables: Iterable[tuple[Chip, Chip]], grids: Sequence[Grid] | None = None
) -> ChipLayout[Chip]:
    """Return the only layout of the chips on one of the grids; by default on any mesh or torus of about their number.

    Raises `LayoutError` if there is none, or more than one.

    >>> square = [("a", "b"), ("b", "c"), ("c", "d"), ("d", "a"), ("b", "e"), ("e", "f"), ("f", "c")]
    >>> layout = find_layout("abcdef", square, [Grid.of((2, 3), (False, False))])
    >>> layout.coordinate_of["a"], layout.coordinate_of["b"], layout.coordinate_of["e"]
    ((0, 0), (0, 1), (0, 2))
    """
    near = neighbours(chips, cables)
    if not chips:
        raise LayoutError("The description has no chips.", "nothing")
    if len(chips) > MOST_CHIPS:
        raise LayoutError(
            f"{len(chips):,} chips without coordinates: a layout is searched for at most {MOST_CHIPS:,}. Say where "
            f"they are, in a description of your own.",
            "too large",
        )
    check_connected(chips, near)
    wanted = list(grids) if grids is not None else likely_grids(len(chips), SLACK_CHIPS)
    budget = Budget()
    fits = _fits(wanted, near, budget)
    if budget.is_spent:
        raise LayoutError(
            f"The layout is ambiguous: {len(chips)} chips and {_count(near)} cables have too many layouts to compare. "
            f"{_ADVICE}",
            "ambiguous",
        )
    if not fits:
        raise LayoutError(_no_fit(chips, near, wanted if grids is not None else None), "not a mesh")
    return _made(_only_one(fits, len(chips)), list(chips), near)


_ADVICE_ON_ONE_GRID = (
    "The cables do not tell which chips and cables are missing. Give --intended FILE: what the same tool wrote while "
    "the machine was whole."
)
_ADVICE = "Say what was intended: --shape and --wrap, or --intended FILE, such as a description from when it was whole."


def neighbours(chips: Sequence[Chip], cables: Iterable[tuple[Chip, Chip]]) -> list[set[int]]:
    """Return the numbers of the chips that cables join to each chip; a cable to itself is none."""
    numbers = {chip: number for number, chip in enumerate(chips)}
    near: list[set[int]] = [set() for _ in chips]
    for a, b in cables:
        near[numbers[a]].add(numbers[b])
        near[numbers[b]].add(numbers[a])
    for number, others in enumerate(near):
        others.discard(number)
    return near


def check_connected(chips: Sequence[object], near: Sequence[set[int]]) -> None:
    """Raise `LayoutError` with the parts, if cables do not join all chips; `near` has each chip's neighbours."""
    left, parts = set(range(len(chips))), []
    while left:
        part, edge = set(), {min(left)}
        while edge:
            part |= edge
            edge = set().union(*(near[chip] for chip in edge)) - part
        parts.append(sorted(part))
        left -= part
    if len(parts) > 1:
        named = " and ".join(f"{{{_some([str(chips[chip]) for chip in part])}}}" for part in parts[:4])
        more = f" and {len(parts) - 4} others" * (len(parts) > 4)
        raise LayoutError(
            f"No cable joins the {len(parts)} parts {named}{more}, so they do not form one mesh. Check the cables "
            f"between them, or describe each part as a machine of its own.",
            "in parts",
        )


def _some(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + f" and {len(names) - most} more" * (len(names) > most)


def _count(near: Sequence[set[int]]) -> int:
    return sum(map(len, near)) // 2


def _fits(grids: Sequence[Grid], near: Sequence[set[int]], budget: Budget) -> list[Fit]:
    """Return the plausible placements, one of each class of equivalent ones.

    Extra cables are allowed as far as no placement on any grid does without them, or, where more cables are missing
    than SLACK_CABLES, as they explain at least as many. Of missing cables, up to SLACK_CABLES are, or one more than in
    the best placement.
    """
    most = min(MOST_EXTRA_CABLES, _count(near) // 8 + 1)
    for extra in range(most + 1):
        for missing in (SLACK_CABLES, 2 * SLACK_CABLES, MOST_MISSING_CABLES):
            found = _fits_within(grids, near, missing, extra, budget)
            if found and (least := min(fit.missing for fit in found)) >= missing > SLACK_CABLES:
                found = _fits_within(grids, near, least + 1, extra, budget)
            if found and least > SLACK_CABLES:
                for more in range(1, min(least, most - extra) + 1):
                    others = _fits_within(grids, near, least - more, extra + more, budget)
                    found += [fit for fit in others if fit.extra == extra + more]
            if found or budget.is_spent:
                return found
    return []


def _fits_within(
    grids: Sequence[Grid], near: Sequence[set[int]], missing: int, extra: int, budget: Budget
) -> list[Fit]:
    """Return the placements on all grids that need no more missing and extra cables than that."""
    found: list[Fit] = []
    for grid in grids:
        # A chip with more cables than any chip of the grid has some to spare, and every cable of the grid is there,
        # missing, or lost with a missing chip.
        excess = sum(max(0, len(others) - grid.degree) for others in near)
        least_extra = max((excess + 1) // 2, _count(near) - grid.n_cables)
        lost = (grid.size - len(near)) * grid.degree
        if len(near) > grid.size or least_extra > extra:
            continue
        if grid.n_cables - lost - (_count(near) - least_extra) > missing:
            continue
        # Missing chips take at least these cables along, and what then remains of the grid is there or missing.
        gone = grid.size - len(near)
        taken = max(0, gone * grid.least_degree - gone * (gone - 1) // 2)
        within = min(missing, grid.n_cables - taken - (_count(near) - extra))
        if within < 0:
            continue
        try:
            found += Search(grid, near, within, extra, budget).run()
        except GaveUp:
            break
    return found


def _only_one(fits: Sequence[Fit], n_chips: int) -> Fit:
    """Return the placement that no other is a rival of."""
    chips = max(min(fit.missing_chips for fit in fits), SLACK_CHIPS)
    kept = [fit for fit in fits if fit.missing_chips <= chips]
    cables = max(min(fit.missing for fit in kept) + 1, SLACK_CABLES)
    kept = sorted(
        (fit for fit in kept if fit.missing <= cables),
        key=lambda fit: (fit.missing_chips, fit.missing, len(fit.grid.shape)),
    )
    if len(kept) == 1:
        return kept[0]
    ways = list(dict.fromkeys(_name_fit(fit) for fit in kept))
    if len(ways) == 1:
        ways = [f"{ways[0]}, in {len(kept)} ways that differ"]
    # Where all of them are the same grid, to name it settles nothing.
    advice = _ADVICE if len({fit.grid for fit in kept}) > 1 else _ADVICE_ON_ONE_GRID
    raise LayoutError(
        f"The layout is ambiguous: the cables of {n_chips} chip{'s' * (n_chips > 1)} fit {'; or '.join(ways[:4])}. "
        f"{advice}",
        "ambiguous",
    )


def _name_fit(fit: Fit) -> str:
    off = ((fit.missing_chips, "missing chip"), (fit.missing, "missing cable"), (fit.extra, "extra cable"))
    named = [f"{n} {what}{'s' * (n > 1)}" for n, what in off if n]
    return f"{fit.grid} with {' and '.join(named)}" if named else f"{fit.grid}, complete"


def _made(fit: Fit, chips: Sequence[Chip], near: Sequence[set[int]]) -> ChipLayout[Chip]:
    """Return the layout, rotated so that chips that come first lie near the first corner."""
    grid = fit.grid
    rotated = min((tuple(image[p] for p in fit.at) for image in _symmetries(grid, fit.at[0])), default=fit.at)
    extra = tuple(
        (chips[a], chips[b])
        for a in range(len(chips))
        for b in sorted(near[a])
        if a < b and not grid.near[rotated[a]] >> rotated[b] & 1
    )
    coordinate_of = {chip: grid.coordinate(position) for chip, position in zip(chips, rotated, strict=True)}
    return ChipLayout(grid, coordinate_of, extra)


def _symmetries(grid: Grid, first: int) -> Iterator[tuple[int, ...]]:
    """Yield the reflections and shifts of the axes that may bring the first chip nearer to the first corner."""
    number = np.arange(grid.size).reshape(grid.shape)
    coordinates = np.indices(grid.shape).reshape(len(grid.shape), -1)
    for flips in itertools.product((False, True), repeat=len(grid.shape)):
        image = coordinates.copy()
        for x, n, wraps, flip in zip(image, grid.shape, grid.wrap, flips, strict=True):
            x[:] = n - 1 - x if flip else x
            if wraps:
                x[:] = (x - x[first]) % n
        yield tuple(number[tuple(image)].tolist())


def _no_fit(chips: Sequence[Chip], near: Sequence[set[int]], grids: Sequence[Grid] | None) -> str:
    widest = max(range(len(chips)), key=lambda chip: len(near[chip]))
    where = " or ".join(str(grid) for grid in grids[:4]) if grids else "any mesh or torus of about that size"
    return (
        f"The cables do not form a mesh: {len(chips)} chips and {_count(near)} cables fit {where} in no way "
        f"(chip {chips[widest]} has {len(near[widest])} neighbours). {_ADVICE}"
    )
