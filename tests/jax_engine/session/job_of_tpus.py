"""A job whose hosts are found from its devices, before and after the loss of one. Run by `test_losses_on_tpus`.

`job LOST SIDE` trains a whole job on virtual CPU devices that are given coordinates and hosts as a TPU's have them;
`ahead TOPOLOGY LOST SIDE` and `after TOPOLOGY HOLE SIDE` compile for libtpu's devices, which cannot run anything. Each
prints one line of JSON: what it has compiled ahead, or which keys it has looked up in the compile cache, and found.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import meshmend.jax as mmj
from jax_engine.compile.job_programs import build
from meshmend.jax.compile.for_topology import slice_fabric
from meshmend.jax.job.run import AHEAD_AFTER
from meshmend.jax.session import Session, initialize_alone, survivors
from meshmend.jax.session.compile_cache import use_compile_cache
from meshmend.jax.session.coordination import Coordination
from meshmend.launch import Launch, Timeline

CACHE, STEPS = Path("compiled"), AHEAD_AFTER + 1


@dataclass(frozen=True)
class Simulated:
    """A device of this process, as if it were a chip of a 4×4 slice whose hosts drive 2×2."""

    device: Any
    coords: tuple[int, int, int]

    @property
    def process_index(self) -> int:
        return self.coords[0] // 2 + 2 * (self.coords[1] // 2)


def record_lookups() -> list[tuple[str, bool]]:
    """Return a list that gets the name of each program of many devices that is looked up, and whether it is there."""
    from jax._src import compilation_cache

    found: list[tuple[str, bool]] = []
    look_up = compilation_cache.get_executable_and_time

    def noted(key: str, options: Any, backend: Any, devices: Any, *more: Any) -> Any:  # JAX 0.12 has callbacks, too
        if len(devices) > 1:
            found.append((key.rpartition("-")[0], any(CACHE.glob(f"{key}*"))))
        return look_up(key, options, backend, devices, *more)

    mock.patch.object(compilation_cache, "get_executable_and_time", noted).start()
    return found


def train(lost: str, side: str) -> dict[str, Any]:
    """Train a few steps on all hosts but one; return what was compiled ahead, looked up and resumed from."""
    chips = [Simulated(device, (i % 4, i // 4, 0)) for i, device in enumerate(jax.devices())]
    left = [one for one in chips if str(one.process_index) != lost]

    def discover(devices: Sequence[Simulated], **facts: Any) -> mmj.Fabric:
        return mmj.discover([one.device for one in devices], coords=[one.coords[:2] for one in devices], **facts)

    mock.patch.object(jax, "devices", return_value=left).start()
    mock.patch.object(survivors, "discover", discover).start()
    use_compile_cache(CACHE)
    looked_up = record_lookups()
    session = initialize_alone(survivors.find_fabric(None, None, (0,)))
    tile = None if side == "none" else side
    job = mmj.Job("shared", 24, tile=tile, session=session, planner="weave", disk_every=0)
    x = np.random.default_rng(0).normal(size=(96, 8)).astype(np.float32)
    shardings = None if tile is None else {"w": P(None, "model")}

    def loss(params: Any, batch: Any) -> Any:
        return jnp.sum((batch @ params["w"] - batch) ** 2, axis=1)

    params = {"w": np.eye(8, dtype=np.float32)}
    more: Any = {"shardings": shardings, "update": "replicated"}
    steps, ahead = STEPS if lost == "none" else STEPS + 1, list[int | str]()
    for step in job.train(loss, optax.adam(0.1), params, x, steps=steps, **more):
        if step.number == STEPS == steps:
            assert job._run is not None
            assert job._run._ahead is not None
            job._run._ahead.wait()
            ahead = job._run._ahead.ready
        assert np.isfinite(step.loss)
    job.close()
    # Who compiles looks the same program up again, and finds it then.
    first = dict(reversed(looked_up))
    resumed = job.resumed
    return {"step": steps, "source": resumed.source, "resumed": resumed.step, "looked_up": first, "ahead": ahead}


def ahead(topology: str, lost: str, side: str) -> dict[str, Any]:
    """Compile for the loss of one process, on process 0 of a slice that is whole."""
    fabric = slice_fabric(topology)
    devices = list(fabric.jax_mesh.devices.flat)
    mock.patch.object(jax, "devices", return_value=devices).start()
    use_compile_cache(CACHE)
    numbers = tuple(sorted({device.process_index for device in devices}))
    launch = Launch("127.0.0.1:1", len(numbers), 0)
    session = Session(fabric, launch, None, numbers, Coordination(0, 1), Timeline(None))
    if side != "none":
        session = session.in_tiles(side)
    wanted = [(number, one) for number, one in session.fabrics_ahead() if str(number) == lost]
    for _, one in wanted:
        build("replicated", one)
    return {"ahead": [number for number, _ in wanted]}


def after(topology: str, hole: str, side: str) -> dict[str, Any]:
    """Compile as the job does that is started again: of all devices of the slice, those in the hole are missing."""
    fabric = slice_fabric(topology)
    live = fabric.mesh.fail(hole).live
    left = [device for device in fabric.jax_mesh.devices.flat if live[tuple(device.coords[: live.ndim])]]
    use_compile_cache(CACHE)
    looked_up = record_lookups()
    found = mmj.discover(left)
    build("replicated", found if side == "none" else mmj.tile(found, side))
    return {"looked_up": looked_up}


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    ways: dict[str, Callable[..., dict[str, Any]]] = {"job": train, "ahead": ahead, "after": after}
    told = ways[what](*rest)
    sys.stdout.write(f"\n{json.dumps(told)}\n")
