"""Scalars take the plan with the fewest steps in every kind of program, and never a second run of the long one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshmend as mm
import meshmend.jax as mmj
from jax_engine import cases
from meshmend.errors import ParameterError, ScheduleError
from meshmend.jax.checks.digests import replica_digests
from meshmend.jax.engine.program import UPDATES, Update, abstract_program
from meshmend.schedule.split import all_gather_of, reduce_scatter_of

CHUNKS = 48


@cache
def holed() -> mmj.Fabric:
    return mmj.discover(jax.devices()[:16], shape="4x4", failed=["2x2@0,0"])


@cache
def long_plan() -> mm.Schedule:
    return mm.plan(holed().mesh, "weave", chunks=CHUNKS, collective="all-reduce-with-update")


@cache
def short_plan() -> mm.Schedule:
    return mm.plan(holed().mesh, "latency")


@cache
def program_of(update: Update = "replicated", *, planned: bool = True) -> Any:
    return mmj.install(long_plan(), holed(), update=update, scalars=short_plan() if planned else None)


def steps_of_chunk(schedule: mm.Schedule, chunk: int) -> int:
    """Steps that move a chunk, from the list of transfers."""
    moves = zip(schedule.step, schedule.first_chunk, schedule.n_chunks, strict=True)
    return len({int(step) for step, first, count in moves if first <= chunk < first + count})


def lanes_of(*programs: mmj.Program | None) -> int:
    """Permutes in the code of these programs, each run once."""
    return sum(len(lanes) for program in programs if program for lanes in program.layout.shape.lanes)


def loops_of(*programs: mmj.Program) -> int:
    return sum(len(program.tables) for program in programs)


def count(function: Any, *arguments: Any, **keywords: Any) -> tuple[int, int]:
    """Loops and permutes in the code of a function, before anything is optimised."""
    text = jax.jit(function).lower(*arguments, **keywords).as_text()
    return text.count("stablehlo.while"), text.count("stablehlo.collective_permute")


@pytest.mark.parametrize("update", UPDATES)
def test_all_kinds_of_programs_have_a_program_for_scalars_of_the_same_few_steps(update: Update) -> None:
    schedule = long_plan()
    fewest = min(steps_of_chunk(schedule, chunk) for chunk in range(CHUNKS))
    assert short_plan().n_steps < fewest < schedule.n_steps / 2, "otherwise there is nothing to be seen here"
    for install in (mmj.install, abstract_program):
        for plan, n_steps in ((None, fewest), (short_plan(), short_plan().n_steps)):
            scalars = install(schedule, holed(), update=update, scalars=plan).scalars
            assert scalars is not None
            assert scalars.n_steps == n_steps
            assert scalars.collective is mm.Collective.ALL_REDUCE
            assert scalars.scalars is None


def test_a_plan_without_an_update_gives_the_same_program_for_scalars() -> None:
    plain = mm.plan(holed().mesh, "hamiltonian")
    assert len({mmj.install(plain, holed(), update=update).for_scalars.n_steps for update in UPDATES}) == 1


def test_halves_need_no_whole_where_there_is_a_plan_for_scalars() -> None:
    fabric = holed()
    scatter, gather = reduce_scatter_of(long_plan()), all_gather_of(long_plan())
    pair = mmj.install(None, fabric, scatter=scatter, gather=gather, scalars=short_plan(), update="two-phase")
    assert pair.for_scalars.n_steps == short_plan().n_steps
    with pytest.raises(ParameterError, match=r"no plan for the few numbers .* as in scalars=mm\.plan\(fabric\.mesh"):
        mmj.install(None, fabric, scatter=scatter, gather=gather, update="two-phase")
    with pytest.raises(ParameterError, match=r"Expected a Schedule, .* got a NoneType"):
        mmj.install(None, fabric, scalars=short_plan(), update="two-phase")
    with pytest.raises(ParameterError, match="Scalars go with an all-reduce, got them with a schedule for all-gather"):
        mmj.install(gather, fabric, scalars=short_plan())
    for update in UPDATES:
        with pytest.raises(ParameterError, match="Expected an all-reduce as scalars, got a schedule for all-gather"):
            mmj.install(long_plan(), fabric, update=update, scalars=gather)
        with pytest.raises(ScheduleError, match=r"The schedule is for .* Plan for fabric\.mesh"):
            mmj.install(long_plan(), fabric, update=update, scalars=mm.plan(mm.Mesh("4x4"), "latency"))


def test_the_bits_of_what_takes_the_plan_do_not_depend_on_scalars() -> None:
    program = program_of()
    rng = np.random.default_rng(1)
    many, loss = rng.normal(size=(12, 5, CHUNKS)).astype(jnp.bfloat16), rng.normal(size=12).astype(np.float32)
    alone = cases.on_chips(holed(), mmj.all_reduce, many, replace(program, scalars=None))
    together, total = cases.on_chips(holed(), mmj.all_reduce, (many, loss), program)
    assert np.asarray(alone).tobytes() == np.asarray(together).tobytes()
    np.testing.assert_allclose(total, np.full(12, loss.astype(np.float64).sum()), atol=12 * 2e-7 * np.abs(loss).sum())


def test_less_than_an_element_per_chunk_takes_the_program_for_scalars() -> None:
    program, sums = program_of(), cases.mapped(holed())
    few, many = np.zeros(12 * (CHUNKS - 1), np.float32), np.zeros(12 * CHUNKS, np.float32)
    scalars = (loops_of(program.scalars), lanes_of(program.scalars))
    whole = (loops_of(program), lanes_of(program))
    assert scalars != whole
    assert count(sums, few, program) == scalars
    assert count(sums, many, program) == whole
    assert count(sums, (few, np.zeros(12, np.float32)), program) == whole, "leaves of a dtype travel together"
    assert count(sums, few, replace(program, scalars=None)) == whole
    assert count(sums, few, program.scalars) == scalars


def test_two_cores_per_chip_count_their_elements_together() -> None:
    fabric = cases.two_cores()
    program = mmj.install(mm.plan(fabric.mesh, "weave", chunks=8), fabric)
    assert lanes_of(program) != lanes_of(program.scalars)
    every = P(("chip", "core"))
    mapped = cases.mapped(fabric, in_specs=(every, program.spec), out_specs=every)
    for size, way in ((1, program.scalars), (15, program.scalars), (16, program)):
        values = np.random.default_rng(size).integers(-99, 99, (8, size), dtype=np.int32)
        assert count(mapped, values, program)[1] == lanes_of(way)
        np.testing.assert_array_equal(jax.jit(mapped)(values, program), np.tile(values.sum(axis=0), (8, 1)))


def errors(params: Any, batch: Any) -> Any:
    """One float32 value per example, a whole number, of bfloat16 weights."""
    return jnp.sum((batch["x"] @ params["w"].astype(jnp.float32) - batch["y"]) ** 2, axis=-1)


def mean_error(params: Any, batch: Any) -> Any:
    return jnp.mean(errors(params, batch))


def whole_numbers(n_examples: int = 24) -> Any:
    rng = np.random.default_rng(2)
    params = {"w": jnp.asarray(rng.integers(-1, 2, (8, 8)), jnp.bfloat16)}
    x, y = (rng.integers(-1, 2, (n_examples, 8)).astype(np.float32) for _ in range(2))
    return params, {"x": x, "y": y}


@pytest.mark.parametrize("per_example", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_float32_loss_beside_bfloat16_gradients_does_not_run_the_plan_twice(per_example: bool) -> None:
    fabric, program, (params, batch) = holed(), program_of(), whole_numbers()
    assert params["w"].size >= CHUNKS
    loss = errors if per_example else mean_error
    ways = {None: (program, program.scalars), jnp.float32: (program,)}
    for accumulate_dtype, runs in ways.items():
        training = mmj.train_step(
            loss, optax.sgd(1e-2), fabric, per_example=per_example, accumulate_dtype=accumulate_dtype
        )
        state = jax.jit(training.init)(params, program)
        assert count(training.step, params, state, batch, program) == (loops_of(*runs), lanes_of(*runs))
        if accumulate_dtype is None:
            step = jax.jit(training.step)
            new, _, value = step(params, state, batch, program)
            before, _, _ = step(params, state, batch, replace(program, scalars=None))
            assert np.asarray(new["w"]).tobytes() == np.asarray(before["w"]).tobytes(), "the gradients' bits"
            np.testing.assert_allclose(float(value), np.asarray(errors(params, batch), np.float64).mean(), rtol=1e-6)


def test_weights_of_examples_beside_bfloat16_gradients_are_summed_as_scalars() -> None:
    fabric, program, (params, batch) = holed(), program_of(planned=False), whole_numbers()
    weights = np.arange(24) % 3
    training = mmj.train_step(errors, optax.sgd(1e-2), fabric, per_example=True, accumulate_dtype=None)
    state = jax.jit(training.init)(params, program)
    runs = (program, program.scalars)
    found = count(training.step, params, state, batch, program, weights=weights)
    assert found == (loops_of(*runs), lanes_of(*runs)), "the loss and the weights travel together"
    value = jax.jit(training.step)(params, state, batch, program, weights=weights)[2]
    each = np.asarray(errors(params, batch), np.float64)
    np.testing.assert_allclose(float(value), (each * weights).sum() / weights.sum(), rtol=1e-6)


def test_norms_of_a_sharded_update_take_the_program_for_scalars() -> None:
    """The loss is one run of it, the norms another; of the long plan there are its halves, or its one way, only."""
    fabric, (params, batch) = holed(), whole_numbers()
    clipped = optax.chain(mmj.clip_by_global_norm(1.0), optax.adam(1e-2))
    pair, fused = program_of("two-phase"), program_of("fused")
    halves = (pair, pair.gather)
    for optimizer, program, runs in (
        (optax.adam(1e-2), pair, (*halves, pair.scalars)),
        (clipped, pair, (*halves, pair.scalars, pair.scalars)),
        (mmj.lamb(1e-2), pair, (*halves, pair.scalars, pair.scalars)),
        (optax.adam(1e-2), fused, (fused, fused.scalars)),
        # Where the norm is over its limit, it is summed once more with what goes down again.
        (clipped, fused, (fused, fused.scalars, fused.scalars, fused, fused.scalars)),
    ):
        training = mmj.train_step(mean_error, optimizer, fabric)
        state = jax.eval_shape(training.init, params, program)
        assert count(training.step, params, state, batch, program)[1] == lanes_of(*runs)


def test_clipping_by_plans_for_scalars_equals_one_device() -> None:
    fabric, (params, batch) = holed(), whole_numbers()
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    optimizer = optax.chain(mmj.clip_by_global_norm(1.0), optax.sgd(1e-2))
    gradients = jax.grad(mean_error)(params, batch)
    assert optax.tree.norm(gradients) > 1
    wanted = params["w"] - 1e-2 * gradients["w"] / optax.tree.norm(gradients)
    for kind in UPDATES:
        training, program = mmj.train_step(mean_error, optimizer, fabric), program_of(kind)
        new, _, value = jax.jit(training.step)(params, jax.jit(training.init)(params, program), batch, program)
        np.testing.assert_allclose(new["w"], wanted, atol=1e-6)
        np.testing.assert_allclose(float(value), np.asarray(errors(params, batch), np.float64).mean(), rtol=1e-6)


def test_sharded_parameters_sum_loss_and_norm_by_the_program_for_scalars() -> None:
    fabric, pair, (whole, batch) = holed(), program_of("two-phase"), whole_numbers()
    params = mmj.fsdp.shard_params(whole, fabric, pair)

    def loss(params: Any, batch: Any, pair: mmj.Program) -> Any:
        return errors(mmj.fsdp.gather_params(params, pair), batch)

    optimizer = optax.chain(mmj.clip_by_global_norm(1.0), optax.adam(1e-2))
    training = mmj.fsdp.sharded_train_step(loss, optimizer, fabric, per_example=True)
    state = jax.eval_shape(training.init, params, pair)
    found = count(training.step, params, state, batch, pair)[1]
    assert found == lanes_of(pair.gather, pair, pair.scalars, pair.scalars)


def test_tiles_do_not_run_the_plan_twice_either() -> None:
    fabric = mmj.tile(mmj.discover(jax.devices()[:16], shape="4x4", failed=["0,1"]), "2x2", model=4)
    program = mmj.install(mm.plan(fabric.mesh, "weave", chunks=16), fabric)
    params, batch = whole_numbers(6)
    step = mmj.value_and_grad(mean_error, fabric, P(None, "model"), accumulate_dtype=None)
    text = jax.jit(partial(step, program=program)).lower(params, batch).as_text()
    assert text.count("stablehlo.collective_permute") == lanes_of(program, program.scalars)


@pytest.mark.parametrize("kind", UPDATES)
def test_digests_of_replicas_take_the_program_for_scalars(kind: Update) -> None:
    fabric, program, (params, _) = holed(), program_of(kind), whole_numbers()
    digests = partial(replica_digests, fabric=fabric)
    assert count(digests, params, program)[1] == lanes_of(program.scalars)
    found = np.asarray(jax.jit(digests)(params, program))
    assert found.shape == (1, 12, 1)
    assert len(set(found.ravel().tolist())) == 1
    assert found.any()
    assert (found == np.asarray(jax.jit(digests)(params, program.scalars))).all()
