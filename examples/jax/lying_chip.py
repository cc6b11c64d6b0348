"""A job in which chip (1, 2) computes wrong gradients from a step on: it is found, left out, and leaves no trace.

meshmend run --local 2x6 --host 2x2 --shared lying-chip examples/jax/lying_chip.py
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshmend.jax as mmj

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=40)
options.add_argument("--lies-from", type=int, default=25, help="step from which on the chip lies")
options.add_argument("--save", help="file for the parameters at the end")
given = options.parse_args()

checks = mmj.Checks(digests_every=10, recompute_every=10)
job = mmj.Job(global_batch=64, disk_every=20, checks=checks)
liar = int(job.fabric.mesh.rank_of[1, 2])  # below 0 once it has been left out


@jax.custom_vjp
def through(params, step):
    """Return the parameters; on the way back, the gradients of one chip become wrong."""
    del step
    return params


def backward(step, gradients):
    """Return gradients, and lie about them."""
    lies = (jax.lax.axis_index(job.fabric.axes) == liar) & (step >= given.lies_from)
    return jax.tree.map(lambda gradient: jnp.where(lies, 1.5 * gradient, gradient), gradients), None


through.defvjp(lambda params, step: (params, step), backward)


def loss(params, state, batch):
    """Return each example's loss, and a model state that counts the steps."""
    values = (batch["x"] @ through(params, state["step"])["w"] - batch["y"]) ** 2
    return values, {"step": jnp.full(values.shape, state["step"] + 1)}


x = np.random.default_rng(0).normal(size=(512, 8)).astype(np.float32)
begin, state = {"w": jnp.zeros(8)}, {"step": np.float32(0)}
dataset = {"x": x, "y": x.sum(axis=1)}
is_first = job.session.launch.process == 0
for step in job.train(loss, optax.adam(0.05), begin, dataset, steps=given.steps, model_state=state):
    if is_first and (step.number % 10 == 0 or step.recovered):
        print(f"step {step.number} on {step.chips} chips, loss {step.loss:.3f}")
if given.save and is_first:
    np.save(given.save, job.params["w"])
