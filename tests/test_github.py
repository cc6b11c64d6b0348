"""What the repository says to GitHub agrees with what it says to everybody else."""

from __future__ import annotations

import re
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
