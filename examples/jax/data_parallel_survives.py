"""`data_parallel.py` as a job that survives: it restarts on the hosts that are left, from the last committed step."""

import argparse
import inspect

import jax
import numpy as np
import optax

import meshmend.jax as mmj

job = mmj.Job(shared="data-parallel", global_batch=256)
text = np.frombuffer(inspect.getsource(argparse).encode(), np.uint8)
dataset = np.lib.stride_tricks.sliding_window_view(text, 9)  # eight letters, and the one that follows


def init(key):
    """Return the parameters of an embedding, a hidden layer and a readout."""
    shapes = {"embed": (256, 16), "hidden": (128, 128), "read": (128, 256)}
    return {name: jax.random.normal(key, shape) / shape[0] ** 0.5 for name, shape in shapes.items()}


def loss(params, batch):
    """Return the cross-entropy of each example."""
    hidden = jax.nn.relu(params["embed"][batch[:, :-1]].reshape(len(batch), -1) @ params["hidden"])
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["read"], batch[:, -1])


optimizer = optax.adamw(1e-2)
params = init(jax.random.key(0))
for step in job.train(loss, optimizer, params, dataset, steps=100):
    if step.number % 20 == 0:
        print(f"step {step.number}: loss {step.loss:.3f}")
