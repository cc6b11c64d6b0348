"""One of two processes; the first compiles a train step for the chips of the second alone. Run by a test."""

from __future__ import annotations

import json
import sys

import jax
import numpy as np
import optax

import meshmend as mm
import meshmend.jax as mmj
from meshmend.jax.compile import compile_train_step
from meshmend.jax.engine.program import UPDATES, Update
from meshmend.jax.session.coordination import Coordination


def build(fabric: mmj.Fabric, update: Update) -> bool:
    program = mmj.install(mm.plan(fabric.mesh, "hamiltonian"), fabric, update=update)
    feed = mmj.Feed(np.ones((64, 4), np.float32), mmj.KeepGlobal(16), threads=0, prefetch=0)
    training = mmj.train_step(lambda w, x: x @ w, optax.adam(0.1), fabric, per_example=True)
    compiled = compile_train_step(training, program, np.zeros(4, np.float32), feed.like(fabric))
    return compiled.layout.fabric == fabric


if __name__ == "__main__":
    me = int(sys.argv[2])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=me)
    told: dict[str, bool] = {}
    theirs = [device for device in jax.devices() if device.process_index == 1]
    if me == 0:
        fabric = mmj.discover(theirs, shape="2x4")
        told = {update: build(fabric, update) for update in UPDATES}
    Coordination(me, 2).exchange(None)
    sys.stdout.write(json.dumps(told) + "\n")
