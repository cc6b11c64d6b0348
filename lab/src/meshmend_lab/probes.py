"""Probes of `meshmend lab doctor`, each run as `python -m meshmend_lab.probes NAME` in a separate process."""

from __future__ import annotations

import sys
from typing import Any

from meshmend.cost import predict
from meshmend.doctor.probes import HOLED, expect, main
from meshmend.planning import plan
from meshmend.topology import Mesh
from meshmend_lab.mesh import Lab
from meshmend_lab.simgrid import simulate, version


def try_mesh() -> dict[str, Any]:
    """Create a lab of two chips and remove it."""
    with Lab.temporary(Mesh("1x2"), rate="40mbit") as lab:
        return {"detail": f"a lab of {lab.mesh.n_chips} chips was created and removed"}


def try_simgrid() -> dict[str, Any]:
    """Simulate a schedule and compare with the prediction."""
    schedule = plan(HOLED, "hamiltonian")
    seconds, foreseen = float(simulate(schedule, 1e6).sum()), predict(schedule, 1e6).seconds
    expect(abs(seconds - foreseen) < 1e-5 * foreseen)
    return {"detail": f"{version()}, simulated an all-reduce on {HOLED}: as predicted"}


PROBES = {"try_mesh": try_mesh, "try_simgrid": try_simgrid}

if __name__ == "__main__":
    main(PROBES, *sys.argv[1:])
