"""The answers against meshmend's own functions: the page tells what `plan`, `verify` and `predict` say."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest

import meshmend as mm
from meshmend.cost.units import name_seconds
from meshmend.errors import MeshmendError
from meshmend.planning.auto import CHOICES
from meshmend.planning.two_color import TwoColor
from meshmend_lab.availability.boxes import largest_box
from meshmend_lab.studio import answers
from meshmend_lab.studio.state import QUICK_BUDGET_S, State

HURT = State(
    shape="6x6",
    fail=("2x2@2,2", "0,5"),
    fail_cable=("4,0-4,1",),
    cable_rate=("5,4-5,5=1/2",),
    payload="10MB",
    hardware="tpu-v6e",
)
HURT_MESH = mm.Mesh("6x6", failed=["2x2@2,2", (0, 5)], failed_cables=["4,0-4,1"], cable_rates={"5,4-5,5": 0.5})


def oracle(mesh: mm.Mesh, planner: str = "auto", payload: float = 1e7, hardware: str = "tpu-v6e") -> mm.Schedule:
    return mm.plan(mesh, planner, payload_bytes=payload, hardware=hardware, budget_s=QUICK_BUDGET_S)


@pytest.mark.parametrize("planner", ["auto", "latency"])
def test_an_answer_is_what_plan_and_predict_say(planner: str) -> None:
    found = answers.answer(State(**{**vars_of(HURT), "planner": planner}))
    schedule = oracle(HURT_MESH, planner)
    forecast = mm.predict(schedule, 1e7, "tpu-v6e")
    assert (found["planner"], found["steps"], found["chunks"], found["transfers"]) == (
        schedule.planner,
        schedule.n_steps,
        schedule.total_chunks,
        schedule.n_transfers,
    )
    assert found["seconds"] == forecast.seconds
    assert found["time"] == name_seconds(forecast.seconds)
    assert found["ratio"] == forecast.ratio_to_bound
    assert found["bound_units"] == forecast.bound.units
    assert sum(part["seconds"] for part in found["gap"]) == pytest.approx(forecast.seconds)
    assert (found["chips"], found["size"]) == (HURT_MESH.n_chips, 36) == (31, 36)
    assert found["verified"]
    assert found["proof"].startswith("proven all-reduce: every contribution of 31 chips exactly once")


def vars_of(state: State) -> dict[str, Any]:
    return {name: getattr(state, name) for name in State.__dataclass_fields__}


def test_link_loads_are_counted_transfer_by_transfer() -> None:
    found = answers.answer(HURT)["links"]
    schedule = oracle(HURT_MESH)
    carried: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}
    for src, dst, chunks in zip(schedule.src, schedule.dst, schedule.n_chunks, strict=True):
        key = (HURT_MESH.chip(int(src)), HURT_MESH.chip(int(dst)))
        carried[key] = carried.get(key, 0.0) + float(chunks) / schedule.total_chunks
    assert all(sum(abs(x - y) for x, y in zip(a, b, strict=True)) == 1 for a, b in carried), "weave sends to neighbours"
    assert len(found) == HURT_MESH.n_cables
    for name, loads in found.items():
        a, b = (tuple(map(int, end.split(","))) for end in name.split("-"))
        assert a < b
        rate = 0.5 if name == "5,4-5,5" else 1.0
        expected = [carried.get((a, b), 0.0) / rate, carried.get((b, a), 0.0) / rate]
        assert loads == pytest.approx(expected, abs=1e-6)
    assert not {"4,0-4,1", "2,1-2,2", "0,4-0,5"} & set(found)


def test_survivors_in_two_groups_are_an_error_that_says_so() -> None:
    with pytest.raises(MeshmendError, match="2 disconnected groups"):
        answers.answer(State(shape="4x4", fail=("4x1@0,1",)))


def test_alternatives_are_every_planner_a_smaller_mesh_and_the_whole_one() -> None:
    state = State(shape="6x6", fail=("2x2@2,2",), payload="1MB", hardware="tpu-v6e")
    by_name = {row["name"]: row for row in answers.alternatives(state)}
    assert list(by_name) == [*(kind.name for kind in CHOICES), "sub-mesh", "no failures"]
    holed = mm.Mesh("6x6", failed=["2x2@2,2"])
    assert by_name["two-color"]["unsupported_reason"] == TwoColor().unsupported_reason(holed) is not None
    for name in ("hamiltonian", "row-pairs", "weave", "latency"):
        assert by_name[name]["seconds"] == mm.predict(oracle(holed, name, 1e6), 1e6, "tpu-v6e").seconds
    for name, shape in (("sub-mesh", "2x6"), ("no failures", "6x6")):
        assert by_name[name]["seconds"] == mm.predict(oracle(mm.Mesh(shape), "auto", 1e6), 1e6, "tpu-v6e").seconds
    assert by_name["sub-mesh"]["detail"] == "2x6@0,0: 12 chips, 38% of those that live"


def test_the_smaller_mesh_keeps_its_slow_cables_and_its_wrap() -> None:
    mesh = mm.Mesh("4x6", wrap=True, failed=[(0, 0), (0, 3)], failed_cables=["2,2-3,2"], cable_rates={"1,0-1,5": "1/2"})
    part, box = answers._healthy_part(mesh)
    assert box == largest_box(mesh.live)
    assert str(box) == "3x6@1,0"
    assert part == mm.Mesh("3x6", wrap=[False, True], failed_cables=["1,2-2,2"], cable_rates={"0,0-0,5": "1/2"})


def test_a_layout_has_every_chip_and_every_cable() -> None:
    found = answers.layout("3x4", "1")
    assert [chip["name"] for chip in found["chips"]] == [f"{r},{c}" for r, c in itertools.product(range(3), range(4))]
    assert all((chip["x"], chip["y"]) == (chip["at"][1], chip["at"][0]) for chip in found["chips"])
    names = {cable["name"] for cable in found["cables"]}
    down = {f"{r},{c}-{r + 1},{c}" for r in range(2) for c in range(4)}
    across = {f"{r},{c}-{r},{c + 1}" for r in range(3) for c in range(3)}
    assert names == down | across | {f"{r},0-{r},3" for r in range(3)}
    wrapped = next(cable for cable in found["cables"] if cable["name"] == "1,0-1,3")
    assert len(wrapped["lines"]) == 2, "it leaves the picture and comes back"


def test_steps_are_those_of_the_plan() -> None:
    found = answers.steps(HURT)
    schedule = oracle(HURT_MESH)
    assert (found["first"], found["last"], found["steps"]) == (0, schedule.n_steps - 1, schedule.n_steps)
    assert {(a, b) for a, b in zip(found["src"], found["dst"], strict=True)} == set(
        zip(schedule.src.tolist(), schedule.dst.tolist(), strict=True)
    )


def test_long_plans_are_shown_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_FILM_STEPS", 5)
    found = answers.steps(HURT)
    assert (found["first"], found["last"]) == (0, 4)
    assert found["steps"] > 5


def test_a_plan_file_is_the_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.npz").write_bytes(answers.plan_file(HURT))
    assert mm.load(tmp_path / "plan.npz") == oracle(HURT_MESH)


def test_sixteen_by_thirty_two_is_answered_at_once() -> None:
    # A second of a quiet core, counted in work: 3 million passes of a loop take a quarter of it.
    started = time.process_time()
    assert sum(i * i for i in range(3_000_000)) > 0
    unit = time.process_time() - started
    state = State(shape="16x32", fail=("4x2@6,8",), payload="1GB", hardware="tpu-v6e")
    answers.answer(State(shape="4x4"))  # imports
    assert answers.answer(state)["cpu_seconds"] < 4 * unit
