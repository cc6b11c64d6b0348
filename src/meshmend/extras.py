"""What is installed only with an extra, and how to install it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from meshmend.errors import MissingExtraError, ParameterError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


def new_figure(path: Path, size_in: tuple[float, float]) -> Figure:
    """Return an empty figure of matplotlib for a plot that `path` can hold; raise an error that says what to do."""
    require("matplotlib", needed_for="Plotting", extra="draw")
    from matplotlib.figure import Figure

    figure = Figure(figsize=size_in, layout="constrained")
    if path.suffix.removeprefix(".").lower() not in figure.canvas.get_supported_filetypes():
        raise ParameterError(f"Cannot draw to {path.name!r}: expected a name that ends in .png, .svg or .pdf.")
    return figure
