"""Periodic weave: a few trees, packed into a period of so many steps as the busiest cable has trees, and repeated.

Weaving every chunk for itself takes time and memory for every chunk. Here some thirty trees (`packing`) are given
steps once (`tracks`), such that no link has two transfers in steps that are equal modulo the period: then the same
again a period later, with other chunks, never meets it. Any number of repeats costs nothing more, and the busiest link
is idle only while the whole fills and drains. That takes longer than with chunks that are woven one by one, because
every bend of a tree waits for its track: so this is for long payloads, and for meshes where nothing else can be
planned.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshmend.planning.weave.packing import pack
from meshmend.planning.weave.runs import MeshLines
from meshmend.planning.weave.tracks import Steps, find_tracks
from meshmend.planning.weave.trees import NAME, PHASES, measure, reroot
from meshmend.schedule import Op, Schedule
from meshmend.topology import Mesh

MAX_TREES = 64
MIN_TREES = 2
MAX_TEMPLATE_TRANSFERS = 2**22
"""No larger template is chosen: it would take minutes to make."""
ROOM, WIDE_ROOM = 0.025, 0.05
"""Part of the cables' mean load by which the period is longer: with less, packing takes for ever. Where survivors are
oddly shaped the busiest cable must carry more than the mean, and the wide one fits better."""
PACKING_SHARE = 0.6
"""Part of the time that may go into packing; what it leaves is for finding tracks."""
GROW_SECONDS = 3e-6
MOVE_SECONDS, MOVE_SECONDS_PER_CHIP = 2.5e-3, 5e-7
CHOICE_SECONDS, CHOICE_SECONDS_PER_CHIP = 2e-5, 6e-7
CHOICES_PER_RUN = 7
"""What it takes, as measured on a small virtual machine: to grow a tree, for each chip; to move an overload; and to
choose the tracks of a run, for each chip along a side, so many times in the first attempt. Work is limited by these,
not by a clock: every host must come to the same plan."""


def choose_trees(mesh: Mesh, room: float = ROOM) -> int:
    """Return how many trees to pack: about half as many as both sides of the mesh have chips, where the period fits.

    A period is a whole number of steps, no shorter than the mean load of the cables. On a full mesh combs share the
    cables evenly, so it may be exactly that; where something has failed, some room must be left.

    >>> choose_trees(Mesh("32x32")), choose_trees(Mesh("32x32", failed=["4x2@6,8"]))
    (64, 32)
    """
    load = max(1, mesh.n_chips - 1) / max(1, mesh.n_cables)
    is_full = mesh.n_chips == mesh.size and not mesh.failed_cables
    sides = sum(n for n in mesh.shape if n > 1)
    most = min(MAX_TREES, MAX_TEMPLATE_TRANSFERS // max(1, 2 * (mesh.n_chips - 1)))
    high = max(MIN_TREES, min(most, sides if is_full else 5 * sides // 8))
    low = max(MIN_TREES, min(3 * sides // 8, high - high // 3))
    least = 0.0 if is_full else room

    def excess(n_trees: int) -> tuple[bool, float]:
        beyond = least_period(mesh, n_trees) / (n_trees * load) - 1
        return beyond < least, beyond if beyond >= least else -beyond

    return min(range(low, high + 1), key=excess)


def least_period(mesh: Mesh, n_trees: int) -> int:
    """Return the mean load of a cable by so many trees, rounded up."""
    return -(-n_trees * (mesh.n_chips - 1) // max(1, mesh.n_cables))


def least_seconds(mesh: Mesh, n_trees: int) -> float:
    """Return about how many CPU seconds a template takes at least."""
    # A comb has a run for each line, and some are broken.
    runs = 1.3 * n_trees * mesh.n_chips / min((n for n in mesh.shape if n > 1), default=1)
    return n_trees * mesh.n_chips * GROW_SECONDS + runs * CHOICES_PER_RUN * _choice_seconds(mesh)


def _choice_seconds(mesh: Mesh) -> float:
    return CHOICE_SECONDS + sum(mesh.shape) / mesh.n_axes * CHOICE_SECONDS_PER_CHIP


def make_template(mesh: Mesh, n_trees: int, *, seconds: float) -> tuple[Schedule, int]:
    """Return a schedule of `n_trees` chunks and the period after which it can be repeated."""
    wanted = least_period(mesh, n_trees)
    moves = max(20, int(PACKING_SHARE * seconds / (MOVE_SECONDS + mesh.n_chips * MOVE_SECONDS_PER_CHIP)))
    trees = pack(mesh, n_trees, wanted, moves)
    period = max(wanted, int(np.bincount(trees.cables.ravel()).max()))
    eccentricity, somewhere = measure(trees)
    roots = eccentricity.argmin(axis=1)
    rooted = reroot(somewhere, np.arange(n_trees), roots)
    lines = MeshLines(mesh)
    runs = [lines.runs(trees.cables[tree], rooted, tree) for tree in range(n_trees)]
    budget = int((1 - PACKING_SHARE) * seconds / _choice_seconds(mesh))
    steps = find_tracks(lines, runs, period, budget=budget)
    return _schedule(mesh, rooted.parent, steps, roots), period


def _schedule(mesh: Mesh, parent: NDArray[np.int32], steps: Steps, roots: NDArray[np.int64]) -> Schedule:
    tree, rank = np.nonzero(parent >= 0)
    above = parent[tree, rank]
    step = np.concatenate([steps.up[tree, rank], steps.down[tree, rank]])
    step -= step.min()
    phase = np.repeat([0, 1], len(tree))
    return Schedule(
        mesh,
        total_chunks=len(parent),
        step=step,
        src=np.concatenate([rank, above]),
        dst=np.concatenate([above, rank]),
        first_chunk=np.concatenate([tree, tree]),
        op=np.repeat([Op.REDUCE, Op.COPY], len(tree)),
        phase=phase,
        phase_names=PHASES,
        owners=roots,
        planner=NAME,
        may_idle=True,
    )
