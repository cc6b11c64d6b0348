"""What is installed only with an extra of meshmend-lab, and how to install it."""

from __future__ import annotations

from importlib.util import find_spec

from meshmend.errors import MissingExtraError


def install_hint(extra: str) -> str:
    """Return the command that installs an extra of meshmend-lab, from a package index and from a checkout.

    >>> install_hint("export")
    "pip install 'meshmend-lab[export]' (in a checkout: pip install . './lab[export]')"
    """
    return f"pip install 'meshmend-lab[{extra}]' (in a checkout: pip install . './lab[{extra}]')"


def require(*modules: str, needed_for: str, extra: str) -> None:
    """Raise `MissingExtraError` if one of these modules is not installed; none of them is imported.

    >>> require("json", needed_for="Reading", extra="export")
    """
    for module in modules:
        if find_spec(module) is None:
            raise MissingExtraError(needed_for, module, install_hint(extra))
