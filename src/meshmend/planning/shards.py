"""Shards: reduce-scatters, all-gathers and broadcasts in the layout that process groups have.

A process group numbers its members as it likes, and member g's shard is the g-th of equal parts of the payload. What
the planner makes has equal parts in the order of chips instead; chunks are only labels, so they are renumbered.

A broadcast is an all-gather in which the root owns every chunk. The verifier needs no more than that to prove it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from meshmend.cost import Hardware
from meshmend.errors import ParameterError, ScheduleError
from meshmend.planning.cache import PlanCache
from meshmend.planning.gather import Gather, gather_from
from meshmend.planning.proven import plan
from meshmend.schedule import Collective, Schedule
from meshmend.schedule.verify import ensure_proven
from meshmend.topology import Mesh


def plan_shards(
    mesh: Mesh, collective: str | Collective, *, order: Sequence[int] | None = None, **target: Any
) -> Schedule:
    """Plan a reduce-scatter or an all-gather of equal shards, proven: rank r owns shard `order[r]` of the payload.

    Without an order, it owns shard r. `target` is `payload_bytes` (all shards together), `hardware`, and a `mode`, a
    `cache` and `budget_s` if there are any, as in `plan`.

    >>> shards = plan_shards(Mesh("2x2"), "all-gather", order=[2, 0, 1, 3], payload_bytes=64)
    >>> shards.owners.tolist()
    [1, 2, 0, 3]
    """
    positions = np.arange(mesh.n_chips) if order is None else np.asarray(order, dtype=np.int64)
    if sorted(positions.tolist()) != list(range(mesh.n_chips)):
        raise ParameterError(f"Expected each shard from 0 to {mesh.n_chips - 1} once, got {list(order or [])}.")
    found = plan(mesh, Gather.name, collective=collective, **target)
    if found.total_chunks % mesh.n_chips:
        # Few chunks are quicker for a short payload, but then some chips own none.
        found = plan(mesh, Gather.name, collective=collective, chunks=mesh.n_chips, cache=target.get("cache"))
    per_chip = found.total_chunks // mesh.n_chips
    if np.any(np.bincount(found.owners, minlength=mesh.n_chips) != per_chip) or np.any(found.n_chunks != 1):
        raise ScheduleError(f"{found!r} does not give each rank {per_chip} chunks, each sent alone.")
    # A chunk's place among those of its owner, in the order of their numbers.
    by_owner, place = np.argsort(found.owners, kind="stable"), np.empty(found.total_chunks, dtype=np.int64)
    place[by_owner] = np.arange(found.total_chunks) % per_chip
    number = positions[found.owners] * per_chip + place
    if np.array_equal(number, np.arange(found.total_chunks)):
        return found
    owners = np.empty_like(found.owners)
    owners[number] = found.owners
    renumbered = found.replace(first_chunk=number[found.first_chunk], owners=owners)
    ensure_proven(renumbered)
    return renumbered


def plan_halves(
    mesh: Mesh,
    *,
    payload_bytes: float,
    hardware: str | Hardware,
    max_steps: int | None = None,
    cache: PlanCache | None = None,
    **budget: float,
) -> tuple[Schedule, Schedule]:
    """Plan a reduce-scatter and an all-gather with the same chunks and owners, as sharded parameters need them.

    Every chip owns as many chunks, at least one. With `max_steps`, plans of more steps than that have one chunk per
    chip instead: steps that are written out one by one can run beside computing.

    >>> [half.n_steps for half in plan_halves(Mesh("4x4"), payload_bytes=1e6, hardware="tpu-v6e-xla")]
    [9, 9]
    """

    def half(collective: Collective, **parameters: Any) -> Schedule:
        return plan(mesh, Gather.name, collective=collective, cache=cache, **parameters)

    target: dict[str, Any] = {"payload_bytes": payload_bytes, "hardware": hardware, **budget}
    gather = half(Collective.ALL_GATHER, **target)
    chunks = max(1, gather.total_chunks // mesh.n_chips) * mesh.n_chips
    if max_steps is not None and gather.n_steps > max_steps:
        chunks = mesh.n_chips
    if chunks != gather.total_chunks:
        gather = half(Collective.ALL_GATHER, chunks=chunks, **budget)
    return half(Collective.REDUCE_SCATTER, chunks=chunks, **budget), gather


def plan_broadcast(mesh: Mesh, root: int, **target: Any) -> Schedule:
    """Plan a broadcast from rank `root`, proven: an all-gather in which it owns every chunk.

    `target` is `payload_bytes` and `hardware`, as in `plan`.

    >>> plan_broadcast(Mesh("4x4", failed=["2x2@1,1"]), root=0, payload_bytes=2**23)
    Schedule(gather all-gather on 4x4 minus 2x2@1,1: 12 chips, 27 steps, 24 chunks, 264 transfers)
    """
    if not 0 <= root < mesh.n_chips:
        raise ParameterError(f"The root is a rank from 0 to {mesh.n_chips - 1}: got {root}.")
    # What suits an all-gather of the same payload: the cables of the slowest chip decide both.
    chunks = plan(mesh, Gather.name, collective=Collective.ALL_GATHER, verify=False, **target).total_chunks
    made = gather_from(mesh, np.full(chunks, root, dtype=np.int64), "broadcast")
    ensure_proven(made)
    return made
