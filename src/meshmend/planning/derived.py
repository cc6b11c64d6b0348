"""Derived: other collectives from a planner's all-reduce: its halves, or it with a fused update."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

from meshmend.planning.base import Floor, Planner, Unsupported
from meshmend.schedule import Collective, Schedule
from meshmend.schedule.fused_update import with_update
from meshmend.schedule.split import all_gather_of, reduce_scatter_of
from meshmend.topology import Mesh

_DERIVE: dict[Collective, Callable[[Schedule], Schedule]] = {
    Collective.REDUCE_SCATTER: reduce_scatter_of,
    Collective.ALL_GATHER: all_gather_of,
    Collective.ALL_REDUCE_WITH_UPDATE: with_update,
}


@final
@dataclass(frozen=True)
class Derived(Planner):
    """The work of another planner as another collective: the reductions of its all-reduce, the copies, or all of it.

    >>> from meshmend.planning import Hamiltonian
    >>> Derived(Hamiltonian(), Collective.ALL_GATHER).plan(Mesh("4x4"))
    Schedule(hamiltonian all-gather on 4x4: 16 chips, 15 steps, 32 chunks, 480 transfers)
    """

    planner: Planner
    collective: Collective

    def __post_init__(self) -> None:
        # Who owns a chunk keeps a share of the optimizer's state: that is to be the same for all.
        object.__setattr__(self, "planner", self.planner.with_even_owners())

    @property
    def name(self) -> str:  # type: ignore[override]  # other planners' names belong to the class
        """The name of its planner, which signs what it makes."""
        return self.planner.name

    def variants(self, mesh: Mesh, step_cost: float) -> Sequence[Derived]:
        """Return the planner's variants: what is best for the whole is best for its parts."""
        return [replace(self, planner=variant) for variant in self.planner.variants(mesh, step_cost)]

    def slack_variants(self, mesh: Mesh, latency: float, message: float) -> Sequence[Derived]:
        """Return the planner's."""
        return [replace(self, planner=variant) for variant in self.planner.slack_variants(mesh, latency, message)]

    def floor(self, mesh: Mesh) -> Floor:
        """Return what the whole costs at least, or half of it: reductions and copies mirror each other."""
        whole = self.planner.floor(mesh)
        if self.collective.is_all_reduce:
            return whole
        return Floor(-(-whole.steps // 2), whole.link_load / 2, whole.chip_load / 2)

    def n_transfers(self, mesh: Mesh) -> int:
        """Return the size of the whole, which is made on the way."""
        return self.planner.n_transfers(mesh)

    def is_routed(self, mesh: Mesh, phase: str) -> bool:
        """Say what the planner says."""
        return self.planner.is_routed(mesh, phase)

    def _ready_for(self, mesh: Mesh) -> Derived:
        ready = copy.copy(self)
        object.__setattr__(ready, "planner", self.planner._ready_for(mesh))
        return ready

    def _check(self, mesh: Mesh) -> None:
        if not self.planner.is_splittable:
            instead = "'weave' or 'auto'" if self.collective.is_all_reduce else "'gather', which plans one, or 'auto'"
            raise Unsupported(
                f"no chip is the first where a chunk of its all-reduce is complete, so it has no {self.collective}. "
                f"Use {instead}."
            )
        self.planner.admit(mesh)

    def _plan(self, mesh: Mesh) -> Schedule:
        return _DERIVE[self.collective](self.planner.make(mesh))
