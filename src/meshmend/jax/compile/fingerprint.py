"""A digest of what a function computes, from what it is made of: without tracing it, and the same in every process.

A program that was compiled earlier may be run in place of a function only if tracing that function would make the same
program again. So what pickle would write of it is hashed, and of functions and classes also their code, what they close
over, and the globals that they use. Of installed packages it is the version that counts, and what their functions close
over, such as the learning rate of an optimizer. What cannot be written is refused: that costs a compilation, while a
digest that overlooks something would train with a program of yesterday.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from meshmend.errors import MeshmendError

MOST_OBJECTS = 100_000
"""Objects that are looked at. A loss that reaches more holds a data set, or all of a framework."""
INSTALLED = tuple(sysconfig.get_path(which) + os.sep for which in ("stdlib", "platstdlib", "purelib", "platlib"))
"""Found once: a process has thousands of modules, and to find these folders takes as long as to load a program."""
WRAPPERS = (property, functools.cached_property, staticmethod, classmethod)


class UnidentifiedError(MeshmendError):
    """Something has no digest. Fields: its `name`, and `why`."""

    def __init__(self, name: str, why: str) -> None:
        self.name = name
        self.why = why
        super().__init__(f"{name} cannot be identified: {why}")


def fingerprint(**values: Any) -> str:
    """Return a digest of named values: functions, optimizers, arrays, settings and whatever is made of them.

    >>> def scaled(rate):
    ...     return lambda w: w * rate
    >>> fingerprint(f=scaled(0.1)) == fingerprint(f=scaled(0.1))
    True
    >>> fingerprint(f=scaled(0.1)) == fingerprint(f=scaled(0.2))
    False
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, value in values.items():
        try:
            _Pickler(types.SimpleNamespace(write=digest.update), protocol=4).dump((name, value))
        except RecursionError:
            raise UnidentifiedError(name, "it is nested too deeply") from None
        except Exception as error:  # whatever a class says when it is not to be copied
            raise UnidentifiedError(name, f"{type(error).__name__}: {error}"[:200]) from error
    return digest.hexdigest()


class _Pickler(pickle._Pickler):
    """Writes objects to be hashed, not to be read: what it puts in the place of a function is only told apart.

    It is Python's own implementation in Python, of which joblib's hasher is made, too: the one in C takes equal
    strings for the same or for different ones, as they lie in memory.
    """

    n_objects = 0

    def memoize(self, obj: Any) -> None:
        if not isinstance(obj, (str, bytes, tuple)):
            super().memoize(obj)  # type: ignore[misc]  # not in typeshed

    def reducer_override(self, obj: Any) -> Any:
        """Return a label of an object and what is to be written of it, which may lead back to the object."""
        self.n_objects += 1
        if self.n_objects > MOST_OBJECTS:
            raise ValueError(f"what it holds has more than {MOST_OBJECTS} parts")
        if obj is str:
            return NotImplemented
        if _is_public(obj):
            return str, (obj.__module__, obj.__qualname__, stamp(obj.__module__))
        match obj:
            case types.FunctionType():
                return str, ("function", obj.__module__, obj.__qualname__), _parts_of_function(obj)
            case types.CodeType():
                # Not where it stands: comments and lines that move change nothing.
                shape = (obj.co_argcount, obj.co_posonlyargcount, obj.co_kwonlyargcount, obj.co_flags)
                names = (obj.co_names, obj.co_varnames, obj.co_freevars, obj.co_cellvars)
                return str, ("code", obj.co_code, shape, names, obj.co_exceptiontable), [obj.co_consts]
            case types.ModuleType():
                return str, ("module", obj.__name__, stamp(obj.__name__))
            case type() if not is_installed(obj.__module__):
                named = {name: one for name, one in vars(obj).items() if _is_of_class(name, one)}
                return str, ("class", obj.__module__, obj.__qualname__), [obj.__bases__, named]
            case set() | frozenset():
                return str, ("set",), sorted(fingerprint(element=element) for element in obj)
            case _ if isinstance(obj, WRAPPERS):
                parts = [getattr(obj, name, None) for name in ("fget", "fset", "func", "__func__")]
                return str, (type(obj).__name__,), parts
            case _ if hasattr(obj, "__wrapped__") and hasattr(obj, "lower"):  # a jitted function
                return str, ("jit",), [obj.__wrapped__]
            case jax.Array() if jnp.issubdtype(obj.dtype, jax.dtypes.prng_key):
                return str, ("key", str(jax.random.key_impl(obj))), [jax.random.key_data(obj)]
        return NotImplemented


def _parts_of_function(function: types.FunctionType) -> list[Any]:
    code, cells = function.__code__, []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:
            cells.append("empty")
    attributes = {name: one for name, one in vars(function).items() if name != "__wrapped__"}
    parts = [code, function.__defaults__, function.__kwdefaults__, cells, attributes]
    if is_installed(function.__module__):
        return [stamp(function.__module__), *parts]
    names = sorted(_names_in(code))
    used = {name: function.__globals__.get(name, sys.modules.get(name)) for name in names}
    for name, module in list(used.items()):
        if isinstance(module, types.ModuleType) and not is_installed(module.__name__):
            used |= {f"{name}.{one}": vars(module)[one] for one in names if one in vars(module)}
    return [*parts, used]


def _names_in(code: types.CodeType) -> set[str]:
    """Return the names that a function, and the functions inside it, look up: globals, attributes and modules."""
    return set(code.co_names).union(*(_names_in(one) for one in code.co_consts if isinstance(one, types.CodeType)))


def _is_of_class(name: str, value: Any) -> bool:
    return not name.startswith(("__", "_abc_")) or isinstance(value, types.FunctionType)


def _is_public(value: Any) -> bool:
    """Whether an object is what an installed module has under its name: then that and the version say what it is."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or not is_installed(module):
        return False
    return getattr(sys.modules.get(module), name, None) is value


@functools.cache
def is_installed(name: str) -> bool:
    """Whether a module belongs to Python, to meshmend or to an installed package, which has a version."""
    if name == "__main__":
        return False
    if name.split(".")[0] == "meshmend" or name in sys.builtin_module_names:
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:  # a part of an extension module has none
        parent = name.rpartition(".")[0]
        return bool(parent) and is_installed(parent)
    return file.startswith(INSTALLED) or f"{os.sep}site-packages{os.sep}" in file


@functools.cache
def stamp(name: str) -> str:
    """Return the version of the package that a module belongs to, or what its file has in it where it says none.

    Of a meshmend that is not installed, the sizes and times of its files count: somebody is working on it.
    """
    top = name.split(".")[0]
    package = sys.modules.get(top)
    version, file = getattr(package, "__version__", None), getattr(package, "__file__", None)
    if file is None:
        return f"{top} of Python {sys.version}"
    if isinstance(version, str) and (top != "meshmend" or "site-packages" in Path(file).parts):
        return f"{top} {version}"
    if top != "meshmend":
        return f"{top} {hashlib.sha256(Path(file).read_bytes()).hexdigest()}"
    files = [(str(path), path.stat()) for path in sorted(Path(file).parent.rglob("*.py"))]
    return f"{top} {[(path, found.st_size, found.st_mtime_ns) for path, found in files]}"


def sources() -> str:
    """Return a digest of the files of all modules that are loaded and belong to no package: the script and its own.

    It changes with what a loss looks up by name while it is traced, which nothing that it is made of shows.
    """
    digest = hashlib.sha256()
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and not is_installed(name) and Path(file).is_file():
            digest.update(f"{name}\0{hashlib.sha256(Path(file).read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()
