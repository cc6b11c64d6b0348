"""Readers run what they read: so do these tests, page by page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pages import ROOT, read, run_in

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# These need torch or a lab, and are run by the tests of those.
WITH_TORCH = {"lab.md", "torch.md"}
HERE = [page for page in PAGES if page.name not in WITH_TORCH]


# As many virtual chips as the pages speak of.
CHIPS = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=64"}


@pytest.mark.parametrize("page", HERE, ids=lambda page: page.name)
def test_every_block_runs(page: Path, tmp_path: Path) -> None:
    run_in(tmp_path, page, **CHIPS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [p for p in HERE if any(block.when == "slow" for block in read(p))], ids=lambda page: page.name
)
def test_every_slow_block_runs(page: Path, tmp_path: Path) -> None:
    run_in(tmp_path, page, "--slow", **CHIPS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_whatever_a_page_points_to_is_there(page: Path) -> None:
    for target in re.findall(r"\]\(((?!https?:|#|mailto:)[^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} points to {target}"


def test_every_page_is_on_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in (ROOT / "docs").iterdir():
        if page.suffix in (".md", ".ipynb"):
            assert f" {page.name}\n" in site, f"{page.name} is not in the site's navigation"


def test_what_is_run_elsewhere_is() -> None:
    elsewhere = {page.name: [block.kind for block in read(page) if block.when == "elsewhere"] for page in PAGES}
    # test_restart_docs.py runs the script twice, test_restart.py the example.
    assert {name: kinds for name, kinds in elsewhere.items() if kinds} == {"restart.md": ["python", "console"]}


def test_a_broken_page_is_noticed(tmp_path: Path) -> None:
    broken = {
        "python": "```python\n1 / 0\n```\n",
        "console": "```console\n$ meshmend plan 4x4 --planner nonsense\n```\n",
        "pip": "```console\n$ pip install '.[nonsense]'\n```\n",
        "bash": "```bash\nif true; then\n```\n",
        "unmarked": "```\n$ meshmend plan 4x4\n```\n",
        "unclosed": "```python\n1\n",
    }
    for name, text in broken.items():
        (tmp_path / name).mkdir()
        page = tmp_path / f"{name}.md"
        page.write_text(text, encoding="utf-8")
        with pytest.raises(AssertionError, match=name):
            run_in(tmp_path / name, page)
