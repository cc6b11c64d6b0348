import numpy as np
import pytest

import meshmend as mm
import meshmend.numpy as mmn


@pytest.mark.parametrize("planner", ["hamiltonian", "row-pairs"])
def test_sums(planner: str) -> None:
    mesh = mm.Mesh("8x8", failed=["2x2@2,2"])
    payload = np.random.default_rng(0).integers(-99, 99, (60, 123))
    assert (mmn.run(mm.plan(mesh, planner), payload) == payload.sum(axis=0)).all()
