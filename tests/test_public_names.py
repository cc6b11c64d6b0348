"""What is public: the names in the `__all__` of the modules that CONTRIBUTING lists, each with one home."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import itertools
from collections import defaultdict

import pytest

import meshmend
from public_names import PUBLIC, SOURCE, names_in

NEEDS = {"meshmend.jax": ("jax", "optax"), "meshmend.torch": ("torch", "torchft")}


def is_installed(name: str) -> bool:
    """Whether the extras that a public module needs are here."""
    needed = [extra for prefix, extras in NEEDS.items() if f"{name}.".startswith(f"{prefix}.") for extra in extras]
    return all(importlib.util.find_spec(extra) is not None for extra in needed)


def test_the_public_surface_is_small() -> None:
    assert len(meshmend.__all__) <= 20
    assert 20 < len(PUBLIC) < 30


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there_and_lives_there(name: str) -> None:
    if not is_installed(name):
        pytest.skip(f"{name} needs an extra that is not installed")
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__) > 0
    for word in module.__all__:
        assert not word.startswith("_")
        found = getattr(module, word)
        if inspect.isclass(found) or inspect.isfunction(found):
            home = found.__module__
            assert home == name or home.startswith(f"{name}."), f"{name} lists {word}, which lives in {home}"


def test_every_package_says_what_it_gives() -> None:
    for path in SOURCE.rglob("__init__.py"):
        assert names_in(path) is not None, path.relative_to(SOURCE)


def test_a_name_has_one_public_home_and_at_most_another_above_it() -> None:
    homes = defaultdict(list)
    for name in PUBLIC:
        path = SOURCE.joinpath(*name.split(".")[1:])
        for word in names_in(path / "__init__.py" if path.is_dir() else path.with_suffix(".py")) or []:
            homes[word].append(name)
    for word, modules in homes.items():
        for first, second in itertools.combinations(modules, 2):
            if second.startswith(f"{first}.") or not (is_installed(first) and is_installed(second)):
                continue
            # Elsewhere the same word may name another thing, as each engine has its all_reduce.
            assert getattr(importlib.import_module(first), word) is not getattr(
                importlib.import_module(second), word
            ), (word, modules)


def test_no_two_classes_share_a_name() -> None:
    homes = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(SOURCE)))
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}
