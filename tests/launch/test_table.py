"""Every failure that docs/failures.md describes has a test, and the test is there."""

from __future__ import annotations

import re

from pages import ROOT

PAGE = (ROOT / "docs/failures.md").read_text(encoding="utf-8")


def test_every_row_names_tests_that_are_there() -> None:
    table = PAGE.split("## What happens when …")[1].split("\n\n")[1]
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) > 25
    files = (path for folder in ("tests", "lab/tests") for path in (ROOT / folder).rglob("test_*.py"))
    tests = "\n".join(path.read_text(encoding="utf-8") for path in files)
    there = set(re.findall(r"^def (test_\w+)", tests, re.M))
    for what, _, by in rows:
        named = re.findall(r"`(test_\w+)`", by)
        assert named or "bench restart" in by or by.strip(" |") == "the same", what
        assert set(named) <= there, (what, set(named) - there)
