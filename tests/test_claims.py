"""What the first pages claim, held to what the code does, to the data that are kept, and to each other."""

from __future__ import annotations

import ast
import csv
import re
import statistics
from pathlib import Path

import pytest
import yaml

import meshmend as mm
from meshmend.cost import find_hardware
from pages import ROOT

DOCS = ROOT / "docs"
SOURCE = ROOT / "src"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def page(name: str) -> str:
    return " ".join((DOCS / name).read_text(encoding="utf-8").split())


def test_committed_means_the_same_everywhere_and_the_readme_says_what_is_lost() -> None:
    assert "*committed* when all hosts have written their copies of it" in " ".join(README.split())
    assert "If more fail, the job goes back to its last checkpoint" in " ".join(README.split())
    assert "committed when all hosts of its round have written their copies of it" in page("glossary.md")
    assert "*committed* when all hosts have written their copies of it" in page("recovery.md")
    assert "*Committed* is a step whose copy all hosts of the round have written" in page("trust.md")


def test_the_status_is_on_the_first_screen() -> None:
    begin = README.partition("\n## ")[0]
    assert "alpha" in begin
    assert re.search(r"has never run on\*\* \| \*\*an accelerator, or a cluster", begin)
    assert "comes up whole or not at all" in begin
    assert "```" not in begin
    home = (DOCS / "index.md").read_text(encoding="utf-8").partition("```")[0]
    assert "Alpha: [no accelerator](where.md) has run it yet." in home


def test_the_readme_is_in_the_order_of_its_readers() -> None:
    begin, *parts = README.split("\n## ")
    assert [part.partition("\n")[0] for part in parts] == [
        "Try it",
        "Who it is for",
        "What it gains",
        "How fast",
        "How far it scales",
        "Links",
    ]
    assert re.findall(r"^- \*\*(\w+)\.\*\*", begin, re.M) == ["Survives", "Plans", "Proves", "Operates"]
    for wanted in ("Slurm", "Kubernetes", "metrics", "quarantine", "runbook"):
        assert wanted in begin
    (log,) = re.findall(r"^```text\n(.*?)^```$", README, re.M | re.S)
    assert len(log.splitlines()) <= 8
    assert "arxiv.org/abs/2011.03605" in parts[-1]


def test_a_row_that_is_priced_with_v6e_says_how_large_its_slices_are() -> None:
    row = re.search(
        r"^\| TPU v6e \| 2-D, at most (\d+)×(\d+) \|", (DOCS / "where.md").read_text(encoding="utf-8"), re.M
    )
    assert row is not None
    assert f"TPU v6e, whose slices end at {int(row[1]) * int(row[2])} chips" in README
    table = README.partition("## What it gains")[2].partition("\n## ")[0].partition("\n\n")[2]
    assert not any("v6e" in line for line in table.splitlines() if line.startswith("|"))


def test_the_times_in_lock_step_beside_the_table_are_predicted_now() -> None:
    mesh, name = mm.Mesh("8x8", failed=["2x2@2,2"]), "tpu-v6e-xla"

    def units(payload: float) -> float:
        forecast = mm.predict(mm.plan(mesh, payload_bytes=payload, hardware=name), payload, name)
        return forecast.seconds * find_hardware(name).link_bytes_per_s / payload

    assert f"{units(1e9):.3f} M/b for 1 GB and {units(1e8):.3f} M/b for 100 MB" in README
    assert "no latency, and each transfer waits only for its input" in README
    how_fast = README.partition("## How fast")[2]
    assert how_fast.index("M is the payload") < how_fast.index("| M/b on")


def test_predictions_are_compared_with_clocks() -> None:
    with (DOCS / "data" / "jax_allreduce.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["off_by"] != "–" and not row["case"].startswith("job")]
    off = [abs(int(row["off_by"].replace("−", "-").removesuffix(" %"))) for row in rows]
    least, most, worst = map(
        int, re.findall(r"off by (\d+) to (\d+) % in the median and by (\d+) % at worst", README)[0]
    )
    assert abs(statistics.median(off) - least) < 1
    assert max(off) == worst
    text = page("measured.md")
    assert f"off by {least} % in the median of {len(off)}." in text
    assert f"off by {most} % in the median of 25" in text


def test_what_a_script_needs_is_what_its_example_shows() -> None:
    assert "five new lines replace fifteen: your step, sharding and loop" in " ".join(README.split())
    assert "Iterators and batch normalisation are refused" in README


def test_elastic_slices_are_named_with_what_they_assume() -> None:
    least, most = re.findall(r"Elastic slices keep ([\d.]+) to ([\d.]+) % if", README)[0]
    text = page("availability.md")
    assert f"keep {least} ± " in text
    assert f"{most} ± " in text


def imported_by(module: str, seen: set[str]) -> set[str]:
    """Add all of meshmend that a module imports when it is imported, but for what only type checkers read."""
    path = SOURCE.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if module in seen or not path.is_file():
        return seen
    seen.add(module)
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("meshmend."):
            for name in (node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)):
                imported_by(name, seen)
    return seen


