"""What ran and where the time went: seconds per part beside its budget, what did not run, and what takes the most.

    python .ci/times.py FOLDER            what `.ci/run` and `.ci/nightly` print at their end
    python .ci/times.py FOLDER --all      every file and test, not only those that take the most

FOLDER has `parts.tsv`, a line per part with its name, seconds, budget, exit status and CPU seconds; pytest's
own report of a part as `PART.xml`, and what it printed as `PART.log`. Seconds of a file are added up over the processes
that ran it, setup included. Exits with 1 if one of the parts after `--expected` has failed or is not there.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

N_FILES, N_TESTS = 12, 8


class Part(NamedTuple):
    """A part of a check, as it was noted when it ended."""

    name: str
    took_s: int
    budget_s: int
    status: int
    cpu_s: int
    """On two cores it takes half of this at least."""


class Tests(NamedTuple):
    """The tests of a part."""

    by_file: Mapping[str, float]
    by_test: Mapping[str, float]
    outcomes: Mapping[str, int]
    why_skipped: Mapping[str, int]
    selected: int
    """How many were to be run."""


def read_parts(folder: Path) -> list[Part]:
    """Read what was noted, in the order in which the parts ended."""
    path = folder / "parts.tsv"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [Part(name, *map(int, numbers)) for name, *numbers in (line.split("\t") for line in lines)]


def read_tests(folder: Path, name: str) -> Tests:
    """Read pytest's report, of which the family xunit1 names files; there is none of a part that runs no tests."""
    by_file: dict[str, float] = defaultdict(float)
    by_test: dict[str, float] = {}
    outcomes: Counter[str] = Counter()
    why: Counter[str] = Counter()
    report, log = folder / f"{name}.xml", folder / f"{name}.log"
    cases = list(ET.parse(report).iter("testcase")) if report.is_file() else []  # noqa: S314
    for case in cases:
        file, seconds = case.get("file", case.get("classname", "?")), float(case.get("time", 0))
        by_file[file] += seconds
        by_test[f"{file}::{case.get('name')}"] = seconds
        kinds = {child.tag for child in case}
        outcomes["failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"] += 1
        why.update(child.get("message", "?") for child in case if child.tag == "skipped")
    said = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    wanted = [re.search(pattern, said) for pattern in (r"(\d+) selected", r"\[(\d+) items\]", r"collected (\d+) items")]
    selected = next((int(found[1]) for found in wanted if found), 0)
    return Tests(by_file, by_test, outcomes, why, selected)


def table(parts: list[Part], tests: Mapping[str, Tests]) -> list[str]:
    """Return a line per part."""
    lines = [f"{'part':18} {'seconds':>8} {'budget':>8} {'CPU s':>8} {'passed':>8} {'skipped':>8} {'failed':>8}"]
    for part in parts:
        found = tests[part.name]
        counts = " ".join(f"{found.outcomes[kind] or '':>8}" for kind in ("passed", "skipped", "failed"))
        never_ran = found.selected - sum(found.outcomes.values())
        notes = ["over its budget"] * (part.took_s > part.budget_s) + [f"{never_ran} did not run"] * (never_ran > 0)
        notes += [f"exit status {part.status}"] * (part.status != 0)
        seconds = f"{part.took_s:8} {part.budget_s:8} {part.cpu_s:8}"
        lines.append(f"{part.name:18} {seconds} {counts}  {', '.join(notes)}".rstrip())
    return lines


def largest(seconds: Mapping[str, float], count: int | None) -> list[str]:
    """Return lines of the largest entries."""
    return [f"{value:8.1f}  {name}" for name, value in sorted(seconds.items(), key=lambda one: -one[1])[:count]]


def main() -> int:
    """Print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--all", action="store_true", help="every file and test")
    parser.add_argument("--expected", nargs="*", default=[], metavar="PART", help="parts that were to be run")
    arguments = parser.parse_args()
    parts = read_parts(arguments.folder)
    tests = {part.name: read_tests(arguments.folder, part.name) for part in parts}
    missing = [name for name in arguments.expected if name not in tests]
    lines = ["", *table(parts, tests), *(f"{name:18} did not run" for name in missing)]
    why = sum((Counter(found.why_skipped) for found in tests.values()), Counter[str]())
    lines += ["", "Skipped:"] * bool(why) + [f"{count:8}  {reason}" for reason, count in why.most_common()]
    for what, count in (("by_file", N_FILES), ("by_test", N_TESTS)):
        seconds = {f"{part}: {name}": s for part, found in tests.items() for name, s in getattr(found, what).items()}
        lines += ["", f"Most seconds, {what.replace('_', ' ')}:", *largest(seconds, None if arguments.all else count)]
    sys.stdout.write("\n".join(lines) + "\n\n")
    return int(bool(missing) or any(part.status for part in parts if part.name in arguments.expected))


if __name__ == "__main__":
    raise SystemExit(main())
