"""The command line: `meshmend COMMAND`. One file a command; what they share is in `common`."""

from __future__ import annotations

import typer

from meshmend import __version__
from meshmend.cli import (
    availability,
    bench,
    compare,
    doctor,
    draw,
    lab,
    plan,
    predict,
    prepare,
    reproduce,
    route,
    verify,
)
from meshmend.cli import compile as compile_command

app = typer.Typer(
    name="meshmend",
    help="Plan, prove and run an allreduce over whatever chips of a mesh survive.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("plan")(plan.command)
app.command("prepare")(prepare.command)
app.command("route")(route.command)
app.command("verify")(verify.command)
app.command("predict")(predict.command)
app.command("compare")(compare.command)
app.command("reproduce")(reproduce.command)
app.command("availability")(availability.command)
app.command("draw")(draw.command)
app.command("compile")(compile_command.command)
app.command("doctor")(doctor.command)
app.add_typer(lab.app, name="lab")
app.add_typer(bench.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"meshmend {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and stop."
    ),
) -> None:
    """Plan, prove and run an allreduce over whatever chips of a mesh survive."""


def main() -> None:
    """Run the command line; the entry point of the `meshmend` script."""
    app()
