"""What may be installed, and how a program must be passed: a wrong table would be a wrong sum on every chip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import meshmend as mm
import meshmend.jax as mmj
from jax_engine import cases
from meshmend.errors import ParameterError, ScheduleError, VerificationError
from meshmend.jax.engine.collectives import shard_of
from meshmend.jax.engine.program import UPDATES, Update, abstract_program
from meshmend.planning import Weave
from meshmend.schedule import Op

HOLED = "row-pairs 4x4 - 2x2"


def corrupted(schedule: mm.Schedule) -> mm.Schedule:
    """The same with one reduction made a copy: an addend is lost."""
    op = schedule.op.copy()
    op[3] = Op.COPY
    assert op[3] != schedule.op[3]
    return mm.Schedule(
        schedule.mesh, total_chunks=schedule.total_chunks, step=schedule.step, src=schedule.src, dst=schedule.dst,
        first_chunk=schedule.first_chunk, n_chunks=schedule.n_chunks, op=op, owners=schedule.owners,
    )  # fmt: skip


def fabric_without_proofs(**facts: Any) -> mmj.Fabric:
    return mmj.discover(jax.devices()[:16], shape="4x4", **facts)


def test_a_schedule_that_is_not_an_all_reduce_is_refused_by_everything_that_installs() -> None:
    fabric = fabric_without_proofs()
    bad = corrupted(mm.plan(fabric.mesh, "hamiltonian", verify=False))
    both: list[Update] = ["replicated", "two-phase"]
    for install in (mmj.install, abstract_program):
        for update in both:
            with pytest.raises(VerificationError, match=r"expected the contribution of .* once, got it not at all"):
                install(bad, fabric, update=update)


def test_a_schedule_that_was_not_proven_is_proven_on_the_way() -> None:
    fabric = fabric_without_proofs()
    schedule = mm.plan(fabric.mesh, "hamiltonian", verify=False)
    assert not schedule.is_proven
    mmj.install(schedule, fabric)
    assert schedule.is_proven


@pytest.mark.parametrize("planner", ["row-pairs", "hamiltonian", "two-color", "weave"])
def test_a_plan_for_a_torus_does_not_fit_a_mesh_but_the_other_way_round_it_does(planner: str) -> None:
    plain, torus = (mm.plan(mm.Mesh("4x4", wrap=wrap), planner) for wrap in (False, True))
    for update in UPDATES:
        with pytest.raises(
            ScheduleError, match=r"8 cables that the fabric.* lacks: one joins \(0,0\) and \(0,3\).*wrap"
        ):
            mmj.install(torus, fabric_without_proofs(), update=update)
    mmj.install(torus, fabric_without_proofs(wrap=True))
    mmj.install(plain, fabric_without_proofs(wrap=True))


def test_a_plan_may_leave_cables_out_but_not_use_a_failed_one() -> None:
    whole, cut = mm.Mesh("4x4"), mm.Mesh("4x4", failed_cables=["1,1-1,2"])
    fabric = fabric_without_proofs()
    broken = mmj.Fabric(cut, fabric.jax_mesh, None)
    mmj.install(mm.plan(cut, "weave"), fabric)
    with pytest.raises(ScheduleError, match=r"1 cables .* joins \(1,1\) and \(1,2\)"):
        mmj.install(mm.plan(whole, "weave"), broken)


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_program_that_is_not_split_by_chip_is_refused(check_vma: bool) -> None:
    """With `PartitionSpec()` every chip would read the first chip's table, and every sum would be wrong."""
    fabric, schedule = cases.fabric_of(HOLED), cases.schedule_of(HOLED)
    program, pair = mmj.install(schedule, fabric), mmj.install(schedule, fabric, update="two-phase")
    x = jnp.ones((12, 4))

    def mapped(function: Any, spec: PartitionSpec) -> Any:
        return cases.mapped(fabric, function, in_specs=(cases.BY_CHIP, spec), check_vma=check_vma)

    uses = {
        "all_reduce": (mmj.all_reduce, program),
        "reduce_scatter": (lambda a, h: mmj.reduce_scatter(a, h)[0], pair),
        "shard_of": (lambda a, h: shard_of(a, h)[0], pair),
        "all_gather": (lambda a, h: mmj.all_gather((a.reshape(-1, 1),), h, like=a), pair),
    }
    for function, tables in uses.values():
        with pytest.raises(ParameterError, match=r"received 12 rows .* expected its own row only.*program\.spec"):
            jax.jit(mapped(function, PartitionSpec()))(x, tables)
    assert (np.asarray(jax.jit(mapped(mmj.all_reduce, program.spec))(x, program)) == 12).all()
    with pytest.raises(ParameterError, match="not closed over"):
        jax.jit(mapped(lambda a, _: mmj.all_reduce(a, program), PartitionSpec()))(x, ())
    with pytest.raises(ParameterError, match=r"Call this inside jax\.shard_map"):
        mmj.all_reduce(x, program)


