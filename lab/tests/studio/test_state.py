"""The state: what the page may ask, and that the command and the link that it shows ask the same."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest
from typer.testing import CliRunner

from meshmend import Mesh
from meshmend.cli.options import HoleOptions
from meshmend.errors import MeshmendError, ParameterError
from meshmend.planning.proven import split_planner
from meshmend_lab.cli import app
from meshmend_lab.studio.state import MAX_CHIPS, MAX_LIST, State, whole_machine

HURT = Mesh(
    "6x6",
    wrap=[True, False],
    failed=["2x2@2,2", "5,0"],
    failed_cables=["0,0-5,0", "0,4-0,5"],
    cable_rates={"1,4-1,5": 0.5},
)
STATES = [
    State(),
    State(shape="16x32", fail=("4x2@6,8",), payload="1GB", hardware="tpu-v6e"),
    State.of(HURT, planner="weave", budget=2.0),
    State.of(Mesh("2x3x4", wrap=True, failed=["1x1x2@1,1,1"]), payload="1KB"),
]


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.shape)
def test_the_command_asks_the_same(state: State) -> None:
    words = shlex.split(state.command)
    assert words[:3] == ["meshmend", "plan", state.shape]
    given: dict[str, list[str]] = {}
    for option, value in zip(words[3::2], words[4::2], strict=True):
        given.setdefault(option, []).append(value)
    fail, cut, slow = (given.get(f"--{name}") for name in ("fail", "fail-cable", "cable-rate"))
    holes = HoleOptions(fail, cut, slow, *given.get("--wrap", []))
    assert holes.mesh(words[2]) == state.mesh
    assert given["--payload"] == [state.payload]
    assert given["--hardware"] == [state.hardware]
    name, parameters = split_planner(given.get("--planner", ["auto"])[0])
    assert (name, parameters.get("budget_s", 10)) == (state.planner, state.budget)


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.shape)
def test_a_link_keeps_the_state(state: State) -> None:
    given: dict[str, Any] = {}
    for name, value in parse_qsl(state.fragment):
        key = name.replace("-", "_")
        if key in ("fail", "fail_cable", "cable_rate"):
            given.setdefault(key, []).append(value)
        else:
            given[key] = float(value) if key == "budget" else value
    assert State.read(given) == state


def test_a_mesh_survives() -> None:
    assert State.of(HURT).mesh == HURT


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], r"The state is \[\], expected an object with the fields shape, wrap"),
        ({"colour": 1}, "has no field 'colour'"),
        ({"shape": 8}, "shape has 8, expected a text"),
        ({"shape": "8" * 65}, "expected a text of at most 64"),
        ({"payload": "1\x1bMB"}, "payload has '1\\\\x1bMB', expected a text"),
        ({"fail": "2,2"}, "fail is '2,2', expected a list"),
        ({"fail": [[2, 2]]}, r"fail has \[2, 2\], expected a text"),
        ({"fail": ["0,0"] * (MAX_LIST + 1)}, r"expected a list of at most 12,288 texts"),
        ({"budget": 3600}, "expected CPU seconds, above 0 and up to 10"),
        ({"budget": True}, "expected CPU seconds"),
        ({"budget": float("nan")}, "expected CPU seconds"),
    ],
)
def test_whatever_is_no_state_is_refused(given: object, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        State.read(given)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (State(shape="33x64"), "has 2,112 chips; the studio shows up to 2,048. Choose a smaller shape"),
        (State(shape="99999x99999"), "has 9,999,800,001 chips; the studio shows up to 2,048"),
        (State(shape="0x4"), "0x4"),
        (State(wrap="7"), "wrap 7: expected none, all, or axes from 0 to 1"),
        (State(fail=("9,9",)), "outside the 8x8 mesh"),
        (State(fail=("8x8@0,0",)), "All 64 chips"),
        (State(fail_cable=("0,0-5,5",)), "not neighbours"),
        (State(cable_rate=("0,0-0,1=2",)), "rate"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(state: State, message: str) -> None:
    with pytest.raises(MeshmendError, match=message):
        _ = state.mesh


def test_a_payload_of_nothing_is_refused() -> None:
    with pytest.raises(ParameterError, match="expected more than 0 bytes"):
        _ = State(payload="0B").payload_bytes


def test_the_largest_machine_is_shown() -> None:
    assert whole_machine("32x64", "none").size == MAX_CHIPS


def test_the_slow_cable_of_a_failed_chip_stays_slow() -> None:
    whole = Mesh("2x2", cable_rates={"0,0-0,1": "1/2"})
    assert State.of(whole.fail("0,0")).mesh.whole == whole
    cut = State.of(whole.with_failures(failed_cables=["0,0-0,1"]))
    assert cut.cable_rate == (), "a cable is dead or slow, not both"


def test_it_starts_with_the_machines_hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("meshmend: 1\nshape: 4x4\nhardware: tenstorrent-t3000\n", encoding="utf-8")
    monkeypatch.setattr("meshmend_lab.cli.studio._serve", lambda *_: None)
    words = ["studio", "--machine", str(path), "--listen", "127.0.0.1:0", "--json"]

    def url(*more: str) -> str:
        result = CliRunner().invoke(app, [*words, *more])
        assert result.exit_code == 0, result.output
        return str(json.loads(result.stdout)["url"])

    assert "hardware=tenstorrent-t3000" in url()
    assert "hardware=tpu-v6e" in url("--hardware", "tpu-v6e")
