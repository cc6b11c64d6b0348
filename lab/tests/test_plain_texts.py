"""The help, the messages and the documented names of the laboratory are as plain as the product's."""

from __future__ import annotations

import re

import griffe

from meshmend_lab.cli import app
from pages import ROOT
from plain_words import EXAMPLES, found, helps, messages
from prose import sentences_of

NAMES = re.findall(r"^::: meshmend_lab\.([\w.]+)$", (ROOT / "docs/lab_reference.md").read_text(encoding="utf-8"), re.M)


def test_help_and_messages_are_as_plain_as_the_pages() -> None:
    said = [one for one in helps(app) if not one.text.startswith("One of: ")] + messages(ROOT / "lab/src")
    said = [one for one in said if "text_proto.py" not in one.where]  # a grammar in one string
    assert len(said) > 500
    assert not found(said), "\n".join(found(said))


def test_docstrings_of_documented_names_are_as_plain() -> None:
    lab = griffe.load("meshmend_lab", search_paths=[str(ROOT / "lab/src")])
    texts = {name: lab[name].docstring for name in NAMES}
    said = [
        one for name, text in texts.items() for one in sentences_of(EXAMPLES.sub("", text.value if text else ""), name)
    ]
    assert len(said) > 30
    assert not found(said), "\n".join(found(said))
