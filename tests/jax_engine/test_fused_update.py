"""A sharded update within one all-reduce, against the same in two phases and against NumPy."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.typing import NDArray

import meshmend as mm
import meshmend.jax as mmj
import meshmend.numpy as mmn
from jax_engine.restart_cases import vectors_of
from jax_engine.training_cases import INSTALLED, check_copies, chips_of, matrices, run
from meshmend.errors import ParameterError
from meshmend.jax.engine.update_tables import update_tables
from meshmend.jax.state.layout.state_layout import StateLayout
from meshmend.schedule.fused_update import update_windows, with_update
from meshmend.schedule.lanes import lower
from meshmend.schedule.split import reduce_scatter_of, single_chunk_of
from rows import others_slow

EIGHT = ("3x3", "1,1")
TWELVE = ("4x4", "2x2@0,2")
SIXTY = ("8x8", "2x2@2,2")
MEANS = [(3, -2, 1), (1024, 256, -64), (-5, 4, 2), (7, 0, -3)]
"""What the examples' three columns are on average, step by step: the gradients of the second step are large."""
LIMIT = 128.0
"""Of the gradients' norm, which is a sixty-fourth of the second step's if the last two columns are zero."""

Params = dict[str, jax.Array]


@cache
def plan_of(where: tuple[str, str], planner: str, **more: Any) -> mm.Schedule:
    return mm.plan(chips_of(*where).mesh, planner, collective="all-reduce-with-update", **more)


def make_params() -> Params:
    rng = np.random.default_rng(0)
    shapes = {"w": (9, 11), "b": (7,), "scale": (), "none": (0, 3)}
    return {name: jnp.asarray(rng.integers(-8, 9, shape), jnp.float32) for name, shape in shapes.items()}


def batches(n_devices: int, columns: int = 3) -> list[NDArray[np.float32]]:
    """Whole numbers with exactly these means, however differently spread over the devices."""
    rng = np.random.default_rng(1)
    found = []
    for means in MEANS:
        batch = rng.integers(-4, 5, (2 * n_devices, 3))
        batch[-1] += np.array(means) * len(batch) - batch.sum(axis=0)
        batch[:, columns:] = 0
        found.append(batch.astype(np.float32))
    return found


def losses_of(params: Any, batch: Any) -> Any:
    """Linear in each weight: 64 of `w` count as much as the first column, `b` as the second, `scale` as the third."""
    counts = (np.arange(99) < 64).reshape(9, 11)
    wide = {name: leaf.astype(jnp.float32) for name, leaf in params.items()}
    return batch @ jnp.stack([jnp.sum(wide["w"] * counts), jnp.sum(wide["b"]), wide["scale"]])


def loss(params: Any, batch: Any) -> Any:
    return jnp.mean(losses_of(params, batch))


def trained(
    fabric: mmj.Fabric, optimizer: Any, program: Any, params: Any, *, loss: Any = loss, columns: int = 3, **more: Any
) -> tuple[Any, Any]:
    """Return the final parameters and state as a checkpoint has them, without padding; and what each step returned."""
    training = mmj.train_step(loss, optimizer, fabric, **more)
    given = batches(int(fabric.jax_mesh.size), columns)
    weights = {"weights": np.arange(len(given[0])) % 3} if more.get("has_aux") else {}
    found = run(training, params, given, program, scale=0.5, **weights)
    check_copies(found.params)
    layout = StateLayout.of(training, program, params)
    layout.check(found.params, found.state)
    return vectors_of(layout, (found.params, found.state)), (found.losses, found.aux)


def check_same(got: Any, wanted: Any, tolerance: float) -> None:
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        ours, theirs = (np.asarray(x) for x in (a, b))
        assert ours.dtype == theirs.dtype
        ours, theirs = (x.astype(np.float64) for x in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, tolerance, tolerance, err_msg=jax.tree_util.keystr(path))


def check_as_two_phases(
    fabric: mmj.Fabric, schedule: mm.Schedule, optimizer: Any, tolerance: float, params: Any = None, **more: Any
) -> None:
    params = make_params() if params is None else params
    programs = [mmj.install(schedule, fabric, update=INSTALLED[kind]) for kind in ("fused", "sharded")]
    got, wanted = (trained(fabric, optimizer, program, params, **more) for program in programs)
    check_same(got[0], wanted[0], tolerance)
    check_same(got[1], wanted[1], 1e-6)  # losses are added up along another way, and are no whole numbers


OPTIMIZERS = {
    "momentum": (optax.sgd(0.5, momentum=0.5), 0.0),
    "adamw, a mask": (
        optax.chain(optax.scale_by_adam(), mmj.add_decayed_weights(0.1, matrices), optax.scale_by_learning_rate(1e-2)),
        1e-6,
    ),
    "adamw, clipped": (optax.chain(mmj.clip_by_global_norm(LIMIT), optax.adamw(1e-2)), 1e-6),
}


