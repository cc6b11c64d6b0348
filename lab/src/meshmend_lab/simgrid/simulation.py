"""SimGrid as an independent check: the same schedule, over the same routes, in a flow simulator by other authors.

SimGrid (https://simgrid.org) comes with Debian as `python3-simgrid` for the system's Python, so it runs in a process
of its own. The platform has one SimGrid link for every link of the mesh; each path also crosses a pure delay, the
step's latency; and where a chip drives only some of its links at once, its sender and its receiver are links too.
A step ends when its last flow has; then the next begins, as in a lock-step engine. For an asynchronous one, each link
has an actor that sends its transfers in order, each as soon as its chip has what it sends (`simulate_arrivals`).

Times are simulated in units of one chunk's time on a link, so that SimGrid's absolute precision does not matter.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshmend.cost.hardware import DEFAULT_HARDWARE, Hardware, find_hardware
from meshmend.cost.paths import TransferPaths
from meshmend.errors import MissingExtraError, ParameterError
from meshmend.schedule import Schedule
from meshmend_lab.errors import SimgridError

INTERPRETER_VARIABLE = "MESHMEND_SIMGRID_PYTHON"
"""An environment variable that names a Python which can `import simgrid`, where it is not found by itself."""

CHUNK_UNITS = 10**6
"""What a chunk weighs in SimGrid, which counts whole bytes."""


def is_available() -> bool:
    """Return whether some Python on this machine can import SimGrid."""
    return _interpreter() is not None


def version() -> str | None:
    """Return the version of SimGrid that some Python on this machine can import, or None."""
    python = _interpreter()
    if python is None:
        return None
    stdin = _ask(python, "import simgrid; print(simgrid.simgrid_version)")
    return stdin.stdout.strip() or None


def simulate(
    schedule: Schedule, payload_bytes: float, hardware: str | Hardware = DEFAULT_HARDWARE
) -> NDArray[np.float64]:
    """Return how long each step of `schedule` takes in SimGrid; their sum is what `predict` gives in lock-step."""
    chosen = find_hardware(hardware)
    chunk_s = _chunk_seconds(schedule, payload_bytes, chosen)
    clocks = np.array(_run(_job(schedule, chosen, chunk_s)), dtype=np.float64)
    return np.diff(clocks, prepend=0.0) * chunk_s


def simulate_arrivals(
    schedule: Schedule, payload_bytes: float, hardware: str | Hardware = DEFAULT_HARDWARE
) -> NDArray[np.float64]:
    """Return when each transfer has arrived in SimGrid, in seconds; the last is what `predict` gives asynchronously.

    For transfers of one chunk between neighbours, over links that chips drive all at once.
    """
    chosen, mesh = find_hardware(hardware), schedule.mesh
    link = mesh.link(schedule.src, schedule.dst)
    plain = not chosen.message_s and chosen.links_at_once is None and not chosen.is_switched
    if not plain or (link < 0).any() or (schedule.n_chunks != 1).any():
        raise ParameterError(
            "SimGrid follows transfers of one chunk between neighbours, where messages cost nothing besides."
        )
    chunk_s = _chunk_seconds(schedule, payload_bytes, chosen)
    late = (chosen.step_latency_s + chosen.hop_latency_s) / chunk_s
    needs: list[list[int]] = [[] for _ in range(schedule.n_transfers)]
    arrivals: dict[tuple[int, int], list[int]] = {}
    columns = (schedule.step, schedule.src, schedule.dst, schedule.first_chunk)
    for row, (step, src, _, chunk) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        before = arrivals.get((src, chunk), [])
        needs[row] = [other for other in before if schedule.step[other] < step]
        arrivals.setdefault((int(schedule.dst[row]), chunk), []).append(row)
    job = {
        "links": [(CHUNK_UNITS * rate, 0.0) for rate in mesh.link_rates.tolist()],
        "paths": [[number] for number in range(mesh.n_link_slots)],
        "transfers": list(zip(link.tolist(), needs, strict=True)),
        "amount": CHUNK_UNITS,
        "latency": late,
    }
    return np.array(_run(job), dtype=np.float64) * chunk_s


def _chunk_seconds(schedule: Schedule, payload_bytes: float, hardware: Hardware) -> float:
    if not 0 < payload_bytes < float("inf"):
        raise ParameterError(f"payload_bytes is {payload_bytes}, expected a positive number of bytes to simulate.")
    return payload_bytes / schedule.total_chunks / hardware.link_bytes_per_s


def _run(job: dict[str, Any]) -> Any:
    """Return what SimGrid makes of a job, whose times are in units of a chunk's."""
    python = _interpreter()
    if python is None:
        raise MissingExtraError(
            "Simulating",
            "SimGrid for Python",
            f"apt-get install python3-simgrid (then, if needed, set {INTERPRETER_VARIABLE} to that python3)",
        )
    source = resources.files("meshmend_lab.simgrid").joinpath("worker.py").read_text(encoding="utf-8")
    done = _ask(python, source, stdin=json.dumps(job))
    if done.returncode:
        raise SimgridError(f"SimGrid failed (exit code {done.returncode}): {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout)


def _job(schedule: Schedule, hardware: Hardware, chunk_s: float) -> dict[str, Any]:
    """Describe links, paths and steps; a unit of time is `chunk_s` seconds."""
    mesh, crossed = schedule.mesh, TransferPaths.of(schedule)
    pairs, path = np.unique(schedule.src.astype(np.int64) * mesh.n_chips + schedule.dst, return_inverse=True)
    paths: list[list[int]] = [[] for _ in pairs]
    first_row = np.full(len(pairs), -1, dtype=np.int64)
    first_row[path[::-1]] = np.arange(schedule.n_transfers)[::-1]
    far = set(crossed.far.tolist())
    for number, row in enumerate(first_row.tolist()):
        if row in far:
            low, high = np.searchsorted(crossed.far_row, (row, row + 1))
            paths[number] = crossed.far_link[low:high].tolist()
        else:
            paths[number] = [int(crossed.link[row])]
    hop = hardware.hop_latency_s / chunk_s
    links: list[tuple[float, float]] = [(CHUNK_UNITS * rate, hop) for rate in mesh.link_rates.tolist()]
    width = hardware.links_at_once
    if width is not None and width < mesh.n_directions:
        sender, receiver = len(links), len(links) + mesh.n_chips
        links += [(CHUNK_UNITS * width, 0.0)] * (2 * mesh.n_chips)
        for number, (src, dst) in enumerate(
            zip(*(end.tolist() for end in np.divmod(pairs, mesh.n_chips)), strict=True)
        ):
            paths[number] += [sender + src, receiver + dst]
    delay = len(links)
    links.append((CHUNK_UNITS * 1e9, hardware.step_latency_s / chunk_s))  # so wide that nothing ever waits for it
    amounts = (schedule.n_chunks.astype(np.int64) * CHUNK_UNITS).tolist()
    flows = list(zip(path.tolist(), amounts, strict=True))
    starts = schedule.step_starts.tolist()
    return {
        "links": links,
        "paths": [[*links_of, delay] for links_of in paths],
        "steps": [flows[a:b] for a, b in itertools.pairwise(starts)],
    }


@functools.cache
def _interpreter() -> str | None:
    """Return a Python that can import simgrid: the one that was named, this one, or one of the system's."""
    candidates = [os.environ.get(INTERPRETER_VARIABLE), sys.executable, "/usr/bin/python3", shutil.which("python3")]
    for python in dict.fromkeys(c for c in candidates if c and os.access(c, os.X_OK)):
        try:
            tried = _ask(python, "import simgrid; simgrid.Engine", timeout_s=60)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if tried.returncode == 0:
            return python
    return None


def _ask(
    python: str, code: str, *, stdin: str | None = None, timeout_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run code in another Python, away from this folder, with `stdin` as its standard input."""
    with tempfile.TemporaryDirectory() as elsewhere:
        # Not run as a script: Python would search the script's own folder first, which need not be meant for it.
        return subprocess.run(  # noqa: S603  # the interpreter is found, not given by input
            [python, "-c", code],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            cwd=elsewhere,
            timeout=timeout_s,
        )
