"""Mutation testing: would the tests notice if one operator, number or argument of a trusted file were another?

    python tests/mutation.py                  every file of TARGETS, then the table
    python tests/mutation.py verify lanes     some of them
    python tests/mutation.py --show verify    the changes that no test noticed

Runs mutmut (`pip install mutmut`) in a copy of the repository. It takes minutes per file, so it is a command of its own
and no part of CI. tests/mutation.md lists the survivors of the last run and why they are harmless. Exits with 1 where
fewer than 90 % of a file's mutants are caught.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEAST_CAUGHT = 0.9
PLUGIN = """
import pytest

pytest.Item._nodeid = property(lambda item: item.nodeid)  # mutmut 3.8 reads the name that pytest 9.1 and older have
"""


@dataclass(frozen=True)
class Target:
    """A file that must be right, and the tests that hold it."""

    file: str
    tests: tuple[str, ...]


TARGETS = {
    "verify": Target(
        "src/meshmend/schedule/verify.py", ("tests/schedule/test_verify.py", "tests/schedule/test_faults.py")
    ),
    "faults": Target("src/meshmend/schedule/faults.py", ("tests/schedule/test_faults.py",)),
    "schedule": Target("src/meshmend/schedule/schedule.py", ("tests/schedule/test_schedule.py",)),
    "deadlock": Target("src/meshmend/routing/deadlock.py", ("tests/routing/test_deadlock.py",)),
    "files": Target("src/meshmend/schedule/serialize.py", ("tests/schedule/test_serialize.py",)),
    "program": Target("src/meshmend/torch/program.py", ("tests/torch_engine/test_program.py",)),
    "lanes": Target("src/meshmend/schedule/lanes.py", ("tests/jax_engine/test_lanes.py",)),
    "state_layout": Target("src/meshmend/jax/state/layout/state_layout.py", ("tests/jax_engine/state/test_layout.py",)),
    "flat": Target("src/meshmend/jax/state/layout/flat.py", ("tests/jax_engine/state/test_layout.py",)),
}


def main() -> int:
    """Run what was asked for, print a line per file, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="FILE", help=f"some of: {', '.join(TARGETS)}")
    parser.add_argument("--show", action="store_true", help="print the mutants that no test noticed")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(TARGETS)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(TARGETS)}")
    weak = 0
    for name in arguments.names or TARGETS:
        with tempfile.TemporaryDirectory(prefix="meshmend-mutation-") as folder:
            verdicts = run(TARGETS[name], Path(folder), arguments.processes)
            counts = Counter(verdicts.values())
            caught = sum(n for verdict, n in counts.items() if verdict in ("killed", "timeout", "suspicious"))
            print(
                f"{name:10} {caught:5,} of {len(verdicts):5,} mutants caught: {caught / len(verdicts):.1%}", flush=True
            )
            weak += caught / len(verdicts) < LEAST_CAUGHT
            if arguments.show:
                for mutant in (mutant for mutant, verdict in verdicts.items() if verdict not in ("killed", "timeout")):
                    print(show(mutant, Path(folder)))
    return 1 if weak else 0


def run(target: Target, folder: Path, processes: int) -> dict[str, str]:
    """Return the verdict on every mutant of one file."""
    copy = folder / "meshmend"
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    for name in tracked:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    (copy / "tests" / "mutmut_compatibility.py").write_text(PLUGIN)
    arguments = ["-p", "no:xdist", "-p", "no:cacheprovider", "-p", "mutmut_compatibility", "-m", "not slow"]
    with (copy / "pyproject.toml").open("a") as project:
        project.write(
            "\n[tool.mutmut]\n"
            'source_paths = ["src"]\n'
            f"only_mutate = {[target.file]}\n"
            f"pytest_add_cli_args_test_selection = {list(target.tests)}\n"
            f"pytest_add_cli_args = {arguments}\n"
            'also_copy = ["README.md", "docs", "examples"]\n'
            'process_isolation = "forkserver"\n'
        )
    environment = {**os.environ, "PYTHONPATH": str(copy / "tests")}
    done = mutmut(copy, "run", "--max-children", str(processes), environment=environment)
    lines = [line.strip().split(": ") for line in mutmut(copy, "results", "--all", "true").stdout.splitlines()]
    verdicts = {line[0]: line[1] for line in lines if len(line) == 2}
    if not verdicts or "not checked" in verdicts.values():
        sys.exit(f"mutmut did not get through {target.file}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return verdicts


def mutmut(folder: Path, *words: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run mutmut with the interpreter that runs this."""
    command = [sys.executable, "-m", "mutmut", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def show(mutant: str, folder: Path) -> str:
    """Return a mutant's name and the lines that it changes."""
    lines = mutmut(folder / "meshmend", "show", mutant).stdout.splitlines()
    changed = [line for line in lines if line[:1] in "-+" and line[:3] not in ("---", "+++")]
    return "\n".join([mutant, *changed, ""])


if __name__ == "__main__":
    raise SystemExit(main())
