"""All-reduces that check themselves: the same bits as plain ones, and every injected fault named where it happened."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

import meshmend.jax as mmj
from jax_engine import cases
from meshmend.jax.checks.checksums import ADDITION, KINDS, MEMORY, TRANSFER, Fault, is_wrong_sum
from meshmend.schedule import Op
from meshmend.schedule.lanes import KEEP

SIZE = 50


@cache
def checked(name: str) -> tuple[mmj.Fabric, mmj.Program, Any]:
    fabric = cases.fabric_of(name)
    program = mmj.install(cases.schedule_of(name), fabric)

    def both(tree: Any, program: mmj.Program, fault: Fault | None) -> Any:
        return mmj.all_reduce(tree, program), *mmj.checked_all_reduce(tree, program, fault=fault)

    by_chip = cases.BY_CHIP
    mapped = jax.shard_map(
        both,
        mesh=fabric.jax_mesh,
        in_specs=(by_chip, program.spec, jax.sharding.PartitionSpec()),
        out_specs=(by_chip, by_chip, by_chip),
        check_vma=False,
    )
    return fabric, program, jax.jit(mapped)


def payload(n_chips: int, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {
        "int32": rng.integers(-(2**31), 2**31, size=n_chips * SIZE, dtype=np.int32),
        "float32": (rng.normal(size=n_chips * SIZE) * 10.0 ** rng.integers(-5, 5, n_chips * SIZE)).astype(np.float32),
    }


@pytest.mark.parametrize(
    "name",
    [
        "row-pairs 4x4 - 2x2",
        pytest.param("weave 4x4", marks=pytest.mark.slow),
        pytest.param("trees 8x8 - odd holes", marks=pytest.mark.slow),
        pytest.param("weave 3-D, a cable lost", marks=pytest.mark.slow),
        pytest.param("two-color, two run lengths", marks=pytest.mark.slow),
    ],
)
def test_the_sums_have_the_bits_of_plain_ones_and_nothing_is_found(name: str) -> None:
    fabric, program, run = checked(name)
    tree = payload(fabric.n_chips)
    tree["bfloat16"] = tree["float32"].astype(jnp.bfloat16)
    tree["float32"][3], tree["float32"][7] = np.inf, np.finfo(np.float32).max  # what overflows is nobody's fault
    plain, sums, evidence = run(tree, program, None)
    for dtype, values in plain.items():
        assert np.asarray(values).tobytes() == np.asarray(sums[dtype]).tobytes(), dtype
    assert mmj.bad_sums(evidence, program, fabric) == []


def places(program: mmj.Program) -> dict[str, list[tuple[int, int, int, int]]]:
    """Return where each kind of fault can be: (loop, chip, step, lane)."""
    found: dict[str, list[tuple[int, int, int, int]]] = {kind: [] for kind in KINDS}
    for number, (tables, lanes) in enumerate(zip(program.tables, program.layout.shape.lanes, strict=True)):
        for i, lane in enumerate(lanes):
            ops = np.asarray(tables.ops)[:, :, i] if len(lane.ops) > 1 else np.full(tables.send.shape[:2], lane.ops[0])
            for chip, step in np.argwhere(ops != KEEP).tolist():
                found[TRANSFER].append((number, chip, step, i))
                source = next(source for source, target in lane.pairs if target == chip)
                found[MEMORY].append((number, source, step, i))
                if ops[chip, step] == Op.REDUCE:
                    found[ADDITION].append((number, chip, step, i))
    return found


BATCH = 240
"""Faults in one call: each has its own payload, and all of them travel together."""


@cache
def injected(name: str) -> tuple[Any, Any]:
    """Return a compiled function of a payload, the program and a batch of faults, and one that sums without faults."""
    fabric, program, _ = checked(name)

    def faulty(payload: Any, program: mmj.Program, faults: Fault) -> Any:
        return jax.vmap(lambda fault: mmj.checked_all_reduce(payload, program, fault=fault), out_axes=1)(faults)

    by_chip, same = cases.BY_CHIP, jax.sharding.PartitionSpec()
    specs: dict[str, Any] = {"mesh": fabric.jax_mesh, "check_vma": False}
    return (
        jax.jit(jax.shard_map(faulty, in_specs=(by_chip, program.spec, same), out_specs=(by_chip, by_chip), **specs)),
        jax.jit(jax.shard_map(mmj.all_reduce, in_specs=(by_chip, program.spec), out_specs=by_chip, **specs)),
    )


def inject(name: str, count: int, seed: int) -> Counter[str]:
    """Flip so many bits, and count what was missed. Whatever is found must be what was done, and where."""
    fabric, program, _ = checked(name)
    faulty, plain = injected(name)
    rng = np.random.default_rng(seed)
    where = places(program)
    size = 4 * program.layout.shape.total_chunks  # nothing is padded: a flip in a zero is as small as rounding
    whole = rng.uniform(0.5, 1.5, size=fabric.n_chips * size).astype(np.float32)
    wanted = np.asarray(plain(whole, program), float).reshape(fabric.n_chips, size)
    missed: Counter[str] = Counter()
    for first in range(0, count, BATCH):
        faults = []
        for number in range(first, first + BATCH):
            kind = KINDS[number % 3]
            loop, chip, step, lane = where[kind][int(rng.integers(len(where[kind])))]
            element = int(rng.integers(4 * program.layout.shape.lanes[loop][lane].run))
            faults.append((KINDS.index(kind), chip, loop, step, lane, element, number // 3 % 32))
        sums, evidence = faulty(whole, program, Fault(*jnp.asarray(faults, jnp.int32).T))
        sums = np.asarray(sums, float).reshape(fabric.n_chips, size, BATCH)
        evidence = np.moveaxis(np.asarray(evidence), 1, 0)
        for number in range(min(BATCH, count - first)):
            what, chip, loop, _, lane, *_ = faults[number]
            kind = KINDS[what]
            chips: tuple[tuple[int, ...], ...] = (fabric.mesh.chip(chip),)
            if kind == TRANSFER:
                pairs = program.layout.shape.lanes[loop][lane].pairs
                chips = (fabric.mesh.chip(next(a for a, b in pairs if b == chip)), *chips)
            found = mmj.bad_sums(evidence[number], program, fabric)
            if not found:
                missed[kind] += 1
                # Two roundings of a partial sum; on its way it is rounded again with every further one.
                error = np.abs(sums[:, :, number] - wanted).max()
                assert error <= 4 * np.finfo(np.float32).eps * 1.5 * fabric.n_chips, "what is missed is like rounding"
            else:
                assert [(one.kind, one.chips, one.times) for one in found] == [(kind, chips, 1)], faults[number]
    return missed


def test_flips_are_named() -> None:
    missed = inject("row-pairs 4x4 - 2x2", 48, seed=0)
    assert {*missed} <= {ADDITION}
    assert missed[ADDITION] <= 3


@pytest.mark.slow
def test_five_thousand_flips_in_memory_and_transfers_are_all_named() -> None:
    missed = inject("row-pairs 4x4 - 2x2", 7500, seed=1)
    assert {*missed} <= {ADDITION}
    # Of 32 bits, the lowest three of a sum at most lie within rounding.
    assert missed[ADDITION] <= 2500 * 3 / 32


def wrong(*arrays: Any) -> NDArray[np.bool_]:
    a, b, total = map(jnp.asarray, arrays)
    return np.asarray(is_wrong_sum(a, b, total))


@pytest.mark.parametrize(("dtype", "decades"), [(np.float32, 4), (jnp.bfloat16, 4), (np.float16, 1)])
def test_a_wrong_sum_is_told_from_rounding(dtype: Any, decades: int) -> None:
    rng = np.random.default_rng(5)
    a, b = ((rng.normal(size=20_000) * 10.0 ** rng.uniform(-decades, decades, 20_000)).astype(dtype) for _ in range(2))
    b[:5000] = -a[:5000] * dtype(1.01)  # cancellation
    exact = a.astype(np.float64) + b.astype(np.float64)
    assert not wrong(a, b, exact.astype(dtype)).any()
    largest = np.maximum(np.abs(a.astype(np.float64)), np.abs(b.astype(np.float64)))
    off = exact + rng.choice([-1, 1], size=20_000) * 16 * float(jnp.finfo(dtype).eps) * largest
    normal = 16 * float(jnp.finfo(dtype).eps) * largest > 8 * float(jnp.finfo(dtype).tiny)  # below, all is rounding
    assert normal.mean() > 0.5
    assert wrong(a, b, off.astype(dtype))[normal].all()


def test_a_wrong_sum_of_integers_is_always_noticed() -> None:
    whole = np.arange(-5, 5, dtype=np.int32)
    assert wrong(whole, whole, 2 * whole + (whole == 3)).tolist() == (whole == 3).tolist()
