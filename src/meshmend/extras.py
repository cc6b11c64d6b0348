"""What is installed only with an extra, and how to install it."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module, metadata
from importlib.util import find_spec

from meshmend.errors import MissingExtraError, VersionError

TESTED = {
    "jax": ("0.10.2", "0.11.2", "0.12.0.1"),
    "torch": ("2.7.0", "2.13.0", "2.14.1", "2.15.0"),
    "torchft": ("0.2.0", "2026.10.26 (nightly)"),
}
"""The versions that the quick tests have passed with: docs/versions.md says when, and with which others."""


def own_version() -> str:
    """Return the version of meshmend that is installed."""
    try:
        return metadata.version("meshmend")
    except metadata.PackageNotFoundError:  # run from a source tree that was never installed
        return "0+unknown"


def version_of(package: str) -> str | None:
    """Return the version of an installed package, also of one that comes in a distribution of another name.

    >>> version_of("no_such_package")
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        named = metadata.packages_distributions().get(package)
        return metadata.version(named[0]) if named else None


def install_hint(extra: str | None = None) -> str:
    """Return the command that installs meshmend or one of its extras, from a package index and from a checkout.

    >>> install_hint("jax")
    "pip install 'meshmend[jax]' (in a checkout: pip install '.[jax]')"
    >>> install_hint()
    'pip install meshmend (in a checkout: pip install .)'
    """
    if extra is None:
        return "pip install meshmend (in a checkout: pip install .)"
    return f"pip install 'meshmend[{extra}]' (in a checkout: pip install '.[{extra}]')"


def require(*modules: str, needed_for: str, extra: str) -> None:
    """Raise `MissingExtraError` if one of these modules is not installed; none of them is imported.

    >>> require("json", needed_for="Reading", extra="draw")
    >>> require("json", "no_such_module", needed_for="Reading", extra="draw")
    Traceback (most recent call last):
    ...
    meshmend.errors.MissingExtraError: Reading needs no_such_module, which is not installed here. Install it with: ...
    """
    for module in modules:
        if find_spec(module) is None:
            raise MissingExtraError(needed_for, module, install_hint(extra))


def require_names(library: str, names: Iterable[str], *, needed_for: str) -> None:
    """Raise `VersionError` if an installed library does not have these names, each as in "module.path:name.attribute".

    >>> require_names("numpy", ["numpy.linalg:norm"], needed_for="It")
    >>> require_names("numpy", ["numpy.linalg:norm", "numpy.nowhere:a", "numpy.linalg:no.norm"], needed_for="It")
    Traceback (most recent call last):
    ...
    meshmend.errors.VersionError: It does not work with numpy ..., which lacks numpy.nowhere:a, numpy.linalg:no.norm...
    """
    missing = []
    for name in names:
        module, _, path = name.partition(":")
        try:
            found = import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            missing.append(name)
    if missing:
        tested = ", ".join(TESTED.get(library, ("no version",)))
        raise VersionError(needed_for, library, version_of(library) or "of unknown version", missing, tested)
