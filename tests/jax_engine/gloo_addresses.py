"""One of two processes that sum over Gloo, each at a loopback address of its own: where it listens, what it sums."""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshmend.jax.engine.private import use_gloo_at
from network import listening


def main(coordinator: str, process: int) -> None:
    """Join, sum, and print what came of it."""
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(coordinator, 2, process)
    before = listening()
    use_gloo_at(f"127.0.0.{2 + process}")
    mesh = jax.sharding.Mesh(jax.devices(), "chip")
    parts = jax.make_array_from_callback(
        (len(jax.devices()),), NamedSharding(mesh, PartitionSpec("chip")), lambda _: np.ones(1, np.float32)
    )
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))(parts)
    again = ""
    try:
        use_gloo_at("127.0.0.9")
    except RuntimeError as error:
        again = str(error)
    hosts = sorted(host for host, _ in listening() - before if host != "127.0.0.9")
    sys.stdout.write(json.dumps({"listens": hosts, "sum": float(total.addressable_data(0)), "again": again}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
