"""`meshmend machine`, and `--machine` in the commands that plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from descriptions import OWN, SAMPLES, nodes
from meshmend import Mesh
from meshmend.cli import app
from meshmend.cli.machine import coloured, picture

CLI = CliRunner()


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(OWN, encoding="utf-8")
    return path


def run(*words: object) -> tuple[int, str]:
    done = CLI.invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})
    return done.exit_code, done.output


def test_it_shows_what_is_missing_and_whom_to_call(mine: Path) -> None:
    code, out = run("machine", mine)
    assert code == 0
    assert "4x8 wrapped on axis 1 minus 1x1@0,3, 2x2@2,0, 1 cable with 1 slow cable" in out
    assert "(0,3) tray1.chip3 on node0" in out
    assert "0,0-0,1 at 1/2" in out
    assert "o===o---o   x   o---o---o---o" in out
    assert f"next: meshmend plan --machine {mine} --payload 100MB --hardware tpu-v3" in out


def test_json_has_the_same_facts(mine: Path) -> None:
    code, out = run("machine", mine, "--json")
    facts = json.loads(out)
    assert code == 0
    assert (facts["mesh"], facts["chips"], facts["call"]) == ("4x8", 27, ["node0"])
    assert facts["cable_rates"] == {"0,0-0,1": "1/2"}
    assert {"at": [0, 3], "name": "tray1.chip3", "host": "node0"} in facts["failed_chips"]


def test_the_terminals_picture_tells_what_has_failed_and_what_is_slow(mine: Path) -> None:
    done = CLI.invoke(app, ["machine", str(mine)], env={"COLUMNS": "200"}, color=True)
    assert "o===o---o   x   o---o---o---o\n" in done.output
    assert "o---o-x-o---o---o---o---o---o\n" in done.output
    assert 'o chip; x failed chip, -x- failed cable; = and " slow cables; wrap cables are not shown' in done.output
    drawn = coloured(picture(Mesh("1x3", failed_cables=["0,0-0,1"], cable_rates={"0,1-0,2": 0.5})))
    assert drawn.plain == "\no-x-o===o"
    styles = {drawn.plain[span.start]: str(span.style) for span in drawn.spans}
    assert styles == {"-": "dim", "x": "bold red", "=": "yellow"}


def test_plan_takes_the_machine_and_more_holes(mine: Path) -> None:
    code, out = run("plan", "--machine", mine, "--fail", "0,7", "--planner", "weave", "--chunks", 8, "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["chips"] == 26
    assert facts["verified"]
    assert run("plan", "4x8", "--machine", mine)[0] == 1
    assert run("plan", "4x8", "--intended", mine)[0] == 1
    assert run("plan")[0] == 2


def test_a_failure_without_a_place_is_shown_and_not_planned_for(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(nodes([f"node{n}" for n in range(16)], bad=["node5"]), encoding="utf-8")
    code, out = run("machine", path)
    assert code == 0
    assert "node5: not Ready" in out
    assert "next:" not in out
    code, out = run("plan", "--machine", path)
    assert code == 1
    assert "nothing says where in the mesh: node5" in out


def test_an_ambiguous_machine_is_settled_by_its_shape_or_by_what_was_intended(tmp_path: Path) -> None:
    text = SAMPLES["t3000"].without(chips=[6, 7]).text
    hurt, whole = tmp_path / "hurt.yaml", tmp_path / "whole.yaml"
    hurt.write_text(text.replace("n300", "unknown"), encoding="utf-8")
    whole.write_text(SAMPLES["t3000"].text, encoding="utf-8")
    code, out = run("machine", hurt)
    assert code == 1
    assert "The layout is ambiguous" in out
    code, out = run("machine", hurt, "--intended", whole)
    assert code == 0
    assert "chip 6" in out
    code, out = run("plan", "--machine", hurt, "--intended", whole, "--planner", "weave", "--chunks", 8)
    assert code == 0


T3000 = 'meshmend: 1\nhardware: tenstorrent-t3000\nshape: 4x8\nfailed: ["0,3"]\nrates: {"1,1-1,2": 1/2}'
"""A described machine whose links have less than a third of the rate of the default's."""


@pytest.mark.parametrize("command", ["plan", "compare"])
def test_a_machine_brings_its_hardware(command: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(T3000, encoding="utf-8")

    def facts(*words: str) -> tuple[str, float]:
        code, out = run(command, "--machine", path, "--payload", "100MB", *words, "--json")
        assert code == 0, out
        found = json.loads(out)
        if command == "compare":
            assert found["full_mesh"]["cable_rates"] == {"1,1-1,2": "1/2"}, "nothing failed, and as slow"
        seconds = found["bound_seconds"] if command == "plan" else found["mesh"]["bound_seconds"]
        return found["hardware"]["name"], seconds

    # 25 GB/s per link against 82: a bound is a number of bytes over the rate.
    name, seconds = facts()
    assert name == "tenstorrent-t3000"
    assert facts("--hardware", "tenstorrent-t3000") == (name, seconds)
    said, other = facts("--hardware", "tpu-v3")
    assert said == "tpu-v3"
    assert seconds / other == pytest.approx(82 / 25)


def test_the_studio_starts_with_the_machines_hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(T3000, encoding="utf-8")
    monkeypatch.setattr("meshmend.cli.studio._serve", lambda *_: None)
    words = ["studio", "--machine", path, "--listen", "127.0.0.1:0", "--json"]
    assert "hardware=tenstorrent-t3000" in json.loads(run(*words)[1])["url"]
    assert "hardware=tpu-v6e" in json.loads(run(*words, "--hardware", "tpu-v6e")[1])["url"]
