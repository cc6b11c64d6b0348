"""Every command of the laboratory, every way to fail: one line on standard error, as those of the product."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import typer

from cli.failures import CUT, check, run
from commandline import commands
from meshmend import Mesh, plan, save
from meshmend_lab.cli import app
from meshmend_lab.mesh import journal

PLAN = plan(Mesh("2x2"), "hamiltonian")
# command, what is wrong, the words, a part of the message
CASES: list[tuple[str, str, list[str], str]] = [
    ("mesh up", "bad name", ["2x2", "--name", "[bold]"], "'[bold]' is not a valid name for a lab"),
    ("mesh up", "bad rate", ["2x2", "--rate", "1\u0660mbit"], "is not a rate"),
    ("mesh up", "bad delay", ["2x2", "--delay", "5 ms"], "'5 ms' is not a delay. Write it as tc does"),
    ("mesh up", "cut mesh", ["4x4", *CUT], "are not connected"),
    ("mesh up", "too large", ["99x99"], "has 9,801 chips; the limit is 400"),
    ("mesh show", "missing", ["nobody"], "No lab named nobody is up"),
    ("mesh kill", "missing", ["0,0", "--name", "nobody"], "No lab named nobody is up"),
    ("mesh down", "name and all", ["nobody", "--all"], "leave out the name"),
    ("bench allreduce", "nowhere", [], "Say where"),
    ("bench allreduce", "delay without a lab", ["--loopback", "1x2", "--delay", "5ms"], "--delay is of a lab's links"),
    ("bench allreduce", "bad unit", ["--loopback", "1x2", "--payload", "much"], "is not a payload"),
    ("simulate", "no range", ["--seeds", "7"], "expected the first seed and the one after the last"),
    ("availability", "bad host", ["4x4", "--assume", "host=3x3"], "host of 3x3 chips does not tile"),
    ("availability", "too short", ["4x4", "--days", "0"], "--days 0: expected more than 0"),
    ("availability", "too long", ["4x4", "--days", "1e308"], "at most 36,500"),
    ("availability", "bad ending", ["4x4", "-o", "a.pdf"], "expected .html or .htm"),
    ("availability", "name and no page", ["4x4", "--name", "Mine"], "give --output F.html as well"),
    ("availability", "no folder", ["4x4", "-o", "nowhere/a.html"], "nothing can be written"),
    ("studio", "too large", ["200x200"], "has 40,000 chips; the studio shows up to 2,048"),
    ("studio", "hardware of a file", ["4x4", "--hardware", "mine.json"], "no hardware 'mine.json', and opens no files"),
    ("studio", "bad address", ["4x4", "--listen", "127.0.0.1:many"], "expected an address and a port"),
    ("studio", "no such address", ["4x4", "--listen", "192.0.2.1:0"], "Choose another port"),
    ("paper", "bad unit", ["--resnet-compute", "long"], "is not a time"),
    ("figure", "no such figure", ["11", "-o", "a.svg"], "there is no figure 11"),
    ("figure", "bad ending", ["9", "-o", "a.html"], "a.html ends in '.html'"),
    ("machine", "no file", ["nowhere.yaml"], "nowhere.yaml: No such file"),
    ("programs", "no plan", ["nowhere.npz", "--machine", "x.yaml", "-o", "a.json"], "nowhere.npz"),
    ("programs", "bad ending", ["plan.npz", "--machine", "x.yaml", "-o", "a.txt"], "expected .json"),
    ("verify", "missing", ["nowhere"], "nowhere/manifest.json cannot be read"),
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each case in a folder with a good plan."""
    monkeypatch.chdir(tmp_path)
    save(PLAN, "plan.npz")
    monkeypatch.setattr(journal, "FOLDER", tmp_path / "journals")


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [pytest.param(command, words, message, id=f"{command}: {what}") for command, what, words, message in CASES],
)
def test_a_failure_is_one_line(command: str, words: list[str], message: str) -> None:
    check(["lab", *command.split(), *words], message)
    assert not Path("a.svg").exists()


GROUP = typer.main.get_command(app)
COMMANDS = [" ".join(words) for words, one in commands(GROUP).items() if not hasattr(one, "commands")]
WITHOUT_FAILURES = {"doctor", "mesh list"}
"""They find what is wrong with a machine and say so; that is no failure of theirs."""

ELSEWHERE = {"mesh run", "export", "bench restart", "bench jax"}
"""What they refuse takes root or an extra: below."""


def test_every_command_has_its_failures_here() -> None:
    assert {command for command, *_ in CASES} == set(COMMANDS) - WITHOUT_FAILURES - ELSEWHERE


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_command_line_is_one_line(command: str) -> None:
    words = ["lab", *command.split()]
    if command == "mesh run":  # whatever follows is the command to run
        code, out, err = run(words)
        assert (code, out) == (2, "")
        assert re.fullmatch(r"Error: [^\n]+\n", err)
    else:
        check([*words, "--qqq"], "No such option: --qqq. See: ", code=2)


@pytest.mark.parametrize(
    ("words", "module", "extra"),
    [
        (["export", "4x4", "-o", "a"], "flatbuffers", "export"),
        (["bench", "allreduce", "--loopback", "1x2"], "torch", "torch"),
        (["bench", "restart"], "orbax", "restart"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[:2]),
)
def test_a_missing_extra_is_one_line(
    words: list[str], module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshmend_lab.extras.find_spec", lambda name: None if name == module else object())
    monkeypatch.setitem(sys.modules, module, None)
    check(["lab", *words], f"needs {module}, which is not installed here")
    assert f"meshmend-lab[{extra}]" in run(["lab", *words])[2]


def test_to_time_jax_takes_an_extra_of_meshmend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshmend.extras.find_spec", lambda name: None if name == "jax" else object())
    monkeypatch.setitem(sys.modules, "jax", None)
    words = ["lab", "bench", "jax", "--shape", "1x2"]
    check(words, "needs jax, which is not installed here")
    assert "pip install 'meshmend[jax]'" in run(words)[2]
