"""`plan`: run a planner, and prove its schedule before returning it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from meshmend.cost import DEFAULT_HARDWARE
from meshmend.cost.units import did_you_mean, split_settings
from meshmend.errors import ParameterError, PlanError
from meshmend.planning.auto import CHOICES, OTHERS, Auto, AutoPlanner, Choice, Tuned, candidates
from meshmend.planning.base import Planner, Unsupported, is_between_neighbours
from meshmend.planning.cache import PREPARED_BUDGET_S, PlanCache
from meshmend.planning.derived import Derived
from meshmend.planning.weave import Weave
from meshmend.planning.weave.planner import check_budget
from meshmend.schedule import Collective, Schedule
from meshmend.schedule.verify import ensure_proven
from meshmend.topology import Mesh

PLANNERS: dict[str, type[Planner]] = {kind.name: kind for kind in (*CHOICES, *OTHERS)} | {Auto.name: Auto}
"""Every planner by its name on the command line."""
AnyPlanner = TypeVar("AnyPlanner", bound=Planner)
PlanFunction = Callable[..., Schedule]
"""The function that engines call for a plan: `plan`, or whatever takes a mesh and keywords as it does and returns what
is proven. Parameters are bound to it beforehand, as in `functools.partial(plan, planner="row-pairs",
cache=PlanCache())`."""
TARGET = ("payload_bytes", "hardware", "mode")
"""What a planner's parameters are chosen for."""
DEFAULT_PAYLOAD_BYTES = 1e8
"""What `plan` assumes where it is not told: for a first look. Whatever runs a plan says what it is for."""


def plan(
    mesh: Mesh,
    planner: str | Planner = Auto.name,
    *,
    collective: str | Collective | None = None,
    verify: bool = True,
    cache: PlanCache | None = None,
    neighbours_only: bool = False,
    **parameters: Any,
) -> Schedule:
    """Plan a collective over the live chips of `mesh`, proven before it is returned: by default an all-reduce.

    `planner` is a name from `PLANNERS`, with its parameters as keywords or in the name ("row-pairs:segments=2"), or a
    planner object. By default it is the fastest of all for `payload_bytes` on `hardware`. Any other planner that is
    named takes these two as well, and then chooses those of its parameters that are not given. `mode="asynchronous"` is
    for engines that wait only for their input data, as PyTorch's does, and not for the end of each step. A `collective`
    that is no all-reduce is planned as such by "gather"; from planners of all-reduces it takes the half of what they
    make, and "auto" takes what is faster. `budget_s` is how many CPU seconds planning may take, about: `auto` and
    `weave` look for faster plans while there is time, 10 s by default. The work is counted, not timed, so that every
    host comes to the same plan.

    `verify=False` leaves the proof to the caller. With a `cache`, a schedule that is in it is proven and returned; one
    from `meshmend prepare` comes first. A schedule that is not in it is planned, proven and kept. A cache that cannot
    be used costs a `CacheWarning`, not the plan.

    `neighbours_only=True` is for networks whose routers cannot route around the hole: every transfer is between
    neighbours, as in all plans of "weave", "hamiltonian" and "gather". A planner that chooses takes the fastest of that
    kind; another planner's schedule of another kind is a `PlanError`.

    >>> plan(Mesh("8x8", failed=["2x2@2,2"]), "row-pairs", segments=2)
    Schedule(row-pairs all-reduce on 8x8 minus 2x2@2,2: 60 chips, ...)
    >>> plan(Mesh("4x4"), "gather", collective="reduce-scatter", chunks=32)
    Schedule(gather reduce-scatter on 4x4: 16 chips, 16 steps, 32 chunks, 480 transfers)
    """
    if isinstance(planner, Planner):
        chosen = _made(planner, parameters, collective)
    else:
        chosen = make_planner(planner, collective=collective, **parameters)
    ready = _admitted(mesh, chosen)
    if cache is not None:
        # One that was prepared with more time comes first, on every host alike.
        entries = dict.fromkeys((_with_budget(chosen, PREPARED_BUDGET_S), chosen))
        kept = cache.find(mesh, entries, neighbours_only=neighbours_only)
        if kept is not None:
            return kept
    schedule = _plan_between_neighbours(mesh, ready) if neighbours_only else ready.make(mesh)
    if verify or cache is not None:
        ensure_proven(schedule)
    if cache is not None:
        cache.offer(mesh, chosen, schedule, neighbours_only=neighbours_only)
    return schedule


