"""A job whose parameters are sharded: it trains as plain optax does, and goes on on other survivors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshmend.jax as mmj
from jax_engine.job.job_cases import (
    BATCH,
    DATASET,
    ENDS,
    FSDP,
    LAYERS,
    alone,
    assert_close,
    assert_same_bits,
    layer,
    make,
    plain_training,
    sharded_loss,
    train,
)
from meshmend.errors import ParameterError

WHOLE, HOLED = "2x3", "2x3 minus 0,0"


def whole_loss(params: Any, batch: Any) -> Any:
    x = jnp.tanh(batch["x"] @ params["ends"]["w"])
    for number in range(3):
        x = layer({"w": params["layers"]["w"][number]}, x)
    return (x @ params["ends"]["out"] - batch["y"]) ** 2


def job(shared: Path, machine: str, **options: Any) -> mmj.Job:
    return mmj.Job(shared, BATCH, session=alone(machine), **{"planner": "weave", "disk_every": 0, **options})


def test_a_job_with_sharded_parameters_is_plain_optax_and_resumes_on_other_chips(tmp_path: Path) -> None:
    """32 samples on five chips and on six: some devices have an example that does not count."""
    first = job(tmp_path / "shared", HOLED)
    losses, samples, _ = train(first, 3, **FSDP)
    first.close()
    second = job(tmp_path / "shared", WHOLE)
    more, others, params = train(second, 5, **FSDP)
    assert (second.resumed.source, second.resumed.step) == ("memory", 3)
    expected = plain_training([*samples, *others], whole_loss, {"ends": ENDS, "layers": LAYERS})
    assert_close((losses + more, params), expected, rtol=1e-5)


@pytest.mark.slow
def test_it_resumes_from_disk_with_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    expected = train(job(tmp_path / "whole", WHOLE), 4, **FSDP)[2]
    found = {}
    for steps in (2, 4):
        part = job(tmp_path / "parts", WHOLE, memory_every=0, disk_every=1)
        found[steps] = train(part, steps, **FSDP)[2]
        part.close()
    assert (part.resumed.source, part.resumed.step) == ("disk", 2)
    assert_same_bits(found[4], expected)


@pytest.mark.slow
@pytest.mark.parametrize("tile", [None, "1x2"])
def test_random_keys_aux_microbatches_and_tiles(tile: str | None, tmp_path: Path) -> None:
    def noisy(params: Any, batch: Any, pair: mmj.Program, keys: Any) -> Any:
        noise = jax.vmap(jax.random.uniform)(keys)
        return sharded_loss(params, batch, pair) + noise, {"noise": noise}

    def plain(params: Any, batch: Any, keys: Any) -> Any:
        noise = jax.vmap(jax.random.uniform)(keys)
        return whole_loss(params, batch) + noise, {"noise": noise}

    inside = {"ends": {"w": P(), "out": P(), "none": P()}, "layers": {"w": P()}}

    def made(fabric: mmj.Fabric, pair: mmj.Program) -> Any:
        if tile is None:
            return make(fabric, pair)
        return {
            "ends": mmj.fsdp.shard_params(ENDS, fabric, pair, shardings=inside["ends"]),
            "layers": mmj.fsdp.shard_params(LAYERS, fabric, pair, stacked=True, shardings=inside["layers"]),
        }

    found = {}
    ways: dict[str, dict[str, Any]] = {
        "fsdp": {"loss": noisy, "params": made, "update": "fsdp"},
        "replicated": {"loss": plain, "params": {"ends": ENDS, "layers": LAYERS}, "shardings": P() if tile else None},
    }
    for name, given in ways.items():
        one = job(tmp_path / name, "2x4 minus 0,0", tile=tile)
        steps = one.train(
            optimizer=optax.adam(0.02),
            dataset=DATASET,
            steps=3,
            rng=5,
            has_aux=True,
            microbatches=1 if tile else 2,
            **given,
        )
        seen = [(step.loss, float(step.aux["noise"])) for step in steps]
        found[name] = seen, one.params
    assert_close(found["fsdp"], found["replicated"], rtol=1e-5)


def test_what_a_job_with_sharded_parameters_refuses(tmp_path: Path) -> None:
    one = job(tmp_path / "a", WHOLE)
    with pytest.raises(ParameterError, match=r"update is 'fsdp' and params is a dict\. .* give a function"):
        train(one, 1, update="fsdp")
    with pytest.raises(ParameterError, match="update is 'auto' and params is a function"):
        train(one, 1, params=make)
    with pytest.raises(ParameterError, match="the shardings inside tiles are given where parameters are made"):
        train(one, 1, shardings=P(), **FSDP)
    with pytest.raises(ParameterError, match="update='fsdp' does not keep a model state yet"):
        train(one, 1, model_state=np.zeros(3), **FSDP)
    with pytest.raises(
        ParameterError, match=r"params is a .*, expected ShardedParams: cut it with mmj.fsdp.shard_params"
    ):
        train(one, 1, **{**FSDP, "params": lambda *_: jnp.ones(3)})
