"""Half: a reduce-scatter or an all-gather as one half of a planner's all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from meshmend.planning.base import CannotServe, Floor, Planner
from meshmend.schedule import Collective, Schedule
from meshmend.schedule.split import all_gather_of, reduce_scatter_of
from meshmend.topology import Mesh


@final
@dataclass(frozen=True)
class Half(Planner):
    """The half of what another planner makes: the reductions of its all-reduce, or the copies.

    >>> from meshmend.planning import Hamiltonian
    >>> Half(Hamiltonian(), Collective.ALL_GATHER).plan(Mesh("4x4"))
    Schedule(hamiltonian all-gather on 4x4: 16 chips, 15 steps, 32 chunks, 480 transfers)
    """

    planner: Planner
    collective: Collective

    @property
    def name(self) -> str:  # type: ignore[override]  # other planners' names belong to the class
        """The name of its planner, which signs what it makes."""
        return self.planner.name

    def variants(self, mesh: Mesh, step_cost: float) -> Sequence[Half]:
        """Return the halves of the planner's variants: what is best for the whole is best for its halves."""
        return [Half(variant, self.collective) for variant in self.planner.variants(mesh, step_cost)]

    def floor(self, mesh: Mesh) -> Floor:
        """Return half of what the whole costs at least: its halves mirror each other."""
        whole = self.planner.floor(mesh)
        return Floor(-(-whole.steps // 2), whole.link_load / 2, whole.chip_load / 2)

    def n_transfers(self, mesh: Mesh) -> int:
        """Return the size of the whole, which is made on the way."""
        return self.planner.n_transfers(mesh)

    def is_routed(self, mesh: Mesh, phase: str) -> bool:
        """Say what the planner says."""
        return self.planner.is_routed(mesh, phase)

    def _check(self, mesh: Mesh) -> None:
        if not self.planner.is_splittable:
            raise CannotServe(
                f"its all-reduce cannot be split into a reduce-scatter and an all-gather, and a {self.collective} was "
                f"asked for. Take 'gather', which plans one as such, or 'auto'."
            )
        reason = self.planner.why_not(mesh)
        if reason is not None:
            raise CannotServe(reason)

    def _plan(self, mesh: Mesh) -> Schedule:
        whole = self.planner.plan(mesh)
        return reduce_scatter_of(whole) if self.collective is Collective.REDUCE_SCATTER else all_gather_of(whole)
