"""`meshmend machine`: what a description of a machine says is there, what is missing, and whom to call."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from meshmend.cli.common import mesh_facts, print_facts, print_json
from meshmend.cli.options import IntendedOption, JsonOption, WrapOption, option, read_wrap
from meshmend.cli.terminal import plain, print_line
from meshmend.cost import find_hardware
from meshmend.errors import ParameterError, name_chip
from meshmend.machines import Machine, read_machine
from meshmend.topology import Mesh, name_cable, parse_shape

MOST_LISTED = 12


def command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A description of the machine, from its own tools.")],
    intended: IntendedOption = None,
    shape: Annotated[
        str | None, option("--shape", "SHAPE", "The machine's shape, if the file leaves it open: 4x8.")
    ] = None,
    wrap: WrapOption = "none",
    json: JsonOption = False,
) -> None:
    """Read a machine's own description: its mesh, the hole, the slow cables, and whom to call.

    Reads Tenstorrent cluster descriptors, neuron-ls JSON, and a YAML of our own; with the laboratory also
    Tenstorrent's mesh graph and physical system descriptors.

    Example: meshmend machine cluster.yaml
    Example: meshmend machine today.yaml --intended healthy.yaml
    """
    if shape is None and wrap != "none":
        raise ParameterError("--wrap goes with --shape: give both, or neither.")
    wraps = False if shape is None else read_wrap(wrap, len(parse_shape(shape)))
    machine = read_machine(file, intended=intended, shape=shape, wrap=wraps)
    if machine.hardware is not None:
        find_hardware(machine.hardware)  # a name that is not known would fail in the next command
    then = _next(machine, file, intended)
    if json:
        print_json(_facts(machine, then))
    else:
        _show(machine, then)


def _next(machine: Machine, file: Path, intended: Path | None) -> str:
    """Return the command to go on with."""
    words = ["meshmend", "plan", "--machine", str(file)]
    words += [] if intended is None else ["--intended", str(intended)]
    words += ["--payload", "100MB"] + ([] if machine.hardware is None else ["--hardware", machine.hardware])
    return shlex.join(words)


def _facts(machine: Machine, then: str) -> dict[str, Any]:
    mesh = machine.mesh
    return {
        **mesh_facts(mesh),
        "format": machine.format,
        "file": machine.file,
        "hardware": machine.hardware,
        "failed_chips": [
            {"at": list(at), "name": _name(machine, at), "host": machine.host(at)} for at in machine.failed_chips
        ],
        "names": {",".join(map(str, at)): chip.name for at, chip in sorted(machine.chips.items())},
        "hosts": sorted({chip.host for chip in machine.chips.values() if chip.host is not None}),
        "call": _hosts_to_call(machine),
        "notes": list(machine.notes),
        "next": then,
    }


def _name(machine: Machine, at: tuple[int, ...]) -> str | None:
    return machine.chips[at].name if at in machine.chips else None


def _hosts_to_call(machine: Machine) -> list[str]:
    """Return the hosts of what is failed or slow; of a chip without a name, those of its neighbours."""
    mesh = machine.mesh
    ends = [end for cable in (*mesh.failed_cables, *mesh.cable_rates) for end in cable]
    whole = Mesh(mesh.shape, wrap=mesh.wrap)
    for at in machine.failed_chips:
        ends.append(at)
        if machine.host(at) is None:
            ends += [whole.chip(int(rank)) for rank in whole.neighbours[whole.rank(at)] if rank >= 0]
    return sorted({host for end in ends if (host := machine.host(end)) is not None})


def _show(machine: Machine, then: str) -> None:
    mesh = machine.mesh
    failed = [machine.name(at) + (f" on {host}" if (host := machine.host(at)) else "") for at in machine.failed_chips]
    cables = [f"{name_cable(cable)}{_between(machine, cable)}" for cable in mesh.failed_cables]
    slow = [f"{name_cable(c)} at {rate}{_between(machine, c)}" for c, rate in mesh.cable_rates.items()]
    facts: dict[str, str | Text] = {
        "format": machine.format,
        "mesh": str(mesh),
        "chips": f"{mesh.n_chips:,} live of {mesh.size:,}",
        "cables": f"{mesh.n_cables:,} live",
        "failed chips": _listed(failed),
        "failed cables": _listed(cables),
        "slow cables": _listed(slow),
        "call": _listed(_hosts_to_call(machine)),
        "notes": "\n".join(plain(note) for note in machine.notes),
    }
    print_facts(f"{machine.file}", {name: value for name, value in facts.items() if value})
    print_line(("next: ", "dim"), plain(then))


def _between(machine: Machine, cable: tuple[tuple[int, ...], tuple[int, ...]]) -> str:
    names = [machine.name(end).removeprefix(name_chip(end)).strip() for end in cable]
    return f" ({' – '.join(names)})" if all(names) else ""


def _listed(rows: list[str]) -> str:
    more = [f"and {len(rows) - MOST_LISTED} more (--json lists all)"] if len(rows) > MOST_LISTED else []
    return "\n".join(plain(row) for row in [*rows[:MOST_LISTED], *more])
