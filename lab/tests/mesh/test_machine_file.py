"""A lab's processes read its machine file: the mesh as it is, and what a link carries. Needs no root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshmend import Mesh, plan, predict
from meshmend.machines import read_machine
from meshmend.schedule import Schedule
from meshmend_lab.mesh import Lab, journal
from meshmend_lab.mesh.journal import Journal

MESHES = [
    Mesh("4x4", wrap=True),
    Mesh("4x4", cable_rates={"0,0-0,1": "1/4"}),
    Mesh("4x4", failed_cables=["0,0-0,1"]),
    Mesh("3x4", wrap=[False, True], failed=["1,2", "2,0"], failed_cables=["0,0-0,3"], cable_rates={"0,0-0,1": "2/3"}),
    Mesh("6"),
    Mesh("2x3x3", wrap=[False, False, True], failed=["1,1,1"]),
    Mesh("2x2", failed=["0,0"], cable_rates={"0,0-0,1": "1/2"}),
]


@pytest.mark.parametrize("mesh", MESHES, ids=repr)
def test_the_machine_file_says_what_the_lab_is(mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "FOLDER", tmp_path)
    lab = Lab("lab", mesh, "40mbit")
    Journal("lab", mesh, "40mbit").write()
    lab.describe()
    assert journal.journal_names() == ["lab"]
    machine = read_machine(lab.environment(mesh.chip(0))["MESHMEND_MACHINE"])
    assert machine.mesh == mesh
    assert machine.mesh.whole == mesh.whole, "the slow cable of a failed chip stays slow"
    assert machine.hardware == str(tmp_path / "lab" / "hardware.json")
    journal.forget("lab")
    assert not list(tmp_path.iterdir())


def priced_on(mesh: Mesh, schedule: Schedule) -> Schedule:
    """The same transfers on another mesh of the same chips."""
    return Schedule(
        mesh,
        total_chunks=schedule.total_chunks,
        step=schedule.step,
        src=schedule.src,
        dst=schedule.dst,
        first_chunk=schedule.first_chunk,
        n_chunks=schedule.n_chunks,
        op=schedule.op,
        owners=schedule.owners,
        phase_names=("all",),
        collective=schedule.collective,
        planner=schedule.planner,
    )


@pytest.mark.parametrize("mesh", MESHES[1:2], ids=repr)
def test_processes_plan_for_the_labs_cables_and_its_rate(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")
    import meshmend.torch as mmt

    monkeypatch.setattr(journal, "FOLDER", tmp_path)
    lab = Lab("lab", mesh, "40mbit")
    lab.describe()
    for name in [name for name in os.environ if name.startswith("MESHMEND_")]:
        monkeypatch.delenv(name)
    for name, value in lab.environment((0, 1)).items():
        monkeypatch.setenv(name, value)
    whole, chip = mmt.MeshOptions().position()
    assert (whole, chip) == (mesh, (0, 1))
    plans = mmt.MeshOptions().plans()
    assert plans.hardware == lab.hardware
    assert (plans.hardware.link_bytes_per_s, plans.hardware.is_switched) == (5e6, False)
    for size in (2**13, 2**23):
        ours = plans.get(whole, size)
        for mode in ("lock-step", "asynchronous"):
            best = plan(mesh, payload_bytes=size, hardware=lab.hardware, mode=mode)
            seconds = [
                predict(priced_on(mesh, one), size, lab.hardware, mode="asynchronous").seconds for one in (ours, best)
            ]
            assert seconds[0] <= 1.05 * seconds[1]
