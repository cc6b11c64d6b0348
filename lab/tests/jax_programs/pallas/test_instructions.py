"""The kernel's flow control, in a model of its semaphores: all orders of small schedules, random ones of larger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import meshmend as mm
from jax_engine.cases import PLANS, schedule_of
from kernel_cases import ADD, CREDIT, DIRECT, HOLES, plan_small, with_word, without_credit
from kernel_model import Broken, Machine, decode, explore, run_at_random
from meshmend.planning import PLANNERS
from meshmend.schedule import Op
from meshmend_lab.pallas.engine import as_the_kernel_drives
from meshmend_lab.pallas.instructions import Kind, instructions_of

SMALL: dict[str, tuple[mm.Mesh, str, dict[str, Any]]] = {
    "two chips": (mm.Mesh("1x2"), "weave", {"chunks": 9}),
    "a line": (mm.Mesh("1x3"), "weave", {"chunks": 6}),
    "a ring": (mm.Mesh("2x2"), "hamiltonian", {}),
    "two at once": (mm.Mesh("2x2"), "latency", {}),
    "trees": (mm.Mesh("2x2"), "weave", {"chunks": 4}),
    "a hole": (mm.Mesh("2x3", failed=["0,0"]), "weave", {"chunks": 2}),
    "a torus": (mm.Mesh("1x4", wrap=(False, True)), "weave", {"chunks": 3}),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("slots", [1, 2])
def test_no_order_of_a_small_schedule_is_wrong(name: str, slots: int) -> None:
    mesh, planner, parameters = SMALL[name]
    schedule = mm.plan(mesh, planner, **parameters)
    made = instructions_of(schedule, slots=slots)
    states = explore(made, schedule.total_chunks)
    lengths = [len(ones) for ones in Machine(made, schedule.total_chunks).lists]
    assert sum(lengths) < states < np.prod([n + 1 for n in lengths])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (PLANS[name][1].n_chips > 24)) for name in PLANS]
)
def test_random_orders_of_every_plan_are_right(name: str) -> None:
    schedule = schedule_of(name)
    for seed, slots in enumerate((None, 3)):
        run_at_random(instructions_of(schedule, slots=slots), schedule.total_chunks, seed)


@pytest.mark.parametrize("planner", [name for name in PLANNERS if name not in ("auto", "gather")])
def test_random_orders_of_every_planner_are_right(planner: str) -> None:
    meshes = [mm.Mesh("4x4", failed=[hole]) for hole in HOLES]
    meshes += [mm.Mesh("4x4"), mm.Mesh("4x4", wrap=True), mm.Mesh("2x2x2"), mm.Mesh("8x8", failed=["2x2@2,2"])]
    run = 0
    for mesh in meshes:
        schedule = plan_small(mesh, planner)
        if schedule is not None:
            run_at_random(instructions_of(schedule), schedule.total_chunks, run)
            run += 1
    assert run >= 2


def test_plans_with_slack_and_repeats_are_right() -> None:
    mesh = mm.Mesh("4x4", failed=["2x2@1,1"])
    slack = mm.plan(mesh, "weave", payload_bytes=1e8, hardware=as_the_kernel_drives("tpu-v6e"), mode="asynchronous")
    repeated = mm.plan(mesh, "weave", chunks=24).interleaved(3)
    for seed, schedule in enumerate((slack, repeated)):
        run_at_random(instructions_of(schedule), schedule.total_chunks, seed)


def test_what_arrives_is_taken_only_when_it_is_needed() -> None:
    """A chunk is added just before its sum is sent on: cut into four parts, four times as late."""

    def lag(schedule: mm.Schedule) -> float:
        """Steps between a transfer's own and that of its receiver when it adds it, in the mean."""
        made = instructions_of(schedule, slots=32)
        columns = (getattr(schedule, name).tolist() for name in ("src", "dst", "first_chunk", "step"))
        step = {(src, dst, chunk): at for src, dst, chunk, at in zip(*columns, strict=True)}
        found = []
        for chip, words in enumerate(made.words.tolist()):
            now = 0
            for one in (decode((a, b)) for a, b in words):
                if one.kind is Kind.SEND:
                    now = step[chip, int(made.ports[chip, 0, one.port]), one.chunk]
                elif one.kind is Kind.RECEIVE and one.add:
                    found.append(now - step[int(made.ports[chip, 2, one.port]), chip, one.chunk])
        return float(np.mean(found))

    plain = mm.plan(mm.Mesh("4x4"), "weave", chunks=64)
    assert lag(plain.interleaved(4)) > lag(plain) + 2


