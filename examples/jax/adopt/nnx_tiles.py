"""After: the same job round a hole, tensor parallelism inside 2x2 tiles, data parallelism over 15 of them."""

import flax.nnx as nnx
import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec
from transformer import Transformer, batches, loss

import meshmend.jax as mmj


def train(steps=20):
    """Return the losses of so many steps."""
    fabric = mmj.tile(mmj.discover(shape="8x8", failed=["2x2@2,2"]), "2x2", model=4)
    mesh = fabric.jax_mesh
    losses = []
    with jax.set_mesh(mesh):
        model = Transformer(nnx.Rngs(0))
        weights = nnx.state(model)
        program = mmj.plan(fabric, weights, shardings=nnx.get_partition_spec(weights)).install(fabric)
        optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, tokens, program):
            graph, params = nnx.split(model)
            differentiate = mmj.value_and_grad(
                lambda params, tokens: loss(nnx.merge(graph, params), tokens), fabric, nnx.get_partition_spec(params)
            )
            value, gradients = differentiate(params, tokens, program=program)
            optimizer.update(model, gradients)
            return value

        for tokens in batches(steps):
            tokens = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("tile")))
            losses.append(float(step(model, optimizer, tokens, program)))
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 64)  # virtual chips on the CPU; leave this out on a TPU
    print(*(f"{value:.6f}" for value in train()))
