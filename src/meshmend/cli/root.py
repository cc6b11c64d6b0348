"""What every command is made of: its help, and the root, which turns every error into one line and an exit code."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from meshmend.cli.common import INTERRUPTED, USAGE, exit_on_error, tell_error
from meshmend.cli.terminal import terminal, write_what_the_encoding_lacks
from meshmend.errors import MeshmendError

WIDE = 76
"""Columns from which on two panels of the help fit beside each other."""

ADDED = "meshmend.commands"
"""The entry point group of commands that other distributions add: each names a `typer.Typer`."""

PANELS = {
    "Mesh": "--machine --intended --fail --fail-cable --cable-rate --wrap --shape --local --host --topology --tile "
    "--cores",
    "Planner": "--planner --collective --neighbours-only",
    "Payload and hardware": "--payload --hardware --mode --dtype",
    "Picture": "--what --chunk --steps",
    "Routes, in place of a plan": "--route",
    "Job": "--hosts --store --shared --cache --job --secret-file",
    "This host": "--host-index --address --domain",
    "Restarts": "--kill --restarts --start-over --state-wait --cold",
    "Server": "--listen",
    "Output": "--output --save --metrics --json --help",
}
"""Options by what they are about, the same in every command. Others are in a panel of their own, or in typer's."""

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


def _shown(params: list[Any]) -> list[Any]:
    """Put options into the panels of the help, and let flags be flags, where typer would write <bool>."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
        panels = [panel for panel, names in PANELS.items() if {*names.split()} & {*param.opts}]
        param.rich_help_panel = next(iter(panels), getattr(param, "rich_help_panel", None))
    return params


class Command(TyperCommand):
    """A command, with help that is wrapped to the terminal, whose errors are one line, or with `--json` one object."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings | {"help": reflowed(settings.get("help"))})

    def invoke(self, ctx: Any) -> Any:
        """Run it."""
        with exit_on_error(ctx.params.get("json", False)):
            return super().invoke(ctx)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return what it takes, with `--help`."""
        return _shown(super().get_params(ctx))


class CommandGroup(TyperGroup):
    """A command that has commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return what it takes, with `--help`."""
        return _shown(super().get_params(ctx))


class Root(CommandGroup):
    """The root of the commands: help on one screen; every error in one line, with an exit code of `EXIT_CODES`.

    Commands of other distributions come after its own, and are loaded when they are asked for.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of its own commands, then of those that other distributions add."""
        own = super().list_commands(ctx)
        return own + sorted({point.name for point in entry_points(group=ADDED)} - {*own})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, None if there is none of that name."""
        own = super().get_command(ctx, cmd_name)
        point = next((point for point in entry_points(group=ADDED) if point.name == cmd_name), None)
        return own if own is not None or point is None else _loaded(point)

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002  # the help goes to the terminal
        """Print the commands in their panels, two beside each other where there is room."""
        console = terminal()
        panels: dict[str, Table] = {}
        for name in self.list_commands(ctx):
            try:
                command: Any = self.get_command(ctx, name)
            except MeshmendError:
                command = TyperCommand(name, short_help="cannot be loaded", rich_help_panel="Broken")
            if not command.hidden:
                table = panels.setdefault(command.rich_help_panel, Table.grid(padding=(0, 1)))
                table.add_row(Text(name, style="cyan"), command.short_help)
        boxes = [Panel(table, title=title, title_align="left", border_style="dim") for title, table in panels.items()]
        beside = 2 if console.width >= WIDE else 1
        screen = Table.grid(expand=True)
        for _ in range(beside):
            screen.add_column(ratio=1)
        for first in range(0, len(boxes), beside):
            screen.add_row(*boxes[first : first + beside])
        flags = [option for param in self.get_params(ctx) for option in param.opts if option.startswith("--")]
        console.print(Text.assemble(("Usage: ", "bold"), f"{ctx.command_path} COMMAND …", ("  ", ""), self.help or ""))
        console.print(screen)
        console.print(Text.assemble(("Options: ", "bold"), ", ".join(flags), "; of a command: COMMAND --help"))
        console.print(Text(self.epilog or "", style="dim"))

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


def _loaded(point: EntryPoint) -> Any:
    """Return the command of an entry point; raise `MeshmendError` if it cannot be imported."""
    try:
        added = point.load()
        command: Any = typer.main.get_command(added)
    except Exception as error:  # whatever importing it may raise
        where = point.dist.name if point.dist is not None else point.value
        raise MeshmendError(
            f"`meshmend {point.name}` cannot be loaded from {where}: {type(error).__name__}: {error}. Install {where} "
            f"again, in the version of this meshmend, or uninstall it."
        ) from error
    command.name, command.rich_help_panel = point.name, added.rich_help_panel
    return command


def _tell_usage(error: Any, as_json: bool) -> int:
    context = getattr(error, "ctx", None)
    if context is not None and type(error).__name__ == "NoArgsIsHelpError":
        return USAGE  # to make the error has printed the help already
    way = f" See: {context.command_path} --help" if context is not None else ""
    tell_error(type(error).__name__, f"{error.format_message().rstrip('.')}.{way}", as_json)
    return int(error.exit_code)
