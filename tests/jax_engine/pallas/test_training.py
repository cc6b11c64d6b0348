"""Training on the kernel, in interpret mode with the race detector on: the README's example, and a fused update."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshmend as mm
import meshmend.jax as mmj
from jax_engine.pallas.kernel_cases import fabric_for, interpret
from meshmend.errors import ParameterError
from meshmend.jax.engine.pallas.instructions import Kind

MESH = mm.Mesh("2x2", failed=["0,0"])


def loss(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch["x"] @ params["a"] + params["b"].astype(jnp.float32)) ** 2)


def weights() -> dict[str, jax.Array]:
    draw = np.random.default_rng(0)
    return {
        "a": jnp.asarray(draw.normal(size=(7, 5)), jnp.float32),
        "b": jnp.asarray(draw.normal(size=(5,)), jnp.bfloat16),
    }


def train(optimizer: optax.GradientTransformation, program: mmj.Program, steps: int = 2) -> Any:
    batch = {"x": jnp.asarray(np.random.default_rng(1).normal(size=(6, 7)), jnp.float32)}
    init, step = mmj.train_step(loss, optimizer, fabric_for(MESH))
    params = weights()
    state, jitted = jax.jit(init)(params, program), jax.jit(step)
    with interpret("eager"):
        for _ in range(steps):
            params, state, value = jitted(params, state, batch, program)
        return jax.tree.map(np.asarray, (params, state, value))


def test_a_fused_update_is_that_of_the_xla_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """Sums have the same bits; the optimizer's formula is compiled in other shapes, and may round differently."""
    schedule = mm.plan(MESH, "weave", chunks=3, collective="all-reduce-with-update")
    optimizer = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10), weight_decay=0.1)
    found = []
    for engine in ("xla", "pallas"):
        program = mmj.install(schedule, fabric_for(MESH), update="fused", engine=engine)
        assert (program.update, program.engine) == ("fused", engine)
        found.append(train(optimizer, program))
    assert "RACE DETECTED" not in capsys.readouterr().out
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(other.astype(np.float64), one.astype(np.float64), rtol=1e-6, atol=1e-7)
    # And it did something.
    assert abs(found[1][0]["a"] - np.asarray(weights()["a"])).min() > 1e-3


def test_what_a_fused_update_cannot_do_in_the_kernel_is_refused() -> None:
    fabric = fabric_for(MESH)
    schedule = mm.plan(MESH, "weave", chunks=6, collective="all-reduce-with-update")
    program = mmj.install(schedule, fabric, update="fused", engine="pallas")
    with pytest.raises(ParameterError, match=r"asks for global_norm.*engine='xla'"):
        train(optax.chain(mmj.clip_by_global_norm(1.0), optax.sgd(0.1)), program)
    with pytest.raises(ParameterError, match=r"asks for chosen.*engine='xla'"):
        train(optax.chain(mmj.add_decayed_weights(0.1, mask={"a": True, "b": False}), optax.sgd(0.1)), program)
    init, step = mmj.train_step(loss, optax.sgd(0.1), fabric, accumulate_dtype=None)
    state = jax.jit(init)(weights(), program)
    with pytest.raises(ParameterError, match=r"travel in one dtype, got 2.*accumulate_dtype=jnp.float32"):
        jax.jit(step)(weights(), state, {"x": jnp.ones((6, 7))}, program)


def test_plans_for_the_kernel_are_asynchronous_and_for_its_preset() -> None:
    fabric = fabric_for(MESH)
    small: Any = {"planner": "weave", "chunks": 6}
    planned = mmj.plan(fabric, weights(), engine="pallas", hardware="tpu-v6e-pallas", **small)
    assert (planned.engine, planned.install(fabric).engine) == ("pallas", "pallas")
    assert planned.hardware.name == "tpu-v6e-pallas"
    assert mmj.plan(fabric, weights(), **small).engine == "xla"
    with pytest.raises(ParameterError, match="no reduce-scatter or all-gather by itself"):
        mmj.plan(fabric, weights(), update="fsdp", engine="pallas")
    fused = mmj.plan(fabric, weights(), update="sharded", engine="pallas", **small).install(fabric)
    assert fused.kernel is not None
    assert fused.kernel.shape.n_updates == fused.layout.shape.total_chunks
    assert int((np.asarray(fused.kernel.words)[:, 1::2] & 7 == Kind.UPDATE).sum()) >= fused.kernel.shape.n_updates


def readme_example() -> dict[str, Any]:
    """The README's model, data and loss, without the job that trains them."""
    page = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(import argparse.*?)```", page, re.S)
    kept = re.sub(r"^job = .*$", "", code, flags=re.M).split("for step in job.train")[0]
    names: dict[str, Any] = {}
    exec(kept, names)  # noqa: S102  # our own page
    return names


def test_a_step_of_the_readmes_example_has_the_xla_engines_bits(capsys: pytest.CaptureFixture[str]) -> None:
    example = readme_example()
    fabric = fabric_for(MESH)
    params = example["init"](np.random.default_rng(0))
    batch = jnp.asarray(example["dataset"][: 4 * fabric.mesh.n_chips])
    init, step = mmj.train_step(example["loss"], optax.adamw(1e-2), fabric, per_example=True)
    found = []
    for engine in ("xla", "pallas"):
        program = mmj.install(mm.plan(MESH, "weave", chunks=6), fabric, engine=engine)
        with interpret("on_wait"):
            done = jax.jit(step)(params, jax.jit(init)(params, program), batch, program)
            found.append(jax.tree.map(np.asarray, done))
    assert "RACE DETECTED" not in capsys.readouterr().out
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        assert one.tobytes() == other.tobytes()
    assert not np.array_equal(found[0][0]["hidden"], params["hidden"])
