"""A job of one process with eight devices that saves its programs, or loads them; run by `test_saved`.

Prints one line of JSON: what JAX has traced and compiled from the start of training to the second step, what the
timeline says of compiling, and the parameters at the end.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np
import optax

import meshmend.jax as mmj

X = np.random.default_rng(0).integers(-3, 4, (64, 4)).astype(np.float32)
WEIGHTS = {"w": np.zeros(4, np.float32), "b": np.zeros((), np.float32)}


def loss(params: Any, batch: Any) -> Any:
    """One value per example; its gradients are whole numbers."""
    return batch @ params["w"] + params["b"]


def main(shared: str, steps: int, update: Any) -> None:
    compiled: list[str] = []

    def heard(event: str, duration_secs: float, **facts: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            compiled.append(f"{event.rpartition('/')[2]} {facts.get('fun_name', '')}")

    at_second: list[str] = []
    with mmj.Job(shared, global_batch=16, disk_every=0, compile_ahead=True) as job:
        jax.monitoring.register_event_duration_secs_listener(heard)
        first = None
        for step in job.train(loss, optax.adam(0.125), WEIGHTS, X, steps=steps, update=update):
            first = step.number if first is None else first
            if step.number == first + 1:
                at_second = list(compiled)
        params = job.params
    events = [event for event in job.session.timeline.events if event["event"] in ("compile", "program", "gave up")]
    found = {name: np.asarray(leaf).tobytes().hex() for name, leaf in params.items()}
    sys.stdout.write(f"\n{json.dumps({'compiled': at_second, 'events': events, 'params': found})}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
