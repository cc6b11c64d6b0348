"""Weave: any connected survivors, close to the limit that the cables set.

Each chunk is reduced up a spanning tree to its root and broadcast back down. Many trees share the cables evenly
(`trees`), their roots are spread over the chips (`roots`), and the chunks follow each other so closely that links
are busy from soon after the start to shortly before the end, with sums of later chunks going up while earlier
ones come down (`slots`). docs/plans.md says why this is near the bound, and why no ring scheme can be.

That plans every chunk for itself. For payloads of very many chunks a few trees are planned instead, as a template that
is repeated (`periodic`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import ClassVar, Literal, final, get_args

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import ParameterError
from meshmend.planning.base import MAX_TRANSFERS, Floor, Planner, Unsupported, check_count
from meshmend.planning.build import Transfers
from meshmend.planning.weave.periodic import ROOM, WIDE_ROOM, choose_trees, least_period, least_seconds, make_template
from meshmend.planning.weave.pieces import Pieces
from meshmend.planning.weave.roots import choose_roots, order_trees, shallow
from meshmend.planning.weave.slots import MAX_POSITIONS, Slots, assign_steps
from meshmend.planning.weave.trees import NAME, PHASES, Rooted, Trees, grow, measure, reroot
from meshmend.schedule import Op, Schedule
from meshmend.topology import Mesh

# What was tuned, all in one place. None of it can make a plan wrong: every plan is proven, whatever these are.
CHUNKS_PER_SIDE = 16
"""Default chunks per chip along each side: filling and draining then add about a fifth."""
MOST_CHUNKS = 4096
"""Default limit of chunks; fewer where the schedule would have more than `MAX_TRANSFERS`."""
MOST_REPEATED_PER_SIDE, MOST_REPEATED = 1024, 2**18
"""The same where a template is repeated: filling and draining then adds half a per cent."""
FILLING_PER_SIDE, REPEATED_FILLING_PER_SIDE = 1.5, 4.0
"""Steps of filling and draining for each chip along each side of a plain mesh, as measured (docs/plans.md)."""
LAG_PER_SIDE = 1.0
"""What a lag of one step adds to that, as measured."""
UNEVEN = 1.006
"""Busiest link over the mean where chunks are planned one by one, as measured."""
TRANSFER_SECONDS = 2e-6
"""CPU seconds for each transfer that is planned by itself, as measured on a small virtual machine that was busy."""
SLACK_TRANSFER_SECONDS = 3e-6
"""The same where it is also followed through time, to price it."""
SLACK_STEP_SECONDS = 4e-4
"""And for each step, of which a long lag makes many."""
FOLLOWED = 30
"""How many repeats of a template are followed, about."""
ENOUGH = 1.08
"""So close to the least time that more chunks would bring it, about, their number need not be doubled again."""
SLACK_PARTS = (2, 3)
"""Parts that a chunk of a template goes in, where engines wait for their data alone."""
START_SECONDS = 0.4
"""CPU seconds besides: importing SciPy, and pricing what was planned."""
THOROUGH = 1.4
"""What one more pass over the steps adds to that."""
TEMPLATE_SHARE = 0.3
"""Part of the budget that the search for a short template may take."""
WORTH_TRYING, ALWAYS_WORTH_TRYING_S = 1.1, 0.1
"""A planner whose estimated time is longer than the best one's by more than this is not tried, unless it takes so few
seconds that the estimate need not be believed."""
DEFAULT_BUDGET_S = 10.0
FEW_TREES = 256
"""How many different trees are grown at least, where there are as many chunks."""
CHUNKS_PER_TREE = 4
"""How many chunks take the same tree, where there are many more of them."""
Owners = Literal["even", "any"]


@final
@dataclass(frozen=True)
class Weave(Planner):
    """One spanning tree per chunk, many trees woven through the mesh: for any connected survivors.

    `chunks` cuts the payload: more of them bring the time of long payloads closer to the bound, and make more
    steps. Left out, it grows with the sides of the mesh. With `trees`, so many chunks are planned as a template that is
    repeated; `chunks` is a multiple of it.

    `lag` is for engines that wait only for their input data. A chunk that has arrived is sent on so many steps later
    than it could be, and links carry others while its latency passes. Chunks planned one by one are then summed in the
    middle of their trees, unless owners are to be even. Each chunk of a template goes in `lag` + 1 parts, one after the
    other, and `chunks` counts those.

    `owners` says what each chunk's owner is for. "even": every chip owns as many chunks, give or take one, as a sharded
    weight update wants. Then nothing is repeated where planners are compared. "any": every chunk has one, which sums go
    up to and copies come down from.

    `budget_s` is how many CPU seconds planning may take, about: work is counted by what it took where it was measured,
    so that every host comes to the same plan.

    >>> from meshmend import plan
    >>> plan(Mesh("4x4", failed=[(1, 1)], failed_cables=["3,2-3,3"]), "weave", chunks=60)
    Schedule(weave all-reduce on 4x4 minus 1x1@1,1, 1 cable: 15 chips, ... steps, 60 chunks, 1,680 transfers)
    >>> plan(Mesh("8x8", failed=["2x2@2,2"]), "weave", trees=8, chunks=80_000)
    Schedule(weave all-reduce on 8x8 minus 2x2@2,2: 60 chips, ... steps, 80,000 chunks, ...; 8 chunks repeated)
    >>> plan(Mesh("8x8", failed=["2x2@2,2"]), "weave", trees=8, chunks=80_000, lag=1)
    Schedule(weave all-reduce on 8x8 minus 2x2@2,2: 60 chips, ... steps, 80,000 chunks, ...; 16 chunks repeated)
    """

    name: ClassVar[str] = NAME

    chunks: int | None = None
    trees: int | None = None
    owners: Owners = "any"
    budget_s: float = DEFAULT_BUDGET_S
    lag: int = 0

    def __post_init__(self) -> None:
        for name in ("chunks", "trees"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check_count(name, value))
        if self.lag != 0:
            object.__setattr__(self, "lag", check_count("lag", self.lag))
        if self.owners not in get_args(Owners):
            raise ParameterError(f"owners is {self.owners!r}, expected one of: {', '.join(get_args(Owners))}.")
        object.__setattr__(self, "budget_s", check_budget(self.budget_s))
        if self.trees is not None:
            if self.owners == "even":
                raise ParameterError("A template of a few trees has a few owners: give either trees or owners='even'.")
            whole = self.trees * (self.lag + 1)
            if self.chunks is not None and self.chunks % whole:
                times = f" · {self.lag + 1}" * bool(self.lag)
                raise ParameterError(
                    f"chunks is {self.chunks}, expected a multiple of trees, {self.trees}{times}: "
                    f"{whole * max(1, round(self.chunks / whole))}, say."
                )

    def variants(self, mesh: Mesh, step_cost: float) -> Sequence[Weave]:
        """Return this planner, and with about the best number of chunks: planned one by one, and as a template.

        The time is steps · (step_cost + 1/K) with steps = load · K + filling: least where K² is filling / (load ·
        step_cost). It is flat there, so that a number close by will do. Those that would take longer to plan, all
        together, than the budget are left out, the slowest first; one is always left.
        """
        if self.chunks is not None or self.trees is not None:
            return [self]
        load, sides = _least_load(mesh), sum(mesh.shape)
        # With fewer chunks than chips some own nothing, and those that do own more than their share.
        least = mesh.n_chips if self.owners == "even" else 1

        def best_chunks(filling: float, most: int) -> int:
            best = math.sqrt(filling * sides / (load * step_cost)) if load * step_cost > 0 else most
            # Steps of the square root of two, so that few plans serve all payloads.
            return max(least, min(round(2 ** (round(2 * math.log2(max(1.0, min(best, most)))) / 2)), most))

        left_s = _left(self.budget_s)
        most = min(MOST_CHUNKS, _most_chunks(mesh, min(int(left_s / TRANSFER_SECONDS), MAX_TRANSFERS)))
        found = [self, replace(self, chunks=best_chunks(FILLING_PER_SIDE, max(most, least)))]
        if self.owners != "even" and mesh.n_chips > 1 and not mesh.has_slow_cables:
            for trees in sorted({choose_trees(mesh, room) for room in (ROOM, WIDE_ROOM)}):
                most = max(1, min(MOST_REPEATED_PER_SIDE * sides, MOST_REPEATED) // trees)
                repeats = min(most, max(1, round(best_chunks(REPEATED_FILLING_PER_SIDE, most * trees) / trees)))
                if repeats > 1:
                    found.append(replace(self, trees=trees, chunks=trees * repeats))
        if found[1].chunks == default_chunks(mesh):
            del found[1]
        return _within_budget(found, left_s, partial(_time, mesh, step_cost), partial(_seconds, mesh, left_s))

    def slack_variants(self, mesh: Mesh, latency: float, message: float) -> Sequence[Weave]:
        """Return this planner with numbers of chunks and the lag that each needs: planned one by one, and as templates.

        A chunk of 1/K of the payload is under way for 1/K + `latency`, so that a lag of K · `latency` steps covers it.
        The time is then steps/K: more chunks are better, until what a chip pays for messages outweighs it. A template's
        chunk goes in L parts, and the others cover the latency of each where (1 − 1/L)/K is as long.
        """
        if self.chunks is not None or self.trees is not None or self.lag:
            given = self.chunks is not None and self.trees is None and not self.lag
            return [self, replace(self, lag=_lag(self.chunks or 1, latency))] if given and latency else [self]
        least = mesh.n_chips if self.owners == "even" else 1
        left_s = _left(self.budget_s)
        most = _most_chunks(mesh, min(int(left_s / SLACK_TRANSFER_SECONDS / 2), MAX_TRANSFERS))
        most = max(least, min(MOST_CHUNKS, MAX_POSITIONS // mesh.n_link_slots, most))
        time, seconds = partial(_slack_time, mesh, latency, message), partial(_slack_seconds, mesh)
        counts = sorted({max(least, min(1 << power, most)) for power in range(most.bit_length() + 1)})
        found = [replace(self, chunks=chunks, lag=_lag(chunks, latency)) for chunks in counts]
        shortest = min(time(weave) for weave in found)
        enough = next(i for i, weave in enumerate(found) if time(weave) <= ENOUGH * shortest)
        found = found[max(0, enough - 1) : enough + 2]
        if self.owners != "even" and mesh.n_chips > 1 and not mesh.has_slow_cables:
            for trees in sorted({choose_trees(mesh, room) for room in (ROOM, WIDE_ROOM)}):
                for parts in SLACK_PARTS:
                    # So many chunks that their other parts just cover the latency.
                    whole = (1 - 1 / parts) / latency if latency else MOST_REPEATED
                    chunks = min(whole, MOST_REPEATED_PER_SIDE * sum(mesh.shape), MOST_REPEATED / parts)
                    repeats = int(chunks / trees)
                    if repeats > 1:
                        found.append(replace(self, trees=trees, chunks=trees * parts * repeats, lag=parts - 1))
        return _within_budget(found, left_s, time, seconds)

    def with_even_owners(self) -> Weave:
        """Return this planner with even owners, unless a template or other owners were asked for."""
        return replace(self, owners="even") if self.owners == "any" and self.trees is None else self

    def floor(self, mesh: Mesh) -> Floor:
        """Return what trees cost at least: each uses P−1 of the cables, and a link carries one chunk per step.

        In a template the busiest link carries a whole number of chunks, and as many again in every repeat.
        """
        load, n = _least_load(mesh), mesh.n_chips
        if self.trees is not None:
            period = least_period(mesh, self.trees)
            repeats = self._n_chunks(mesh) // self.trees  # the parts of a chunk are steps of their own
            return Floor(steps=repeats * period, link_load=period / self.trees, chip_load=2 * (n - 1) / n)
        per_chunk = load * mesh.rates.sum() / Pieces.of(mesh).rates.sum() if mesh.has_slow_cables else load
        steps = math.ceil(self._n_chunks(mesh) * per_chunk - 1e-9)
        return Floor(steps=steps, link_load=load, chip_load=2 * (n - 1) / n)

    def n_transfers(self, mesh: Mesh) -> int:
        """Return what trees have: each chunk crosses P−1 cables on its way up, and as many down.

        Only the template of a repeated schedule is made. Over slow cables a chunk goes in pieces: how many is only
        known afterwards, so that this is the most.
        """
        chunks = self._n_chunks(mesh) if self.trees is None else self.trees * (self.lag + 1)
        whole = 2 * (mesh.n_chips - 1) * chunks
        if not mesh.has_slow_cables:
            return whole
        pieces = Pieces.of(mesh)
        slow = (pieces.per_step > 0) & (pieces.per_step < pieces.per_chunk)
        # A cable of p/q takes at most q/p + 1 steps for a chunk, and it may be the only way for all of them.
        steps = np.ceil(pieces.per_chunk / np.maximum(pieces.per_step[slow], 1))
        return whole + 2 * int(steps.sum()) * chunks

    def _check(self, mesh: Mesh) -> None:
        """Refuse too many chunks for so many chips."""
        if self.trees is not None:
            if mesh.has_slow_cables:
                raise Unsupported(
                    "a template is for cables of one rate, and some are slow. Leave out trees: then every chunk is "
                    "planned alone."
                )
            return
        most = min(MAX_POSITIONS // mesh.n_link_slots, _most_chunks(mesh, MAX_TRANSFERS))
        if self.chunks is not None and self.chunks > most:
            raise Unsupported(
                f"it takes at most {most:,} chunks on {mesh.n_chips:,} chips, and {self.chunks:,} were asked for. "
                f"Repeat a template: give trees={choose_trees(mesh)}, say, and a multiple of it as chunks."
            )

    def _n_chunks(self, mesh: Mesh) -> int:
        if self.chunks is not None:
            return self.chunks
        default, whole = default_chunks(mesh), (self.trees or 1) * (self.lag + 1)
        return default if self.trees is None else -(-default // whole) * whole

    def _plan(self, mesh: Mesh) -> Schedule:
        """Return the woven schedule."""
        chunks = self._n_chunks(mesh)
        if mesh.n_chips == 1:
            return Transfers().schedule(mesh, planner=self.name, total_chunks=chunks, owners=0)
        if self.trees is not None:
            template, period = make_template(mesh, self.trees, seconds=TEMPLATE_SHARE * self.budget_s)
            parts = self.lag + 1
            return template.interleaved(parts).repeated(chunks // (self.trees * parts), period * parts)
        pieces = Pieces.of(mesh) if mesh.has_slow_cables else None
        trees = grow(mesh, _n_trees(mesh, chunks), None if pieces is None else pieces.rates)
        eccentricity, somewhere = measure(trees)
        if self.lag:
            kept = shallow(trees, eccentricity.min(axis=1), hop=self.lag / chunks)
            trees = Trees(mesh, trees.cables[kept], trees.axis[kept])
            eccentricity, somewhere = eccentricity[kept], Rooted(somewhere.parent[kept], somewhere.depth[kept])
        tree_of = order_trees(trees, eccentricity.min(axis=1), chunks, ends=sum(mesh.shape) // 2)
        if self.lag and self.owners != "even":
            roots = eccentricity[tree_of].argmin(axis=1)
        else:
            roots = choose_roots(eccentricity, tree_of)
        rooted = reroot(somewhere, tree_of, roots)
        uses = np.bincount(trees.cables[tree_of].ravel(), minlength=mesh.n_cables)
        if pieces is not None:
            uses = np.ceil(uses / np.maximum(pieces.rates, 1 / pieces.per_chunk))
        thorough = THOROUGH * TRANSFER_SECONDS * self.n_transfers(mesh) <= self.budget_s
        pace = float(uses.max()) / chunks
        slots = assign_steps(mesh, rooted, pace, thorough=thorough, pieces=pieces, lag=self.lag)
        return _schedule(mesh, rooted, slots, roots, pieces)


def check_budget(budget_s: float) -> float:
    """Return a number of seconds that planning may take; refuse what is none."""
    if not isinstance(budget_s, Real) or isinstance(budget_s, bool) or not 0 < budget_s < float("inf"):
        raise ParameterError(f"budget_s is {budget_s!r}, expected a positive number of seconds.")
    return float(budget_s)


def _left(budget_s: float) -> float:
    """Return what a budget leaves for planning."""
    return max(budget_s - START_SECONDS, budget_s / 2)


def _lag(chunks: int, latency: float) -> int:
    """Return how many steps later a chunk is sent on, so that its latency has passed."""
    return math.ceil(chunks * latency - 1e-9)


def _steps(mesh: Mesh, weave: Weave) -> float:
    """Return about how many steps a plan has."""
    sides, chunks = sum(mesh.shape), weave._n_chunks(mesh)
    if weave.trees is None:
        # Each hop takes longer, but most of the filling is waiting for a turn.
        filling = FILLING_PER_SIDE + LAG_PER_SIDE * weave.lag
        return UNEVEN * _least_load(mesh) * chunks + filling * sides
    filling = REPEATED_FILLING_PER_SIDE * (weave.lag + 1)
    return least_period(mesh, weave.trees) / weave.trees * chunks + filling * sides


def _time(mesh: Mesh, step_cost: float, weave: Weave) -> float:
    """Return about how long a plan takes in lock-step, in units of M/b."""
    return _steps(mesh, weave) * (step_cost + 1 / weave._n_chunks(mesh))


def _slack_time(mesh: Mesh, latency: float, message: float, weave: Weave) -> float:
    """Return about how long a plan takes where nobody waits for a step: links are busy, or chips with messages."""
    chunks = weave._n_chunks(mesh)
    return max(_steps(mesh, weave) / chunks, 2 * chunks * message) + latency


def _seconds(mesh: Mesh, budget_s: float, weave: Weave) -> float:
    """Return about how many CPU seconds a plan takes to make."""
    if weave.trees is not None:
        return max(least_seconds(mesh, weave.trees), TEMPLATE_SHARE * budget_s)
    return weave.n_transfers(mesh) * TRANSFER_SECONDS


def _slack_seconds(mesh: Mesh, weave: Weave) -> float:
    """Return about how many CPU seconds a plan takes to make and to follow, transfer by transfer."""
    if weave.trees is not None:
        made = max(least_seconds(mesh, weave.trees), TEMPLATE_SHARE * weave.budget_s)
        return made + FOLLOWED * weave.n_transfers(mesh) * SLACK_TRANSFER_SECONDS
    return weave.n_transfers(mesh) * SLACK_TRANSFER_SECONDS + _steps(mesh, weave) * SLACK_STEP_SECONDS


def _within_budget(
    found: list[Weave], budget_s: float, time: Callable[[Weave], float], seconds: Callable[[Weave], float]
) -> list[Weave]:
    """Leave out planners, those that seem slowest first, until all together can be planned in time; keep one."""
    kept: list[Weave] = []
    left, best = budget_s, min(time(weave) for weave in found)
    for weave in sorted(found, key=time):
        is_cheap = seconds(weave) <= min(ALWAYS_WORTH_TRYING_S, budget_s / 10)
        if seconds(weave) <= left and (not kept or is_cheap or time(weave) <= WORTH_TRYING * best):
            kept.append(weave)
            left -= seconds(weave)
    return kept or [min(found, key=seconds)]


def _least_load(mesh: Mesh) -> float:
    """Return the payload fraction that the busiest link carries at least: (P−1)/E, where a cable counts by its rate."""
    return (mesh.n_chips - 1) / max(1.0, float(mesh.rates.sum()))


def default_chunks(mesh: Mesh) -> int:
    """Return weave's default number of chunks.

    >>> default_chunks(Mesh("32x32"))
    1024
    """
    return min(CHUNKS_PER_SIDE * sum(mesh.shape), MOST_CHUNKS, _most_chunks(mesh, MAX_TRANSFERS))


def _most_chunks(mesh: Mesh, transfers: int) -> int:
    """Return how many chunks fit into so many transfers; at least one."""
    return max(1, transfers // max(1, 2 * (mesh.n_chips - 1)))


def _n_trees(mesh: Mesh, chunks: int) -> int:
    """Return how many different trees to grow; chunks beyond that take them again."""
    trees = max(FEW_TREES, chunks // CHUNKS_PER_TREE)
    # A full square mesh is in balance after every such round.
    whole_rounds = trees // sum(mesh.shape) * sum(mesh.shape)
    return min(chunks, whole_rounds or trees)


def _schedule(
    mesh: Mesh, rooted: Rooted, slots: Slots, roots: NDArray[np.int64], pieces: Pieces | None = None
) -> Schedule:
    step, cell, down = slots.step, slots.cell, slots.down
    per_chunk = 1
    first, n_pieces = np.zeros_like(step), np.ones_like(step)
    if pieces is not None and slots.spans is not None:
        per_chunk = pieces.per_chunk
        row, step, first, n_pieces = slots.spans.cut(step, per_chunk)
        order = np.argsort(step, kind="stable")
        cell, down = cell[row[order]], down[row[order]]
        step, first, n_pieces = step[order], first[order], n_pieces[order]
    chunk, rank = np.divmod(cell, np.int32(mesh.n_chips))
    parent = rooted.parent.ravel()[cell]
    op = np.where(down, np.uint8(Op.COPY), np.uint8(Op.REDUCE))
    # They are in order, and with a lag there may be steps in which nothing goes.
    numbered = np.cumsum(np.diff(step, prepend=step[:1]) > 0)
    return Schedule(
        mesh,
        total_chunks=len(roots) * per_chunk,
        step=numbered,
        src=np.where(down, parent, rank),
        dst=np.where(down, rank, parent),
        first_chunk=chunk * np.int32(per_chunk) + first,
        n_chunks=n_pieces,
        op=op,
        phase=op,
        phase_names=PHASES,
        owners=np.repeat(roots, per_chunk),
        planner=Weave.name,
    )
