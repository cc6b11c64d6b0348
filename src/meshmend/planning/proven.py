"""`plan`: run a planner, and prove what it made before handing it out."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshmend.errors import ParameterError, PlanError
from meshmend.planning.auto import CHOICES, Auto, Choice
from meshmend.planning.base import Planner
from meshmend.planning.cache import PlanCache
from meshmend.schedule import Schedule
from meshmend.topology import Mesh
from meshmend.verify import verify as prove

PLANNERS: dict[str, type[Planner]] = {kind.name: kind for kind in CHOICES} | {Auto.name: Auto}
"""Every planner by the name that the command line knows it by."""


def plan(
    mesh: Mesh,
    planner: str | Planner = Auto.name,
    *,
    verify: bool = True,
    cache: PlanCache | None = None,
    **parameters: Any,
) -> Schedule:
    """Plan an all-reduce over the live chips of `mesh`, proven before it is returned.

    `planner` is a name from `PLANNERS`, with its parameters as keywords, or a planner that is made already. By default
    it is the fastest of all for `payload_bytes` on `hardware`.
    `verify=False` leaves the proof to the caller. With a `cache`, a schedule that is in it is proven and returned, and
    one that is not is planned, proven and kept. A cache that cannot be used costs a `CacheWarning`, not the plan.

    >>> plan(Mesh("8x8", failed=["2x2@2,2"]), "row-pairs", segments=2)
    Schedule(row-pairs all-reduce on 8x8 minus 2x2@2,2: 60 chips, ...)
    """
    chosen = planner if isinstance(planner, Planner) else make_planner(planner, **parameters)
    why_not = _why_not(chosen, mesh)
    if why_not is not None:
        raise PlanError(chosen.name, str(mesh), why_not, _able(mesh, apart_from=chosen.name))
    kept = cache.get(mesh, chosen) if cache is not None else None
    if kept is not None:
        return kept
    schedule = chosen.plan(mesh)
    if verify or cache is not None:
        prove(schedule)
    if cache is not None:
        cache.offer(mesh, chosen, schedule)
    return schedule


def choose(mesh: Mesh, auto: Auto) -> Choice:
    """Return the fastest schedule, not yet proven, together with all that was considered."""
    why_not = _why_not(auto, mesh)
    if why_not is not None:
        raise PlanError(auto.name, str(mesh), why_not)
    return auto.choose(mesh)


def make_planner(name: str, **parameters: Any) -> Planner:
    """Return the planner of that name with those parameters."""
    if name not in PLANNERS:
        raise ParameterError(f"There is no planner {name!r}. Planners: {', '.join(PLANNERS)}.")
    kind = PLANNERS[name]
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for parameter in parameters:
        if parameter not in known:
            takes = f"takes {', '.join(known)}" if known else "takes none"
            raise ParameterError(f"{name} has no parameter {parameter!r}: it {takes}.")
    return kind(**parameters)


def _able(mesh: Mesh, *, apart_from: str) -> list[str]:
    return [kind.name for kind in CHOICES if kind.name != apart_from and _why_not(kind(), mesh) is None]


def _why_not(planner: Planner, mesh: Mesh) -> str | None:
    if not mesh.is_connected:
        return f"its survivors are cut into {mesh.n_components} parts, and no cable is left to sum over."
    return planner.why_not(mesh)
