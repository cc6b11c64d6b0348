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
    quarantine,
    report,
    reproduce,
    route,
    run,
    store,
    studio,
    verify,
    watch,
)
from meshmend.cli import compile as compile_command
from meshmend.cli.common import EXIT_CODES
from meshmend.cli.options import unbundled
from meshmend.cli.root import Command, OneLine

__all__ = ["app", "main"]

app = typer.Typer(
    name="meshmend",
    cls=OneLine,
    help="Plan, prove and run an all-reduce over whatever chips of a mesh survive.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: " + "; ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items()) + ".",
)
app.command("machine", cls=Command)(machine.command)
app.command("plan", cls=Command)(unbundled(plan.command))
app.command("prepare", cls=Command)(unbundled(prepare.command))
app.command("route", cls=Command)(unbundled(route.command))
app.command("verify", cls=Command)(unbundled(verify.command))
app.command("predict", cls=Command)(unbundled(predict.command))
app.command("compare", cls=Command)(unbundled(compare.command))
app.command("reproduce", cls=Command)(unbundled(reproduce.command))
app.command("availability", cls=Command)(unbundled(availability.command))
app.command("report", cls=Command)(unbundled(report.command))
app.command("studio", cls=Command)(unbundled(studio.command))
app.command("draw", cls=Command)(unbundled(draw.command))
app.command("compile", cls=Command)(unbundled(compile_command.command))
app.command(
    "run",
    cls=Command,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
)(run.command)
app.command("store", cls=Command)(store.command)
app.command("watch", cls=Command)(watch.command)
app.command("doctor", cls=Command)(doctor.command)
app.add_typer(quarantine.app, name="quarantine")
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
