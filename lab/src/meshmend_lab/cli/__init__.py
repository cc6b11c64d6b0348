"""The commands of the laboratory: `meshmend lab COMMAND`, an entry point of meshmend's command line."""

from __future__ import annotations

from collections.abc import Callable

import typer

from meshmend.cli.options import unbundled
from meshmend.cli.root import Command, CommandGroup
from meshmend_lab.cli import (
    availability,
    bench,
    doctor,
    export,
    figure,
    machine,
    mesh,
    paper,
    programs,
    simulate,
    studio,
    timing,
    verify,
)

__all__ = ["app"]

app = typer.Typer(
    name="lab",
    cls=CommandGroup,
    help="The laboratory: real links on one machine, campaigns, the paper, and programs for other engines.",
    short_help="links, campaigns, paper",
    rich_help_panel="Laboratory",
    no_args_is_help=True,
    add_completion=False,
)

COMMANDS: dict[str, Callable[..., None]] = {
    "availability": availability.command,
    "simulate": simulate.command,
    "studio": studio.command,
    "paper": paper.command,
    "figure": figure.command,
    "machine": machine.command,
    "programs": programs.command,
    "export": export.command,
    "verify": verify.command,
    "doctor": doctor.command,
}
app.add_typer(mesh.app, name="mesh")
app.add_typer(bench.app, name="bench")
bench.app.command("jax", cls=Command)(timing.command)
for name, command in COMMANDS.items():
    app.command(name, cls=Command)(unbundled(command))
