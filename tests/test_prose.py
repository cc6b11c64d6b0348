"""The sentences that people read: short, with their subject in front. Each refused pattern has its reason.

They are those of pages, help, messages, logs, metrics and alerts, and of the docstrings of public names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from meshmend.cli import app
from pages import ROOT
from prose import END, Sentence, sentences, sentences_of, strings_of
from test_public_names import PUBLIC

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "lab/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "docs").glob("*.ipynb")),
]
MOST_WORDS = 30
MOST_WORDS_OF_A_PAGE = 2500
REFUSED = {
    r"^(?:(?:and|but|so) )?what\b(?=.*[.:;]$)(?!.*\?$)": "name the thing: no sentence begins with a clause of What",
    r"^Of (?!course)": "begin with the subject: a fronted Of has to be read twice",
    r"(?:, too|\bby itself|\bby themselves|\bas such)(?=[.;:)]|$)|\bso[.]$": "leave out what trails after the fact",
    r"\bWithout a new step, again and again\b": "say how often, and what failed",
    r"\bwaits? for (?:its|their) data alone\b": "alone reads as lonely: only for its input data",
    r"\b(?:computes them, but the result is not one|may only not be done yet|wrong alike)\b": "riddles",
    r"\bone per cent in the case below\b": "a bound is not a time",
    r"\b(?:after the loss\b|loss(?:es)? of (?:a|one|\d+) (?:host|chip|board))": "a host fails, training has a loss",
}
EXCEPTIONS = {
    "docs/trust.md": "its promises are revised together with the simulation that tests them",
    "docs/jobs_measured.md": "two paragraphs are rewritten with their next measurement",
}
"""Pages of which some sentences stay as they are, and why."""
MOST_STOPS = 1
"""Colons and semicolons in a sentence of a page: with two of them it is read twice."""
PAGE = re.compile(r"(?!CHANGELOG)\S+\.(?:md|ipynb):\d+$")
"""Where a sentence of a page is. Messages put lists in, and the changelog is one."""
MOST_CODE = 3
"""A cell of CONTRIBUTING's table with more code than this lists files: it is a list, not a sentence."""


def found(path_sentences: list[Sentence]) -> list[str]:
    wrong = []
    for one in path_sentences:
        is_list = one.where.startswith("CONTRIBUTING") and one.text.count("`code`") > MOST_CODE
        if one.n_words > MOST_WORDS and not is_list:
            wrong.append(f"{one.where}: {one.n_words} words, split it: {one.text}")
        if len(re.findall(r"[:;]\s", one.text)) > MOST_STOPS and not one.is_cell and PAGE.match(one.where):
            wrong.append(f"{one.where}: two colons or semicolons, make it two sentences: {one.text}")
        for pattern, why in REFUSED.items():
            if re.search(pattern, one.text, re.IGNORECASE if pattern.startswith("^(") else 0):
                wrong.append(f"{one.where}: {why}: {one.text}")
    return wrong


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_are_short_and_begin_with_their_subject(path: Path) -> None:
    wrong = found(list(sentences(path, ROOT)))
    if str(path.relative_to(ROOT)) in EXCEPTIONS:
        assert 0 < len(wrong) < 10, "an exception that is not needed any more, or too many of them"
    else:
        assert not wrong, "\n".join(wrong)


def helps(commands: typer.Typer = app) -> list[Sentence]:
    """Return the sentences of all commands' help, and of their options."""
    command: Any = typer.main.get_command(commands)
    found = []
    pending = [("meshmend", command)]
    while pending:
        name, one = pending.pop()
        pending += [(f"{name} {word}", other) for word, other in getattr(one, "commands", {}).items()]
        texts = re.split(r"\n\s*\n", one.help or "") + [getattr(option, "help", None) or "" for option in one.params]
        found += [Sentence(name, part) for text in texts for part in END.split(" ".join(text.split()))]
    return found


