"""What one training step sends, planned together: the gradients (or the two halves of FSDP), and scalars.

A job plans for the chips that it has, and `meshmend prepare` for those that it may be left with. Both come here with
the same `StepDemands`, so that what was prepared is what a job asks for. A job writes its own into its shared folder
(`PLANNED_FOR`), where `prepare --shared` reads it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from meshmend.buckets import Folder, as_os_errors
from meshmend.cost import Hardware, between_tiles
from meshmend.cost.hardware import MAX_BYTES, hardware_facts, parse_hardware
from meshmend.errors import ParameterError, PlanError
from meshmend.files import write_whole
from meshmend.planning.auto import Auto
from meshmend.planning.base import Planner
from meshmend.planning.cache import PlanCache
from meshmend.planning.proven import make_planner, plan, read_collective, refusal, split_planner
from meshmend.planning.shards import plan_halves
from meshmend.planning.workload import Workload
from meshmend.schedule import Collective, Schedule
from meshmend.topology import Mesh, cut_into_tiles

PLANNED_FOR = "planned-for.json"
"""The file of a shared folder that says what a job plans for."""
MAX_WORD, MAX_PAYLOAD_BYTES = 64, 1e18
"""What is believed of that file: longer words and larger payloads no job has written."""
SCALAR_BYTES = 64
"""What the plan for scalars is made for: a loss, a weight, a few norms."""


@dataclass(frozen=True)
class StepPlan:
    """Proven schedules for a training step.

    `schedule` is an all-reduce; where parameters are sharded there are `scatter` and `gather` instead, of one layer.
    `scalars` is for losses, weights and norms.
    """

    scalars: Schedule
    schedule: Schedule | None = None
    scatter: Schedule | None = None
    gather: Schedule | None = None

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """All of them; that which moves most comes first."""
        found = (self.schedule, self.scatter, self.gather, self.scalars)
        return tuple(one for one in found if one is not None)


@dataclass(frozen=True)
class StepDemands:
    """The demands of a step that its plans are made for, on whatever chips are left.

    `hardware` is that of a chip; inside tiles of `tile` chips, the payload is one chip's shard, and plans are made
    between tiles. A workload whose collective is an all-gather is one of sharded parameters (FSDP). Its two halves are
    planned so that they can run beside computing, with at most `max_steps` steps if possible.
    """

    workload: Workload
    hardware: Hardware
    tile: str | None = None
    max_steps: int | None = None
    planner: str = Auto.name

    def plan(self, mesh: Mesh, *, cache: PlanCache | None, budget_s: float, **parameters: Any) -> StepPlan:
        """Plan for a mesh of chips."""
        mesh, hardware = self._in_tiles(mesh)
        return plan_step(
            mesh,
            self.workload,
            hardware,
            planner=self.planner,
            max_steps=self.max_steps,
            cache=cache,
            budget_s=budget_s,
            **parameters,
        )

    def refusal(self, mesh: Mesh) -> PlanError | None:
        """Return the error that planning for a mesh of chips would raise; None if its planner serves it.

        Nothing is planned to find out.
        """
        mesh, hardware = self._in_tiles(mesh)
        made_for: dict[str, Any] = {"payload_bytes": self.workload.payload_bytes, "hardware": hardware}
        return refusal(mesh, make_planner(self.planner, collective=self.workload.collective, **made_for))

    def _in_tiles(self, mesh: Mesh) -> tuple[Mesh, Hardware]:
        """Return the mesh that is planned for, and its hardware: of chips, or of tiles."""
        if self.tile is None:
            return mesh, self.hardware
        tiling = cut_into_tiles(mesh, self.tile)
        return tiling.tiles, between_tiles(self.hardware, tiling)

    def write(self, folder: Folder) -> None:
        """Write it into a job's shared folder."""
        facts = {
            **hardware_facts(self.hardware),
            "payload_bytes": self.workload.payload_bytes,
            "collective": self.workload.collective.value,
            "tile": self.tile,
            "max_steps": self.max_steps,
            "planner": self.planner,
        }
        with as_os_errors(folder):
            write_whole(folder / PLANNED_FOR, json.dumps(facts, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Folder) -> StepDemands:
        """Return what the job of a shared folder plans for; raise `ParameterError` where that is not recorded."""
        path = folder / PLANNED_FOR
        try:
            with as_os_errors(path), path.open("rb") as file:
                facts = json.loads(file.read(MAX_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            raise ParameterError(
                f"{path} does not say what a job plans for ({error}). A job writes it when it starts to train; before "
                "that, say it with --payload, --collective and --tile."
            ) from None
        where = str(path)
        hardware = parse_hardware(facts, where)
        tile, planner, collective = (facts.get(key) for key in ("tile", "planner", "collective"))
        for word in (tile or "", planner, collective):
            if not isinstance(word, str) or len(word) > MAX_WORD:
                raise ParameterError(f"{where} has a tile, planner or collective that is not a short text.")
        payload, max_steps = facts.get("payload_bytes"), facts.get("max_steps")
        if type(payload) not in (int, float) or not 0 <= payload < MAX_PAYLOAD_BYTES:
            raise ParameterError(
                f"{where} has payload_bytes {str(payload)[:40]}, expected a number of bytes, 0 or more."
            )
        if max_steps is not None and (type(max_steps) is not int or max_steps < 1):
            raise ParameterError(f"{where} has max_steps {str(max_steps)[:40]}, expected 1 or more, or null.")
        return cls(Workload(payload, read_collective(collective)), hardware, tile, max_steps, planner)


def plan_step(
    mesh: Mesh,
    workload: Workload,
    hardware: Hardware,
    *,
    planner: str | Planner = Auto.name,
    max_steps: int | None = None,
    cache: PlanCache | None = None,
    neighbours_only: bool = False,
    **parameters: Any,
) -> StepPlan:
    """Plan all that a step sends on `mesh`. `parameters` are the planner's; `budget_s` among them counts for all.

    A planner object has its own payload, hardware and parameters.
    """
    if isinstance(planner, str):
        planner, named = split_planner(planner)
        parameters |= named
    budget = {key: value for key, value in parameters.items() if key == "budget_s"}
    kept: dict[str, Any] = {"cache": cache, "neighbours_only": neighbours_only}
    scalars = plan(mesh, payload_bytes=SCALAR_BYTES, hardware=hardware, **kept, **budget)
    is_made = isinstance(planner, Planner)
    made_for: dict[str, Any] = (
        {} if is_made else {"payload_bytes": workload.payload_bytes, "hardware": hardware, **parameters}
    )
    if workload.collective is not Collective.ALL_GATHER:
        collective = None if is_made and workload.collective is Collective.ALL_REDUCE else workload.collective
        return StepPlan(scalars, plan(mesh, planner, collective=collective, **kept, **made_for))
    if planner == Auto.name:
        scatter, gather = plan_halves(mesh, max_steps=max_steps, cache=cache, **made_for)
    else:
        scatter, gather = (
            plan(mesh, planner, collective=half, **kept, **made_for)
            for half in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
        )
    return StepPlan(scalars, scatter=scatter, gather=gather)
