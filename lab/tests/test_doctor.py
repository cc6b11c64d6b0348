"""`meshmend lab doctor`: what the laboratory needs besides Python packages."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from commandline import run
from meshmend.doctor import Finding
from meshmend_lab.cli import doctor

QUICK_S = 60.0


def test_this_machine() -> None:
    found = {one["name"]: one for one in json.loads(run("lab", "doctor", "--json"))["findings"]}
    assert list(found) == ["iproute2", "mesh", "SimGrid"]
    for finding in found.values():
        assert bool(finding["advice"]) == (finding["status"] != "works"), finding


def test_a_mesh_without_root_without_iproute2_and_without_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "look_at_iproute2", lambda: Finding("packages", "iproute2", "works", "6.1"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert doctor.try_mesh(QUICK_S).advice == "sudo meshmend lab mesh up 4x4"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    refused = Finding("engines", "mesh", "broken", "mount --make-shared: Operation not permitted", "again")
    monkeypatch.setattr(doctor, "run_probe", lambda *_, **__: (refused, {}))
    found = doctor.try_mesh(QUICK_S)
    assert (found.status, "--privileged" in str(found.advice)) == ("absent", True)
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "which", lambda _: None)
    found = doctor.try_mesh(QUICK_S)
    assert (found.status, found.advice) == ("absent", "apt-get install iproute2")
