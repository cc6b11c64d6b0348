"""A host of a tiled job dies: the tiles that are whole go on, and no step that was kept is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from meshmend.jax.job.run import IN_FLIGHT
from meshmend.launch.hosts import Hosts
from meshmend.launch.local import LocalJob
from meshmend.launch.timeline import read_timeline

ROOT = Path(__file__).parents[2]
STEPS = 16
KILLED_AFTER = 6


def write_script(folder: Path, update: str) -> Path:
    """The example with fewer steps."""
    text = (ROOT / "examples/jax/survive_tiles.py").read_text(encoding="utf-8")
    for old, new in (
        ("steps=100", f"steps={STEPS}, update={update!r}"),
        ("global_batch=256", "global_batch=64, memory_every=1, disk_every=10"),
    ):
        assert old in text
        text = text.replace(old, new)
    path = folder / "train.py"
    path.write_text(text, encoding="utf-8")
    return path


def losses(events: list[dict[str, Any]]) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


def steps_done(folder: Path) -> int:
    import inspect
    from argparse import ArgumentParser

    from meshmend.jax.data.exactly_once import check_positions

    n_samples = len(Path(str(inspect.getsourcefile(ArgumentParser))).read_bytes()) - 8
    return check_positions(folder / "shared", n_samples)


def undisturbed(folder: Path, shape: str, chips: int) -> dict[int, float]:
    """Losses of the same script in one process, on as many virtual chips."""
    folder.mkdir()
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={chips}",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "MESHMEND_SHAPE": shape,
        "MESHMEND_MEMORY": str(folder / "memory"),
    }
    command = [sys.executable, str(write_script(folder, "replicated"))]
    done = subprocess.run(command, cwd=folder, env=env, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return losses(read_timeline(folder / "shared/timeline/host-0.jsonl"))


# The quick one has three hosts of one tile each. On 8x4 chips a host takes two tiles with it; on 6x4 chips tiles span
# hosts, and a host takes three, of which others had a part.
@pytest.mark.parametrize(
    ("shape", "host", "killed", "update", "tiles"),
    [
        ("2x6", "2x2", 0, "replicated", (3, 2)),
        pytest.param("8x4", "4x2", 1, "replicated", (8, 6), marks=pytest.mark.slow),
        pytest.param("8x4", "4x2", 0, "sharded", (8, 6), marks=pytest.mark.slow),
        pytest.param("6x4", "3x2", 1, "replicated", (6, 4), marks=pytest.mark.slow),
    ],
)
def test_a_host_of_a_tiled_job_dies(
    shape: str,
    host: str,
    killed: int,
    update: str,
    tiles: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    machine = Hosts.of(shape, host)
    script, shared, log = write_script(tmp_path, update), tmp_path / "shared", list[str]()

    def events(number: int) -> list[dict[str, Any]]:
        return read_timeline(shared / f"timeline/host-{number}.jsonl")

    with LocalJob([str(script)], machine, shared, on_line=lambda number, line: log.append(f"{number}: {line}")) as job:
        job.start()
        give_up_at = time.monotonic() + 240
        while max(losses(events(2)), default=0) < KILLED_AFTER:
            job.watch(0.1)
            assert time.monotonic() < give_up_at, log
            assert job.running, log
        job.kill(killed)
        statuses = job.wait(240)
    survivors = [number for number in range(len(machine)) if number != killed]
    assert {number: statuses[number] for number in survivors} == dict.fromkeys(survivors, 0), log
    for number in survivors:
        seen = events(number)
        restored = [(event["source"], event["step"]) for event in seen if event["event"] == "restore"]
        assert [source for source, _ in restored] == ["start", "memory"]
        committed = max(event["step"] for event in seen if event["event"] == "step" and event["round"] == 1)
        # The result of step n means that all hosts have kept step n − 2.
        assert restored[1][1] >= max(KILLED_AFTER, committed) - 2
        assert tuple(event["tiles"] for event in seen if event["event"] == "tiles") == tiles
        # A host may be stopped between writing its copy of the step that is restored and saying so.
        kept = {event["step"] for event in seen if event["event"] == "kept"} | {restored[1][1]}
        assert kept == set(range(1, STEPS + 1))
    assert steps_done(tmp_path) == STEPS
    found = losses(events(survivors[0])) | losses(events(2))
    assert len(found) >= STEPS - 2 * IN_FLIGHT
    assert STEPS in found
    expected = undisturbed(tmp_path / "alone", shape, len(machine) * machine.chips_per_host)
    # The same samples in the same steps; sums in another order round differently, and training carries that on.
    assert max(abs(found[step] / expected[step] - 1) for step in found) < 1e-3
