from typing import Any

import numpy as np
import pytest

import meshmend as mm
import meshmend.numpy as mmn
from meshmend.errors import ScheduleError
from meshmend.schedule.split import all_gather_of, reduce_scatter_of
from standins import tree_schedule

PLANS = [
    ("hamiltonian", mm.Mesh("6x4", failed=["2x2@2,2"]), {}),
    ("two-color", mm.Mesh("4x6"), {}),
    ("two-color", mm.Mesh("4x8", wrap=True), {}),
    ("row-pairs", mm.Mesh("8x8", failed=["2x2@2,2", "4x2@4,6"]), {}),
    ("row-pairs", mm.Mesh("8x8", failed=["2x2@2,2"]), {"segments": 3}),
]


@pytest.mark.parametrize(("planner", "mesh", "parameters"), PLANS)
def test_reduce_scatter_and_all_gather_are_proven_and_make_the_all_reduce(
    planner: str, mesh: mm.Mesh, parameters: dict[str, Any]
) -> None:
    schedule = mm.plan(mesh, planner, **parameters)
    scatter, gather = reduce_scatter_of(schedule), all_gather_of(schedule)
    assert mm.verify(scatter).collective is mm.Collective.REDUCE_SCATTER
    assert mm.verify(gather).collective is mm.Collective.ALL_GATHER
    assert scatter.n_transfers + gather.n_transfers == schedule.n_transfers
    payload = np.random.default_rng(0).integers(-99, 99, (mesh.n_chips, 3 * schedule.total_chunks))
    halfway = mmn.run(scatter, payload)
    own = np.repeat(schedule.owners, 3)
    assert (halfway[own, np.arange(len(own))] == payload.sum(axis=0)).all()
    assert (mmn.run(gather, halfway) == payload.sum(axis=0)).all()


def test_interleaved_trees_are_split() -> None:
    schedule = tree_schedule(mm.Mesh("4x4", failed=["1,2"]), chunks=20)
    for half in (reduce_scatter_of(schedule), all_gather_of(schedule)):
        mm.verify(half)
        assert half.planner == "trees"
        assert (half.owners == schedule.owners).all()


def test_only_an_all_reduce_can_be_split() -> None:
    half = reduce_scatter_of(mm.plan(mm.Mesh("4x4"), "hamiltonian"))
    with pytest.raises(ScheduleError, match="Only an all-reduce can be split: got a schedule of a reduce-scatter"):
        all_gather_of(half)
