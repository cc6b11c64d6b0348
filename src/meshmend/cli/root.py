"""What every command is made of: its help, and the root, which turns every error into one line and an exit code."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from meshmend.cli.common import INTERRUPTED, USAGE, exit_on_error, tell_error
from meshmend.cli.terminal import write_what_the_encoding_lacks

_ClickException: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
"""The class that typer raises for a wrong command line: click's, or that of typer's own copy of click."""


def reflowed(text: str | None) -> str | None:
    r"""Return a docstring with each paragraph on one line, to be wrapped to the terminal; examples keep their lines.

    >>> reflowed("Draw a plan,\nor its steps.\n\nExample: one\nExample: two")
    'Draw a plan, or its steps.\n\nExample: one\nExample: two'
    """
    if text is None:
        return None
    return re.sub(r"(?<!\n)\n(?!\n|Example:)", " ", inspect.cleandoc(text))


def _without_types(params: list[Any]) -> list[Any]:
    """Let the help show flags as flags: typer would write <bool> beside them, as if they took a value."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class Command(TyperCommand):
    """A command, with help that is wrapped to the terminal."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings | {"help": reflowed(settings.get("help"))})

    def get_params(self, ctx: Any) -> list[Any]:
        """Return what it takes, with `--help`."""
        return _without_types(super().get_params(ctx))


class CommandGroup(TyperGroup):
    """A command that has commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return what it takes, with `--help`."""
        return _without_types(super().get_params(ctx))


class OneLine(CommandGroup):
    """The root of the commands: reports every error in one line, with an exit code of `EXIT_CODES`."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command, and exit."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode, windows_expand_args, **extra)
        words = sys.argv[1:] if args is None else list(args)
        as_json = "--json" in words[: words.index("--") if "--" in words else None]
        write_what_the_encoding_lacks()
        try:
            with exit_on_error(as_json):
                code = super().main(words, prog_name, complete_var, False, windows_expand_args, **extra)
                if sys.stdout is not None:
                    sys.stdout.flush()
        except typer.Exit as exited:
            code = exited.exit_code
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
        except _ClickException as error:
            code = _tell_usage(error, as_json)
        if code == INTERRUPTED:
            tell_error("Interrupted", "Interrupted.", as_json)
        sys.exit(code if isinstance(code, int) else 0)


def _tell_usage(error: Any, as_json: bool) -> int:
    context = getattr(error, "ctx", None)
    if context is not None and type(error).__name__ == "NoArgsIsHelpError":
        context.get_help()
        return USAGE
    way = f" See: {context.command_path} --help" if context is not None else ""
    tell_error(type(error).__name__, f"{error.format_message().rstrip('.')}.{way}", as_json)
    return int(error.exit_code)
