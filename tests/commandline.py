"""The command line in this process."""

from __future__ import annotations

import json
from typing import Any

import typer
from typer.testing import CliRunner

from meshmend.cli import app


def run(*words: object, code: int = 0, width: int = 80) -> str:
    """Return what a command prints, errors included; with `--json`, only what is for programs."""
    result = CliRunner(env={"COLUMNS": str(width)}).invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == code, result.output
    return result.stdout if "--json" in words else result.output


def run_json(*words: object, code: int = 0) -> Any:
    """Return the object that a command prints for programs."""
    return json.loads(run(*words, "--json", code=code))


def commands(group: Any = None, words: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Return every command and group of commands by its words; the root has none."""
    group = group or typer.main.get_command(app)
    found = {words: group}
    for name, command in getattr(group, "commands", {}).items():
        found |= commands(command, (*words, name))
    return found
