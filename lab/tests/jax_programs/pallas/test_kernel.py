"""The kernel in Pallas's interpret mode for TPUs, with its race detector on: exact sums, the XLA engine's bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshmend as mm
import meshmend.jax as mmj
from jax_engine.cases import on_chips
from kernel_cases import (
    HOLES,
    MODES,
    all_reduce_on_chips,
    fabric_for,
    integers,
    plan_small,
    run_made,
    without_credit,
)
from kernel_model import Broken, explore
from meshmend.errors import ParameterError, ScheduleError
from meshmend.planning import PLANNERS
from meshmend_lab.pallas import instructions, kernel
from meshmend_lab.pallas.engine import install
from meshmend_lab.pallas.instructions import instructions_of

HOLED = mm.Mesh("2x3", failed=["0,0"])
ALL_REDUCERS = [name for name in PLANNERS if name not in ("auto", "gather")]


def check_exact(schedule: mm.Schedule, mode: Any, capsys: pytest.CaptureFixture[str], rows: int = 1) -> None:
    payload = integers(schedule.mesh, schedule.total_chunks, rows, 128)
    got = run_made(schedule, instructions_of(schedule), payload, mode)
    assert "RACE DETECTED" not in capsys.readouterr().out
    np.testing.assert_array_equal(got, np.broadcast_to(payload.sum(axis=0), payload.shape))


@pytest.mark.parametrize("mode", MODES)
def test_sums_are_exact_and_nothing_races(
    mode: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "BLOCK_ROWS", 2)  # three blocks per chunk
    check_exact(mm.plan(HOLED, "weave", chunks=6), mode, capsys, rows=6)


def test_chips_that_exchange_and_add_are_exact(capsys: pytest.CaptureFixture[str]) -> None:
    check_exact(mm.plan(mm.Mesh("2x2"), "latency"), "eager", capsys)


def test_runs_of_several_chunks_are_exact(capsys: pytest.CaptureFixture[str]) -> None:
    rows: dict[str, Any] = {"step": [0, 1], "src": [1, 0], "dst": [0, 1], "op": [0, 1], "n_chunks": 5}
    schedule = mm.Schedule(mm.Mesh("1x2"), total_chunks=5, owners=[0] * 5, **rows)
    assert instructions_of(schedule).shape.sizes == (1, 4)
    check_exact(schedule, "on_wait", capsys)


def test_long_lists_of_instructions_are_fetched_in_parts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (kernel, instructions):
        monkeypatch.setattr(module, "TABLE_WORDS", 8)
    check_exact(mm.plan(mm.Mesh("1x2"), "weave", chunks=5), "eager", capsys)


@pytest.mark.slow
def test_a_credit_too_many_is_found_by_the_model_and_by_the_race_detector() -> None:
    """The detector sees memory, so it is a slot of the inbox. The model sees semaphores, too, in its own test."""
    schedule = mm.plan(mm.Mesh("1x3"), "weave", chunks=6)
    with pytest.raises(Broken, match="is written before it was read"):
        explore(without_credit(instructions_of(schedule)), schedule.total_chunks)
    explore(instructions_of(schedule), schedule.total_chunks)
    for what in ("broken", "whole"):
        command = [sys.executable, str(Path(__file__).parents[2] / "support" / "broken_credit.py"), what, "on_wait"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert ("RACE DETECTED" in done.stdout + done.stderr) is (what == "broken"), done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_bits_are_those_of_the_xla_engine(capsys: pytest.CaptureFixture[str]) -> None:
    mesh, draw = mm.Mesh("2x2", failed=["1,1"]), np.random.default_rng(1)
    fabric, schedule = fabric_for(mesh), mm.plan(mesh, "weave", chunks=4)
    shapes = {"f": ((5, 33), jnp.float32), "b": ((7,), jnp.bfloat16), "few": ((), jnp.int32)}
    tree = {
        name: jnp.asarray(draw.normal(size=(mesh.n_chips, *shape)) * 100, dtype)
        for name, (shape, dtype) in shapes.items()
    }
    by_xla = on_chips(fabric, mmj.all_reduce, tree, mmj.install(schedule, fabric))
    got = all_reduce_on_chips(schedule, tree)
    assert "RACE DETECTED" not in capsys.readouterr().out
    for name in shapes:
        assert np.asarray(by_xla[name]).tobytes() == got[name].tobytes(), name


def test_bfloat16_is_summed_in_float32() -> None:
    """256 + 1 + … + 1 is 256 in bfloat16, and 260 in float32: a bfloat16 number, too."""
    mesh = mm.Mesh("1x5")
    tree = jnp.asarray([[256.0], [1.0], [1.0], [1.0], [1.0]], jnp.bfloat16) * jnp.ones((5, 8), jnp.bfloat16)
    got = all_reduce_on_chips(mm.plan(mesh, "latency"), tree, accumulate_dtype=jnp.float32)
    assert got.dtype == jnp.bfloat16
    assert (got == 260).all()


def test_what_the_kernel_cannot_do_is_refused() -> None:
    half = mm.plan(HOLED, "weave", chunks=4, collective="reduce-scatter")
    with pytest.raises(ParameterError, match="runs all-reduces, got a schedule for reduce-scatter"):
        install(half, fabric_for(HOLED))
    tree = jnp.ones((5, 40), jnp.float16)
    with pytest.raises(ParameterError, match=r"adds float32, bfloat16, int32, got float16.*use mmj.all_reduce"):
        all_reduce_on_chips(mm.plan(HOLED, "weave", chunks=4), tree)
    with pytest.raises(ScheduleError, match=r"Plan for fabric\.mesh"):
        install(mm.plan(mm.Mesh("2x3"), "weave", chunks=4), fabric_for(HOLED))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("planner", ALL_REDUCERS)
def test_every_planner_is_exact_on_every_hole(planner: str, mode: Any, capsys: pytest.CaptureFixture[str]) -> None:
    meshes = [mm.Mesh("4x4", failed=[hole]) for hole in HOLES]
    meshes += [mm.Mesh("4x4"), mm.Mesh("4x4", wrap=True), mm.Mesh("4x4", wrap=True, failed=["2x2@0,0"])]
    meshes += [mm.Mesh("2x2x2"), mm.Mesh("2x2x2", failed=["0,0,0"])]
    run = 0
    for mesh in meshes:
        schedule = plan_small(mesh, planner)
        if schedule is not None:
            check_exact(schedule, mode, capsys)
            run += 1
            jax.clear_caches()
    assert run >= 2
