"""What the repository says to GitHub agrees with what it says to everybody else."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
LAB = tomllib.loads((ROOT / "lab/pyproject.toml").read_text())["project"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read(path: Path) -> dict[Any, Any]:
    document = yaml.safe_load(path.read_text())
    assert isinstance(document, dict)
    return document


def commands(workflow: dict[Any, Any]) -> str:
    return "\n".join(step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"])


def test_every_supported_python_is_tested() -> None:
    tested = read(ROOT / ".github/workflows/test.yml")["jobs"]["python"]["strategy"]["matrix"]["python"]
    named = [c.rsplit(" ", 1)[1] for c in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", c)]
    assert tested == named
    assert PROJECT["requires-python"] == f">={named[0]}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_names_only_what_exists(path: Path) -> None:
    run = commands(read(path))
    for named in re.findall(r"(?<![\w/])(?:tests|\.ci|docs|lab)/[\w./]+|constraints\.txt", run):
        assert (ROOT / named).exists(), named
    for folder, wheel, extras in re.findall(r"""(?:'\.(/lab)?|dist/(meshmend\w*)-\*\.whl\))\[([\w,]+)\]['"]""", run):
        project = LAB if folder or wheel == "meshmend_lab" else PROJECT
        assert set(extras.split(",")) <= set(project["optional-dependencies"])


def test_every_part_of_the_night_has_a_machine_and_a_limit() -> None:
    """What the runner lists is what the workflow runs; and the parts hold every slow test that `.ci/run` leaves out."""
    listed = subprocess.run([ROOT / ".ci/nightly", "--list"], capture_output=True, text=True, check=True).stdout.split()
    (job,) = read(ROOT / ".github/workflows/nightly.yml")["jobs"].values()
    assert job["strategy"]["matrix"]["part"] == listed
    limit = int(re.findall(r"^LIMIT_MINUTES=(\d+)$", (ROOT / ".ci/nightly").read_text(), re.M)[0])
    assert limit < job["timeout-minutes"]
    unknown = subprocess.run([ROOT / ".ci/nightly", "sometime"], capture_output=True, text=True, check=False)
    assert (unknown.returncode, "no part of .ci/nightly" in unknown.stderr) == (2, True)


def test_what_one_part_leaves_out_another_runs() -> None:
    """In both checks the folders that the core ignores are those that the other parts name, and each is there."""
    for script in (".ci/run", ".ci/nightly"):
        text = (ROOT / script).read_text().replace("\\\n", " ")
        ignored = set(re.findall(r"--ignore=((?:lab/)?tests/[\w./]+)", text))
        named = set(re.findall(r"(?<![=\w/])((?:lab/)?tests/[\w./]+)", text))
        assert ignored
        assert ignored <= named, f"{script}: nothing runs {ignored - named}"
        assert all((ROOT / name).exists() for name in ignored | named)


SUMMARY = """
part                seconds   budget    CPU s   passed  skipped   failed
core                     12       10       21        1        1        1  over its budget, 4 did not run
jax                       5       10        9                             exit status 1
torch              did not run

Skipped:
       1  needs ip
""".lstrip()


def test_a_check_says_what_ran_what_did_not_and_what_takes_long(tmp_path: Path) -> None:
    (tmp_path / "parts.tsv").write_text("core\t12\t10\t0\t21\njax\t5\t10\t1\t9\n")
    (tmp_path / "core.log").write_text("collected 19 items / 12 deselected / 7 selected\n")
    cases = '<testcase file="tests/a.py" name="x" time="1.5"/><testcase file="tests/b.py" name="y" time="2.5"><error/>'
    skipped = '</testcase><testcase file="tests/a.py" name="z" time="0.5"><skipped message="needs ip"/></testcase>'
    (tmp_path / "core.xml").write_text(f"<testsuites><testsuite>{cases}{skipped}</testsuite></testsuites>")
    command = [sys.executable, str(ROOT / ".ci/times.py"), str(tmp_path)]
    for words, status in ([], 0), (["--expected", "core"], 0), (["--expected", "core", "jax", "torch"], 1):
        done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
    assert done.stdout.lstrip().startswith(SUMMARY)
    assert re.search(r"by file:\n +2\.5  core: tests/b\.py\n +2\.0  core: tests/a\.py\n", done.stdout)
    assert re.search(r"by test:\n +2\.5  core: tests/b\.py::y\n +1\.5  core: tests/a\.py::x\n", done.stdout)


def test_a_workflow_may_write_only_what_it_must() -> None:
    assert [path.name for path in WORKFLOWS if read(path)["permissions"]["contents"] != "read"] == []


def test_publishing_needs_no_secret() -> None:
    release = ROOT / ".github/workflows/release.yml"
    assert "secrets." not in release.read_text()
    assert read(release)["jobs"]["publish"]["permissions"] == {"id-token": "write"}


def test_the_version_is_said_by_the_tag_alone() -> None:
    assert "version" in PROJECT["dynamic"]
    assert "version" not in PROJECT


def test_the_citation_has_the_licence_of_the_project() -> None:
    assert read(ROOT / "CITATION.cff")["license"] == PROJECT["license"]
