"""The pages that list things list all of them: environment variables, messages, public names, words."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator

import pytest

from pages import ROOT, read
from public_names import PUBLIC, SOURCE, names_in

DOCS = ROOT / "docs"
NAMES = runpy.run_path(str(DOCS / "names.py"))
SOURCES = [path for folder in ("src", "lab/src") for path in sorted((ROOT / folder).rglob("*.py"))]
VARIABLE = re.compile(r"\bMESHMEND_[A-Z][A-Z_]*[A-Z]\b")
AS_INTERNAL = "Set by `meshmend run` for its workers"


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_every_variable_has_a_row() -> None:
    read = {name for path in SOURCES for name in VARIABLE.findall(path.read_text(encoding="utf-8"))}
    text = page("environment.md")
    rows = re.findall(r"^\| `(MESHMEND_[A-Z_]+)` \| \S", text, re.M)
    assert len(rows) == len(set(rows))
    assert set(rows) == read
    yours = text.partition("## Yours to set")[2].partition("\n## ")[0]
    assert f"meshmend reads {len(re.findall(r'^. `MESHMEND_', yours, re.M))} variables of its own" in text


def test_variables_that_pages_and_examples_use_are_there() -> None:
    known = set(VARIABLE.findall(page("environment.md")))
    examples = [path for path in (ROOT / "examples").rglob("*.*") if path.is_file() and path.suffix != ".pyc"]
    texts = [*ROOT.glob("*.md"), *DOCS.glob("*.md"), *examples]
    used = {name for path in texts for name in VARIABLE.findall(path.read_text(encoding="utf-8"))}
    of_tests = {"MESHMEND_TORCH_TPU_PYTHON", "MESHMEND_MACHINES"}
    assert used - of_tests <= known


def _joined(node: ast.AST) -> str:
    """Return a string expression with … for whatever is put in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_joined(part) for part in node.values)
    return "…" if isinstance(node, ast.FormattedValue) else ""


def strings() -> Iterator[str]:
    """Yield every string of the product's sources, messages among them."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield " ".join(_joined(node).split())


STRINGS = [one for one in strings() if one]
MESSAGES = [
    message
    for row in re.findall(r"^\| (`.*?`) \| ", page("troubleshooting.md"), re.M)
    for message in re.findall(r"`([^`]+)`", row)
]


@pytest.mark.parametrize("message", MESSAGES)
def test_every_message_of_the_page_is_one_of_ours(message: str) -> None:
    parts = [re.escape(part.strip()) for part in message.split("…") if part.strip(" :")]
    assert any(re.search(".*?".join(parts), one) for one in STRINGS), message


def test_the_page_of_messages_covers_the_launcher_and_the_script() -> None:
    assert len(MESSAGES) > 45


def test_every_word_of_the_glossary_is_used_and_is_there_once() -> None:
    text = page("glossary.md")
    words = [
        word for row in re.findall(r"^\| ([a-z][^|]*?) \| ", text, re.M) if row != "word" for word in row.split(", ")
    ]
    assert len(words) == len(set(words)) > 50
    pages = "\n".join(
        path.read_text(encoding="utf-8").lower() for path in DOCS.glob("*.md") if path.name != "glossary.md"
    )
    assert [word for word in words if word not in pages] == []
    for needed in ["chip", "cable", "link", "host", "round", "committed", "tile", "owner", "slack", "goodput"]:
        assert needed in words
    assert "| M/b | " in text


@pytest.mark.parametrize("module", PUBLIC)
def test_the_reference_has_every_public_name_and_an_example_that_runs(module: str) -> None:
    path = SOURCE.joinpath(*module.split(".")[1:])
    listed = names_in(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))
    text = NAMES["on_page_markdown"](page(f"api/{module}.md"))
    assert re.findall(r"^::: (\S+)$", text, re.M) == [f"{module}.{name}" for name in listed or []]
    examples = read(DOCS / f"api/{module}.md")
    assert any(block.runs and block.kind == "python" and module in block.body for block in examples)
    assert f"]({module}.md)" in page("api/index.md")


def test_the_site_writes_the_names_into_their_pages() -> None:
    assert (
        "docs/names.py"
        in (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nhooks: ")[2].partition("\n")[0]
    )
    with pytest.raises(ValueError, match="no __all__"):
        NAMES["names"]("meshmend.__main__")


def test_the_reference_has_no_page_of_another_module() -> None:
    assert {path.stem for path in (DOCS / "api").glob("*.md")} == {"index", *PUBLIC}
