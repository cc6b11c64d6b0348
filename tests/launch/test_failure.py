"""What is said of the error that ends a worker: which kind it is, and the lines of the script that lead to it."""

from __future__ import annotations

import errno
import importlib.util
import sys
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from meshmend.errors import ParameterError
from meshmend.launch import failure
from meshmend.launch.failure import LEFT_OUT, kind_of, readable_trace, repeated_by_restarts

SCRIPT = """
def loss(value):
    return value["accuracy"]

def asks_for_nothing():
    return call(None)

def main():
    return call(through, loss)
"""
OURS = """
from functools import reduce

def call(function, *args):
    return function(*args) if function is not None else {}["fault"]

def through(function):
    return reduce(lambda _, one: function(one), [{}], None)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A script that calls a package whose files count as ours, which calls a library, which calls the script."""
    (tmp_path / "ours").mkdir()
    monkeypatch.setattr(failure, "PACKAGE", f"{tmp_path}/ours/")
    found = types.SimpleNamespace()
    for name, text in (("ours/inner.py", OURS), ("train.py", SCRIPT)):
        (tmp_path / name).write_text(text)
        spec = importlib.util.spec_from_file_location(Path(name).stem, tmp_path / name)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        vars(module).update(vars(found))
        spec.loader.exec_module(module)
        vars(found).update({name: value for name, value in vars(module).items() if callable(value)})
    return found


def lines_of(trace: str) -> list[str]:
    """Return the file and the function of each frame of a traceback."""
    parts = [line.split('"')[1:] for line in trace.splitlines() if line.startswith("  File ")]
    return [f"{Path(path).name} {rest.rpartition(' ')[2]}" for path, rest in parts]


def raised_by(function: Any, *args: Any) -> BaseException:
    try:
        function(*args)
    except Exception as error:
        return error
    raise AssertionError("it raises nothing")


def test_a_traceback_has_the_lines_of_the_script(script: Any) -> None:
    """Neither ours, nor those of a library that we call; and it says how to see them."""
    trace = readable_trace(raised_by(script.main))
    assert lines_of(trace) == ["test_failure.py raised_by", "train.py main", "train.py loss"]
    assert trace.endswith(f"KeyError: 'accuracy'\n{LEFT_OUT}\n")


def test_a_fault_in_our_code_keeps_all_of_its_lines(script: Any) -> None:
    trace = readable_trace(raised_by(script.asks_for_nothing))
    assert lines_of(trace)[1:] == ["train.py asks_for_nothing", "inner.py call"]
    assert trace.endswith("KeyError: 'fault'\n")


def test_all_lines_are_shown_where_jax_shows_its_own(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    error = raised_by(script.main)
    config = types.SimpleNamespace(jax_traceback_filtering="off")
    errors = types.SimpleNamespace(JaxRuntimeError=ZeroDivisionError)
    stand_in = types.SimpleNamespace(config=config, errors=errors, __file__="/nowhere/jax/__init__.py")
    monkeypatch.setitem(sys.modules, "jax", stand_in)
    shown = ["train.py main", "inner.py call", "inner.py through", "inner.py <lambda>", "train.py loss"]
    trace = readable_trace(error)
    assert [line for line in lines_of(trace)[1:] if "functools" not in line] == shown
    assert LEFT_OUT not in trace
    config.jax_traceback_filtering = "auto"
    assert "inner.py" not in readable_trace(error)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TypeError("shapes (4,) and (5,)"), "final"),
        (ParameterError("a mean over the batch"), "final"),
        (FileNotFoundError(errno.ENOENT, "no such file"), "lasting"),
        (OSError(errno.EIO, "disk"), "transient"),
        (MemoryError(), "lasting"),
        (TimeoutError(), "transient"),
    ],
)
def test_an_error_of_the_traced_step_is_that_of_every_host(error: Exception, kind: str) -> None:
    """Not of a file, of memory or of the network: one host may be alone with it, and it may pass."""
    with suppress(type(error)), repeated_by_restarts():
        raise error
    assert kind_of(error) == kind
