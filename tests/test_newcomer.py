"""The recipes of CONTRIBUTING, tried as a newcomer would: each change touches the one place that it names."""

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

REVERSED = '''
"""Hamiltonian's ring, with its two directions exchanged."""

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from meshmend.planning.base import Planner
from meshmend.planning.hamiltonian import Hamiltonian
from meshmend.schedule import Schedule
from meshmend.topology import Mesh


@final
@dataclass(frozen=True)
class Reversed(Planner):
    name: ClassVar[str] = "reversed"

    def n_transfers(self, mesh: Mesh) -> int:
        return Hamiltonian().n_transfers(mesh)

    def _check(self, mesh: Mesh) -> None:
        Hamiltonian()._check(mesh)

    def _plan(self, mesh: Mesh) -> Schedule:
        ring = Hamiltonian()._plan(mesh)
        half = ring.total_chunks // 2
        return Schedule(
            mesh,
            total_chunks=ring.total_chunks,
            step=ring.step,
            src=ring.src,
            dst=ring.dst,
            first_chunk=(ring.first_chunk + half) % ring.total_chunks,
            op=ring.op,
            phase=ring.phase,
            phase_names=ring.phase_names,
            owners=np.roll(ring.owners, half),
            planner=self.name,
        )
'''

THREADS = '''
"""An engine of threads: each chip has one, with its own values, and a queue for what each other chip sends it."""

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from queue import SimpleQueue

import numpy as np

from meshmend.errors import ScheduleError
from meshmend.schedule import Op
from meshmend.schedule.verify import ensure_proven


def run(schedule, payload):
    """Run a schedule on one row per live chip, and return what each ends with."""
    ensure_proven(schedule)
    n_chips, n_chunks = schedule.mesh.n_chips, schedule.total_chunks
    if len(payload) != n_chips:
        raise ScheduleError(f"The payload has {len(payload)} rows, expected one for each of {n_chips} live chips.")
    flat = payload.reshape(n_chips, -1)
    size = flat.shape[1]
    held = np.zeros((n_chips, n_chunks, -(-size // n_chunks)), dtype=payload.dtype)
    held.reshape(n_chips, -1)[:, :size] = flat
    whole = schedule.expanded()
    columns = (whole.step, whole.src, whole.dst, whole.first_chunk, whole.n_chunks, whole.op)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    queues = {(src, dst): SimpleQueue() for _, src, dst, *_ in rows}
    with ThreadPoolExecutor(n_chips) as chips:
        for done in [chips.submit(be_chip, rank, held[rank], rows, queues) for rank in range(n_chips)]:
            done.result()
    return held.reshape(n_chips, -1)[:, :size].reshape(payload.shape)


def be_chip(rank, held, rows, queues):
    """Do one chip's part: in each step send what it held before, then take what comes."""
    mine = [row for row in rows if rank in row[1:3]]
    for _, step in groupby(mine, key=lambda row: row[0]):
        step = list(step)
        for _, src, dst, first, n_chunks, _ in step:
            if src == rank:
                queues[src, dst].put(held[first : first + n_chunks].copy())
        for _, src, dst, first, n_chunks, op in step:
            if dst == rank:
                part, arrived = slice(first, first + n_chunks), queues[src, dst].get()
                held[part] = held[part] + arrived if op == Op.REDUCE else arrived
'''

ASK = """
import json
from typer.testing import CliRunner
import meshmend as mm
from meshmend.cli import app
from meshmend.planning import Auto, Hamiltonian
from meshmend.threads import run
from engine_contract import check_engine

def say(*words):
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output

mesh = mm.Mesh("4x4", failed=["2x2@0,0"])
ring, ours = Hamiltonian().plan(mesh), mm.plan(mesh, "reversed")
first = ours.total_chunks // 2
compared = json.loads(say("compare", "4x4", "--payload", "1MB", "--hardware", "slow-lab", "--json"))
check_engine(run)
print(json.dumps({
    "file": mm.planning.__file__,
    "engine": run.__module__,
    "exchanged": bool(((ring.first_chunk < first) == (ours.first_chunk >= first)).all()),
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
    """What a copy of meshmend says in which the four recipes were followed."""
    copy = tmp_path_factory.mktemp("newcomer") / "meshmend"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "planning" / "reversed.py").write_text(REVERSED, encoding="utf-8")
    (copy / "threads.py").write_text(THREADS, encoding="utf-8")
    table = copy / "planning" / "auto.py"
    insert(table, "from meshmend.schedule import", "from meshmend.planning.reversed import Reversed\n")
    insert(table, "CHOICES: tuple[type[Planner], ...] = (", "Reversed, ", after=True)
    insert(copy / "cost" / "hardware.py", '        _tpu("tpu-v2", ', '        Hardware("slow-lab", 5e6),\n')
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
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(copy.parent), str(Path(__file__).parent)])},
        cwd=copy.parent,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert Path(found["file"]).is_relative_to(copy), "another copy of meshmend answered"
    return found


def test_a_planner_is_a_file_and_its_name_in_the_table(answers: dict[str, Any]) -> None:
    assert answers["exchanged"]
    assert "reversed" in answers["considered"]
    ring, ours = (answers["compared"][name] for name in ("hamiltonian", "reversed"))
    # A ring of 16 chips has 30 steps of 32 transfers each, whichever half goes which way.
    assert (ours["steps"], ours["transfers"], ours["seconds"]) == (30, 960, ring["seconds"])
    assert "One of: reversed, " in answers["help"]


def test_a_hardware_preset_is_an_entry_of_its_table(answers: dict[str, Any]) -> None:
    assert answers["hardware"] == 5e6
    assert "slow-lab" in answers["help"]


def test_a_column_of_compare_is_an_entry_of_its_table(answers: dict[str, Any]) -> None:
    assert answers["headings"] == ["planner", "steps", "per-chip", "time", "×", "bound"]
    assert answers["compared"]["hamiltonian"]["per_chip"] == 60


def test_an_engine_is_a_file_that_keeps_the_contract(answers: dict[str, Any]) -> None:
    assert answers["engine"] == "meshmend.threads"
    assert len(THREADS.strip().splitlines()) < 80


WALK = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## A walk")[2]


def test_the_walk_names_files_and_names_that_are_there() -> None:
    walk = WALK.partition("\n## ")[0]
    named = re.findall(r"`((?:\w+/)*\w+\.py)`(?: \(`([\w.]+)`\))?", walk)
    assert len(named) > 25
    if not (SOURCE / "jax" / "session").is_dir():  # until jax/ has its rooms
        named = [(path, name) for path, name in named if not path.startswith("jax/")]
    for path, name in named:
        assert (SOURCE / path).is_file(), path
        text = (SOURCE / path).read_text(encoding="utf-8")
        for part in filter(None, name.split(".")):
            assert re.search(rf"(def|class) {part}\b", text), (path, name)
