"""Every number in the README has a source in docs/numbers.md, and the predicted ones are still so.

That the README's commands run is for test_pages.py.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.main import get_command

import meshmend as mm
from meshmend.cli import app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
NUMBERS = (ROOT / "docs" / "numbers.md").read_text(encoding="utf-8")
KINDS = {"predicted", "simulated", "measured", "exact", "input"}


@dataclass(frozen=True)
class Row:
    phrase: str
    kind: str
    command: str
    where: str


def rows() -> list[Row]:
    lines = [line for line in NUMBERS.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]
    return [Row(*(row + [""] * (4 - len(row)))) for row in cells]


def prose(text: str) -> str:
    """What a page says in words: no code, no addresses, and none of the numbers that only name something."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    text = re.sub(r"`[^`]*`|!\[[^\]]*\]\([^)]*\)|<[^>]+>", "", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    names = [
        r"\d+(?:×\d+)+ (?:blocks|minus \d+(?:×\d+)+)",  # a shape
        r"figures? \d[\d–, ]*",
        r"\((?:ISCA|HPCA|MLSys) \d{4}\)|, \d{4}\]",  # a year of publication
        r"\bv\d\w?\b|\bn-D\b|\bc10d\b|\bFSDP2\b|Apache-2\.0",  # a chip, a library, a licence
        r"2\(P−1\)",  # a formula
        r"version \d+\.\d+\.\d+",
    ]
    return re.sub("|".join(names), "", text)


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


ON_ITS_PAGE_ONLY = ("optical cubes", "dynamic slices", "elastic slices")
"""Answers that need other machines: the README has those of a mesh, the page all."""


def goodputs_said() -> list[float]:
    return sorted(float(found) for found in re.findall(r"(\d\d\.\d)(?= %)", prose(README)))


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