@pytest.mark.parametrize("name", others_slow(["momentum", "adamw, a mask", "adamw, clipped"], quick=["adamw, clipped"]))
def test_the_fused_update_gives_what_two_phases_give(name: str) -> None:
    check_as_two_phases(chips_of(*EIGHT), plan_of(EIGHT, "weave", chunks=19), *OPTIMIZERS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_60_of_64_chips(name: str) -> None:
    """To the bit where sums are divided by their number of examples: a division by a constant 60 is no division."""
    check_as_two_phases(
        chips_of(*SIXTY), plan_of(SIXTY, "weave", chunks=120), *OPTIMIZERS[name], loss=losses_of, per_example=True
    )


@pytest.mark.slow
@pytest.mark.parametrize(("where", "planner"), [(TWELVE, "hamiltonian"), (TWELVE, "row-pairs"), (TWELVE, "weave")])
def test_with_any_planner(where: tuple[str, str], planner: str) -> None:
    """Rings complete several chunks of a chip in one step, and beside a hole row-pairs leaves chips without any."""
    check_as_two_phases(chips_of(*where), plan_of(where, planner), *OPTIMIZERS["adamw, clipped"])


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "n_cores"), [("1x2", 2), ("1x1", 1)])
def test_two_cores_per_chip_and_a_chip_by_itself(shape: str, n_cores: int) -> None:
    """Each core has its part of the payload, and its own shard; a single chip has all sums without a transfer."""
    mesh = mm.Mesh(shape)
    devices = np.array(jax.devices()[: mesh.n_chips * n_cores]).reshape(mesh.n_chips, n_cores)
    if n_cores == 1:
        fabric = mmj.discover(list(devices.ravel()), shape=shape)
    else:
        fabric = mmj.Fabric(mesh, jax.sharding.Mesh(devices, ("chip", "core")), None)
    schedule = mm.plan(mesh, "weave", chunks=4, collective="all-reduce-with-update")
    check_as_two_phases(fabric, schedule, *OPTIMIZERS["adamw, clipped"])


def test_clipping_on_the_way_is_clipping_first() -> None:
    """In NumPy, to the bit: the one factor that is not 1 is a sixty-fourth."""
    fabric, params = chips_of(*EIGHT), make_params()
    optimizer = optax.chain(mmj.clip_by_global_norm(LIMIT), optax.sgd(0.5))
    program = mmj.install(plan_of(EIGHT, "weave", chunks=19), fabric, update="fused")
    found, _ = trained(fabric, optimizer, program, params, columns=1)
    firsts = [first for first, *_ in MEANS]
    norms = [8.0 * abs(first) for first in firsts]
    assert [norm > LIMIT for norm in norms] == [False, True, False, False], "steps that are clipped, and that are not"
    change = sum(first * min(1.0, LIMIT / norm) for first, norm in zip(firsts, norms, strict=True))
    w = np.asarray(params["w"]) - 0.25 * change * (np.arange(99) < 64).reshape(9, 11)
    expected = jax.tree.leaves({**params, "w": w})
    assert np.array_equal(found["replicated float32"], np.concatenate([np.ravel(leaf) for leaf in expected]))


