"""`meshmend lab mesh`: a mesh of network namespaces on this machine, with cables of a given rate."""

from __future__ import annotations

import os
import subprocess
from typing import Annotated, Any

import typer
from rich.text import Text

from meshmend.cli.common import mesh_facts, print_json, print_result
from meshmend.cli.options import HoleOptions, JsonOption, ShapeArgument, unbundled
from meshmend.cli.root import Command, CommandGroup
from meshmend.cli.terminal import print_line, print_rows
from meshmend.errors import ParameterError
from meshmend.topology import parse_chip
from meshmend_lab.cli.options import LinkDelayOption, LinkRateOption
from meshmend_lab.errors import LabError
from meshmend_lab.mesh import FoundLab, Lab, find_labs, take_down, take_down_all

app = typer.Typer(
    cls=CommandGroup,
    help="A mesh on this machine: one network namespace per chip, cables of a given rate. Needs root.",
    no_args_is_help=True,
)

NameOption = Annotated[str, typer.Option("--name", metavar="NAME", help="Which lab, if there are several.")]
NameArgument = Annotated[str | None, typer.Argument(metavar="NAME", help="Which lab.", show_default="lab")]


@app.command("up", cls=Command)
@unbundled
def up(
    shape: ShapeArgument,
    holes: HoleOptions,
    rate: LinkRateOption = "40mbit",
    delay: LinkDelayOption = None,
    name: NameOption = "lab",
    json: JsonOption = False,
) -> None:
    """Create a lab. It stays until `meshmend lab mesh down`.

    Example: meshmend lab mesh up 4x4 --rate 40mbit --delay 5ms
    """
    _show(Lab.up(holes.mesh(shape), rate=rate, delay=delay, name=name), json)


@app.command("kill", cls=Command)
def kill(
    holes: Annotated[list[str], typer.Argument(metavar="HxW@r,c", help="Holes: rows x columns @ row,column.")],
    name: NameOption = "lab",
    json: JsonOption = False,
) -> None:
    """Cut chips off and route the others round the hole. Processes on those chips lose their network.

    Example: meshmend lab mesh kill 2x2@0,0
    """
    _show(Lab.find(name).kill(*holes), json)


@app.command("show", cls=Command)
def show(name: NameArgument = None, named: NameOption = "lab", json: JsonOption = False) -> None:
    """Describe a lab."""
    _show(Lab.find(name or named), json)


@app.command("list", cls=Command)
def list_labs(json: JsonOption = False) -> None:
    """List the labs on this machine, including what is left of half-built and orphaned ones."""
    labs = find_labs()
    if json:
        print_json({"labs": [_found_facts(lab) for lab in labs]})
    elif labs:
        _show_found(labs)
    else:
        print_line("No lab is up. Create one: meshmend lab mesh up 4x4")


@app.command("down", cls=Command)
def down(
    name: NameArgument = None,
    named: NameOption = "lab",
    every: Annotated[bool, typer.Option("--all", help="Every lab, and every namespace with a lab's prefix.")] = False,
    json: JsonOption = False,
) -> None:
    """Remove a lab in any condition: its namespaces, cables, addresses and routes, and its journal.

    Example: meshmend lab mesh down
    """
    if every and (name is not None or named != "lab"):
        raise ParameterError("--all removes every lab: leave out the name.")
    labs = take_down_all() if every else [take_down(name or named)]
    if json:
        removed = [{"name": lab.name, "up": False, "was": lab.condition} for lab in labs]
        print_json({"labs": removed} if every else removed[0])
        return
    for lab in labs:
        print_line(f"The lab {lab.name} is down.")
    if not labs:
        print_line("No lab was up.")


@app.command(
    "run",
    cls=Command,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
)
def run(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="Command to run, with its arguments.")],
    chip: Annotated[
        list[str] | None, typer.Option("--chip", metavar="r,c", help="Only on this chip. Repeatable.")
    ] = None,
    name: NameOption = "lab",
) -> None:
    """Run a command on every chip of a lab at once, and wait for all of them.

    Each gets MESHMEND_CHIP, MESHMEND_MACHINE (a file: mesh, cables and hardware), MESHMEND_SHAPE, MESHMEND_FAILED,
    RANK, WORLD_SIZE, MASTER_ADDR and GLOO_SOCKET_IFNAME. The exit code is 0 if all of them exit with 0.

    Example: meshmend lab mesh run -- sh -c 'echo $MESHMEND_CHIP'
    """
    lab = Lab.find(name)
    if os.geteuid() != 0:
        raise LabError("Entering a network namespace needs root: run this command with sudo.")
    chips = [parse_chip(word) for word in chip] if chip else list(lab.namespaces)
    namespaces = {each: lab.namespaces[lab.mesh.chip(lab.mesh.rank(each))] for each in chips}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for each, namespace in namespaces.items():
            words = ["ip", "netns", "exec", namespace, *command]
            processes.append(subprocess.Popen(words, env=os.environ | lab.environment(each)))  # noqa: S603
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    raise typer.Exit(next((1 for code in codes if code), 0))


def _show(lab: Lab, as_json: bool) -> None:
    chips: list[dict[str, Any]] = [
        {"chip": list(chip), "namespace": namespace, "address": lab.address(chip)}
        for chip, namespace in lab.namespaces.items()
    ]
    first, last = lab.mesh.chip(0), lab.mesh.chip(lab.mesh.n_chips - 1)
    print_result(
        as_json,
        {"name": lab.name, **mesh_facts(lab.mesh), "rate": lab.rate, "delay": lab.delay, "namespaces": chips},
        f"lab {lab.name}: {lab.mesh}",
        {
            "chips": f"{lab.mesh.n_chips:,} live of {lab.mesh.size:,}",
            "cables": f"{lab.mesh.n_cables:,} of {lab.rate} each way"
            + (f", {len(lab.mesh.cable_rates):,} of them slower" if lab.mesh.has_slow_cables else ""),
            **({"delay": f"{lab.delay} one way, at every hop"} if lab.delay else {}),
            "namespaces": f"{lab.namespace(first)} … {lab.namespace(last)}",
            "addresses": f"{lab.address(first)} … {lab.address(last)}",
            "next": "meshmend lab mesh run -- COMMAND, meshmend lab mesh down",
        },
    )


def _found_facts(lab: FoundLab) -> dict[str, Any]:
    mesh = {} if lab.mesh is None else mesh_facts(lab.mesh)
    return {
        "name": lab.name,
        "condition": lab.condition,
        "pid": lab.pid,
        "rate": lab.rate,
        "delay": lab.delay,
        "namespaces": list(lab.namespaces),
        **mesh,
    }


def _show_found(labs: list[FoundLab]) -> None:
    print_rows(
        labs,
        [
            ("lab", lambda lab: lab.name),
            ("condition", lambda lab: Text(lab.condition, style="green" if lab.condition == "up" else "yellow")),
            ("mesh", lambda lab: lab.mesh),
            ("rate", lambda lab: lab.rate),
            ("delay", lambda lab: lab.delay),
            ("namespaces", lambda lab: f"{len(lab.namespaces)}" + (f" of {lab.n_namespaces}" if lab.mesh else "")),
            ("made by", lambda lab: None if lab.pid is None else f"process {lab.pid}"),
        ],
        words=("condition", "mesh", "rate", "delay", "namespaces", "made by"),
    )
    if any(lab.condition in ("half-built", "orphaned", "damaged") for lab in labs):
        print_line("Remove incomplete labs with: meshmend lab mesh down NAME, or meshmend lab mesh down --all")
