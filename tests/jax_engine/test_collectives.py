from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import meshmend as mm
import meshmend.jax as mmj
from jax_engine import cases
from meshmend.errors import ParameterError, ScheduleError
from meshmend.jax.engine.collectives import shard_of
from meshmend.planning import PLANNERS
from rows import others_slow

Tree = dict[str, Any]

QUICK = (
    "two-color, two run lengths",
    "row-pairs 4x4 - 2x2",
    "weave 3-D, a cable lost",
)
"""Rings, trees, and lanes of several lengths: each plan is three programs to compile."""


def payload(n_chips: int, n_chunks: int) -> Tree:
    """One row per chip, of every kind and of awkward sizes: none, one, fewer and more than there are chunks."""
    rng = np.random.default_rng(n_chips)
    return {
        "int32": rng.integers(-(2**20), 2**20, (n_chips, 3, n_chunks + 1), dtype=np.int32),
        "int8 that wraps": rng.integers(-128, 128, (n_chips, n_chunks + 2), dtype=np.int8),
        "uint16": rng.integers(0, 2**16, (n_chips, 2, 2, 2), dtype=np.uint16),
        "bool": rng.random((n_chips, 5)) < 0.5,
        "float32": rng.normal(size=(n_chips, 2 * n_chunks - 1)).astype(np.float32),
        "one float": rng.normal(size=(n_chips,)).astype(np.float32),
        "no floats": np.zeros((n_chips, 0), np.float32),
        "bfloat16": rng.normal(size=(n_chips, 11, 3)).astype(jnp.bfloat16),
        "float16": rng.normal(size=(n_chips, 13)).astype(np.float16),
        "complex64": (rng.normal(size=(n_chips, n_chunks)) + 1j * rng.normal(size=(n_chips, 1))).astype(np.complex64),
    }


def check_sums(got: Tree, tree: Tree, psum: Tree, *, n: int, accumulated_in: Any = None) -> None:
    """Equal to `lax.psum` exactly on integers; on floats within the error that any order of n additions may make."""
    for name, rows in tree.items():
        result = np.asarray(got[name])
        assert result.dtype == psum[name].dtype, name
        assert result.tobytes() == np.repeat(result[:1], n, axis=0).tobytes(), f"{name}: chips differ"
        if rows.dtype.kind in "iub":
            assert (result == np.asarray(psum[name])).all(), name
            continue
        wide = np.complex128 if rows.dtype.kind == "c" else np.float64
        exact = rows.astype(wide).sum(axis=0)
        own = float(jnp.finfo(rows.dtype).eps)
        summed = min(own, float(jnp.finfo(accumulated_in).eps)) if accumulated_in else own
        # Each of n − 1 additions rounds a partial sum no larger than Σ|x|; then one rounding to the result's dtype.
        bound = (n - 1) * summed * np.abs(rows.astype(wide)).sum(axis=0) + own * np.abs(exact) + 1e-30
        assert (np.abs(result[0].astype(wide) - exact) <= bound).all(), name


def plain_psum(tree: Tree) -> Tree:
    return {name: lax.psum(leaf, "chip") for name, leaf in tree.items()}


# Every dtype that travels is a loop of its own to compile, so most plans are held to three.
THREE = ("int32", "bool", "one float", "float32", "no floats", "bfloat16")


@pytest.mark.parametrize("name", others_slow(cases.PLANS, quick=QUICK))
def test_all_reduce_and_its_pair_equal_psum(name: str) -> None:
    schedule, fabric = cases.schedule_of(name), cases.fabric_of(name)
    n = schedule.mesh.n_chips
    tree = payload(n, schedule.total_chunks)
    if name not in ("hamiltonian 4x4", "row-pairs 4x8 - 2x2"):
        tree = {key: tree[key] for key in THREE}
    program, pair = mmj.install(schedule, fabric), mmj.install(schedule, fabric, update="two-phase")

    def everything(tree: Tree, program: mmj.Program, pair: mmj.Program) -> Any:
        shards = mmj.reduce_scatter(tree, pair, accumulate_dtype=jnp.float32)
        return (
            mmj.all_reduce(tree, program, accumulate_dtype=jnp.float32),
            mmj.all_gather(shards, pair, like=plain_psum(tree), accumulate_dtype=jnp.float32),
            plain_psum(tree),
        )

    whole, by_pair, psum = cases.on_chips(fabric, everything, tree, program, pair)
    check_sums(whole, tree, psum, n=n, accumulated_in=jnp.float32)
    check_sums(by_pair, tree, psum, n=n, accumulated_in=jnp.float32)


