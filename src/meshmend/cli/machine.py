"""`meshmend machine`: what a description of a machine says is there, what is missing, and whom to call."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.text import Text

from meshmend.cli.common import check_output, mesh_facts, print_facts, print_json
from meshmend.cli.options import IntendedOption, JsonOption, WrapOption, option, read_wrap
from meshmend.cli.terminal import plain, print_line
from meshmend.cost import find_hardware
from meshmend.errors import MachineError, ParameterError, name_chip
from meshmend.machines import Machine, read_machine
from meshmend.machines.own import text_of
from meshmend.topology import Mesh, name_cable, parse_shape

MOST_LISTED = 12


def command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A description of the machine, from its own tools.")],
    intended: IntendedOption = None,
    shape: Annotated[
        str | None, option("--shape", "SHAPE", "The machine's shape, if the file leaves it open: 4x8.")
    ] = None,
    wrap: WrapOption = "none",
    lldp: Annotated[
        Path | None,
        option(
            "--lldp", "DIR", "LLDP neighbours of each host, as DIR/HOST.json (lldpcli -f json0): the source of FILE."
        ),
    ] = None,
    routes: Annotated[str | None, option("--routes", "HOST", "The commands that join a host to all others.")] = None,
    json: JsonOption = False,
) -> None:
    """Read a machine's own description: its mesh, the hole, the slow cables, and whom to call.

    Reads Tenstorrent cluster descriptors, neuron-ls JSON, and a YAML of our own; with the laboratory also
    Tenstorrent's mesh graph and physical system descriptors.

    Example: meshmend machine cluster.yaml
    Example: meshmend machine today.yaml --intended healthy.yaml
    Example: meshmend machine wired.json --lldp neighbours --intended shape.yaml
    Example: meshmend machine wired.json --routes node-a
    """
    if shape is None and wrap != "none":
        raise ParameterError("--wrap goes with --shape: give both, or neither.")
    wraps = False if shape is None else read_wrap(wrap, len(parse_shape(shape)))
    machine = read_machine(file if lldp is None else lldp, intended=intended, shape=shape, wrap=wraps)
    if routes is not None:
        commands = _routes(machine, routes)
        if json:
            print_json({"host": routes, "commands": commands})
        else:
            typer.echo("\n".join(commands))
        return
    if lldp is not None:
        check_output("FILE", file, (".json",))
        file.write_text(text_of(machine), encoding="utf-8")
        intended = None  # the file says what is missing
    if machine.hardware is not None:
        find_hardware(machine.hardware)  # a name that is not known would fail in the next command
    then = _next(machine, file, intended)
    if json:
        print_json(_facts(machine, then))
    else:
        _show(machine, then)


def _routes(machine: Machine, host: str) -> list[str]:
    """Return the commands that let a host reach all others over its own cables, and forward what is for others."""
    mesh, at = machine.mesh, machine.coordinate(host)
    chips = [machine.chips.get(mesh.chip(rank)) for rank in range(mesh.n_chips)]
    hosts = [chip for chip in chips if chip is not None and chip.address and chip.ports]
    if not mesh.live[at] or len(hosts) < mesh.n_chips:
        raise MachineError(
            f"{machine.file}: routes need a live host, and each host's address and ports. Describe the machine with "
            "`meshmend machine FILE.json --lldp DIR`."
        )
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import shortest_path

    rank, edges = mesh.rank(at), mesh.cables
    graph = csr_array((np.ones(len(edges)), (edges[:, 0], edges[:, 1])), shape=(mesh.n_chips, mesh.n_chips))
    # In the tree of shortest ways from a destination, what comes before this host is the next on the way to it.
    _, before = shortest_path(graph, directed=False, unweighted=True, return_predecessors=True)
    own, near = hosts[rank], [hosts[other] for other in mesh.neighbours[rank] if other >= 0]
    ends = ["all", *(own.ports[other.name] for other in near)]
    commands = [f"sysctl -w net.ipv4.ip_forward=1 {' '.join(f'net.ipv4.conf.{end}.rp_filter=0' for end in ends)}"]
    for to, other in enumerate(hosts):
        if to != rank:
            via = hosts[before[to, rank]]
            way = f"via {via.address} dev {own.ports[via.name]} onlink src {own.address}"
            commands.append(f"ip route replace {other.address}/32 {way}")
    return commands


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
