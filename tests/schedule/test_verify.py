from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import meshmend.numpy as mmn
from memory import PEAK_MEGABYTES
from meshmend import Mesh, Op, Schedule, plan, verify
from meshmend.errors import CollisionError, VerificationError, WrongSumError
from meshmend.schedule.verify import ensure_proven

LINE = Mesh("1x3")


def line(**changes: Any) -> Schedule:
    """A correct all-reduce over a line of three chips, with some arguments replaced."""
    arguments: dict[str, Any] = {
        "total_chunks": 1,
        "step": [0, 1, 2, 3],
        "src": [0, 1, 2, 1],
        "dst": [1, 2, 1, 0],
        "op": [Op.REDUCE, Op.REDUCE, Op.COPY, Op.COPY],
        "owners": [2],
    }
    return Schedule(LINE, **(arguments | changes))


@pytest.mark.parametrize("method", ["exact", "fingerprint"])
def test_a_correct_schedule_is_proven_by_both_methods(method: Any) -> None:
    proof = verify(line(), method=method)
    assert proof.method == method
    assert (proof.chips, proof.chunks, proof.steps, proof.transfers) == (3, 1, 4, 4)
    assert proof.false_pass_probability == (0 if method == "exact" else 1 / (2**61 - 1))
    # 1 / (2⁶¹ − 1) is 4.3 · 10⁻¹⁹: a bound is rounded up.
    how = "counted exactly" if method == "exact" else "error below 5e-19"
    assert f"proven all-reduce: every contribution of 3 chips exactly once in 1 chunk ({how}; " in str(proof)


def test_a_failed_cable_sends_a_transfer_round_it() -> None:
    square = Mesh("2x2")
    schedule = plan(square, "hamiltonian")
    # Still an all-reduce: the network carries the broken hop round the other way.
    assert verify(schedule, mesh=Mesh("2x2", failed_cables=["0,0-0,1"])).transfers == schedule.n_transfers


def test_chunks_that_travel_together_are_followed_as_one() -> None:
    wide = line(total_chunks=10**7, n_chunks=10**7, owners=np.full(10**7, 2))
    assert verify(wide).seconds < 5


def test_blocks_of_chunks_are_all_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["meshmend.schedule.verify"], "MAX_STATE_BYTES", 256)
    schedule = plan(Mesh("4x4"), "two-color", verify=False)
    assert verify(schedule, method="exact").chunks == 4 * 16
    broken = corrupt(schedule, "drop", np.random.default_rng(0))
    assert broken is not None
    with pytest.raises(WrongSumError, match="ends with a wrong chunk"):
        verify(broken, method="fingerprint")


KINDS = ("drop", "double", "retarget", "change op", "move step", "shift chunk")
SOURCES = [
    ("4x4", [], "hamiltonian", {}),
    ("4x4", [], "two-color", {}),
    ("4x6", ["2x2@0,2"], "hamiltonian", {}),
    ("4x6", [], "row-pairs", {"segments": 2}),
    ("6x6", ["2x2@2,2"], "row-pairs", {}),
    ("6x6", ["4x2@0,0"], "row-pairs", {"orientation": "rows"}),
]


def corrupt(schedule: Schedule, kind: str, rng: np.random.Generator) -> Schedule | None:
    """Break one transfer of a schedule; None where the damage falls outside what a schedule can say."""
    columns: dict[str, NDArray[Any]] = {
        name: getattr(schedule, name).astype(np.int64)
        for name in ("step", "src", "dst", "first_chunk", "n_chunks", "op", "phase")
    }
    row = int(rng.integers(schedule.n_transfers))
    match kind:
        case "drop":
            columns = {name: np.delete(column, row) for name, column in columns.items()}
        case "double":
            columns = {name: np.append(column, column[row]) for name, column in columns.items()}
            columns["step"][-1] = rng.integers(schedule.n_steps)
        case "retarget":
            columns["dst"][row] = rng.integers(schedule.mesh.n_chips)
        case "change op":
            columns["op"][row] = 1 - columns["op"][row]
        case "move step":
            columns["step"][row] = max(0, columns["step"][row] + rng.choice([-3, -2, -1, 1, 2, 3]))
        case "shift chunk":
            columns["first_chunk"][row] += rng.choice([-1, 1])
    end = columns["first_chunk"] + columns["n_chunks"]
    outside = columns["first_chunk"].min() < 0 or end.max() > schedule.total_chunks
    if outside or (columns["src"] == columns["dst"]).any():
        return None
    columns["step"] = np.unique(columns["step"], return_inverse=True)[1]
    return schedule.replace(**columns)


