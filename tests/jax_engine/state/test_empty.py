"""A layer without elements that is the only one of its dtype: kept and restored like any other."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshmend as mm
import meshmend.jax as mmj
from meshmend.jax.session.coordination import Coordination
from meshmend.jax.session.session import Session
from meshmend.jax.state import Keeper, StateLayout
from meshmend.launch import Launch
from meshmend.launch.timeline import Timeline


@pytest.mark.parametrize("sharded", [False, True], ids=["program", "pair"])
def test_a_dtype_of_which_there_is_no_element(sharded: bool, tmp_path: Path) -> None:
    fabric = mmj.discover(jax.devices()[:4], shape="2x2")
    schedule = mm.plan(fabric.mesh, "hamiltonian")
    program = mmj.install(schedule, fabric, update="two-phase" if sharded else "replicated")
    train = mmj.train_step(lambda w, batch: jnp.mean(batch) * jnp.sum(w["w"]), optax.adam(0.1), fabric)
    params = {"w": np.arange(5.0, dtype=np.float32), "none": jnp.zeros((0, 3), jnp.bfloat16)}
    params = jax.device_put(params, fabric.sharding())
    state = jax.jit(train.init)(params, program)
    for step in (0, 1):
        session = Session(fabric, Launch("127.0.0.1:1", 1, 0), None, (0,), Coordination(0, 1), Timeline(None))
        keeper = Keeper(session, StateLayout.of(train, program, params), memory=tmp_path, memory_every=1)
        restored = keeper.restore(params, state)
        assert restored.step == step
        if step == 0:
            keeper.keep(1, params, state)
        keeper.close()
    assert np.asarray(restored.params["w"]).tolist() == [0, 1, 2, 3, 4]
    assert (restored.params["none"].shape, restored.params["none"].dtype) == ((0, 3), jnp.bfloat16)
