"""Which mesh Tenstorrent's runtime opens on a machine: as measured for the losses that were tried, or asked anew.

The runtime opens rectangles and lines. `ttnn_meshes.json` keeps what `ttnn` answered for every single chip and every
2×2 board lost of the machines that lab/benchmarks/tenstorrent.py was run on; that script writes it. It needs no
hardware: the control plane of `ttnn` works on a described machine.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from meshmend.errors import Coordinate, MachineError
from meshmend.topology import Mesh
from meshmend_lab.tenstorrent.numbered import NumberedMachine
from meshmend_lab.tenstorrent.probe import MARK

PYTHON_VARIABLE = "MESHMEND_TTNN"
"""Environment variable that names a Python which has `ttnn`, if this one has not."""
ASK_SECONDS = 120.0
NO_MESH = "no mesh"


@dataclass(frozen=True)
class RuntimeMesh:
    """A mesh that the runtime opens: its shape, and the number of the device at each place, in row-major order."""

    shape: tuple[int, ...]
    devices: tuple[int, ...]

    @property
    def neighbours(self) -> list[tuple[int, int]]:
        """Pairs of devices that are next to each other in this mesh."""
        at = dict(zip(itertools.product(*map(range, self.shape)), self.devices, strict=True))
        steps = np.eye(len(self.shape), dtype=int).tolist()
        pairs = ((place, tuple(x + d for x, d in zip(place, step, strict=True))) for place in at for step in steps)
        return [(at[a], at[b]) for a, b in pairs if b in at]


@dataclass(frozen=True)
class RuntimeAnswer:
    """What the runtime opens on a machine, and on request.

    `opened` is the mesh that it chooses itself, None if it stops with an error. `asked` is the largest one with at
    least two rows and two columns, and `line` the longest line, that it opened for a mesh graph descriptor of the
    user's own; both are None where nobody has asked. `how` says how this is known, with the version of `ttnn`.
    """

    opened: RuntimeMesh | None
    asked: RuntimeMesh | None
    line: RuntimeMesh | None
    how: str


def answer_of(machine: NumberedMachine) -> RuntimeAnswer | None:
    """Return what the runtime opens on a machine: as measured, else as it answers now; None if neither is possible.

    Asking needs a Python with `ttnn`: this one, or the one that MESHMEND_TTNN names.
    """
    known = measured(machine.mesh, machine.hardware)
    if known is not None or not machine.devices:
        return known
    python = os.environ.get(PYTHON_VARIABLE) or (sys.executable if importlib.util.find_spec("ttnn") else None)
    if python is None:
        return None
    try:
        found = ask(Path(machine.file), python)
    except MachineError as error:
        if error.got != NO_MESH:
            raise
        return RuntimeAnswer(None, None, None, f"asked just now: {error}")
    return RuntimeAnswer(_mesh(found), None, None, f"asked just now, ttnn {found['ttnn']}")


def measured(mesh: Mesh, hardware: str | None) -> RuntimeAnswer | None:
    """Return what was measured for this hole on this kind of machine, wherever a symmetry of the grid puts it.

    None if that loss, or that machine, was not tried. Numbers of devices are those of the machine that was described.
    Larger meshes than the runtime opens by itself were asked for with some images of each loss, and the largest counts.
    """
    if mesh.failed_cables or mesh.has_slow_cables:
        return None
    lost = frozenset(at for at in itertools.product(*map(range, mesh.shape)) if not mesh.live[at])
    images = [frozenset(map(image.__getitem__, lost)) for image in _symmetries(mesh)]
    found = []
    for kept in measured_machines():
        if (kept["hardware"], tuple(kept["shape"]), tuple(kept["wrap"])) == (hardware, mesh.shape, mesh.wrap):
            losses = {frozenset(map(tuple, loss["lost"])): loss for loss in kept["losses"]}
            losses[frozenset()] = {"opened": kept["whole"]}
            found += [(kept["ttnn"], losses[image]) for image in images if image in losses]
    opened = [None if loss["opened"] is None else _mesh(loss["opened"]) for _, loss in found]
    if len({one and one.shape for one in opened}) != 1:  # not tried, or it depends on more than the place in the grid
        return None
    asked, line = (_largest(loss.get(key) for _, loss in found) for key in ("asked", "line"))
    version = found[0][0]
    return RuntimeAnswer(opened[0], asked, line, f"measured, ttnn {version}")


@cache
def measured_machines() -> tuple[Mapping[str, Any], ...]:
    """Return the machines of `ttnn_meshes.json`, with their cables and what was measured."""
    kept = json.loads(
        resources.files("meshmend_lab.tenstorrent").joinpath("ttnn_meshes.json").read_text(encoding="utf-8")
    )
    return tuple(kept["machines"])


def ask(
    descriptor: Path,
    python: str,
    *,
    mesh_graph: str | None = None,
    directions: bool = False,
    timeout_s: float = ASK_SECONDS,
) -> dict[str, Any]:
    """Return what the runtime makes of a cluster descriptor; with `mesh_graph`, where a user asks for that mesh.

    `python` is an interpreter that has `ttnn`. Raises `MachineError` with the runtime's own words if it stops.
    """
    probe = resources.files("meshmend_lab.tenstorrent").joinpath("probe.py").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="meshmend-") as folder:
        settings = {"TT_METAL_MOCK_CLUSTER_DESC_PATH": str(descriptor.resolve()), "TT_LOGGER_LEVEL": "fatal"}
        if mesh_graph is not None:
            wanted = Path(folder) / "mesh_graph.textproto"
            wanted.write_text(mesh_graph, encoding="utf-8")
            settings["TT_MESH_GRAPH_DESC_PATH"] = str(wanted)
        try:
            done = subprocess.run(  # noqa: S603  # the interpreter is given by the user, the script is ours
                [python, "-c", probe, *(["directions"] if directions else [])],
                capture_output=True,
                text=True,
                timeout=timeout_s,
                env={**os.environ, **settings},
                cwd=folder,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            why = f"no answer in {timeout_s:g} s" if isinstance(error, subprocess.TimeoutExpired) else str(error)
            raise MachineError(f"{descriptor}: {python} cannot ask ttnn: {why}.", file=str(descriptor)) from None
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        raise MachineError(
            f"{descriptor}: Tenstorrent's runtime opens no mesh on this machine: {_reason(done)}",
            file=str(descriptor),
            got=NO_MESH,
        )
    answer: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
    return answer


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """Return why the runtime stopped, in its own words."""
    lines = (done.stdout + done.stderr).splitlines()
    told = [line.partition("TT_FATAL: ")[2] or line.partition("Error: ")[2] for line in lines]
    return next((words[:300] for words in told if words), f"it ended with code {done.returncode}")


def _mesh(answer: Mapping[str, Any]) -> RuntimeMesh:
    return RuntimeMesh(tuple(answer["shape"]), tuple(answer["devices"]))


def _largest(answers: Iterable[Mapping[str, Any] | None]) -> RuntimeMesh | None:
    """Return the largest mesh that was opened on request: only some images of a loss were asked about."""
    meshes = [_mesh(answer) for answer in answers if answer is not None]
    return max(meshes, key=lambda mesh: len(mesh.devices), default=None)


def _symmetries(mesh: Mesh) -> Iterator[dict[Coordinate, Coordinate]]:
    """Yield the reflections of the axes, and the shifts of those that wrap."""
    options = []
    for n, wraps in zip(mesh.shape, mesh.wrap, strict=True):
        ways = [list(range(n)), list(range(n - 1, -1, -1))]
        options.append([way[s:] + way[:s] for way in ways for s in range(n if wraps else 1)])
    places = list(itertools.product(*map(range, mesh.shape)))
    for maps in itertools.product(*options):
        yield {place: tuple(m[x] for m, x in zip(maps, place, strict=True)) for place in places}