def test_the_verifier_uses_no_planning_code() -> None:
    found = imported_by("meshmend.schedule.verify", set())
    assert "meshmend.topology.mesh" in found
    assert not [name for name in found if name.startswith("meshmend.planning")]
    for path in PAGES:
        assert "no code with the planners" not in path.read_text(encoding="utf-8"), path.name


def test_the_number_of_copies_is_the_one_that_is_kept() -> None:
    source = (SOURCE / "meshmend/jax/state/memory/copies.py").read_text(encoding="utf-8")
    (kept,) = re.findall(r"^KEPT = (\d)$", source, re.M)
    assert kept == "2"
    text = page("recovery.md")
    assert "and two are kept" in text
    assert "| copies of older steps | when the second newer one is written: two are kept" in text


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_torch_comes_from_the_index_of_cpu_builds(path: Path) -> None:
    for command in re.findall(r"pip install torch\b[^`\n]*", path.read_text(encoding="utf-8")):
        assert "--index-url=https://download.pytorch.org/whl/cpu" in command


def test_one_per_cent_is_said_of_the_bound() -> None:
    full, holed = (mm.bound(mm.Mesh("16x32", failed=failed)).seconds(1e9, 1e9) for failed in ([], ["4x2@6,8"]))
    text = page("plans.md")
    assert f"prints {full:.3f} and {holed:.3f} times M/b, so the bound grows by one per cent" in text
    (least, most) = re.findall(r"33 ms takes \[(\d+) to (\d+) ms\]", text)[0]
    assert f"takes {least} ms around a host or a board, {most} ms around a single chip" in page("availability.md")


def test_what_a_hole_costs_is_what_the_table_above_shows() -> None:
    text = (DOCS / "start.md").read_text(encoding="utf-8")
    auto = re.findall(r"^auto .*$", text, re.M)[0].split()
    bound = re.findall(r"^bound .*$", text, re.M)[-1].split()
    of_bound, of_plan = (round(100 * (float(row[-1]) - 1)) for row in (bound, auto))
    assert f"raises the bound by {of_bound} % and the time of the plan by {of_plan} %" in " ".join(text.split())


def test_two_times_of_a_step_against_plain_jax_are_told_apart() -> None:
    table = (DOCS / "jobs_measured.md").read_text(encoding="utf-8")
    cells = re.findall(r"without copies, by default \(100 MB\) \| (.*) \|$", table, re.M)[0]
    times = sorted(float(one) for one in re.findall(r"[\d.]+", cells))
    assert f"with 100 MB it is [{times[0]} to {times[-1]}]" in page("measured.md")


def test_nothing_claims_that_every_number_has_its_command() -> None:
    assert "Every number in these pages" not in page("measured.md")
    assert "Every error says" not in page("start.md")


def test_no_page_claims_a_cluster() -> None:
    assert "a store; no cluster has run it yet" in README
    assert "No cluster has run this yet" in page("cluster.md")
    assert "No accelerator and no cluster has run it yet" in page("index.md")


def test_the_page_cites_what_the_file_does() -> None:
    said = dict(re.findall(r"^  (\w+) *= \{+(.*?)\}+,$", (DOCS / "related.md").read_text(encoding="utf-8"), re.M))
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert said == {
        "author": citation["authors"][0]["name"],
        "title": citation["title"],
        "version": citation["version"],
        "year": str(citation["date-released"].year),
        "license": citation["license"],
    }


def test_the_version_is_the_same_everywhere() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version, date = re.findall(r"^## (\d+\.\d+\.\d+) \((\d{4}-\d\d-\d\d)\)$", changes, re.M)[0]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {version}\n" in citation
    assert f"\ndate-released: {date}\n" in citation
    assert f"alpha, version {version}" in README
    assert f"version {version}" in page("index.md")
    assert f"copyright: meshmend {version}," in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for path in (ROOT / "pyproject.toml", ROOT / "lab/pyproject.toml"):
        assert f'fallback_version = "{version}"' in path.read_text(encoding="utf-8")
    assert f"Only the latest release is fixed, today {version}." in (ROOT / "SECURITY.md").read_text(encoding="utf-8")