def test_the_help_is_as_plain_as_the_pages() -> None:
    said = [one for one in helps() if not one.text.startswith("One of: ")]  # a list of names
    assert len(said) > 150
    assert not found(said), "\n".join(found(said))


def messages(source: Path) -> list[Sentence]:
    """Return the sentences of the strings of a package: messages, log lines, the help of metrics."""
    paths = sorted(source.rglob("*.py"))
    texts = [text for path in paths for text in strings_of(path, source) if text.n_words > 3]
    return [Sentence(text.where, part) for text in texts for part in END.split(" ".join(text.text.split()))]


def test_messages_logs_and_the_help_of_metrics_are_as_plain() -> None:
    said = messages(ROOT / "src")
    wrong = [one for one in found(said) if "hardware.py" not in one]  # a preset's sources are a list, not a message
    assert len(said) > 1500
    assert not wrong, "\n".join(wrong)


def test_alerts_are_as_plain() -> None:
    rules = yaml.safe_load((ROOT / "examples/operate/alerts.yml").read_text(encoding="utf-8"))["groups"]
    texts = [text for group in rules for rule in group["rules"] for text in rule["annotations"].values()]
    said = [one for text in texts for one in sentences_of(text, "alerts.yml")]
    assert len(said) > 15
    assert not found(said), "\n".join(found(said))


PICTURES = {
    "meshmend": "a table of packages, which CONTRIBUTING shows as a block",
    "meshmend.launch": "a picture of its processes",
}
"""Modules whose docstrings have what only looks like sentences."""


EXAMPLES = re.compile(r"^ *>>> .*?(?=\n\s*\n|\Z)", re.M | re.S)


def docstrings(package: str, source: Path, modules: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each public name and its docstring, as the site shows them: read, not imported."""
    griffe: Any = pytest.importorskip("griffe", reason="griffe is not installed: pip install '.[docs]'")
    root = griffe.load(package, search_paths=[str(source)])
    pending = []
    for name in modules:
        module = root[name.partition(".")[2]] if "." in name else root
        pending.append(module)
        pending += [module.members[str(one)] for one in module.exports]
        if module.docstring is not None and name not in PICTURES:
            yield name, module.docstring.value
    seen = set()
    while pending:
        one = pending.pop()
        one = one.final_target if one.is_alias else one
        if one.is_module or one.path in seen:
            continue
        seen.add(one.path)
        if one.docstring is not None:
            yield one.path, one.docstring.value
        if one.is_class:
            pending += [member for name, member in one.members.items() if not name.startswith("_")]


def test_docstrings_of_public_names_are_as_plain() -> None:
    texts = list(docstrings("meshmend", ROOT / "src", PUBLIC))
    said = [one for where, text in texts for one in sentences_of(EXAMPLES.sub("", text), where)]
    assert len(texts) > 500
    assert not found(said), "\n".join(found(said))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("What travels is a chunk.", "name the thing"),
        ("Of each ring one half is red.", "begin with the subject"),
        ("It starts by itself.", "trails"),
        ("Rings close, too.", "trails"),
        (f"{'word ' * 31}ends.", "split it"),
        ("It is small: it is quick; it ends.", "two colons"),
        ("An engine waits for its data alone, then sends.", "input data"),
        ("It resumes 3 s after the loss.", "a host fails"),
        ("Plans for the loss of a host are made.", "a host fails"),
    ],
)
def test_a_bad_sentence_is_found(text: str, message: str) -> None:
    assert any(message in one for one in found([Sentence("page.md:1", text)])), text


@pytest.mark.parametrize("text", ["What is a hole?", "It is one, of course.", "## What it gains"])
def test_a_good_sentence_is_left_alone(text: str) -> None:
    assert found([Sentence("page.md:1", text)]) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_is_not_too_long(path: Path) -> None:
    """As `wc -w` counts: prose, tables and code. The site adds listings that it makes from the code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = " ".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    n_words = len(text.split())
    assert n_words <= MOST_WORDS_OF_A_PAGE, "split it by what its readers want"
