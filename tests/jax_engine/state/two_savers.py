"""One of two processes with eight devices each that save a state together; run by test_orbax.

Prints how much it wrote and read of the state, and whether it read what it had.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshmend as mm
import meshmend.jax as mmj
from meshmend.jax.session.coordination import Coordination
from meshmend.jax.state.candidates import UNCHECKED
from meshmend.jax.state.disk import read
from meshmend.jax.state.disk.disk import Disk
from meshmend.jax.state.disk.orbax import ChunkStore, imported
from meshmend.jax.state.disk.write import checksum_of, copy_to_host
from meshmend.jax.state.layout import rectangles
from meshmend.jax.state.layout.state_layout import StateLayout


class Counted:
    """JAX's coordination client, and the keys that this process has set, by whatever part of it."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self._keys: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def key_value_set(self, key: str, value: str, **options: Any) -> None:
        self.client.key_value_set(key, value, **options)
        self._keys.add(key)

    def key_value_set_bytes(self, key: str, value: bytes, **options: Any) -> None:
        self.client.key_value_set_bytes(key, value, **options)
        self._keys.add(key)

    @property
    def keys(self) -> set[str]:
        """Those that are still there, whoever deletes them."""
        return {key for key in self._keys if self._has(key)}

    def _has(self, key: str) -> bool:
        try:
            self.client.key_value_try_get_bytes(key)
        except jax.errors.JaxRuntimeError:
            return False
        return True


def main() -> dict[str, Any]:
    me = jax.process_index()
    rectangles.chunk_shape.__defaults__ = (1 << 14,)  # small, beside what a process has in one piece
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    tiles = [(row, 2 * host + column) for host in (0, 1) for row in range(4) for column in (0, 1)]
    fabric = mmj.discover(devices, coords=tiles, shape="4x4", failed=["2x2@0,2"])
    pair = mmj.install(mm.plan(fabric.mesh, "row-pairs"), fabric, update="two-phase")
    make: Any = lambda key: {"w": jax.random.randint(key, (3010, 1000), -8, 8).astype(jnp.float32)}  # noqa: E731
    params = mmj.fsdp.init_sharded(make, jax.random.key(0), fabric, pair)
    training = mmj.fsdp.sharded_train_step(lambda *_: 0.0, optax.trace(0.5), fabric)
    state = jax.jit(training.init)(params, pair)
    layout = StateLayout.of(training, pair, params)
    from jax._src import distributed

    counted = Counted(distributed.global_state.client)
    vars(distributed.global_state)["client"] = counted
    coordination = Coordination(me, 2)
    folder = coordination.exchange(tempfile.mkdtemp())[0]
    disk = Disk(folder)
    counts = {"written": 0, "read": 0}
    write, checksum = ChunkStore.write, checksum_of

    def count_write(self: Any, user: int, box: Any, values: Any) -> None:
        counts["written"] += values.nbytes
        write(self, user, box, values)

    def count_read(values: Any) -> str:
        counts["read"] += values.nbytes
        return checksum(values)

    ChunkStore.write = count_write  # type: ignore[method-assign]
    vars(read)["checksum_of"] = count_read

    def save(attempt: int, step: int) -> None:
        facts = {"step": step, "attempt": attempt, "extra": None, "verified": UNCHECKED}
        disk.save(layout, copy_to_host(layout, params, state), facts, coordination.channel("save"))

    save(1, 3)
    coordination.exchange("saved")
    again = layout.to_devices(disk.load(3, layout)[1], jax.tree.map(lambda x: x * 0, (params, state)))
    same = all(
        a.start == b.start and a.elements.tobytes() == b.elements.tobytes()
        for a, b in zip(copy_to_host(layout, *again), copy_to_host(layout, params, state), strict=True)
    )
    found: dict[str, Any] = {
        "same": same,
        "whole": 2 * 3_010_000 * 4,
        **counts,
        "orbax": 0.0,
        "sum": 0.0,
    }
    if me == 0:
        ts: Any = imported("tensorstore")
        spec = {"driver": "ocdbt", "base": f"file://{Path(folder) / '3' / 'state'}/", "path": "params.w"}
        array = ts.open({"driver": "zarr", "kvstore": spec}).result().read().result()
        found["orbax"] = float(np.asarray(array).sum())
    whole = np.asarray(make(jax.random.key(0))["w"])
    found["sum"] = float(whole.sum())
    found["keys"] = []
    for number in range(4):
        if number == 2:  # as another training of the same job does
            disk.close()
            coordination.exchange("closed")
            disk = Disk(folder)
        save(1 + number // 2, 4 + number)
        coordination.exchange("saved")
        found["keys"].append(sorted(counted.keys))
        coordination.exchange("counted")
    coordination.exchange("done")
    disk.close()
    return found


if __name__ == "__main__":
    jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
    sys.stdout.write(json.dumps(main()) + "\n")