def _with_budget(planner: Planner, budget_s: float) -> Planner:
    """Return the same planner with another budget, if it has one."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(planner):  # type: ignore[arg-type]  # planners are dataclasses
        value = getattr(planner, field.name)
        if field.name == "budget_s":
            changed["budget_s"] = budget_s
        elif isinstance(value, Planner):
            changed[field.name] = _with_budget(value, budget_s)
    return dataclasses.replace(planner, **changed)  # type: ignore[type-var]


def choose(mesh: Mesh, chooser: AutoPlanner) -> Choice:
    """Return the fastest schedule, not yet proven, together with all that was considered."""
    return _admitted(mesh, chooser).choose(mesh)


def make_planner(name: str, *, collective: str | Collective | None = None, **parameters: Any) -> Planner:
    """Return the planner of that name with those parameters, for that collective: by default an all-reduce.

    Parameters may be part of the name, and those count first. With a payload or hardware, it tunes what is not given.

    >>> make_planner("weave", chunks=60) == make_planner("weave:chunks=60")
    True
    """
    name, named = split_planner(name)
    kind = PLANNERS[name]
    own = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    wanted = read_collective(collective)
    known = [name for name in dict.fromkeys([*own, *TARGET, "budget_s"]) if name != "collective"]
    parameters |= named
    for parameter in parameters:
        if parameter not in known:
            near = did_you_mean(parameter, known)
            raise ParameterError(f"{name} has no parameter {parameter!r}: it takes {', '.join(known)}.{near}")
    if "budget_s" in parameters and "budget_s" not in own:
        check_budget(parameters.pop("budget_s"))  # it plans in no time
    target = {key: value for key, value in parameters.items() if key in TARGET}
    given = {key: value for key, value in parameters.items() if key not in TARGET}
    kept: dict[str, Any] = {"collective": wanted} if "collective" in own else {}
    whole: dict[str, Any] = {"payload_bytes": DEFAULT_PAYLOAD_BYTES, "hardware": DEFAULT_HARDWARE, **target}
    planner = Auto(**whole, **given, **kept) if kind is Auto else kind(**given, **kept)
    tuned = Tuned(planner, fixed=tuple(given), **whole) if target and kind is not Auto else planner
    return tuned if planner.collective is wanted else Derived(tuned, wanted)


def split_planner(text: str) -> tuple[str, dict[str, Any]]:
    """Return the planner that a text names, and the parameters in it: numbers are numbers, and the planner checks all.

    >>> split_planner("row-pairs:segments=2,orientation=columns")
    ('row-pairs', {'segments': 2, 'orientation': 'columns'})
    """
    name, settings = split_settings(text)
    if name not in PLANNERS:
        near = did_you_mean(name, PLANNERS)
        raise ParameterError(f"There is no planner {name!r}.{near} Planners: {', '.join(PLANNERS)}.")
    found: dict[str, Any] = dict(settings)
    for parameter, value in settings.items():
        if parameter in TARGET:
            raise ParameterError(f"{parameter} is no part of a planner's name: give it beside the name.")
        for kind in (float, int):  # whole numbers stay whole
            with contextlib.suppress(ValueError):
                found[parameter] = kind(value)
    return name, found


def _plan_between_neighbours(mesh: Mesh, planner: Planner) -> Schedule:
    """Return the planner's schedule if it sends to neighbours only; of a chooser, the fastest that does."""
    schedules: Iterable[Schedule]
    if isinstance(planner, AutoPlanner):
        choice = planner.choose(mesh)
        others = [one.planner for one in choice.considered[1:] if one.unsupported_reason is None]
        schedules = itertools.chain([choice.schedule], (other.plan(mesh) for other in others))
    else:
        schedules = [planner.make(mesh)]
    for schedule in schedules:
        if is_between_neighbours(schedule):
            return schedule
    raise PlanError(
        planner.name,
        str(mesh),
        f"it sends to chips that are not neighbours. Plan with {Weave.name}, which sends to neighbours only, or "
        f"configure the routers for the hole and plan without neighbours_only.",
        alternatives=None,
    )


def read_collective(collective: str | Collective | None) -> Collective:
    """Return the collective of that name; by default an all-reduce.

    >>> read_collective("all-gather")
    <Collective.ALL_GATHER: 'all-gather'>
    """
    if collective is None:
        return Collective.ALL_REDUCE
    if collective not in set(Collective):
        raise ParameterError(f"There is no collective {collective!r}. Collectives: {', '.join(Collective)}.")
    return Collective(collective)


def _made(planner: Planner, parameters: dict[str, Any], collective: str | Collective | None) -> Planner:
    """Return the planner, whose parameters are already set."""
    if collective is not None and read_collective(collective) is not planner.collective:
        raise ParameterError(
            f"The planner {planner!r} is made already, and its collective is {planner.collective}: plan cannot make it "
            f"{collective}. Pass its name: plan(mesh, {planner.name!r}, collective={str(collective)!r})."
        )
    if parameters:
        raise ParameterError(
            f"The planner {planner!r} already has its parameters, so plan cannot set {', '.join(parameters)}. "
            f"Set its parameters where it is made, or pass its name: "
            f"plan(mesh, {planner.name!r}, {next(iter(parameters))}=…)."
        )
    return planner


def refusal(mesh: Mesh, planner: Planner) -> PlanError | None:
    """Return the error that planning for a mesh would raise, with the planners that serve it; None if this one does.

    Nothing is planned to find out.
    """
    try:
        _admitted(mesh, planner)
    except PlanError as error:
        return error
    return None


def _admitted(mesh: Mesh, planner: AnyPlanner) -> AnyPlanner:
    """Return the planner, ready for that mesh, or raise the error that names those that serve it."""
    try:
        return planner.admit(mesh)
    except Unsupported as refused:
        others = [one for one in candidates(planner.collective) if one.name != planner.name]
        able = [one.name for one in others if one.unsupported_reason(mesh) is None]
        raise PlanError(planner.name, str(mesh), refused.reason, able) from None
