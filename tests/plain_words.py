"""What makes a sentence hard to read, and the sentences of help, messages and docstrings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from prose import END, Sentence, strings_of

MOST_WORDS = 30
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


def helps(commands: typer.Typer) -> list[Sentence]:
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


def messages(source: Path) -> list[Sentence]:
    """Return the sentences of the strings of a package: messages, log lines, the help of metrics."""
    paths = sorted(source.rglob("*.py"))
    texts = [text for path in paths for text in strings_of(path, source) if text.n_words > 3]
    return [Sentence(text.where, part) for text in texts for part in END.split(" ".join(text.text.split()))]


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
