"""What the commands share: how a mesh is given, how facts are shown, how errors are told."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from meshmend.errors import MeshError, MeshmendError
from meshmend.topology import Mesh, name_cable, name_shape

ShapeArgument = Annotated[str, typer.Argument(metavar="SHAPE", help="Chips along each axis, as in 16x32.")]
FailOption = Annotated[
    list[str] | None,
    typer.Option("--fail", metavar="HxW@r,c", help="A hole: rows x columns @ row,column; or one chip r,c. Repeatable."),
]
FailCableOption = Annotated[
    list[str] | None,
    typer.Option("--fail-cable", metavar="r,c-r,c", help="A failed cable between two neighbours. Repeatable."),
]
WrapOption = Annotated[
    str, typer.Option("--wrap", metavar="AXES", help="Axes that close on themselves: none, all, or numbers as in 0,1.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def read_mesh(shape: str, fail: list[str] | None, fail_cable: list[str] | None, wrap: str) -> Mesh:
    """Make the mesh that the options describe."""
    plain = Mesh(shape)
    axes = [False] * plain.n_axes
    if wrap == "all":
        axes = [True] * plain.n_axes
    elif wrap != "none":
        for word in wrap.split(","):
            if not (word.isascii() and word.isdigit() and int(word) < plain.n_axes):
                raise MeshError(f"--wrap {wrap}: expected none, all, or axes from 0 to {plain.n_axes - 1}, as in 0,1.")
            axes[int(word)] = True
    return Mesh(shape, wrap=axes, failed=fail or (), failed_cables=fail_cable or ())


def mesh_facts(mesh: Mesh) -> dict[str, Any]:
    """Return what every command's JSON says of a mesh."""
    return {
        "mesh": name_shape(mesh.shape),
        "wrap": list(mesh.wrap),
        "chips": mesh.n_chips,
        "failed": [str(hole) for hole in mesh.holes],
        "failed_cables": [name_cable(cable) for cable in mesh.failed_cables],
    }


@contextmanager
def told_errors(as_json: bool) -> Iterator[None]:
    """Turn meshmend's errors into one line for people, or one object for programs, and exit code 1."""
    try:
        yield
    except MeshmendError as error:
        if as_json:
            print_json({"error": type(error).__name__, "message": str(error)})
        else:
            Console(stderr=True, soft_wrap=True).print(f"[bold red]Error:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None


def print_json(facts: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    typer.echo(json.dumps(facts, indent=2))


def print_facts(title: str, facts: Mapping[str, str]) -> None:
    """Print a two-column table for people."""
    console = Console()
    console.print(title, style="bold", highlight=False)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for name, value in facts.items():
        table.add_row(name, value)
    console.print(table)
