"""Readers copy a block and run it: so do these tests, each block alone in a fresh process and a fresh folder."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from page_blocks import BLOCKS, PAGES
from pages import ROOT, Block, read, run


def run_all(page: Path) -> None:
    for block in read(page):
        run(block)


# These need torch, and are run by the tests of it; what needs the laboratory is run by lab/tests/test_pages.py.
WITH_TORCH = {"torch.md", "torch_devices.md", "torch_engine.md", "meshmend.torch.md"}
HERE = [
    block
    for block in BLOCKS
    if block.page.name not in WITH_TORCH and block.kind not in ("text", "diff") and not block.needs_lab
]


@pytest.mark.parametrize("block", [block for block in HERE if not block.slow], ids=lambda block: block.name)
def test_every_block_runs_alone(block: Block) -> None:
    run(block, {"JAX_PLATFORMS": "cpu"})


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in HERE if block.slow], ids=lambda block: block.name)
def test_every_slow_block_runs_alone(block: Block) -> None:
    run(block, {"JAX_PLATFORMS": "cpu"})


def test_whatever_a_page_points_to_is_there() -> None:
    targets = r"\]\(((?!https?:|#|mailto:)[^)#]+)[^)]*\)"
    said = [(page, target) for page in PAGES for target in re.findall(targets, page.read_text(encoding="utf-8"))]
    assert [(page.name, target) for page, target in said if not (page.parent / target).exists()] == []


def test_every_page_is_on_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    docs = ROOT / "docs"
    pages = [str(page.relative_to(docs)) for page in docs.rglob("*") if page.suffix in (".md", ".ipynb")]
    assert [page for page in pages if f" {page}\n" not in site] == []


@pytest.mark.parametrize("name", ["contributing.md", "changelog.md"])
def test_the_links_of_an_included_page_work_on_the_site(name: str) -> None:
    included = runpy.run_path(str(ROOT / "docs" / "included.py"))["on_page_markdown"]
    text = included((ROOT / "docs" / name).read_text(encoding="utf-8"))
    links = re.findall(r"\]\(((?!https?:|#)[^)#]+)", text)
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).is_file()] == []


def test_what_is_run_elsewhere_is_run_by_a_test_that_is_there() -> None:
    assert [block.name for block in BLOCKS if block.by and not (ROOT / block.by).is_file()] == []


def test_a_command_can_be_copied_without_a_prompt() -> None:
    commands = [block for block in BLOCKS if block.kind == "bash"]
    assert [block.name for block in commands if re.search(r"^\$ ", block.body, re.M)] == []


NEEDS = runpy.run_path(str(ROOT / "docs" / "needs.py"))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("meshmend plan 8x8\n", ""),
        ("import jax\nimport meshmend.jax as mmj\n", "needs pip install '.[jax]'"),
        ("meshmend run --local 4x4 --host 2x2 train.py\n", "needs pip install '.[launch]'"),
        ("meshmend draw 4x4 -o a.svg\n", "needs pip install '.[draw]'"),
        ("python lab/benchmarks/weave.py\n", "needs a checkout, pip install . ./lab"),
        ("pip install '.[tpu]'\nmeshmend compile --topology v6e:4x4\n", "needs a checkout"),
        ("sudo meshmend lab mesh up 4x4\n", "needs root, pip install . ./lab"),
        ("python lab/benchmarks/paper_workloads.py\n", "needs a checkout, pip install '.[tpu]' './lab[workloads]'"),
    ],
)
def test_the_site_says_what_a_block_needs(body: str, said: str) -> None:
    assert NEEDS["needs"](body) == said
    page = SimpleNamespace(file=SimpleNamespace(src_path="page.md"))
    title = f' title="{said}"' if said else ""
    assert NEEDS["on_page_markdown"](f"Text.\n\n```bash\n{body}```\n", page=page) == (
        f"Text.\n\n```bash{title}\n{body}```\n"
    )


def test_what_blocks_need_can_be_installed() -> None:
    extras = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    )
    assert set(NEEDS["EXTRAS"]) <= extras
    for block in BLOCKS:
        if block.kind == "python" and block.runs and re.search(r"^(?:import|from) (?:jax|optax)\b", block.body, re.M):
            assert re.search(r"\[.*(jax|restart)", NEEDS["needs"](block.body)), block.name


def test_a_block_that_is_not_run_says_so_on_the_site() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_path="cluster.md"))
    shown = NEEDS["on_page_markdown"]((ROOT / "docs/cluster.md").read_text(encoding="utf-8"), page=page)
    assert '```bash title="not to paste alone: it needs eight hosts and a store"\n' in shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\n1 / 0\n```\n", "ZeroDivisionError"),
        ("```python\nx = 1\n```\n\n```python\nprint(x)\n```\n", "NameError"),
        ("```bash\ntouch here\n```\n\n```bash\ncat here\n```\n", "No such file"),
        ("```bash\nmeshmend plan 4x4 --planner nonsense\n```\n", "nonsense"),
        ("```bash\nfalse\ntrue\n```\n", "exit code 1"),
        ("```bash\npip install '.[nonsense]'\n```\n", "there is no nonsense"),
        ("```bash\nif true; then\n```\n", "syntax error"),
        ("<!-- not run: a reason -->\n```bash\nif true; then\n```\n", "syntax error"),
        ("```python\nprint(1)\n```\n\n<!-- output -->\n```text\n2\n```\n", "the page shows '2'"),
        ("```\nmeshmend plan 4x4\n```\n", "is marked ''"),
        ("```console\n$ meshmend plan 4x4\n```\n", "is marked 'console'"),
        ("<!-- run: never -->\n```bash\nfalse\n```\n", "is none of those"),
        ("<!-- output -->\n```text\n2\n```\n", "follows a block that is run"),
        ("```python\n1\n", "do not come in as many pairs"),
    ],
)
def test_a_broken_page_is_detected(text: str, message: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    with pytest.raises((AssertionError, ValueError), match=message):
        run_all(page)


def test_output_may_leave_something_out(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```bash\nseq 5\n```\n\n<!-- output -->\n```text\n1\n…\n  5\n```\n", encoding="utf-8")
    run_all(page)
