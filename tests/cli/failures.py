"""Commands that fail, and the one line that says why."""

from __future__ import annotations

import json
import re

from typer.testing import CliRunner

from meshmend.cli import app
from meshmend.cli.terminal import plain

CUT = ("--fail", "1x4@1,0")
"""Cuts 4x4 in two."""


def run(words: list[str]) -> tuple[int, str, str]:
    """Run a command in this process; an exception that nobody expected is a failure of the test, with its traceback."""
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def check(words: list[str], message: str, code: int = 1) -> None:
    """The contract: a line for people, and one object for programs."""
    got, out, err = run([*words, "--json"])
    assert got == code, err
    assert re.fullmatch(r"Error: [^\n]+\n", err), err
    assert message in err
    facts = json.loads(out)
    assert facts.keys() == {"error", "message"}
    assert plain(facts["message"]) == err.removeprefix("Error: ").rstrip("\n")
