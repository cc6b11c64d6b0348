"""What the commands share besides their options: output, files to write, error reporting and the exit codes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from meshmend.cli.terminal import plain, print_line, terminal
from meshmend.cost import Forecast
from meshmend.errors import MeshmendError, ParameterError
from meshmend.topology import Mesh, name_cable, name_shape

SCHEDULES = (".npz", ".txt")
REFUSED, USAGE, INTERRUPTED, PIPE_CLOSED, TERMINATED = 1, 2, 130, 141, 143
EXIT_CODES = {
    0: "done",
    REFUSED: "failed, with one line that says why: no plan, no proof, a file that cannot be read or written",
    USAGE: "usage error: an unknown option, a missing argument",
    INTERRUPTED: "interrupted (Ctrl-C)",
    PIPE_CLOSED: "the reader of the output closed the pipe",
    TERMINATED: "`meshmend run` was ended by SIGTERM",
}
"""What each exit code means; `meshmend --help` and the documentation say the same."""


def without_devices() -> None:
    """Keep JAX, which is not imported yet, to the CPU: searching for a TPU that is not there takes minutes."""
    os.environ["JAX_PLATFORMS"] = "cpu"


def mesh_facts(mesh: Mesh) -> dict[str, Any]:
    """Return the JSON description of a mesh that all commands share."""
    return {
        "mesh": name_shape(mesh.shape),
        "chips": mesh.n_chips,
        **{name: value for name, value in mesh.to_dict().items() if name != "shape"},
        "cable_rates": {name_cable(cable): str(rate) for cable, rate in mesh.cable_rates.items()},
    }


def forecast_facts(forecast: Forecast) -> dict[str, Any]:
    """Return the JSON of a forecast."""
    return {
        "seconds": forecast.seconds,
        "bound_seconds": forecast.bound_seconds,
        "least_seconds": forecast.least_seconds,
        "ratio_to_bound": forecast.ratio_to_bound,
        "busiest_link_load": forecast.busiest_link_load,
        "busiest_links": [
            {"src": list(link.src), "dst": list(link.dst), "load": link.load} for link in forecast.busiest_links
        ],
        "by_phase": forecast.by_phase,
        "gap": dataclasses.asdict(forecast.gap),
    }


@contextmanager
def exit_on_error(as_json: bool) -> Iterator[None]:
    """Report expected errors as one line on standard error, and as one JSON object for programs, with exit code 1."""
    try:
        yield
    except BrokenPipeError:
        _leave_the_pipe()
        raise typer.Exit(PIPE_CLOSED) from None
    except MeshmendError as error:
        tell_error(type(error).__name__, str(error), as_json)
        raise typer.Exit(REFUSED) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        tell_error(type(error).__name__, f"{where}{error.strerror or error}.", as_json)
        raise typer.Exit(REFUSED) from None
    except MemoryError:
        tell_error("MemoryError", "This needs more memory than this machine has.", as_json)
        raise typer.Exit(REFUSED) from None


def tell_error(kind: str, message: str, as_json: bool) -> None:
    """Print one line on standard error, and with `--json` one object on standard output."""
    if as_json:
        try:
            print_json({"error": kind, "message": message})
        except OSError:
            _leave_the_pipe()
    with contextlib.suppress(OSError):  # standard error may be closed
        print_line(("Error:", "bold red"), " ", plain(message), stderr=True)


def _leave_the_pipe() -> None:
    """Discard all further writes to standard output, including Python's own flush at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_json(facts: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    typer.echo(json.dumps(facts, indent=2))


def print_result(as_json: bool, facts: Mapping[str, Any], title: str, shown: Mapping[str, str | Text]) -> None:
    """Print a result: all of its facts for programs, or for people what is shown of them, below a title."""
    if as_json:
        print_json(facts)
    else:
        print_facts(title, shown)


def print_facts(title: str, facts: Mapping[str, str | Text]) -> None:
    """Print a two-column table for people."""
    console = terminal()
    console.print(plain(title), style="bold")
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for name, value in facts.items():
        table.add_row(name, value)
    console.print(table)


def check_output(option: str, path: Path | None, endings: Sequence[str] = ()) -> None:
    """Raise `ParameterError` if a result cannot be written to `path`; called before the work that makes it."""
    if path is None:
        return
    if endings and path.suffix.lower() not in endings:
        known = f"{', '.join(endings[:-1])} or {endings[-1]}" if len(endings) > 1 else endings[0]
        raise ParameterError(f"{option} {path}: the name ends in {path.suffix!r}, expected {known}.")
    if path.is_dir():
        raise ParameterError(f"{option} {path}: this is a folder; name a file in it.")
    if path.exists():
        if not os.access(path, os.W_OK):
            raise ParameterError(f"{option} {path}: this file is not writable.")
        return
    check_folder(option, path.parent, make=False)


def check_folder(option: str, folder: Path, *, make: bool) -> None:
    """Raise `ParameterError` if no file can be made in a folder; with `make`, a missing folder is created."""
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        # Try it, since permissions are not enough: the disk may be read-only or full.
        with tempfile.TemporaryFile(dir=folder, prefix=".meshmend-"):
            pass
    except OSError as error:
        why = "there is no such folder" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        raise ParameterError(f"{option}: nothing can be written in {folder}: {why}.") from error
