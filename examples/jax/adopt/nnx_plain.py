"""Before: a Flax NNX job under plain jit, tensor parallelism over 4 chips, data parallelism over 16 groups of them."""

import flax.nnx as nnx
import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from transformer import Transformer, batches, loss


def train(steps=20):
    """Return the losses of so many steps."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(16, 4), ("data", "model"))
    losses = []
    with jax.set_mesh(mesh):
        model = Transformer(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, tokens):
            value, gradients = nnx.value_and_grad(loss)(model, tokens)
            optimizer.update(model, gradients)
            return value

        for tokens in batches(steps):
            tokens = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("data")))
            losses.append(float(step(model, optimizer, tokens)))
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 64)  # virtual chips on the CPU; leave this out on a TPU
    print(*(f"{value:.6f}" for value in train()))
