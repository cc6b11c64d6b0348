"""The sentences that people read: short, with their subject in front. Each refused pattern has its reason.

They are those of pages, help, messages, logs, metrics and alerts, and of the docstrings of public names.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from meshmend.cli import app
from pages import ROOT
from plain_words import EXAMPLES, docstrings, found, helps, messages
from prose import Sentence, sentences, sentences_of
from public_names import PUBLIC

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "lab/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "docs").glob("*.ipynb")),
]
MOST_WORDS_OF_A_PAGE = 2500
EXCEPTIONS = {
    "docs/trust.md": "its promises are revised together with the simulation that tests them",
    "docs/jobs_measured.md": "two paragraphs are rewritten with their next measurement",
}
"""Pages of which some sentences stay as they are, and why."""


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_are_short_and_begin_with_their_subject(path: Path) -> None:
    wrong = found(list(sentences(path, ROOT)))
    if str(path.relative_to(ROOT)) in EXCEPTIONS:
        assert 0 < len(wrong) < 10, "an exception that is not needed any more, or too many of them"
    else:
        assert not wrong, "\n".join(wrong)


def test_the_help_is_as_plain_as_the_pages() -> None:
    said = [one for one in helps(app) if not one.text.startswith("One of: ")]  # a list of names
    assert len(said) > 150
    assert not found(said), "\n".join(found(said))


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
