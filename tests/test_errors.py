"""The tree of errors: each of them crosses to another process whole."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from meshmend import errors
from meshmend.errors import MeshmendError, PlanError

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, MeshmendError)]

# A value for each parameter of a constructor, by its annotation: a new error with a new kind of field fails here.
VALUES: dict[Any, Any] = {
    str: "some words",
    str | None: "other words",
    int: 3,
    int | None: 7,
    float: 0.5,
    errors.Coordinate: (6, 8),
    errors.Coordinate | None: (1, 2),
}


def make(kind: type[MeshmendError]) -> MeshmendError:
    """Return an error of this kind with every field set."""
    if not inspect.isfunction(kind.__init__):  # it is a ValueError's or an Exception's own
        return kind("something went wrong at (6,8)")
    positional, named = [], {}
    hints = get_type_hints(kind.__init__)
    for name, parameter in inspect.signature(kind).parameters.items():
        hint = getattr(hints[name], "type", hints[name])  # that of an InitVar
        if str(hint).startswith("collections.abc.Sequence"):
            value: Any = ("weave", "row-pairs") if "str" in str(hint) else (1, 2)
        else:
            value = VALUES[hint]
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            named[name] = value
        else:
            positional.append(value)
    return kind(*positional, **named)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_is_the_same_after_pickling_and_copying(kind: type[MeshmendError]) -> None:
    error = make(kind)
    error.add_note("seen on the way")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):  # noqa: S301
        assert type(again) is kind
        assert str(again) == str(error) != ""
        assert again.args == error.args
        assert vars(again) == vars(error)
        assert again.__notes__ == ["seen on the way"]


def test_every_error_is_public() -> None:
    assert {kind.__name__ for kind in KINDS} <= set(errors.__all__)


def refuse(mesh_name: str) -> None:
    raise PlanError("weave", mesh_name, "it is cut apart.")


def test_an_error_raised_in_another_process_arrives() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.raises(PlanError, match="weave cannot plan for 4x4: it is cut apart") as caught:
            pool.submit(refuse, "4x4").result()
        assert caught.value.planner == "weave"


@pytest.mark.parametrize(("engine", "module"), [("jax", "jax"), ("jax", "optax"), ("torch", "torch")])
def test_an_engine_without_its_packages_names_the_extra(engine: str, module: str) -> None:
    code = f"import sys; sys.modules[{module!r}] = None; import meshmend.{engine}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == (
        f"meshmend.errors.MissingExtraError: meshmend.{engine} needs {module}, which is not installed here. Install it "
        f"with: pip install 'meshmend[{engine}]' (in a checkout: pip install '.[{engine}]')"
    )


def test_the_way_to_install_an_extra_is_said_in_one_place() -> None:
    source = Path(errors.__file__).parent
    said = {path.name for path in source.rglob("*.py") if "pip install 'meshmend[" in path.read_text(encoding="utf-8")}
    assert said == {"extras.py"}
