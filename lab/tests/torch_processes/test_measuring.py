"""`mmt.measure` in a lab finds the rate of its links."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")

from meshmend import Mesh
from meshmend_lab.mesh import Lab
from namespaces import needs_lab
from torch_engine.processes import measure_together


@pytest.mark.slow
@needs_lab
@pytest.mark.usefixtures("compiler")
def test_in_a_lab_the_rate_of_its_links_is_found(tmp_path: Path) -> None:
    mesh = Mesh("2x2")
    with Lab.temporary(mesh, rate="40mbit", name="measured") as lab:
        found = measure_together(mesh, f"tcp://{lab.address((0, 0))}:29400", "chip0", tmp_path / "lab.json", lab.enter)
    hardware = found[0][1]
    assert not hardware.is_switched
    assert hardware.link_bytes_per_s == pytest.approx(lab.rate_bytes_per_s, rel=0.25)
