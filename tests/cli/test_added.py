"""Commands that other distributions add, by the entry point group `meshmend.commands`."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

from meshmend.cli import app
from meshmend.cli.root import ADDED


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with a group of commands, one that cannot be imported, and one that has a name of ours."""
    extra = typer.Typer(short_help="from elsewhere", rich_help_panel="Elsewhere", no_args_is_help=True)
    extra.command("twice")(lambda number: typer.echo(2 * int(number)))
    extra.command("again")(lambda: None)
    module = ModuleType("distribution_of_a_test")
    module.extra = extra  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names = {"extra": f"{module.__name__}:extra", "broken": "no_such_distribution:app", "plan": f"{module.__name__}:x"}
    points = [EntryPoint(name, value, ADDED) for name, value in names.items()]
    monkeypatch.setattr("meshmend.cli.root.entry_points", lambda *, group: points if group == ADDED else [])


@pytest.mark.usefixtures("added")
def test_a_command_of_another_distribution_is_run_and_shown() -> None:
    assert CliRunner().invoke(app, ["extra", "twice", "21"]).output == "42\n"
    help_ = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["--help"]).output
    assert "Elsewhere" in help_
    assert "extra from elsewhere" in help_
    assert "cannot be loaded" in help_


@pytest.mark.usefixtures("added")
def test_one_that_cannot_be_loaded_says_so_and_disturbs_no_other() -> None:
    done = CliRunner().invoke(app, ["broken"])
    assert done.exit_code == 1
    assert "`meshmend broken` cannot be loaded from no_such_distribution:app: ModuleNotFoundError" in done.stderr
    assert done.stderr.count("\n") == 1
    assert CliRunner().invoke(app, ["plan", "2x2", "--planner", "hamiltonian"]).exit_code == 0
