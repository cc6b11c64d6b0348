"""After: the same step round a hole, its model split inside 2x2 tiles, its batch over the three that are left."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import meshmend.jax as mmj

VOCAB, WIDTH, HIDDEN, LAYERS, LENGTH, BATCH = 32, 16, 32, 3, 8, 48
AXES = {"embed": ("vocab", "width"), "up": ("layer", "width", "hidden"), "down": ("layer", "hidden", "width")}
RULES = {"batch": "fsdp", "vocab": "tensor", "width": "fsdp", "hidden": "tensor"}


def spec(*names):
    """Return how an array with these logical axes is split."""
    return PartitionSpec(*(RULES.get(name) for name in names))


def init(key):
    """Return the parameters."""
    shapes = {"embed": (VOCAB, WIDTH), "up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)}
    keys = jax.random.split(key, len(shapes))
    return {name: jax.random.normal(k, shape) * 0.1 for (name, shape), k in zip(shapes.items(), keys, strict=True)}


def loss(params, tokens):
    """Return the mean cross-entropy of the next token."""
    constrain = jax.lax.with_sharding_constraint
    x = constrain(params["embed"][tokens[:, :-1]], spec("batch", None, None))

    @jax.checkpoint
    def layer(x, weights):
        hidden = constrain(jax.nn.gelu(x @ weights["up"]), spec("batch", None, "hidden"))
        return x + hidden @ weights["down"], None

    x, _ = jax.lax.scan(layer, x, {"up": params["up"], "down": params["down"]})
    logits = jnp.einsum("btw,vw->btv", x, params["embed"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def batches(steps):
    """Yield sequences that count upwards from random starts: something to learn."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        yield (rng.integers(0, VOCAB, (BATCH, 1)) + np.arange(LENGTH + 1)).astype(np.int32) % VOCAB


def train(steps=5):
    """Return the losses of so many steps."""
    fabric = mmj.tile(mmj.discover(jax.devices()[:16], shape="4x4", failed=["1,1"]), "2x2", fsdp=2, tensor=2)
    mesh = fabric.jax_mesh
    optimizer = optax.adamw(1e-2)
    specs = {name: spec(*axes) for name, axes in AXES.items()}

    def step(params, state, tokens, program):
        value, gradients = mmj.value_and_grad(loss, fabric, specs)(params, tokens, program=program)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    with jax.set_mesh(mesh):
        shardings = {name: NamedSharding(mesh, one) for name, one in specs.items()}
        params = jax.device_put(init(jax.random.key(0)), shardings)
        program = mmj.plan(fabric, params, shardings=specs).install(fabric)
        state = jax.jit(optimizer.init)(params)
        jitted = jax.jit(step, donate_argnums=(0, 1))
        losses = []
        for tokens in batches(steps):
            tokens = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec(("tile", "fsdp"))))
            params, state, value = jitted(params, state, tokens, program)
            losses.append(float(value))
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 16)  # virtual chips on the CPU; leave this out on a TPU
    print(*(f"{value:.6f}" for value in train()))
