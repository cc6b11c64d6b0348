"""What people see: help that shows flags as flags, tables on narrow terminals, colours that can be switched off."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from rich.table import Table
from typer.testing import CliRunner

from commandline import commands
from meshmend.cli import app, terminal
from meshmend.cli.root import PANELS
from meshmend.cost import bound
from meshmend.topology import Mesh

LEAVES = [command for command in commands().values() if not hasattr(command, "commands")]
"""Every command that does something."""


def shown(*words: str, width: int = 100) -> str:
    result = CliRunner(env={"COLUMNS": str(width)}).invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.output


def test_the_first_screen_of_the_help_is_one_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshmend.cli.root.entry_points", lambda **_: [])
    lines = shown("--help", width=80).rstrip().splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    panels = {panel: re.findall(r"│ (\w+) ", half) for panel, half in _panels(lines)}
    assert panels == {
        "Start here": ["plan", "verify", "compare", "draw", "run", "doctor"],
        "Operate": ["prepare", "store", "watch", "machine", "quarantine"],
        "Study": ["compile"],
    }
    visible = {name for name, command in commands()[()].commands.items() if not command.hidden}
    assert visible == {name for names in panels.values() for name in names}
    assert all(len(line) <= 60 for line in shown("--help", width=60).splitlines())


def _panels(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the title and the lines of each panel, of which two lie beside each other."""
    for columns in (slice(0, 40), slice(40, 80)):
        half = "\n".join(line[columns] for line in lines)
        yield from re.findall(r"╭─ ([\w ]+) ─+╮\n(.*?)╰", half, re.S)


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_help_shows_flags_as_flags_and_all_that_it_was_given(words: tuple[str, ...]) -> None:
    help_ = shown(*words, "-h")
    assert "Usage" in help_
    if not words:
        return  # the first screen has a test of its own
    options = help_.partition("─ Arguments")[2].partition("╯")[2] or help_
    assert not re.search(r"<\w+|BOOLEAN|INTEGER|TEXT|--no-", options)
    assert re.search(r"─ Output .*--help +-h +Show this message", options, re.S)
    # Square brackets in a text would be taken for a style, and vanish.
    said = " ".join(re.sub("[│╭╮╰╯─]", " ", shown(*words, "--help", width=400)).split())
    assert [param.name for param in options_of(commands()[words]) if " ".join(param.help.split()) not in said] == []
    # A line break of a docstring is not one of the terminal's: paragraphs are wrapped to its width.
    assert max(len(line.rstrip()) for line in shown(*words, "-h", width=60).splitlines()) <= 60


def options_of(command: Any) -> list[Any]:
    return [param for param in command.params if param.param_type_name == "option"]


def test_the_command_line_stays_small() -> None:
    """What somebody has to look through: commands, and the options of all of them together, without --help."""
    assert len(commands()[()].commands) <= 14
    assert sum(len(options_of(command)) for command in LEAVES) <= 128


def test_long_lists_of_options_are_in_panels() -> None:
    panels = re.findall(r"╭─ ([\w ]+?) ─", shown("plan", "--help"))
    assert panels == ["Arguments", "Mesh", "Planner", "Payload and hardware", "Output"]
    for command in LEAVES:
        known = [param for param in command.get_params(typer.Context(command)) if param in options_of(command)]
        if len(known) > 8:
            assert all(param.rich_help_panel in PANELS for param in known), command.name
    named = [name for names in PANELS.values() for name in names.split()]
    there = {name for command in LEAVES for param in command.params for name in param.opts}
    assert len(named) == len(set(named))
    assert set(named) - {"--help"} <= there


@pytest.mark.parametrize("shape", ["4X6", "4×6", "4x6"])
def test_shapes_are_written_in_three_ways(shape: str) -> None:
    hole = f"2{shape[1]}2@0,0"
    facts = json.loads(shown("plan", shape, "--fail", hole, "--planner", "hamiltonian", "--json"))
    assert (facts["mesh"], facts["failed"]) == ("4x6", ["2x2@0,0"])


