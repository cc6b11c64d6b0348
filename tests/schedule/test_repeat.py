"""Repeated schedules: the template's proof is the whole's, and every reader agrees with the expanded form."""

from __future__ import annotations

import copy
import pickle
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import counting
import meshmend as mm
import meshmend.numpy as mmn
from forged_plans import forge
from meshmend import Mesh, Op, Schedule
from meshmend.cost import StepDemand, link_load
from meshmend.errors import CollisionError, ScheduleError, ScheduleFileError, VerificationError
from meshmend.schedule import MAX_EXPANDED, Collective
from meshmend.schedule.serialize import to_text
from meshmend.schedule.split import all_gather_of, reduce_scatter_of
from random_schedules import random_schedule, with_idle_steps


def pair(**changes: Any) -> Schedule:
    """Two chips and one chunk: up, then down."""
    rows: dict[str, Any] = {"step": [0, 1], "src": [1, 0], "dst": [0, 1], "op": [Op.REDUCE, Op.COPY], "owners": [0]}
    return Schedule(Mesh((1, 2)), total_chunks=1, **(rows | changes))


def broken(template: Schedule, rng: random.Random) -> Schedule:
    """Return the template with one number changed: mostly wrong, sometimes with a chunk written twice in a step."""
    names = ("step", "src", "dst", "first_chunk", "n_chunks", "op")
    columns = {name: getattr(template, name).tolist() for name in names}
    n_chips, row = template.mesh.n_chips, rng.randrange(template.n_transfers)
    match rng.choice(["op", "src", "dst", "step", "twice"]):
        case "op":
            columns["op"][row] ^= 1
        case "step":
            columns["step"][row] = rng.randrange(template.n_steps)
        case "twice":
            for name in names:
                columns[name].append(columns[name][row])
            columns["src"][-1] = rng.choice([r for r in range(n_chips) if r != columns["dst"][row]])
        case end:
            opposite = "dst" if end == "src" else "src"
            columns[end][row] = rng.choice([r for r in range(n_chips) if r != columns[opposite][row]])
    columns["step"] = np.unique(columns["step"], return_inverse=True)[1]
    return Schedule(
        template.mesh,
        total_chunks=template.total_chunks,
        owners=template.owners,
        collective=template.collective,
        **columns,
    )


def repeated(seed: int, rng: random.Random) -> Schedule | None:
    """Return a random template, every other one broken, a few times over."""
    template = random_schedule(seed, max_chips=6, max_chunks=4)
    if template.n_transfers == 0:
        return None
    if seed % 2:
        template = broken(template, rng)
    if seed % 3 == 0:
        template = with_idle_steps(template, rng)
    return template.repeated(rng.randint(2, 5), rng.randint(1, template.n_steps))


def test_the_proof_of_the_template_is_the_proof_of_the_whole() -> None:
    rng = random.Random(7)
    verdicts = {True: 0, False: 0}
    for seed in range(300):
        whole = repeated(seed, rng)
        if whole is None:
            continue
        expanded = whole.expanded()
        assert whole.n_steps == expanded.n_steps
        assert whole.phases == expanded.phases
        assert whole.step_starts[-1] == whole.n_transfers
        right = counting.is_right(expanded)
        verdicts[right] += 1
        for form in (whole, expanded):
            if right:
                assert mm.verify(form, method="exact").chunks == whole.total_chunks
            else:
                with pytest.raises(VerificationError):
                    mm.verify(form, method="exact")
        assert whole.is_proven == expanded.is_proven == right
    assert min(verdicts.values()) > 50


def test_expanded_is_every_repeat_shifted_by_its_period_and_its_chunks() -> None:
    template = random_schedule(4, collective=Collective.ALL_REDUCE)
    whole = template.repeated(3, 2)
    names = ("src", "dst", "n_chunks", "op", "phase")
    expected = sorted(
        (step + 2 * r, first + template.total_chunks * r, *rest)
        for r in range(3)
        for step, first, *rest in zip(
            template.step.tolist(),
            template.first_chunk.tolist(),
            *(getattr(template, name).tolist() for name in names),
            strict=True,
        )
    )
    expanded = whole.expanded()
    for form in (whole, expanded):
        columns = (form.step, form.first_chunk, *(getattr(form, name) for name in names))
        assert sorted(zip(*(column.tolist() for column in columns), strict=True)) == expected
        assert form.owners.tolist() == template.owners.tolist() * 3
        assert form.n_steps == template.n_steps + 4
        assert form.total_chunks == 3 * template.total_chunks
        assert form.n_transfers == len(expected)
    assert expanded.repeats == 1
    assert whole.phases == expanded.phases
    assert whole != expanded
    assert expanded.expanded() is expanded
    assert np.array_equal(whole.step_starts, expanded.step_starts)


