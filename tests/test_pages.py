"""Readers copy a block and run it: so do these tests, each block alone in a fresh process and a fresh folder."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from pages import ROOT, Block, read, run


def run_all(page: Path) -> None:
    for block in read(page):
        run(block)


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# These need torch, and are run by the tests of it; what needs the laboratory is run by lab/tests/test_pages.py.
WITH_TORCH = {"torch.md"}
BLOCKS = [block for page in PAGES for block in read(page)]
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_whatever_a_page_points_to_is_there(page: Path) -> None:
    for target in re.findall(r"\]\(((?!https?:|#|mailto:)[^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} points to {target}"


def test_every_page_is_on_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in (ROOT / "docs").iterdir():
        if page.suffix in (".md", ".ipynb"):
            assert f" {page.name}\n" in site, f"{page.name} is not in the site's navigation"


def test_pages_spell_all_reduce_in_one_way() -> None:
    for page in PAGES:
        code = r"^ *```.*?^ *```$|`[^`]*`|^:::[^\n]*|\]\([^)]*\)"
        prose = re.sub(code, "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        assert not re.findall(r"(?i)\ball[ _]?(?:reduce|gather)\b|\breduce[ _]?scatter\b", prose), page.name


def test_what_is_run_elsewhere_or_not_at_all_is_listed() -> None:
    by = {(block.page.name, block.kind, block.by) for block in BLOCKS if block.by}
    assert by == {
        ("README.md", "python", "tests/jax_engine/job/test_docs.py"),
        ("README.md", "bash", "tests/jax_restart/test_job.py"),
        ("lab.md", "bash", "lab/tests/mesh/test_delay.py"),
        ("export.md", "bash", "lab/tests/jax_programs/test_exporting.py"),
        ("export.md", "python", "lab/tests/jax_programs/test_exporting.py"),
        ("jax.md", "bash", "tests/jax_engine/compile/test_tiles.py"),
        ("availability.md", "bash", "tests/availability/test_log.py"),
        ("availability.md", "bash", "lab/tests/jobs/test_replayed.py"),
        ("machines.md", "bash", "tests/jax_engine/test_bench.py"),
        ("measured.md", "bash", "tests/jax_engine/test_bench.py"),
        ("start.md", "bash", "tests/jax_restart/test_first_hour.py"),
        ("start.md", "bash", "tests/cli/test_doctor.py"),
        ("index.md", "python", "tests/jax_engine/job/test_docs.py"),
        ("index.md", "bash", "tests/jax_restart/test_job.py"),
        ("jobs.md", "bash", "tests/jax_restart/test_job.py"),
        ("jobs.md", "bash", "tests/jax_restart/test_local_job.py"),
        ("jobs.md", "bash", "tests/jax_restart/test_first_hour.py"),
        ("jobs.md", "python", "tests/jax_engine/session/test_docs.py"),
        ("jobs.md", "python", "tests/jax_engine/job/test_docs.py"),
        ("operate.md", "bash", "tests/jax_restart/test_run.py"),
        ("operate.md", "bash", "tests/jax_restart/test_checking.py"),
        ("jax.md", "bash", "lab/tests/jax_programs/test_hidden.py"),
        ("torch.md", "bash", "tests/torch_engine/test_failures.py"),
        ("torch.md", "python", "tests/torch_engine/test_failures.py"),
        ("torch.md", "bash", "tests/torch_engine/test_torchrun.py"),
        ("torch.md", "diff", "tests/torch_engine/test_torchrun.py"),
    }
    for _, _, test in by:
        assert (ROOT / test).is_file(), test
    reasons = [(block.page.name, block.reason) for block in BLOCKS if block.reason]
    assert reasons == [
        ("CONTRIBUTING.md", "it makes an environment and installs into it"),
        ("CONTRIBUTING.md", "it searches for half an hour"),
        ("export.md", "one rank of 64, on TPUs; lab/tests/torch_processes/test_torch_tpu.py runs the hooks"),
        ("jobs.md", "it needs eight hosts and a store"),
        ("jobs.md", "it is a server that never ends"),
        ("jobs.md", "it needs Slurm and eight nodes"),
        ("operate.md", "the line of a script that the example below has whole"),
        ("see.md", "it is a server that never ends"),
        ("torch.md", "it is a server that never ends"),
        ("torch.md", "one rank of twelve; tests/torch_engine/test_fsdp.py runs the same code"),
        ("torch.md", "one process of several; tests/torch_engine/test_measuring.py runs the same code"),
        ("torch.md", "one rank of several; examples/torch/sharded_update.py is the whole program"),
        ("where.md", "it needs a TPU"),
    ]


def test_a_command_can_be_copied() -> None:
    for block in BLOCKS:
        if block.kind == "bash":
            assert not re.search(r"^\$ ", block.body, re.M), f"{block.name} has a prompt, which would be copied with it"


NEEDS = runpy.run_path(str(ROOT / "docs" / "needs.py"))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("meshmend plan 8x8\n", ""),
        ("import jax\nimport meshmend.jax as mmj\n", "needs pip install '.[jax]'"),
        ("meshmend run --local 4x4 --host 2x2 train.py\n", "needs pip install '.[launch]'"),
        ("meshmend compare 4x4 --payload 1MB --plot a.svg\n", "needs pip install '.[draw]'"),
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
    page = SimpleNamespace(file=SimpleNamespace(src_path="jobs.md"))
    shown = NEEDS["on_page_markdown"]((ROOT / "docs/jobs.md").read_text(encoding="utf-8"), page=page)
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
