"""Fifteen lines that train, and go on when a host dies: a small network learns to write Python, letter by letter.

    python examples/jax/survive.py                            # alone, on whatever devices there are

Start it with a launcher on several hosts, and it trains on all (docs/cluster.md). Start it again, and it goes on
from where it stopped. The folder `shared`, or that of `meshmend run --shared`, has its plans, compiled programs and
checkpoints: remove it to start over.
"""

import argparse
import inspect

import jax
import numpy as np
import optax

import meshmend.jax as mmj

job = mmj.Job(global_batch=256)  # first of all: it joins the other hosts
text = np.frombuffer(inspect.getsource(argparse).encode(), np.uint8)
dataset = np.lib.stride_tricks.sliding_window_view(text, 9)  # eight letters, and the one that follows


def init(rng):
    """Return the parameters to begin with, the same on every host."""
    shapes = {"embed": (256, 16), "hidden": (128, 128), "read": (128, 256)}
    return {name: np.float32(rng.normal(size=shape) / shape[0] ** 0.5) for name, shape in shapes.items()}


def loss(params, batch):
    """Return one value per example, without a mean over the batch."""
    hidden = jax.nn.relu(params["embed"][batch[:, :-1]].reshape(len(batch), -1) @ params["hidden"])
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["read"], batch[:, -1])


for step in job.train(loss, optax.adamw(1e-2), init(np.random.default_rng(0)), dataset, steps=100):
    if step.number % 20 == 0:
        print(f"step {step.number}: loss {step.loss:.3f} on {step.chips} chips")