@pytest.mark.parametrize("rounds", [6, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", ["exact", "fingerprint"])
def test_the_verifier_and_numpy_agree_on_every_corruption(method: Any, rounds: int) -> None:
    rng = np.random.default_rng(20201107)
    outcomes: Counter[tuple[str, str]] = Counter()
    tried = 0
    for shape, failed, planner, parameters in SOURCES:
        schedule = plan(Mesh(shape, failed=failed), planner, **parameters)  # type: ignore[arg-type]
        chips, chunks = schedule.mesh.n_chips, schedule.total_chunks
        for kind in KINDS:
            for _ in range(rounds):
                broken = corrupt(schedule, kind, rng)
                if broken is None:
                    continue
                tried += 1
                # Random 40-bit numbers: two different multisets of contributions will not have equal sums.
                payload = rng.integers(0, 2**40, (chips, chunks))
                right = bool((mmn.run(broken, payload) == payload.sum(axis=0)).all())
                try:
                    verify(broken, method=method)
                    verdict = "proven"
                except WrongSumError:
                    verdict = "wrong sum"
                except CollisionError:
                    verdict = "collision"
                if not right:
                    assert verdict != "proven", (shape, planner, kind)
                if verdict == "wrong sum":
                    assert not right, (shape, planner, kind)
                outcomes[kind, verdict] += 1
    assert tried >= 25 * rounds
    for kind in KINDS:
        assert outcomes[kind, "wrong sum"] >= rounds // 2, (kind, outcomes)
    # Some damage is harmless, and the verifier must say so too.
    assert sum(count for (_, verdict), count in outcomes.items() if verdict == "proven") >= rounds // 2


def test_a_schedule_carries_whether_it_is_proven() -> None:
    schedule = line()
    assert not schedule.is_proven
    verify(schedule, mesh=Mesh("1x3"), method="fingerprint", seed=1)
    assert not schedule.is_proven  # whoever knows the seed can make a schedule that passes
    ensure_proven(schedule)
    assert schedule.is_proven
    assert plan(Mesh("2x2")).is_proven
    assert not plan(Mesh("2x2"), verify=False).is_proven


def test_too_few_transfers_are_refused_before_the_mesh_is_looked_at() -> None:
    lone = Schedule(Mesh("4x4"), total_chunks=1, step=[0], src=[0], dst=[1], op=[0], owners=[0])
    with pytest.raises(
        WrongSumError, match="all-reduce of 16 chips takes 15 transfers or more: the schedule has 1"
    ) as e:
        verify(lone)
    assert (e.value.expected, e.value.got) == ("15 transfers or more", "1")
    assert "neighbours" not in vars(lone.mesh)


def test_other_survivors_of_the_same_number_are_detected() -> None:
    alone = Schedule(Mesh("1x2", failed=["0,0"]), total_chunks=1, step=[], src=[], dst=[], op=[], owners=[0])
    with pytest.raises(VerificationError, match="has other survivors"):
        verify(alone, mesh=Mesh("1x2", failed=["0,1"]))


BOMBS = (
    PEAK_MEGABYTES
    + """
import resource, sys
import numpy as np
from meshmend import Mesh, MeshmendError, Schedule, verify

resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, 3 * 2**30))  # NumPy's threads reserve a good part of this

def attempt(mesh, **columns):
    try:
        print(verify(Schedule(mesh, op=1, **columns)))
    except MeshmendError as error:
        print(type(error).__name__, error)

# 50,000 runs of one chunk, then 50,000 transfers of them all, in one step: 2,500,000,000 writes of two chips.
K = 50_000
runs = np.concatenate([np.arange(K), np.zeros(K, int)])
attempt(Mesh((1, 2)), total_chunks=K, step=np.repeat([0, 1], K), src=0, dst=1, first_chunk=runs,
        n_chunks=np.repeat([1, K], K), owners=np.zeros(K, int))
# 200,000 runs that one transfer per step moves all together, in 200,000 steps.
K = 200_000
runs = np.concatenate([np.arange(K), np.zeros(K, int)])
attempt(Mesh((1, 2)), total_chunks=K, step=np.maximum(np.arange(2 * K) - K + 1, 0), src=0, dst=1, first_chunk=runs,
        n_chunks=np.repeat([1, K], K), owners=np.zeros(K, int))
# Sixteen million chips and one transfer.
attempt(Mesh((8,) * 8), total_chunks=1, step=[0], src=[0], dst=[1], owners=[0])
# A line of chips, every one of which sends to the far end.
n = 20_000
attempt(Mesh((1, n)), total_chunks=1, step=np.arange(n - 1), src=np.arange(1, n), dst=0, owners=[0])
# A ring with a failed cable, and flows that would cross it: their routes need tables.
n = 60_000
attempt(Mesh((1, n), wrap=True, failed_cables=[((0, 0), (0, n - 1))]), total_chunks=1, step=np.zeros(n - 1, int),
        src=np.arange(n - 1), dst=[n - 1 - i if i < n // 4 else i + 1 for i in range(n - 1)], owners=[0])
print("peak", peak_megabytes(), "MB")
"""
)


def test_hostile_schedules_are_refused_before_they_take_memory() -> None:
    """In a process of its own, which may not have much more memory than it needs."""
    done = subprocess.run([sys.executable, "-c", BOMBS], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    n_far = sum(range(2, 20_000))
    collision, work, few, hops, tables, peak = done.stdout.splitlines()
    assert collision.startswith("CollisionError Step 1 writes chunk 0 of chip (0,1) twice")
    # 200,000 single moves, 200,000 of 200,000; the cells of two chips; the transfers, and 1,024 for each step.
    n = 200_000
    moves = n + n**2 + 2 * n + 2 * n + (n + 1) * 1024
    assert work.startswith("VerificationError To prove 400,000 transfers of 200,000 different runs of chunks between 2")
    assert f"takes {moves:,} moves; at most 8,589,934,592 are made" in work
    assert few.startswith("WrongSumError The all-reduce of 16,777,216 chips takes 16,777,215 transfers or more")
    assert f"takes {n_far:,} hops; the limit is 4,194,304" in hops
    assert "cells of route tables; the limit is 1,073,741,824" in tables
    assert int(peak.split()[1]) < 1000


def test_a_proof_that_would_take_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["meshmend.schedule.verify"]
    # Three chips, one class, moved four times: by fingerprints 4 + 3 moves, 4 transfers, and 4 steps.
    work = 4 + 3 + 4 + 4 * 1024
    monkeypatch.setattr(module, "MAX_WORK", work)
    assert verify(line(), method="fingerprint").steps == 4
    monkeypatch.setattr(module, "MAX_WORK", work - 1)
    with pytest.raises(VerificationError, match=f"3 chips takes {work:,} moves; at most {work - 1:,} are made"):
        verify(line(), method="fingerprint")
    # Two blocks of chunks follow every step twice.
    two = line(total_chunks=2, n_chunks=1, owners=[2, 1])
    monkeypatch.setattr(module, "MAX_STATE_BYTES", 3 * 16)
    monkeypatch.setattr(module, "MAX_WORK", 4 + 6 + 2 * (4 + 4 * 1024) - 1)
    with pytest.raises(VerificationError, match="4 transfers of 2 different runs of chunks between 3 chips"):
        verify(two, method="fingerprint")


def test_chips_too_many_to_count_exactly_are_counted_by_fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["meshmend.schedule.verify"]
    monkeypatch.setattr(module, "MAX_STATE_BYTES", 9)
    assert verify(line(), method="exact").chips == 3
    monkeypatch.setattr(module, "MAX_STATE_BYTES", 8)
    with pytest.raises(VerificationError, match="3 chips exactly takes 9 bytes per chunk; at most 8 are used"):
        verify(line(), method="exact")
    monkeypatch.setattr(module, "EXACT_CELLS", 9)
    monkeypatch.setattr(module, "MAX_STATE_BYTES", 9)
    assert verify(line()).method == "exact"
    monkeypatch.setattr(module, "EXACT_CELLS", 8)
    assert verify(line()).method == "fingerprint"
