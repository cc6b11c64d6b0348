"""A loop of permutes beside others that do not need its result, in two processes: `python -m jax_engine.beside`."""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshmend.jax.engine.cpu_order import one_by_one

N_DEVICES, RUNS = 16, 20
LARGE, SMALL = 200_000, 64


def ring_sum(x: Any, unroll: int) -> Any:
    """Add up the rows of all devices, by passing them round a ring."""

    def shift(held: Any, _: None) -> tuple[Any, None]:
        total, x = held
        x = lax.ppermute(x, "chip", [(i, (i + 1) % N_DEVICES) for i in range(N_DEVICES)])
        return (total + x, x), None

    return lax.scan(shift, (x, x), None, length=N_DEVICES - 1, unroll=unroll)[0][0]


def both(large: Any, small: Any) -> Any:
    # The rest makes the program large enough for XLA to run its operations side by side.
    rest = [jnp.cumsum(jnp.sort(small * i, axis=1), axis=1) for i in range(1, 9)]
    return ring_sum(large, 1), ring_sum(small, N_DEVICES), rest


def main(coordinator: str, process: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, 2, process)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "chip")
    by_chip = PartitionSpec("chip")
    rows = np.arange(N_DEVICES, dtype=np.float32)[:, None]

    def by_rows(width: int) -> jax.Array:
        wide = rows.repeat(width, axis=1)
        return jax.make_array_from_callback(wide.shape, NamedSharding(mesh, by_chip), lambda at: wide[at])

    mapped = jax.shard_map(both, mesh=mesh, in_specs=by_chip, out_specs=by_chip, check_vma=False)
    step = jax.jit(one_by_one(mapped))
    given = by_rows(LARGE), by_rows(SMALL)
    wrong = 0
    for _ in range(RUNS):
        for found in step(*given)[:2]:
            wrong += sum(int(np.sum(np.asarray(part.data) != rows.sum())) for part in found.addressable_shards)
    sys.stdout.write(json.dumps({"wrong": wrong}) + "\n")
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