def test_a_template_that_begins_with_idle_steps_loses_none() -> None:
    """Up in step 2 and down in step 3, three times, every four steps: of steps 0 to 11 six count."""
    columns: dict[str, Any] = {"src": [1, 0], "dst": [0, 1], "op": [0, 1], "phase": [0, 1]}
    padded: dict[str, Any] = {name: [*column, *column] for name, column in columns.items()}
    template = Schedule(
        Mesh((1, 2)),
        total_chunks=2,
        step=[2, 3, 2, 3],
        first_chunk=[0, 0, 1, 1],
        owners=[0, 0],
        phase_names=("up", "down"),
        may_idle=True,
        **padded,
    )
    whole = template.repeated(3, 4)
    assert whole.n_steps == 6
    assert whole.step.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert whole.step_starts.tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert [(phase.first_step, phase.last_step) for phase in whole.phases] == [(0, 4), (1, 5)]
    assert whole.expanded().phases == whole.phases
    mm.verify(whole)
    mm.verify(whole.expanded())
    forecast = mm.predict(whole, 1e9, "ideal", mode="asynchronous")
    assert forecast.seconds >= forecast.bound_seconds


def test_a_chunk_that_is_written_twice_in_a_step_is_found_in_the_template() -> None:
    template = Schedule(
        Mesh((1, 3)), total_chunks=1, step=[0, 0, 1, 1], src=[0, 2, 1, 1], dst=[1, 1, 0, 2], op=[0, 0, 1, 1], owners=[1]
    )
    with pytest.raises(CollisionError, match=r"[Ss]tep 0"):
        mm.verify(template.repeated(10**6, 2))


def test_sums_are_those_of_the_expanded_schedule() -> None:
    rng, draw = random.Random(1), np.random.default_rng(1)
    for seed in range(0, 60, 2):
        whole = repeated(seed, rng)
        if whole is None or whole.collective is not Collective.ALL_REDUCE:
            continue
        payload = draw.integers(-99, 99, size=(whole.mesh.n_chips, 5 * whole.total_chunks - 3))
        assert np.array_equal(mmn.run(whole, payload), np.broadcast_to(payload.sum(axis=0), payload.shape))
        assert np.array_equal(mmn.run(whole, payload), mmn.run(whole.expanded(), payload))


def busy_seconds(demand: StepDemand, payload: float, hardware: mm.Hardware) -> NDArray[np.float64]:
    """How long each step of all repeats lasts, without those that are idle; the demand follows only some repeats."""
    seconds, busy = demand.step_seconds(payload, hardware), demand._is_busy
    begin = demand.schedule.template.n_steps - 1
    end = begin + demand.schedule.period
    steady = np.tile(seconds[begin:end][busy[begin:end]], demand.schedule.repeats - demand._repeats)
    return np.concatenate([seconds[:end][busy[:end]], steady, seconds[end:][busy[end:]]])


def test_predictions_are_exactly_those_of_the_expanded_schedule() -> None:
    rng = random.Random(3)
    checked = 0
    for seed in range(200):
        template = random_schedule(seed, max_chips=8, max_chunks=5)
        if template.n_transfers == 0:
            continue
        if seed % 2:
            template = with_idle_steps(template, rng)
        period = rng.randint(1, template.n_steps)
        whole = template.repeated(rng.choice([2, 3, 5, 8, 40]), period)
        expanded = whole.expanded()
        ours, theirs = StepDemand(whole), StepDemand(expanded)
        # A chunk is 2 s, a hop 1 s and a step 4 s: sums of whole numbers are exact in any order.
        for width in (None, 1):
            hardware = mm.Hardware("whole", 1.0, step_latency_s=4.0, hop_latency_s=1.0, links_at_once=width)
            payload = 2.0 * whole.total_chunks
            assert np.array_equal(busy_seconds(ours, payload, hardware), busy_seconds(theirs, payload, hardware))
            assert ours.seconds(payload, hardware) == theirs.seconds(payload, hardware)
            assert ours.phase_seconds(payload, hardware) == pytest.approx(
                theirs.phase_seconds(payload, hardware), rel=1e-12
            )
        if whole.repeats < 4:
            ahead, same = (mm.predict(form, payload, hardware, mode="asynchronous") for form in (whole, expanded))
            assert ahead.seconds == pytest.approx(same.seconds)
            assert ahead.ratio_to_bound >= 1 - 1e-12
        assert link_load(whole) == pytest.approx(link_load(expanded), rel=1e-12)
        checked += 1
    assert checked > 100