def test_the_inbox_is_less_than_a_twentieth_of_the_payload_and_slots_fill_it() -> None:
    for chunks, slots in ((64, 2), (384, 4), (768, 8), (2048, 8)):
        schedule = mm.plan(mm.Mesh("4x4", failed=["2x2@0,0"]), "weave", chunks=chunks)
        ports, found, longest = instructions_of(schedule).shape.inbox_chunks
        assert (ports, found, longest) == (4, slots, 1)


def test_runs_of_several_chunks_are_cut_into_powers_of_two() -> None:
    mesh = mm.Mesh("1x2")
    step, src, dst, op = [0, 1], [1, 0], [0, 1], [Op.REDUCE, Op.COPY]
    schedule = mm.Schedule(mesh, total_chunks=13, step=step, src=src, dst=dst, op=op, n_chunks=13, owners=[0] * 13)
    mm.verify(schedule)
    made = instructions_of(schedule)
    sends = [decode((a, b)) for a, b in made.words[1].tolist()]
    assert [made.shape.sizes[one.size] for one in sends if one.kind is Kind.SEND] == [8, 4, 1]
    assert [one.chunk for one in sends if one.kind is Kind.SEND] == [0, 8, 12]
    assert explore(made, 13) > 10


def test_a_chunk_that_is_not_final_goes_through_the_inbox() -> None:
    """Two chips exchange and add: neither may write into what the other is still sending."""
    made = instructions_of(mm.plan(mm.Mesh("1x2"), "latency"))
    ones = [decode((a, b)) for a, b in made.words[0].tolist()]
    assert [one.kind for one in ones] == [Kind.SEND, Kind.SENT, Kind.RECEIVE]
    assert not any(one.direct for one in ones)


@pytest.mark.parametrize(("name", "numbers"), [("a line", [0, 10, 11]), ("a torus", [0, 1]), ("trees", range(8))])
def test_a_credit_too_many_is_found(name: str, numbers: Sequence[int]) -> None:
    """Where nothing else keeps the sender waiting; on the trees that is each of the eight credits."""
    mesh, planner, parameters = SMALL[name]
    schedule = mm.plan(mesh, planner, **parameters)
    for number in numbers:
        with pytest.raises(Broken, match="is written before it was read"):
            explore(without_credit(instructions_of(schedule), number), schedule.total_chunks)


def test_what_else_could_be_wrong_is_found() -> None:
    exchange = mm.plan(mm.Mesh("1x2"), "latency")
    made = instructions_of(exchange)
    words = made.words.tolist()
    direct = with_word(with_word(made, 0, 0, words[0][0][1] | DIRECT), 1, 2, words[1][2][1] | DIRECT)
    with pytest.raises(Broken, match=r"is written while it leaves|is used while"):
        explore(direct, 1)
    with pytest.raises(Broken, match="is written while it leaves"):
        explore(with_word(made, 0, 1, int(Kind.NOTHING)), 1)
    with pytest.raises(Broken, match="but what was sent is None"):
        explore(with_word(made, 0, 0, int(Kind.NOTHING)), 1)
    with pytest.raises(Broken, match="a wrong sum"):
        explore(with_word(made, 0, 2, words[0][2][1] & ~ADD), 1)
    long = mm.plan(mm.Mesh("1x2"), "weave", chunks=9)
    made = instructions_of(long, slots=2)
    gives = next(i for i, (_, word) in enumerate(made.words[0].tolist()) if word & 7 == Kind.RECEIVE and word >> 3 & 1)
    with pytest.raises(Broken, match="wait for ever"):
        explore(with_word(made, 0, gives, int(made.words[0, gives, 1]) & ~CREDIT), 9)
