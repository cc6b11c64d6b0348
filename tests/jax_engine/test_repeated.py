"""Repeated schedules in the JAX engine: exact sums, and tables that do not grow with the number of repeats."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshmend as mm
import meshmend.jax as mmj
import meshmend.numpy as mmn
from jax_engine import cases
from jax_engine.cases import replay
from meshmend.planning import Weave
from meshmend.schedule import Collective
from meshmend.schedule.lanes import lower
from random_schedules import random_schedule, repeated_with_idle_steps


@pytest.mark.parametrize("seed", range(30))
def test_tables_of_any_repeated_schedule_do_what_numpy_does(seed: int) -> None:
    template = random_schedule(seed, collective=Collective.ALL_REDUCE, max_chips=6, max_chunks=4)
    if template.n_transfers == 0:
        return
    whole = template.repeated(2 + seed % 4, 1 + seed % template.n_steps)
    payload = np.random.default_rng(seed).integers(-99, 99, size=(whole.mesh.n_chips, whole.total_chunks))
    assert np.array_equal(replay(lower(whole), payload), mmn.run(whole, payload))
    assert np.array_equal(mmn.run(whole, payload), np.broadcast_to(payload.sum(axis=0), payload.shape))


def test_templates_that_begin_with_idle_steps_are_summed_exactly() -> None:
    """By their tables, by NumPy, and a few by the engine itself."""
    n_run = 0
    for seed in range(200):
        whole = repeated_with_idle_steps(seed)
        if whole is None:
            continue
        payload = np.random.default_rng(seed).integers(-99, 99, size=(whole.mesh.n_chips, whole.total_chunks))
        total = np.broadcast_to(payload.sum(axis=0), payload.shape)
        for form in (whole, whole.expanded()):
            assert np.array_equal(mmn.run(form, payload), total), seed
        assert np.array_equal(replay(lower(whole), payload), total), seed
        if seed % 40 == 0:
            fabric = cases.fabric_for(whole.mesh)
            for form in (whole, whole.expanded()):
                program = mmj.install(form, fabric)
                got = cases.on_chips(fabric, mmj.all_reduce, payload.astype(np.int32), program)
                assert np.array_equal(got, total), (seed, form)
            n_run += 1
    assert n_run > 1


def test_tables_do_not_grow_with_the_repeats() -> None:
    mesh = mm.Mesh("4x4", failed=["1,1"])
    few, many = (lower(Weave(chunks=8 * n, trees=8, budget_s=0.1).plan(mesh)) for n in (2, 2000))
    for one, other in zip(few.loops, many.loops, strict=True):
        assert np.array_equal(one.send, other.send)
        assert np.array_equal(one.ops, other.ops)
        assert one.lanes == other.lanes
    assert few.shape.repeat is not None
    assert few.loops[0].n_steps == few.shape.repeat.period
    assert few.shape != many.shape


def test_a_sharded_update_finds_its_chunks() -> None:
    fabric = cases.fabric_of("trees 4x4")
    schedule = mm.plan(fabric.mesh, Weave(chunks=48, trees=6, budget_s=0.1))
    pair = mmj.install(schedule, fabric, update="two-phase")
    values = np.random.default_rng(1).integers(-99, 99, size=(16, 100)).astype(np.int32)

    def through_shards(x: jax.Array, pair: mmj.Program) -> jax.Array:
        shards = mmj.reduce_scatter(x, pair)
        return jnp.asarray(mmj.all_gather(shards, pair, like=x))

    got = cases.on_chips(fabric, through_shards, values, pair)
    assert (np.asarray(got) == values.sum(axis=0)).all()
