"""A machine with a hole: the chips that its own runtime uses, those that meshmend uses, and an all-reduce on each.

Tenstorrent's runtime opens rectangles and lines (`runtime.py`). Which one is measured; times are
predicted, on every mesh with the fastest of meshmend's plans, so that the runtime's meshes are not charged for its own
all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from meshmend.cost.hardware import DEFAULT_HARDWARE, Hardware
from meshmend.cost.predict import predict
from meshmend.planning import plan
from meshmend.topology import Mesh
from meshmend_lab.tenstorrent.numbered import NumberedMachine
from meshmend_lab.tenstorrent.runtime import RuntimeAnswer, answer_of


@dataclass(frozen=True)
class UsedMesh:
    """A mesh that somebody computes on, and the predicted time of an all-reduce over all of its chips.

    `mesh` and `seconds` are None where no mesh opens at all.
    """

    who: str
    mesh: Mesh | None
    seconds: float | None

    @property
    def n_chips(self) -> int:
        """Number of chips in use."""
        return 0 if self.mesh is None else self.mesh.n_chips


@dataclass(frozen=True)
class RuntimeComparison:
    """What a machine's runtime opens, and what meshmend plans for. `answer` is None if the runtime's is not known."""

    answer: RuntimeAnswer | None
    rows: tuple[UsedMesh, ...]


def compare_with_runtime(
    machine: NumberedMachine, payload_bytes: float, hardware: str | Hardware | None = None
) -> RuntimeComparison:
    """Return the meshes that Tenstorrent's runtime opens on a machine, and what is left of it, with predicted times."""
    answer, priced = answer_of(machine), hardware or machine.hardware or DEFAULT_HARDWARE
    meshes: list[tuple[str, Mesh | None]] = []
    if answer is not None:
        opened = None if answer.opened is None else Mesh(answer.opened.shape)
        meshes.append(("ttnn, by itself", opened))
        for who, asked in (("ttnn, asked for a mesh", answer.asked), ("ttnn, asked for a line", answer.line)):
            if asked is not None and (opened is None or asked.shape != opened.shape):
                meshes.append((who, Mesh(asked.shape)))
    meshes.append(("meshmend", machine.mesh))
    rows = (UsedMesh(who, mesh, _seconds(mesh, payload_bytes, priced)) for who, mesh in meshes)
    return RuntimeComparison(answer, tuple(rows))


@cache  # the same few meshes are left by many holes
def _seconds(mesh: Mesh | None, payload_bytes: float, hardware: str | Hardware) -> float | None:
    if mesh is None:
        return None
    schedule = plan(mesh, payload_bytes=payload_bytes, hardware=hardware)
    return predict(schedule, payload_bytes, hardware).seconds