def test_gradients_that_jax_has_summed_over_the_cores_are_refused() -> None:
    """With check_vma=True and weights that vary over "chip" only, JAX adds up the cores and so would meshmend."""
    fabric = cases.two_cores()
    program = mmj.install(mm.plan(fabric.mesh, "hamiltonian"), fabric)
    every = PartitionSpec(("chip", "core"))

    def gradients(axes: tuple[str, ...]) -> Any:
        def local(w: Any, x: Any, program: mmj.Program) -> Any:
            w = jax.lax.pcast(w, axes, to="varying")
            return mmj.all_reduce(jax.grad(lambda w: jnp.sum(x @ w))(w), program)

        specs = (PartitionSpec(), every, program.spec)
        mapped = cases.mapped(fabric, local, in_specs=specs, out_specs=every, check_vma=True)
        return jax.jit(mapped)(jnp.ones(3), jnp.ones((8, 3)), program)

    assert (np.asarray(gradients(("chip", "core"))) == 8).all()
    with pytest.raises(ParameterError, match=r"the same along core, so .* would count it 2 times.*check_vma=False"):
        gradients(("chip",))


def test_a_schedule_or_the_other_kind_of_program_is_no_program() -> None:
    fabric, schedule = cases.fabric_of(HOLED), cases.schedule_of(HOLED)
    with pytest.raises(
        ParameterError, match=r"Expected a Program for all-reduce, got a Schedule.*mmj\.install\(schedule"
    ):
        mmj.all_reduce(jnp.ones(3), schedule)  # type: ignore[arg-type]
    with pytest.raises(
        ParameterError,
        match=r"is for all-reduce, expected one for reduce-scatter.*install\(schedule, fabric, update='two-phase'\)",
    ):
        mmj.reduce_scatter(jnp.ones(3), mmj.install(schedule, fabric))
    with pytest.raises(
        ParameterError, match=r"Expected a Schedule, as meshmend\.plan\(fabric\.mesh\) makes, got a Mesh"
    ):
        mmj.install(fabric.mesh, fabric)  # type: ignore[arg-type]
    init, step = mmj.train_step(lambda w, b: jnp.mean(b * w), optax.sgd(0.1), fabric)
    w = jnp.ones(())
    calls: list[Callable[[], Any]] = [lambda: init(w, schedule), lambda: step(w, (), jnp.ones(12), schedule)]
    for call in calls:
        with pytest.raises(
            ParameterError,
            match=r"Expected a Program, got a Schedule.*mmj\.install",
        ):
            call()


def test_a_plan_that_leaves_the_chunks_to_a_few_owners_is_no_pair() -> None:
    fabric = cases.fabric_of("trees 4x4")
    few = mm.plan(fabric.mesh, Weave(chunks=48, trees=2, budget_s=0.1))
    with pytest.raises(ParameterError, match=r"One of 16 chips owns \d+ of 48 chunks .* Plan with owners='even'\."):
        mmj.install(few, fabric, update="two-phase")
    even = mm.plan(fabric.mesh, "weave", chunks=48, owners="even")
    assert mmj.install(even, fabric, update="two-phase").n_chips == 16


def test_other_ways_to_update_are_refused() -> None:
    fabric, schedule = cases.fabric_of(HOLED), cases.schedule_of(HOLED)
    with pytest.raises(
        ParameterError, match="update is 'sharded', expected one of: 'replicated', 'fused', 'two-phase'"
    ):
        mmj.install(schedule, fabric, update="sharded")  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match=r"scatter and gather go with update='two-phase', got them with .*'fused'"):
        mmj.install(schedule, fabric, update="fused", scatter=schedule)
