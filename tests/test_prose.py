"""The sentences of the pages: short, with their subject in front. Each refused pattern has its reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from meshmend.cli import app
from pages import ROOT
from prose import END, Sentence, sentences

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
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
}
EXCEPTIONS = {
    "docs/trust.md": "its promises are revised together with the simulation that tests them",
    "docs/jobs_measured.md": "two paragraphs are rewritten with their next measurement",
}
"""Pages of which some sentences stay as they are, and why."""
MOST_CODE = 3
"""A cell of CONTRIBUTING's table with more code than this lists files: it is a list, not a sentence."""


def found(path_sentences: list[Sentence]) -> list[str]:
    wrong = []
    for one in path_sentences:
        is_list = one.where.startswith("CONTRIBUTING") and one.text.count("`code`") > MOST_CODE
        if one.n_words > MOST_WORDS and not is_list:
            wrong.append(f"{one.where}: {one.n_words} words, split it: {one.text}")
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


def helps() -> list[Sentence]:
    """Return the sentences of all commands' help, and of their options."""
    command: Any = typer.main.get_command(app)
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("What travels is a chunk.", "name the thing"),
        ("Of each ring one half is red.", "begin with the subject"),
        ("It starts by itself.", "trails"),
        ("Rings close, too.", "trails"),
        (f"{'word ' * 31}ends.", "split it"),
        ("An engine waits for its data alone, then sends.", "input data"),
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
    n_words = len(path.read_text(encoding="utf-8").split())
    assert n_words <= MOST_WORDS_OF_A_PAGE, "split it by what its readers want"
