"""The command line: `meshmend COMMAND`. One file per command; what they share is in `options` and `common`.

Other distributions add commands by the entry point group `meshmend.commands` (`root`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from meshmend import __version__
from meshmend.cli import (
    compare,
    doctor,
    draw,
    machine,
    plan,
    prepare,
    quarantine,
    run,
    store,
    verify,
    watch,
)
from meshmend.cli import compile as compile_command
from meshmend.cli.common import EXIT_CODES
from meshmend.cli.options import unbundled
from meshmend.cli.root import Command, Root

__all__ = ["app", "main"]

app = typer.Typer(
    name="meshmend",
    cls=Root,
    help="Plan, prove and run an all-reduce over whatever chips of a mesh survive.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: " + "; ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items()) + ".",
)
START, OPERATE, STUDY = "Start here", "Operate", "Study"


def _add(name: str, panel: str, brief: str, command: Callable[..., None], **settings: Any) -> None:
    """Add a command: `brief` is what the first screen of the help says about it."""
    app.command(name, cls=Command, rich_help_panel=panel, short_help=brief, **settings)(unbundled(command))


_add("plan", START, "plan, prove, predict", plan.command)
_add("verify", START, "prove a saved plan", verify.command)
_add("compare", START, "planners side by side", compare.command)
_add("draw", START, "plans, steps and routes", draw.command)
_add(
    "run",
    START,
    "train through failures",
    run.command,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
)
_add("doctor", START, "what works on this host", doctor.command)
_add("prepare", OPERATE, "plan for failed hosts", prepare.command)
_add("store", OPERATE, "a job's rendezvous", store.command)
_add("watch", OPERATE, "a job and its goodput", watch.command)
app.add_typer(quarantine.app, name="quarantine", rich_help_panel=OPERATE, short_help="what a job leaves out")
_add("machine", OPERATE, "read a machine's files", machine.command)
_add("compile", STUDY, "a plan for a TPU slice", compile_command.command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"meshmend {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Plan, prove and run an all-reduce over whatever chips of a mesh survive."""


def main() -> None:
    """Run the command line; the entry point of the `meshmend` script."""
    app()