def test_plan_leads_with_its_time_and_the_bound() -> None:
    words = ("plan", "4x6", "--planner", "hamiltonian", "--payload", "10MB", "--hardware", "tpu-v3")
    facts = json.loads(shown(*words, "--json"))
    limit = bound(Mesh("4x6")).units * 10e6 / 82e9
    assert facts["bound_seconds"] == pytest.approx(limit)
    assert facts["ratio_to_bound"] == pytest.approx(facts["seconds"] / limit)
    lines = shown(*words).splitlines()
    assert lines[0] == "hamiltonian all-reduce on 4x6"
    time = re.fullmatch(
        r"time +([\d.]+) µs for 10 MB per chip on tpu-v3: ([\d.]+)× the bound of ([\d.]+) µs", lines[1].strip()
    )
    assert time
    assert float(time[1]) == pytest.approx(facts["seconds"] * 1e6, rel=1e-3)
    assert float(time[2]) == pytest.approx(facts["ratio_to_bound"], abs=5e-4)
    assert float(time[3]) == pytest.approx(limit * 1e6, rel=1e-3)


def table_of(n: int) -> Table:
    table = Table("planner", "why not", title="\nAll of them", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.columns[1].min_width = 16
    for i in range(n):
        table.add_column(f"heading {i}", justify="right")
    table.add_row("weave", "words that may be wrapped where they have to be", *(f"{i},234.5 ms" for i in range(n)))
    return table


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120])
@pytest.mark.parametrize("n", [1, 3, 6])
def test_no_number_is_ever_cut(n: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", str(width))
    terminal.print_table(table_of(n))
    printed = out.getvalue()
    assert "…" not in printed
    for i in range(n):
        assert f"{i},234.5 ms" in printed
    # Side by side where there is room: all numbers are on one line then.
    fits = width >= len("planner") + 2 + 16 + n * (2 + len("0,234.5 ms"))
    assert any(all(f"{i},234.5 ms" in line for i in range(n)) for line in printed.splitlines()) == (fits or n == 1)
    assert "All of them" in printed
    assert ("planner" in printed) == fits
    assert all(word in printed for word in ["words", "that", "may", "be", "wrapped", "heading"])


@pytest.mark.parametrize(("settings", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)], ids=["colour", "NO_COLOR"])
def test_colours_can_be_switched_off(settings: dict[str, str], coloured: bool) -> None:
    code = (
        "from meshmend.cli.common import print_facts\nfrom meshmend.cli.terminal import approved\n"
        "print_facts('title', {'name': approved('it')})"
    )
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    environment |= {"FORCE_COLOR": "1", "TERM": "xterm-256color"} | settings
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True, timeout=120)
    assert (b"\x1b[32m" in done.stdout or b"\x1b[36m" in done.stdout) == coloured


def test_progress_is_for_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def words_on_screen(is_terminal: bool, as_json: bool = False) -> str:
        out = io.StringIO()
        monkeypatch.setattr(out, "isatty", lambda: is_terminal, raising=False)
        monkeypatch.setattr(sys, "stderr", out)
        with terminal.working("planning [/bold]\x1b[2J", as_json, total=2) as tell:
            tell(advance=1)
            tell("proving")
        return out.getvalue()

    monkeypatch.setenv("TERM", "xterm-256color")
    watched = words_on_screen(True)
    assert "proving" in watched
    assert "1/2" in watched
    assert "\x1b[2J" not in watched
    assert words_on_screen(False) == ""
    assert words_on_screen(True, as_json=True) == ""


def test_the_shell_completes() -> None:
    settings = {"_MESHMEND_COMPLETE": "complete_bash", "COMP_WORDS": "meshmend pl", "COMP_CWORD": "1"}
    assert CliRunner(env=settings).invoke(app, [], prog_name="meshmend").stdout.split() == ["plan"]
