"""The command line: `meshmend COMMAND`. One file per command; what they share is in `options` and `common`."""

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
    machine,
    plan,
    predict,
    prepare,
    reproduce,
    route,
    run,
    store,
    studio,
    verify,
)
from meshmend.cli import compile as compile_command
from meshmend.cli.common import EXIT_CODES
from meshmend.cli.options import unbundled
from meshmend.cli.root import OneLine

__all__ = ["app", "main"]

app = typer.Typer(
    name="meshmend",
    cls=OneLine,
    help="Plan, prove and run an all-reduce over whatever chips of a mesh survive.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="Exit codes: " + "; ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items()) + ".",
)
app.command("machine")(machine.command)
app.command("plan")(unbundled(plan.command))
app.command("prepare")(unbundled(prepare.command))
app.command("route")(unbundled(route.command))
app.command("verify")(unbundled(verify.command))
app.command("predict")(unbundled(predict.command))
app.command("compare")(unbundled(compare.command))
app.command("reproduce")(unbundled(reproduce.command))
app.command("availability")(unbundled(availability.command))
app.command("studio")(unbundled(studio.command))
app.command("draw")(unbundled(draw.command))
app.command("compile")(unbundled(compile_command.command))
app.command(
    "run", context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}
)(run.command)
app.command("store")(store.command)
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
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Plan, prove and run an all-reduce over whatever chips of a mesh survive."""


def main() -> None:
    """Run the command line; the entry point of the `meshmend` script."""
    app()