def test_everything_a_train_step_does_in_repeats_of_a_short_plan() -> None:
    """Weights of examples, aux, microbatches, a scale; and two dtypes, of which one is sent wider than it is."""

    def with_aux(params: Any, batch: Any) -> Any:
        values = losses_of(params, batch)
        return values, {"positive": values > 0}

    short = plan_of(EIGHT, "weave", chunks=8)
    schedule = short.repeated(3, period=short.n_steps // 2)
    params = make_params()
    params["b"] = params["b"].astype(jnp.bfloat16)
    more = {"loss": with_aux, "has_aux": True, "microbatches": 2, "per_example": True}
    check_as_two_phases(chips_of(*EIGHT), schedule, optax.adam(1e-2), 1e-6, params, **more)


@pytest.mark.slow
def test_weights_are_sent_down_in_their_own_dtype_where_sums_are_over() -> None:
    """A ring goes up first and down afterwards: there bfloat16 weights travel as such, and in float32 up."""
    schedule, fabric = plan_of(TWELVE, "hamiltonian"), chips_of(*TWELVE)
    params = {name: leaf.astype(jnp.bfloat16) for name, leaf in make_params().items()}
    check_as_two_phases(chips_of(*TWELVE), schedule, optax.adam(1e-2), 0.0, params)
    training, program = mmj.train_step(loss, optax.adam(1e-2), fabric), mmj.install(schedule, fabric, update="fused")
    state = jax.eval_shape(training.init, params, program)
    text = jax.jit(training.step).lower(params, state, batches(12)[0], program).as_text()
    chunk = -(-sum(leaf.size for leaf in params.values()) // schedule.total_chunks)
    sent = [line for line in text.splitlines() if "collective_permute" in line and f"<1x{chunk}x" in line]
    assert {line.count(f"<1x{chunk}xbf16>") for line in sent} == {0, 2}


@pytest.mark.parametrize("repeats", [1, 4])
@pytest.mark.parametrize(("where", "planner"), [(EIGHT, "weave"), (TWELVE, "row-pairs"), (SIXTY, "weave")])
def test_each_chunk_has_one_update_at_its_owner_while_it_may(
    where: tuple[str, str], planner: str, repeats: int
) -> None:
    template = plan_of(where, planner)
    schedule = template.repeated(repeats, period=template.n_steps // 3)
    lowered = lower(schedule)
    tables = np.concatenate([np.pad(table, [(0, 0), (0, 0), (0, 3)], constant_values=-(2**31))[:, :, :3]
                             for table in update_tables(schedule, lowered)], axis=1)  # fmt: skip
    first, last = update_windows(template)
    period = schedule.period or template.n_steps
    found = []
    for now in range(schedule.n_steps):
        at = tables[:, now % period].astype(np.int64) + now // period * template.total_chunks
        for chip, place in np.argwhere((at >= 0) & (at < schedule.total_chunks)):
            repeat, chunk = divmod(int(at[chip, place]), template.total_chunks)
            assert chip == template.owners[chunk]
            assert first[chunk] <= now - repeat * schedule.period <= last[chunk]
            found.append(int(at[chip, place]))
        # The engine updates what lies between those that are over and those that are still to come.
        over, open_ = at >= schedule.total_chunks, at < 0
        assert not np.any(over[:, 1:] & ~over[:, :-1])
        assert not np.any(open_[:, :-1] & ~open_[:, 1:])
    assert sorted(found) == list(range(schedule.total_chunks))


def test_windows_are_from_the_last_sum_to_the_first_copy() -> None:
    schedule = plan_of(EIGHT, "weave", chunks=19)
    for chunk, (first, last) in enumerate(zip(*update_windows(schedule), strict=True)):
        mine = (schedule.first_chunk <= chunk) & (chunk < schedule.first_chunk + schedule.n_chunks)
        into = mine & (schedule.dst == schedule.owners[chunk]) & (schedule.op == 0)
        assert first == schedule.step[into].max()
        assert last == schedule.step[mine & (schedule.src == schedule.owners[chunk])].min() - 1


@pytest.mark.parametrize(("planner", "fewest"), [("weave", 30), ("row-pairs", 60), ("hamiltonian", 118)])
def test_a_single_chunk_of_an_all_reduce_is_one(planner: str, fewest: int) -> None:
    whole = plan_of(SIXTY, planner)
    single = single_chunk_of(whole)
    payload = np.random.default_rng(0).integers(-99, 100, (60, 3))
    assert np.array_equal(mmn.run(single, payload), np.broadcast_to(payload.sum(axis=0), payload.shape))
    assert single.n_steps <= min(fewest, whole.n_steps)
    mm.verify(single)


def test_a_chip_keeps_its_share_of_the_state_only() -> None:
    fabric, schedule = chips_of(*SIXTY), plan_of(SIXTY, "weave", chunks=120)
    training = mmj.train_step(lambda w, batch: jnp.sum(w) * jnp.mean(batch), optax.adamw(1e-2), fabric)
    program = mmj.install(schedule, fabric, update="fused")
    weights = jnp.zeros(100_000)
    layout = StateLayout.of(training, program, weights)
    assert layout == StateLayout.of(training, mmj.install(schedule, fabric, update="two-phase"), weights)
    state = jax.jit(training.init)(weights, program)
    on_one = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    chunk = -(-100_000 // 120)
    assert on_one == 2 * 2 * chunk * 4 + 4, "two chunks of both moments, and the count of steps"
    assert on_one <= (8 * 100_000 + 4) * (1 / 60 + 0.001)


def test_what_does_not_go_with_an_update_is_refused() -> None:
    fabric, schedule = chips_of(*EIGHT), plan_of(EIGHT, "weave", chunks=19)
    program = mmj.install(schedule, fabric, update="fused")
    params = make_params()
    for optimizer, why in [
        (mmj.lamb(0.1), r"norms of layers.*LARS and LAMB.*update='two-phase'"),
        (mmj.lars(0.1), r"norms of layers.*LARS and LAMB.*update='two-phase'"),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), r"combines values.*mmj\.clip_by_global_norm"),
        (optax.adamw(0.1, mask=matrices), r"treats some layers differently"),
    ]:
        with pytest.raises(ParameterError, match=why):
            mmj.train_step(loss, optimizer, fabric).init(params, program)
    with pytest.raises(ParameterError, match=r"Expected an all-reduce, got a schedule of a reduce-scatter"):
        mmj.install(reduce_scatter_of(schedule), fabric, update="fused")
    with pytest.raises(ParameterError, match=r"for all-reduce-with-update, expected one for reduce-scatter"):
        mmj.reduce_scatter(params, program)
    plain = mm.plan(fabric.mesh, "weave", chunks=19, owners="even")
    assert mmj.install(plain, fabric, update="fused").layout == program.layout, "any all-reduce that can be updated"
    assert with_update(plain) == schedule
