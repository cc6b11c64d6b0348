"""The same with a sharded update: each chip has the optimizer's state of a fifteenth of its shards."""

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
        graph, params = nnx.split(model)
        shardings = nnx.get_partition_spec(params)
        program = mmj.plan(fabric, params, update="sharded", shardings=shardings).install(fabric)
        init, step = mmj.train_step(
            lambda params, tokens: loss(nnx.merge(graph, params), tokens),
            optax.adamw(1e-2),
            fabric,
            shardings=shardings,
        )
        state, step = jax.jit(init)(params, program), jax.jit(step, donate_argnums=(0, 1))

        for tokens in batches(steps):
            tokens = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("tile")))
            params, state, value = step(params, state, tokens, program)
            losses.append(float(value))
        nnx.update(model, params)
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 64)  # virtual chips on the CPU; leave this out on a TPU
    print(*(f"{value:.6f}" for value in train()))
