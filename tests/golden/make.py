"""Writes the files of this folder: what this version of meshmend writes, for later versions to read.

    python tests/golden/make.py plan copy         # some of them
    python tests/golden/make.py                   # all

Make one anew only when its format changes on purpose, with a new number that older files are refused for. Otherwise a
test that fails has found that a job which is updated between two rounds, or a plan that somebody has kept, is lost.
"""

from __future__ import annotations

import io
import os
import sys
import tarfile
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))
STEP = 7


def plan() -> None:
    """A schedule around a hole, and one that repeats itself: the two formats of files."""
    import meshmend as mm

    schedule = mm.plan(mm.Mesh("4x4", failed=["2x2@0,2"]), "row-pairs")
    mm.save(schedule, FOLDER / "plan.npz")
    mm.save(schedule.repeated(5, schedule.n_steps), FOLDER / "plan-repeated.npz")


def log() -> None:
    """Two observations of one chip, by two attempts, and the list with the verdict."""
    from meshmend.launch import Hosts
    from meshmend.quarantine import Observation, Suspect, report

    suspect, number = Suspect.parse("2,3"), {"chunk": 5, "agree": 63, "differ": 1}
    with tempfile.TemporaryDirectory() as folder:
        for attempt, step in ((1, 400), (2, 460)):
            seen = Observation("digest", (suspect,), step, "chunk 5 differs", number)
            at = 1e9 + step
            report(folder, [seen], attempt=attempt, verified=step - 20, hosts=Hosts.of("8x8", "4x2"), now=lambda: at)  # noqa: B023
        pack(Path(folder), "quarantine")


def copy() -> None:
    """A host's copy in memory of step 7."""
    from jax_engine.restart_cases import Started

    with tempfile.TemporaryDirectory() as folder:
        job = Started(sharded=True, memory=Path(folder) / "memory")
        job.restore()
        job.keep(STEP)
        job.crash()
        (Path(folder) / "memory" / "lock").unlink(missing_ok=True)
        pack(Path(folder) / "memory", "copy")


def checkpoint() -> None:
    """A checkpoint on disk of step 7."""
    from jax_engine.restart_cases import Started

    with tempfile.TemporaryDirectory() as folder:
        job = Started(sharded=True, memory_every=0, disk=Path(folder) / "disk", disk_every=1)
        job.restore()
        job.keep(STEP)
        job.keeper.close()
        pack(Path(folder) / "disk", "checkpoint")


def pack(folder: Path, name: str) -> None:
    """Write all files of a folder into an archive."""
    with tarfile.open(FOLDER / f"{name}.tar.gz", "w:gz") as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"):
            content = path.read_bytes()
            member = tarfile.TarInfo(path.relative_to(folder).as_posix())
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def unpack(name: str, folder: Path) -> Path:
    """Write the files of an archive into a folder, and return that."""
    with tarfile.open(FOLDER / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder


if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    kinds = {"plan": plan, "log": log, "copy": copy, "checkpoint": checkpoint}
    for kind in sys.argv[1:] or kinds:
        kinds[kind]()