def test_sums_in_own_dtype_and_means() -> None:
    name = "row-pairs 4x4 - 2x2"
    fabric = cases.fabric_of(name)
    tree = payload(12, 16)
    program = mmj.install(cases.schedule_of(name), fabric)

    def both(tree: Tree, program: mmj.Program) -> Any:
        means = jax.tree.map(lambda x: lax.pmean(x, "chip"), tree)
        return mmj.all_reduce(tree, program), plain_psum(tree), mmj.all_reduce(tree, program, mean=True), means

    sums, psum, means, pmean = cases.on_chips(fabric, both, tree, program)
    check_sums(sums, tree, psum, n=12)
    for key in tree:
        assert means[key].dtype == pmean[key].dtype, key
    np.testing.assert_allclose(means["float32"], pmean["float32"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(means["int32"], pmean["int32"], rtol=1e-6)


def test_means_of_integers_are_made_in_float32_and_do_not_wrap() -> None:
    name = "row-pairs 4x4 - 2x2"
    fabric, program = cases.fabric_of(name), mmj.install(cases.schedule_of(name), cases.fabric_of(name))
    largest = {"int8": 127, "uint8": 255, "int16": -(2**15), "int32": 2**30, "bool": True}
    tree = {dtype: np.full((12, 4), value, dtype) for dtype, value in largest.items()}
    tree["none"] = np.zeros((12, 0), np.int8)
    means = cases.on_chips(fabric, lambda tree, program: mmj.all_reduce(tree, program, mean=True), tree, program)
    assert {leaf.dtype for leaf in means.values()} == {jnp.dtype(jnp.float32)}
    for dtype, value in largest.items():
        assert (np.asarray(means[dtype]) == float(value)).all(), dtype
    pair = mmj.install(cases.schedule_of(name), fabric, update="two-phase")
    with pytest.raises(ParameterError, match=r"a mean of int8 would not be cut .*x\.astype\(jnp\.float32\)"):
        cases.on_chips(fabric, lambda x, h: mmj.reduce_scatter(x, h, mean=True), tree["int8"], pair)


def test_types_too_narrow_to_add_up_in_are_refused_or_widened() -> None:
    name = "row-pairs 4x4 - 2x2"
    fabric, schedule = cases.fabric_of(name), cases.schedule_of(name)
    program, pair = mmj.install(schedule, fabric), mmj.install(schedule, fabric, update="two-phase")
    rows = np.random.default_rng(0).integers(0, 2, (12, 9))
    for dtype, wider in (("float8_e4m3fn", jnp.float32), ("float8_e5m2", jnp.float32), ("int4", jnp.int32)):
        values = jnp.asarray(rows, dtype)
        with pytest.raises(
            ParameterError, match=rf"{dtype} is too narrow to add up in.*accumulate_dtype=jnp\.{wider.__name__}"
        ):
            cases.on_chips(fabric, mmj.all_reduce, values, program)

    def summed(tree: Tree, program: mmj.Program, pair: mmj.Program) -> Any:
        shards = mmj.reduce_scatter(tree, pair, accumulate_dtype=jnp.float32)
        back = mmj.all_gather(shards, pair, like=tree, accumulate_dtype=jnp.float32)
        return mmj.all_reduce(tree, program, accumulate_dtype=jnp.float32), back

    tree = {"narrow": jnp.asarray(rows, jnp.float8_e4m3fn), "float32": jnp.asarray(rows, jnp.float32)}
    for got in cases.on_chips(fabric, summed, tree, program, pair):
        assert got["narrow"].dtype == jnp.float8_e4m3fn
        for leaf in got.values():
            assert (np.asarray(leaf, np.float32) == rows.sum(axis=0)).all()


def test_payloads_of_more_than_two_billion_elements() -> None:
    """By shapes alone: elements are never counted in 32 bits, and a chunk that has too many of them is refused."""
    name = "row-pairs 4x4 - 2x2"
    fabric, schedule = cases.fabric_of(name), cases.schedule_of(name)
    program = mmj.install(schedule, fabric)
    mapped = cases.mapped(fabric)
    large = jax.ShapeDtypeStruct((12, 2**33 + 1), jnp.bfloat16)
    assert jax.eval_shape(mapped, large, program).shape == large.shape
    too_large = jax.ShapeDtypeStruct((12, schedule.total_chunks * (2**31 - 1) + 1), jnp.bfloat16)
    with pytest.raises(ParameterError, match=r"are 2,147,483,648 elements per chunk, but JAX counts to 2,147,483,647"):
        jax.eval_shape(mapped, too_large, program)


def test_negative_zeros_and_nans_reach_every_chip_with_the_same_bits() -> None:
    """Idle lanes and copies must not touch values: −0 + 0 would be +0 on some chips only."""
    name = "trees 4x8 - 2x2"
    fabric = cases.fabric_of(name)
    n = fabric.mesh.n_chips
    values = np.full((n, 500), -0.0, np.float32)
    values[3, 100:200] = np.nan
    values[4, 200:300] = np.inf
    program = mmj.install(cases.schedule_of(name), fabric)
    got = np.asarray(cases.on_chips(fabric, mmj.all_reduce, values, program))
    assert len({row.tobytes() for row in got}) == 1
    assert np.signbit(got[0, :100]).all()
    assert np.isnan(got[0, 100:200]).all()
    assert (got[0, 200:300] == np.inf).all()


def test_shards_are_the_owners_chunks() -> None:
    name = "row-pairs 4x4 - 2x2"
    schedule, fabric = cases.schedule_of(name), cases.fabric_of(name)
    pair = mmj.install(schedule, fabric, update="two-phase")
    n, chunks = schedule.mesh.n_chips, schedule.total_chunks
    values = np.tile(np.arange(chunks * 2, dtype=np.int32), (n, 1))

    def cut(values: jax.Array, pair: mmj.Program) -> Any:
        return shard_of(values, pair), mmj.reduce_scatter(values, pair)

    (cut_rows,), (summed,) = cases.on_chips(fabric, cut, values, pair)
    assert (np.asarray(summed) == n * np.asarray(cut_rows)).all()
    for rank in range(n):
        mine = np.flatnonzero(schedule.owners == rank)
        want = np.zeros(cut_rows.shape[1:], np.int32)
        want[: len(mine)] = values[0].reshape(chunks, 2)[mine]
        assert (np.asarray(cut_rows)[rank] == want).all()


def test_two_cores_a_chip_add_up_inside_the_chip_first() -> None:
    """24 CPU devices as 12 chips of two cores: each core carries half of the payload."""
    devices = np.array(jax.devices()[:24])
    chips = cases.fabric_of("hamiltonian 4x4").mesh.fail("2x2@0,0")
    fabric = mmj.Fabric(chips, jax.sharding.Mesh(devices.reshape(12, 2), ("chip", "core")), None)
    schedule = mm.plan(chips, "row-pairs")
    program, pair = mmj.install(schedule, fabric), mmj.install(schedule, fabric, update="two-phase")
    values = np.random.default_rng(0).integers(-99, 99, (24, 1001), dtype=np.int32)

    def both(values: jax.Array, program: mmj.Program, pair: mmj.Program) -> Any:
        shards = mmj.reduce_scatter(values[0], pair)
        back = mmj.all_gather(shards, pair, like=values[0])
        again = mmj.all_gather(shard_of(back, pair), pair, like=back)
        return mmj.all_reduce(values[0], program)[None], back[None], again[None], mmj.all_reduce(1, program, mean=True)

    every = PartitionSpec(("chip", "core"))
    specs, results = (every, program.spec, pair.spec), (every, every, every, PartitionSpec())
    *sums, one = jax.jit(cases.mapped(fabric, both, in_specs=specs, out_specs=results))(values, program, pair)
    assert one == 1.0
    for got in sums:
        assert (np.asarray(got) == values.sum(axis=0)).all()


def test_works_with_check_vma_on_varying_values_and_refuses_others() -> None:
    fabric = cases.fabric_of("trees 4x4")
    program = mmj.install(cases.schedule_of("trees 4x4"), fabric)
    for size in (2, 40):  # fewer elements than there are chunks, and more
        values = np.arange(16 * size, dtype=np.float32)
        got = np.asarray(jax.jit(cases.mapped(fabric, check_vma=True))(values, program)).reshape(16, size)
        assert (got[5] == values.reshape(16, size).sum(axis=0)).all()
    with pytest.raises(ParameterError, match=r"would count it 16 times.*check_vma=False"):
        cases.mapped(fabric, in_specs=(PartitionSpec(), program.spec), check_vma=True)(jnp.arange(32.0), program)


def test_composes_with_loops_and_donation() -> None:
    """A jitted loop of all-reduces, its input donated."""
    fabric = cases.fabric_of("hamiltonian 4x4")
    program = mmj.install(cases.schedule_of("hamiltonian 4x4"), fabric)

    def repeated(x: jax.Array, program: mmj.Program) -> Any:
        return lax.fori_loop(0, 3, lambda _, x: mmj.all_reduce(x, program, mean=True), x)

    x = jax.device_put(jnp.arange(16.0 * 32), fabric.sharding("chip"))
    got = jax.jit(cases.mapped(fabric, repeated), donate_argnums=0)(x, program)
    assert x.is_deleted()
    assert (got.reshape(16, 32)[7] == jnp.arange(16.0 * 32).reshape(16, 32).mean(axis=0)).all()


def test_runs_in_place() -> None:
    """Beside the payload, at most two runs of chunks a lane."""
    for name in ("one-way ring", "row-pairs 4x4", "trees 4x8 - 2x2"):
        schedule, fabric = cases.schedule_of(name), cases.fabric_of(name)
        n, chunk = schedule.mesh.n_chips, 1000
        program = mmj.install(schedule, fabric)
        x = jax.ShapeDtypeStruct((n * schedule.total_chunks * chunk,), jnp.float32, sharding=fabric.sharding("chip"))
        memory = jax.jit(cases.mapped(fabric), donate_argnums=0).lower(x, program).compile().memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes == schedule.total_chunks * chunk * 4
        runs = max(sum(lane.run for lane in lanes) for lanes in program.layout.shape.lanes)
        assert memory.temp_size_in_bytes <= 2 * runs * chunk * 4 + 4096, name


def test_wrong_programs_are_refused() -> None:
    fabric = cases.fabric_of("hamiltonian 4x4")
    pair = mmj.install(cases.schedule_of("hamiltonian 4x4"), fabric, update="two-phase")
    x = np.zeros((16, 4), np.float32)
    with pytest.raises(ParameterError, match=r"for reduce-scatter, expected one for all-reduce.*install"):
        cases.on_chips(fabric, mmj.all_reduce, x, pair)
    with pytest.raises(ParameterError, match=r"for all-gather, expected one for reduce-scatter.*update='two-phase'"):
        cases.on_chips(fabric, mmj.reduce_scatter, x, pair.gather)
    with pytest.raises(
        ScheduleError, match=r"The schedule is for .*4x8 minus.* but the fabric is .*Plan for fabric.mesh"
    ):
        mmj.install(cases.schedule_of("hamiltonian 4x8 - 2x2"), fabric)

    def mismatched(x: jax.Array, pair: mmj.Program) -> Any:
        shards = mmj.reduce_scatter(x, pair)
        return mmj.all_gather(shards, pair, like=jnp.zeros(100))

    with pytest.raises(ParameterError, match=r"A shard has shape .* expected .* cut from another tree"):
        cases.on_chips(fabric, mismatched, x, pair)
    with pytest.raises(ParameterError, match="There are 1 shards, but a tree like this has 2"):
        cases.on_chips(
            fabric,
            lambda x, h: mmj.all_gather(mmj.reduce_scatter(x, h), h, like=(x, x.astype(jnp.int32))),
            x,
            pair,
        )


@pytest.mark.slow
@pytest.mark.parametrize("planner", ["row-pairs", "weave" if "weave" in PLANNERS else "trees"])
def test_the_papers_504_chips(planner: str) -> None:
    """16×32 minus 4×2, for real on 504 CPU devices, in a process of its own."""
    code = f"""
import jax, numpy as np, meshmend as mm, meshmend.jax as mmj
from jax.sharding import PartitionSpec
from standins import tree_schedule
fabric = mmj.discover(shape="16x32", failed=["4x2@6,8"])
planner = {planner!r}
schedule = tree_schedule(fabric.mesh, chunks=128) if planner == "trees" else mm.plan(fabric.mesh, planner)
program = mmj.install(schedule, fabric)
by_chip = PartitionSpec("chip")
total = jax.jit(jax.shard_map(mmj.all_reduce, mesh=fabric.jax_mesh, in_specs=by_chip, out_specs=by_chip,
                              check_vma=False))
rows = np.random.default_rng(0).integers(-99, 99, (504, 2001), dtype=np.int32)
got = np.asarray(total(rows, program))
assert (got == rows.sum(axis=0)).all()
print("equal on", len(got))
"""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=504"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False, capture_output=True, text=True)
    assert done.stdout.strip() == "equal on 504", done.stderr[-2000:]


@pytest.mark.parametrize("names", [("float32",), ("float32", "bfloat16", "int32", "complex64", "one float")])
def test_a_device_that_does_not_count_adds_zeros(names: tuple[str, ...]) -> None:
    """Whatever it has, NaN too: whether its leaves are packed with others or travel alone."""
    fabric = mmj.discover(jax.devices()[:4], shape="2x2", failed=["0,0"])
    program = mmj.install(mm.plan(fabric.mesh, "weave"), fabric)
    tree = {name: values for name, values in payload(3, 8).items() if name in names}
    for name, values in tree.items():
        values[1] = 77 if name == "int32" else np.nan

    def total(tree: Tree, counts: Any, program: Any) -> Tree:
        found: Tree = mmj.all_reduce(tree, program, accumulate_dtype=jnp.float32, counts=counts)
        return found

    found = cases.on_chips(fabric, total, tree, np.array([True, False, True]), program)
    for name, values in tree.items():
        wanted = values[0].astype(np.complex128) + values[2].astype(np.complex128)
        for row in np.asarray(found[name]).astype(np.complex128):
            np.testing.assert_allclose(row, wanted, rtol=2**-7 if name == "bfloat16" else 1e-6)
