"""A slow cable's links are held to their part of the lab's rate; the journal keeps it. Needs no root."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshmend import Mesh
from meshmend_lab.mesh import Lab, journal
from meshmend_lab.mesh.journal import Journal

MESH = Mesh("2x2", cable_rates={"0,0-0,1": "3/4", "0,1-1,1": "1/2"})


def rates(lab: Lab, chip: tuple[int, int]) -> dict[str, str]:
    """The rate of each interface, as tc is told."""
    words = [line.split() for line in lab._limits(lab.mesh.rank(chip))]
    return {line[line.index("dev") + 1]: line[line.index("rate") + 1] for line in words}


def test_both_ends_of_a_cable_have_its_rate() -> None:
    lab = Lab("lab", MESH, "40mbit")
    assert rates(lab, (0, 0)) == {"south": "40mbit", "east": "30000000bit"}
    assert rates(lab, (0, 1)) == {"south": "20000000bit", "west": "30000000bit"}
    assert rates(lab, (1, 1)) == {"north": "20000000bit", "west": "40mbit"}


def test_the_journal_keeps_rates_and_reads_journals_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "FOLDER", tmp_path)
    Journal("lab", MESH, "40mbit").write()
    found = Journal.read("lab")
    assert found is not None
    assert found.mesh == MESH
    path = tmp_path / "lab.json"
    path.write_text(path.read_text().replace('"cable_rates"', '"of_a_later_version"'))
    older = Journal.read("lab")
    assert older is not None
    assert older.mesh == Mesh("2x2")
