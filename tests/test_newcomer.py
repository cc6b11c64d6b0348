"""The recipes of CONTRIBUTING, tried as a newcomer would: each change touches the one place that it names.

The walk through the code names files and names that are there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import meshmend

SOURCE = Path(meshmend.__file__).parent

RENAMED = '''
"""Hamiltonian's ring, under another name."""

from dataclasses import dataclass
from typing import ClassVar, final

from meshmend.planning.base import Planner
from meshmend.planning.hamiltonian import Hamiltonian
from meshmend.schedule import Schedule
from meshmend.topology import Mesh


@final
@dataclass(frozen=True)
class Renamed(Planner):
    name: ClassVar[str] = "renamed"

    def n_transfers(self, mesh: Mesh) -> int:
        return Hamiltonian().n_transfers(mesh)

    def _check(self, mesh: Mesh) -> None:
        Hamiltonian()._check(mesh)

    def _plan(self, mesh: Mesh) -> Schedule:
        return Hamiltonian()._plan(mesh).replace(planner=self.name)
'''

ASK = """
import json
from typer.testing import CliRunner
import meshmend as mm
from meshmend.cli import app
from meshmend.planning import Auto

def say(*words):
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output

mesh = mm.Mesh("4x4", failed=["2x2@0,0"])
compared = json.loads(say("compare", "4x4", "--payload", "1MB", "--hardware", "slow-lab", "--json"))
print(json.dumps({
    "file": mm.planning.__file__,
    "planned": mm.plan(mesh, "renamed").planner,
    "considered": [candidate.planner.name for candidate in Auto(1e8, "tpu-v3").choose(mesh).considered],
    "compared": {entry["planner"]: entry for entry in compared["mesh"]["planners"]},
    "hardware": compared["hardware"]["link_bytes_per_s"],
    "headings": say("compare", "4x4", "--payload", "1MB").splitlines()[1].split(),
    "help": say("plan", "--help") + say("compare", "--help"),
}))
"""


def insert(path: Path, beside: str, words: str, *, after: bool = False) -> None:
    """Add words before, or after, the only place that reads so."""
    text = path.read_text(encoding="utf-8")
    assert text.count(beside) == 1
    path.write_text(text.replace(beside, beside + words if after else words + beside), encoding="utf-8")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a copy of meshmend says in which three recipes were followed."""
    copy = tmp_path_factory.mktemp("newcomer") / "meshmend"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "planning" / "renamed.py").write_text(RENAMED, encoding="utf-8")
    table = copy / "planning" / "auto.py"
    insert(table, "from meshmend.schedule import", "from meshmend.planning.renamed import Renamed\n")
    insert(table, "CHOICES: tuple[type[Planner], ...] = (", "Renamed, ", after=True)
    insert(copy / "cost" / "hardware.py", '        *_tpu("tpu-v2", ', '        Hardware("slow-lab", 5e6),\n')
    insert(
        copy / "planning" / "compare.py",
        '    Column("chunks",',
        '    Column("per_chip", lambda schedule: schedule.n_transfers / schedule.mesh.n_chips, heading="per-chip"),\n',
    )
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(copy.parent)},
        cwd=copy.parent,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert Path(found["file"]).is_relative_to(copy), "another copy of meshmend answered"
    return found


def test_a_planner_is_a_file_and_its_name_in_the_table(answers: dict[str, Any]) -> None:
    assert answers["planned"] == "renamed"
    assert "renamed" in answers["considered"]
    ring, ours = (answers["compared"][name] for name in ("hamiltonian", "renamed"))
    # A ring of 16 chips has 30 steps of 32 transfers each.
    assert (ours["steps"], ours["transfers"], ours["seconds"]) == (30, 960, ring["seconds"])
    assert "One of: renamed, " in answers["help"]


def test_a_hardware_preset_is_an_entry_of_its_table(answers: dict[str, Any]) -> None:
    assert answers["hardware"] == 5e6
    assert "slow-lab" in answers["help"]


def test_a_column_of_compare_is_an_entry_of_its_table(answers: dict[str, Any]) -> None:
    assert answers["headings"] == ["planner", "steps", "per-chip", "time", "×", "bound"]
    assert answers["compared"]["hamiltonian"]["per_chip"] == 60


WALK = (Path(__file__).parents[1] / "docs/walk.md").read_text(encoding="utf-8")


def test_the_walk_names_files_and_names_that_are_there() -> None:
    walk = WALK.partition("\n## ")[0]
    named = re.findall(r"`((?:\w+/)*\w+\.py)`(?: \(`([\w.]+)`\))?", walk)
    assert len(named) > 25
    for path, name in named:
        assert (SOURCE / path).is_file(), path
        text = (SOURCE / path).read_text(encoding="utf-8")
        for part in filter(None, name.split(".")):
            assert re.search(rf"(def|class) {part}\b", text), (path, name)
