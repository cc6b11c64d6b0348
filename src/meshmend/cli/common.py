"""What the commands share beside their options: how facts are shown, how errors are told."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from meshmend.errors import MeshmendError
from meshmend.topology import Mesh, name_cable, name_shape


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
