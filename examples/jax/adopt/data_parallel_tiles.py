"""After: the same job on the 15 chips that are left. Each is a tile of its own, and the plan sums the gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import meshmend.jax as mmj

WIDTH, BATCH = 8, 240


def loss(params, batch):
    """Return the mean squared error."""
    hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)


def batches(steps):
    """Yield points of a noisy function: something to learn."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        x = rng.normal(0, 1, (BATCH, WIDTH)).astype(np.float32)
        yield {"x": x, "y": np.sin(x.sum(axis=1)) + rng.normal(0, 0.1, BATCH).astype(np.float32)}


def train(steps=5):
    """Return the losses of so many steps."""
    fabric = mmj.tile(mmj.discover(jax.devices()[:16], shape="4x4", failed=["1,1"]), "1x1")
    mesh = fabric.jax_mesh
    optimizer = optax.adamw(1e-2)
    rng = np.random.default_rng(1)
    shapes = {"w": (WIDTH, 32), "b": (32,), "v": (32,)}
    params = {name: jnp.asarray(rng.normal(0, 0.3, shape), jnp.float32) for name, shape in shapes.items()}
    program = mmj.plan(fabric, params).install(fabric)
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))

    @jax.jit
    def step(params, state, batch, program):
        value, gradients = mmj.value_and_grad(loss, fabric, PartitionSpec())(params, batch, program=program)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = jax.jit(optimizer.init)(params), []
    for batch in batches(steps):
        batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("tile")))
        params, state, value = step(params, state, batch, program)
        losses.append(float(value))
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 16)  # virtual chips on the CPU; leave this out on a TPU
    print(*(f"{value:.6f}" for value in train()))