@pytest.mark.parametrize(
    ("mesh", "trees"),
    [
        (Mesh("4x4", failed=["1,1"]), 4),
        (Mesh("6x8", failed=["2x2@2,2"]), 7),
        (Mesh("5x5", wrap=True, failed=["2,2"]), 5),
        (Mesh("3x3x3", failed=["1,1,1"]), 6),
        (Mesh("1x7"), 3),
    ],
    ids=str,
)
def test_asynchronous_forecasts_of_long_schedules_go_on_at_their_pace(
    mesh: Mesh, trees: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = mm.plan(mesh, "weave", trees=trees, chunks=60 * trees)
    for hardware in ("ideal", "tpu-v4-xla"):
        exact = mm.predict(whole, 1e8, hardware, mode="asynchronous").seconds
        assert exact == pytest.approx(mm.predict(whole.expanded(), 1e8, hardware, mode="asynchronous").seconds)
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["meshmend.cost.predict"], "MAX_FOLLOWED", 10 * whole.template.n_transfers)
            assert mm.predict(whole, 1e8, hardware, mode="asynchronous").seconds == pytest.approx(exact, rel=0.01)


def test_files_keep_the_template_and_its_two_numbers(tmp_path: Path) -> None:
    whole = mm.plan(Mesh("4x4", failed=["1,1"]), "weave", chunks=6).repeated(10**6, 5)
    mm.save(whole, tmp_path / "plan.npz")
    back = mm.load(tmp_path / "plan.npz")
    assert back == whole
    assert (back.repeats, back.period, back.total_chunks) == (10**6, 5, 6 * 10**6)
    assert not back.is_proven
    mm.verify(back)


def test_files_without_repeats_are_as_they_were() -> None:
    text = to_text(pair())
    assert text.startswith("meshmend schedule 1\n")
    assert "repeats" not in text
    assert to_text(pair().repeated(3, 1)).startswith("meshmend schedule 2\n")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeats": 1}, "repeats in its header is 1, expected 2 or more"),
        ({"repeats": -3}, "expected 2 or more"),
        ({"repeats": True}, "repeats in its header should be int"),
        ({"drop": "repeats"}, "repeats in its header should be int, got None"),
        ({"repeats": 9999999999}, "at most 2,147,483,647 chunks"),
        ({"period": 0}, "expected 1 to the template's 2"),
        ({"period": 3}, "expected 1 to the template's 2"),
        ({"period": 1.5}, "period in its header should be int"),
        ({"format": 1}, "it repeats, which format 1 does not"),
    ],
)
def test_nonsense_in_a_file_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = forge(tmp_path / "plan.npz", pair().repeated(3, 1), **changes)
    with pytest.raises(ScheduleFileError, match=message):
        mm.load(path)


def test_numbers_that_make_no_schedule_are_refused() -> None:
    whole = pair().repeated(3, 1)
    with pytest.raises(ScheduleError, match="is repeated already"):
        whole.repeated(2, 1)
    with pytest.raises(ScheduleError, match="1 or more times"):
        pair().repeated(0, 1)
    with pytest.raises(ScheduleError, match="more than 2,147,483,647 steps"):
        pair().repeated(2**31 - 1, 2)
    template = pair()
    assert template.repeated(1, 0) is template


def test_what_is_too_long_is_proven_and_saved_but_not_expanded(tmp_path: Path) -> None:
    whole = pair().repeated(MAX_EXPANDED, 1)
    mm.verify(whole)
    mm.save(whole, tmp_path / "plan.npz")
    assert mm.load(tmp_path / "plan.npz") == whole
    with pytest.raises(ScheduleError, match="more than the 33,554,432 transfers that are expanded"):
        whole.expanded()
    with pytest.raises(ScheduleError, match="owners"):
        _ = pair().repeated(MAX_EXPANDED + 1, 1).owners


def test_copies_are_equal_and_prove_themselves_again() -> None:
    whole = pair().repeated(5, 1)
    mm.verify(whole)
    assert len(whole.step) == 10
    for twin in (copy.deepcopy(whole), pickle.loads(pickle.dumps(whole))):  # noqa: S301  # our own bytes
        assert twin == whole
        assert not twin.is_proven
        assert not twin.step.flags.writeable
    assert whole != pair().repeated(5, 2)
    assert whole != pair().repeated(4, 1)


def test_halves_are_right_whether_or_not_they_can_be_repeated() -> None:
    kept = []
    for chunks, period in ((2, 3), (16, 12), (24, 2)):
        whole = mm.plan(Mesh("4x4", failed=["1,1"]), "weave", chunks=chunks).repeated(4, period)
        for half in (reduce_scatter_of(whole), all_gather_of(whole)):
            mm.verify(half)
            assert half.total_chunks == 4 * chunks
            assert counting.is_right(half.expanded())
            kept.append(half.repeats)
    assert 4 in kept
