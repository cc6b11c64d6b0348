"""Train steps whose sums are checked: the same bits as without, every injected fault named, and what is refused."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshmend as mm
import meshmend.jax as mmj
from meshmend.errors import ParameterError
from meshmend.jax import training
from meshmend.jax.checks.checksums import ADDITION, KINDS, MEMORY, TRANSFER, Fault
from meshmend.jax.compiling import compile_train_step
from meshmend.jax.managed.model import SHARDED_FROM_BYTES, Model

STEPS = 3


@cache
def four_chips() -> tuple[mmj.Fabric, mmj.Program]:
    """Return few chips, because checked steps take long to compile: `test_checksums` has the other plans."""
    fabric = mmj.discover(jax.devices()[:4], shape="2x2")
    return fabric, mmj.install(mm.plan(fabric.mesh, "hamiltonian"), fabric)


def make_params() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "w": jnp.asarray(rng.normal(size=(5, 17)), jnp.bfloat16),
        "out": jnp.asarray(rng.normal(size=(17, 3)), jnp.float32),
    }


def batches(n_devices: int) -> list[Any]:
    rng = np.random.default_rng(1)
    return [
        (rng.normal(size=(4 * n_devices, 5)).astype(np.float32), rng.normal(size=(4 * n_devices, 3)).astype(np.float32))
        for _ in range(STEPS)
    ]


def errors(params: Any, batch: Any) -> Any:
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"].astype(jnp.float32)) @ params["out"] - y) ** 2, axis=1)


def with_aux(params: Any, batch: Any) -> Any:
    values = errors(params, batch)
    return values, {"large": values > 1}


def n_rows(program: mmj.Program) -> int:
    """Rows of evidence: one per lane and one for the end, of the program and of that for scalars."""
    assert program.scalars is not None
    return sum(sum(map(len, way.layout.shape.lanes)) + 1 for way in (program, program.scalars))


def mean(loss: Any) -> Any:
    return lambda params, batch: jax.tree.map(jnp.mean, loss(params, batch))


def train(training: mmj.TrainStep, program: mmj.Program) -> tuple[Any, list[Any]]:
    """Return parameters and state at the end, and what each step returned besides."""
    params = make_params()
    state = jax.jit(training.init)(params, program)
    step, results = jax.jit(training.step), []
    for batch in batches(training.fabric.jax_mesh.devices.size):
        params, state, *more = step(params, state, batch, program)
        results.append(more)
    return (params, state), results


def check_same_bits(got: Any, wanted: Any) -> None:
    same = jax.tree.map(lambda one, other: np.asarray(one).tobytes() == np.asarray(other).tobytes(), got, wanted)
    assert all(jax.tree.leaves(same)), same


FORMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mean, aux, microbatches": (mean(with_aux), {"has_aux": True, "microbatches": 2}),
    "per example": (errors, {"per_example": True}),
}


@pytest.mark.parametrize("form", FORMS)
def test_checked_sums_give_the_same_bits_and_no_evidence(form: str) -> None:
    fabric, program = four_chips()
    loss, options = FORMS[form]
    wanted, plain = train(mmj.train_step(loss, optax.adam(0.1), fabric, **options), program)
    got, results = train(mmj.train_step(loss, optax.adam(0.1), fabric, check_sums=True, **options), program)
    check_same_bits(got, wanted)
    for more, (*checked, evidence) in zip(plain, results, strict=True):
        check_same_bits(checked, more)
        assert evidence.shape == (4, n_rows(program), len(KINDS))
        assert evidence.sharding.is_equivalent_to(fabric.sharding("chip"), 3)
        assert mmj.bad_sums(evidence, program, fabric) == []


def test_two_cores_per_chip_have_a_row_each() -> None:
    fabric = mmj.discover(jax.devices()[:4], shape="1x2", coords=[(0, i // 2) for i in range(4)])
    program = mmj.install(mm.plan(fabric.mesh, "two-color"), fabric)
    wanted, _ = train(mmj.train_step(mean(errors), optax.sgd(0.1), fabric), program)
    got, results = train(mmj.train_step(mean(errors), optax.sgd(0.1), fabric, check_sums=True), program)
    check_same_bits(got, wanted)
    evidence = np.array(results[0][-1])
    assert len(evidence) == 4
    assert mmj.bad_sums(evidence, program, fabric) == []
    evidence[3, -1, 0] = 3  # the second core of the second chip
    assert mmj.bad_sums(evidence, program, fabric) == [mmj.BadSum(MEMORY, ((0, 1),), 3)]


def test_faults_in_a_train_steps_sums_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric, program = four_chips()
    made = mmj.train_step(mean(errors), optax.sgd(0.1), fabric, check_sums=True)
    params, batch = make_params(), batches(4)[0]

    @jax.jit
    def evidence_of(fault: Fault) -> Any:
        def faulty(*given: Any, **how: Any) -> Any:
            return mmj.checked_all_reduce(*given, **how, fault=fault)

        monkeypatch.setattr(training, "checked_all_reduce", faulty)
        return made.step(params, made.init(params, program), batch, program)[-1]

    source, target = program.layout.shape.lanes[0][0].pairs[2]
    for kind, chips in ((MEMORY, (source,)), (TRANSFER, (source, target)), (ADDITION, (target,))):
        fault = Fault(*map(jnp.int32, (KINDS.index(kind), chips[-1], 0, 0, 0, 1, 29)))
        (found,) = mmj.bad_sums(evidence_of(fault), program, fabric)
        assert found == mmj.BadSum(kind, tuple(map(fabric.mesh.chip, chips)), 1)


def test_a_process_judges_the_rows_of_its_own_devices() -> None:
    fabric, program = four_chips()
    whole = np.zeros((4, n_rows(program), len(KINDS)), np.uint32)
    whole[1, -1, 0], whole[3, 0, 2] = 2, 1
    evidence = jax.device_put(whole, fabric.sharding("chip"))
    bad = {1: mmj.BadSum(MEMORY, (fabric.mesh.chip(1),), 2), 3: mmj.BadSum(ADDITION, (fabric.mesh.chip(3),), 1)}
    assert mmj.bad_sums(evidence, program, fabric) == list(bad.values())
    shards = {shard.index[0].start: shard for shard in evidence.addressable_shards}
    for rows in ((0, 1), (2, 3), (0, 2), (1, 3)):
        seen = SimpleNamespace(shape=evidence.shape, addressable_shards=[shards[row] for row in rows])
        assert mmj.bad_sums(seen, program, fabric) == [bad[row] for row in rows if row in bad]
    # One copy per device: each is the same evidence, not more of it.
    assert mmj.bad_sums(jax.device_put(whole, fabric.sharding()), program, fabric) == list(bad.values())


def test_evidence_of_another_program_is_refused() -> None:
    fabric, program = four_chips()
    with pytest.raises(ParameterError, match=r"Expected evidence of shape .* got \(4, 99, 3\)"):
        mmj.bad_sums(np.zeros((4, 99, 3), np.uint32), program, fabric)


def test_a_model_with_state_returns_its_evidence_last_and_is_compiled_with_it() -> None:
    fabric, program = four_chips()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        values, aux = with_aux(params, batch)
        return values + state["seen"], ({"seen": state["seen"] + values}, aux)

    found = {}
    for check_sums in (False, True):
        model = Model(
            loss, optax.adam(0.1), make_params(), {"seen": np.float32(0)}, has_aux=True, check_sums=check_sums
        )
        feed = mmj.Feed(FeedOf(), mmj.KeepGlobal(10))
        batch = next(feed.batches(fabric))
        step = compile_train_step(model.training(fabric), program, model.params, batch)
        params = model.place(fabric, program)
        found[check_sums] = step.step(params, step.init(params), batch)
    *got, evidence = found[True]
    check_same_bits(got, list(found[False]))
    assert got[3].keys() == {"large"}
    assert mmj.bad_sums(evidence, program, fabric) == []


class FeedOf:
    """Ten samples: some chips' parts of a batch are padded."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> Any:
        return np.full(5, i, np.float32), np.ones(3, np.float32)


