"""Bounds and forecasts over cables of different rates, held to brute force and to sums by hand."""

from __future__ import annotations

import pytest

from meshmend import Collective, plan
from meshmend.cost import bound, busiest_link_load, predict
from meshmend.planning import Hamiltonian
from meshmend.schedule import Op, Schedule
from meshmend.topology import Mesh


def test_rates_of_one_change_nothing_and_slower_cables_never_help() -> None:
    mesh = Mesh("8x8", failed=["2x2@2,2"])
    assert bound(Mesh("8x8", failed=["2x2@2,2"], cable_rates={"8x8@0,0": 1})) == bound(mesh)
    column = [bound(Mesh("8x8", failed=["2x2@2,2"], cable_rates={"8x1@0,5": rate})).units for rate in (1, 0.75, 0.5)]
    assert column == sorted(column)
    assert column[0] < column[-1]
    half = Mesh("8x8", failed=["2x2@2,2"], cable_rates={"8x8@0,0": 0.5})
    assert bound(half).units == pytest.approx(2 * bound(mesh).units)
    assert bound(half, collective=Collective.REDUCE_SCATTER).units == pytest.approx(
        2 * bound(mesh, collective=Collective.REDUCE_SCATTER).units
    )


def test_what_binds_is_said() -> None:
    assert "a slow cable is the only way between two parts" in bound(Mesh("1x4", cable_rates={"0,1-0,2": 0.5})).why
    assert "over its 2 cables (1 slow)" in bound(Mesh("4x4", cable_rates={"0,0-0,1": 0.25})).why
    assert (
        "2 cables (all slow) are all that joins" in bound(Mesh("2x4", cable_rates={"1x2@0,1": 0.5, "1x2@1,1": 0.5})).why
    )
    one_at_a_time = bound(Mesh("2x2", cable_rates={"0,0-0,1": 0.5}), links_at_once=1)
    assert not one_at_a_time.is_exact
    assert one_at_a_time.units == pytest.approx(2 * 3 / 4)


def line(rates: dict[str, float], steps: list[tuple[int, int, int, int]], chunks: int) -> Schedule:
    """Copies along 1x4: (step, src, dst, chunk)."""
    step, src, dst, chunk = zip(*steps, strict=True)
    mesh = Mesh("1x4", cable_rates=rates)
    op = [Op.COPY] * len(steps)
    return Schedule(
        mesh, total_chunks=chunks, step=step, src=src, dst=dst, first_chunk=chunk, op=op, owners=[0] * chunks
    )


def test_forecasts_by_hand() -> None:
    # Two chunks of 1 s each over 0→1→2, whose second cable has a third of the rate.
    schedule = line({"0,1-0,2": 1 / 3}, [(0, 0, 1, 0), (1, 1, 2, 0), (1, 0, 1, 1), (2, 1, 2, 1)], chunks=2)
    assert predict(schedule, 2e9, "ideal").seconds == pytest.approx(1 + 3 + 3)
    assert predict(schedule, 2e9, "ideal", mode="asynchronous").seconds == pytest.approx(1 + 3 + 3)
    assert busiest_link_load(schedule) == pytest.approx(3.0)
    first = predict(schedule, 2e9, "ideal").busiest_links[0]
    assert (str(first), first.load) == ("(0,1)→(0,2)", 1.0)
    assert first.time == pytest.approx(3.0)
    assert first.rate == pytest.approx(1 / 3)
    # The first cable slow instead: in lock-step the third step is quick, asynchronously the second chunk waits.
    both_ways = line({"0,0-0,1": 1 / 3}, [(0, 0, 1, 0), (1, 1, 2, 0), (1, 0, 1, 1), (2, 1, 2, 1)], chunks=2)
    assert predict(both_ways, 2e9, "ideal").seconds == pytest.approx(3 + 3 + 1)


def test_a_slow_hop_on_the_way_delays_the_end_whichever_it_is() -> None:
    for slow in ("0,0-0,1", "0,1-0,2", "0,2-0,3"):
        schedule = line({slow: 0.25}, [(0, 0, 3, 0)], chunks=1)
        for mode in ("lock-step", "asynchronous"):
            assert predict(schedule, 1e9, "ideal", mode=mode).seconds == pytest.approx(4.0)


def test_the_gap_adds_up() -> None:
    forecast = predict(plan(Mesh("4x4", cable_rates={"4x1@0,1": 0.5}), "weave"), 1e8, "tpu-v4-xla")
    assert sum(forecast.gap.parts.values()) == pytest.approx(forecast.seconds)
    assert min(forecast.gap.parts.values()) >= 0


def test_auto_takes_the_fastest_by_forecasts_that_know_rates() -> None:
    mesh = Mesh("4x4", cable_rates={"0,0-0,1": 0.25})
    best = predict(plan(mesh, payload_bytes=1e6, hardware="tpu-v3"), 1e6, "tpu-v3").seconds
    for name in ("hamiltonian", "two-color", "row-pairs", "weave"):
        assert best <= predict(plan(mesh, name), 1e6, "tpu-v3").seconds * (1 + 1e-9)
    # Every ring passes the corner, and every step of it waits for the slow cable.
    ring = Hamiltonian().plan(mesh)
    whole = predict(Hamiltonian().plan(Mesh("4x4")), 1e9, "ideal").seconds
    assert predict(ring, 1e9, "ideal").seconds == pytest.approx(4 * whole)
