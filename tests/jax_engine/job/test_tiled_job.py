"""A job whose model is split inside tiles: it trains as plain optax does, and goes on on other tiles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshmend.jax as mmj
from jax_engine.job.job_cases import (
    BATCH,
    DATASET,
    SHARDINGS,
    SPLIT,
    alone,
    assert_close,
    loss,
    plain_training,
    train,
)
from meshmend.errors import ParameterError, RestartError
from meshmend.jax.session.survivors import fabric_of_hosts
from meshmend.launch.hosts import Hosts


def tiled_job(shared: Path, machine: str, **options: Any) -> mmj.Job:
    return mmj.Job(shared, BATCH, session=alone(machine), planner="weave", disk_every=0, tile="2x2", **options)


@pytest.mark.parametrize("update", ["replicated", pytest.param("sharded", marks=pytest.mark.slow)])
def test_a_tiled_job_is_plain_optax_and_resumes_on_other_tiles(update: Any, tmp_path: Path) -> None:
    options = {"params": SPLIT, "shardings": SHARDINGS, "update": update}
    first = tiled_job(tmp_path / "shared", "4x4")
    losses, samples, _ = train(first, 3, **options)
    first.close()
    # A chip is gone, and with it the tile that it was in: three tiles, of which none lies where it lay.
    second = tiled_job(tmp_path / "shared", "4x4 minus 0,0")
    assert second.fabric.mesh.n_chips == 3
    more, others, params = train(second, 6, **options)
    assert second.resumed.source == "memory"
    assert second.resumed.step == 3
    expected_losses, expected = plain_training([*samples, *others], params=SPLIT)
    assert_close((losses + more, params), (expected_losses, expected), rtol=1e-5)


@pytest.mark.slow
def test_model_state_and_random_keys_in_tiles(tmp_path: Path) -> None:
    def with_state(params: Any, state: Any, batch: Any, keys: Any) -> Any:
        noise = jax.vmap(jax.random.uniform)(keys)
        new = {"out": 0.5 * state["out"] + batch["x"][:, :1] * jax.numpy.ones(8)}
        return loss(params, batch) + noise, (new, {"noise": noise})

    found = {}
    for machine, tile in (("2x4", None), ("4x4 minus 0,0", "2x2")):
        job = mmj.Job(tmp_path / str(tile), BATCH, session=alone(machine), planner="weave", disk_every=0, tile=tile)
        steps = job.train(
            with_state,
            optax.adam(0.02),
            SPLIT,
            DATASET,
            steps=3,
            model_state={"out": np.zeros(8, np.float32)},
            rng=5,
            has_aux=True,
            shardings=SHARDINGS if tile else None,
        )
        kept = [(step.loss, float(step.aux["noise"])) for step in steps]
        found[tile] = kept, job.params, job.model_state
    assert_close(found["2x2"], found[None], rtol=1e-5)


def test_what_a_tiled_job_refuses(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="inner names the axes inside a tile: give tile="):
        mmj.Job(tmp_path / "a", BATCH, session=alone("4x4"), inner={"model": 4})
    with pytest.raises(ParameterError, match="shardings say how a model is split inside tiles"):
        train(mmj.Job(tmp_path / "b", BATCH, session=alone("4x4"), disk_every=0), 1, shardings=SHARDINGS)
    first = tiled_job(tmp_path / "c", "4x4")
    train(first, 1, params=SPLIT, shardings=SHARDINGS)
    first.close()
    with pytest.raises(RestartError, match=r"params\['out'\]: expected float32\[8\], \(\) of tiles with model=4, got"):
        train(tiled_job(tmp_path / "c", "4x4"), 2, params=SPLIT, shardings=P())


def test_losses_ahead_are_cut_into_tiles_too() -> None:
    machine = Hosts.of("4x4", "2x2")
    session = replace(alone("4x4"), hosts=machine)
    tiled = session.in_tiles("2x2", fsdp=2, tensor=2)
    assert tiled.fabric.inner_axes == ("fsdp", "tensor")
    events = [event for event in tiled.timeline.events if event["event"] == "tiles"]
    assert [(event["tiles"], event["chips"], event["wasted"]) for event in events] == [(4, 16, 0)]
    lone = fabric_of_hosts(Hosts.of("4x4", "4x4"), [0], jax.devices()[:16])
    assert replace(session, fabric=lone).in_tiles("2x2").fabric.mesh.n_chips == 4
    with pytest.raises(RestartError, match="Host 7 has no chip in any of the 4 tiles of 2x2 chips"):
        replace(session, host_of_process=(0, 7)).in_tiles("2x2")