@pytest.mark.parametrize("install", [mmj.install_pair, mmj.install_turn])
def test_a_sharded_update_is_refused(install: Any) -> None:
    fabric, _ = four_chips()
    program = install(mm.plan(fabric.mesh, "weave", chunks=8, collective="all-reduce-with-turn"), fabric)
    step = mmj.train_step(mean(errors), optax.sgd(0.1), fabric, check_sums=True)
    why = r"replicated update .* mmj.install\(schedule, fabric\) .*check_sums"
    with pytest.raises(ParameterError, match=why):
        step.init(make_params(), program)
    with pytest.raises(ParameterError, match=why):
        step.step(make_params(), (), batches(4)[0], program)


def test_tiles_are_refused() -> None:
    fabric = mmj.tile(mmj.discover(jax.devices()[:16], shape="4x4"), "2x2", model=4)
    with pytest.raises(ParameterError, match=r"Sums over tiles are not checked yet.*Give check_sums=False"):
        mmj.train_step(mean(errors), optax.sgd(0.1), fabric, check_sums=True)


def test_models_whose_update_is_sharded_are_refused() -> None:
    large = {"w": jax.ShapeDtypeStruct((SHARDED_FROM_BYTES // 8,), jnp.float32)}
    model = Model(errors, optax.adam(0.1), large, check_sums=True)
    assert not model.is_sharded("replicated")
    for update, why in (("auto", "its state is large"), ("sharded", r"update='sharded'\. Use update='replicated'")):
        with pytest.raises(ParameterError, match=why):
            model.is_sharded(update)  # type: ignore[arg-type]
    assert not Model(errors, optax.adam(0.1), make_params(), check_sums=True).is_sharded("auto")
    fsdp = Model(errors, optax.adam(0.1), lambda fabric, pair: None, check_sums=True)
    with pytest.raises(ParameterError, match=r"update='fsdp'\. Use update='replicated', or check_sums=False"):
        fsdp.is_sharded("fsdp")
    with pytest.raises(ParameterError, match=r"update='fsdp'\. Use update='replicated', or check_sums=False"):
        fsdp.training(four_chips()[0])
