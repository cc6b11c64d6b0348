"""Every number in the README has a source in docs/numbers.md, and the predicted ones are still so.

That the README's commands run is for test_pages.py.
"""

from __future__ import annotations

import re
import shlex

import pytest
from typer.main import get_command

import meshmend as mm
from meshmend.cli import app
from readme import ON_ITS_PAGE_ONLY, README, ROOT, goodputs_said, prose, rows

KINDS = {"predicted", "simulated", "measured", "exact", "input"}


def test_every_number_has_a_source() -> None:
    text = prose(README)
    for row in rows():
        text = text.replace(prose(row.phrase), "")
    left = [line.strip() for line in text.splitlines() if re.search(r"\d", line)]
    assert not left, "docs/numbers.md has no row for the numbers in these lines"


def test_every_source_is_of_a_number_that_is_there() -> None:
    flat = " ".join(prose(README).split())
    for row in rows():
        assert " ".join(prose(row.phrase).split()) in flat, f"the README does not say {row.phrase!r} any more"
        assert row.kind in KINDS


@pytest.mark.parametrize("command", sorted({row.command.strip("`") for row in rows()}))
def test_the_command_is_there(command: str) -> None:
    if command.startswith("mm."):
        assert eval(command, {"mm": mm})  # noqa: S307
        return
    words = shlex.split(command.removeprefix("sudo "))
    if words[0] == "python":
        assert (ROOT / words[1]).is_file()
        return
    assert words[0] == "meshmend"
    if words[1] == "lab":
        return  # lab/tests/test_readme.py reads them
    group, arguments = get_command(app), words[1:]
    while hasattr(group, "commands"):
        group, arguments = group.commands[arguments[0]], arguments[1:]
    # Reads the arguments without running anything: an option that is gone is an error.
    group.make_context(words[1], list(arguments)).close()


def test_recovery_is_what_its_page_says() -> None:
    text = (ROOT / "docs" / "jobs_measured.md").read_text(encoding="utf-8")
    assert re.findall(r"([\d.]+) s in the\s+median and ([\d.]+) s at worst", README) == re.findall(
        r"^\| \*\*total\*\* \| \*\*([\d.]+)\*\* \| \*\*([\d.]+)\*\*", text, re.M
    )
    assert "20 failures in 4 runs" in text


def test_goodput_is_what_its_page_says() -> None:
    text = (ROOT / "docs" / "availability.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| \**(\d\d\.\d\d) ± ", text, re.M)
    table = [float(value) for name, value in rows if not name.startswith(ON_ITS_PAGE_ONLY)]
    assert sorted(round(value, 1) for value in table) == goodputs_said()
    assert len(rows) == len(table) + len(ON_ITS_PAGE_ONLY)
