"""What is public: the names in the `__all__` of the modules that CONTRIBUTING lists, each with one home."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import itertools
from collections import defaultdict
from pathlib import Path

import pytest

import meshmend

SOURCE = Path(meshmend.__file__).parent
NEEDS = {"meshmend.jax": ("jax", "optax"), "meshmend.torch": ("torch", "torchft")}
PUBLIC = [
    "meshmend",
    "meshmend.errors",
    "meshmend.numpy",
    "meshmend.topology",
    "meshmend.machines",
    "meshmend.schedule",
    "meshmend.schedule.verify",
    "meshmend.schedule.serialize",
    "meshmend.schedule.split",
    "meshmend.routing",
    "meshmend.cost",
    "meshmend.cost.units",
    "meshmend.planning",
    "meshmend.planning.compare",
    "meshmend.drawing",
    "meshmend.availability",
    "meshmend.quarantine",
    "meshmend.launch",
    "meshmend.doctor",
    "meshmend.jax",
    "meshmend.jax.checks",
    "meshmend.jax.train.fsdp",
    "meshmend.jax.session",
    "meshmend.jax.state",
    "meshmend.jax.compile",
    "meshmend.torch",
]


def is_installed(name: str) -> bool:
    """Whether the extras that a public module needs are here."""
    needed = [extra for prefix, extras in NEEDS.items() if f"{name}.".startswith(f"{prefix}.") for extra in extras]
    return all(importlib.util.find_spec(extra) is not None for extra in needed)


def names_in(path: Path) -> list[str] | None:
    """What a file's `__all__` lists, read without running it."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            assert node.value is not None
            return list(ast.literal_eval(node.value))
    return None


def test_the_top_level_is_small() -> None:
    assert len(meshmend.__all__) <= 20


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


def test_contributing_lists_the_public_modules() -> None:
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    public = text.split("## What is public")[1].split("\n## ")[0]
    for name in PUBLIC:
        assert f"`{name}`" in public or f"`{name.rpartition('.')[2]}`" in public, name
