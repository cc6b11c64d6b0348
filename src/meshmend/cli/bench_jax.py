"""`meshmend bench allreduce --engine jax`: in a process of its own, because JAX reads its number of devices once."""

from __future__ import annotations

from operator import itemgetter
from typing import Annotated

import typer

from meshmend.bench.jax_report import COLUMNS, N_NAMES, read_payload, summary, table_rows, title
from meshmend.cli.common import print_facts, print_json
from meshmend.cli.options import complete_hardware, completing
from meshmend.cli.terminal import print_rows, working
from meshmend.cost import find_hardware
from meshmend.cost.units import format_bytes
from meshmend.doctor.examine import ask, jax_environment, virtual_devices
from meshmend.errors import LabError
from meshmend.extras import require
from meshmend.planning import make_planner
from meshmend.topology import Mesh

TIMEOUT_S = 3600.0
EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="NAME",
        help="torch (processes over Gloo) or jax (virtual CPU devices, or without --loopback those that JAX has).",
        autocompletion=completing("torch", "jax"),
    ),
]
MeasuredOption = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="NAME",
        help="With --engine jax: the preset or file that plans and predictions are made for. [default: measured first]",
        autocompletion=complete_hardware,
    ),
]


def time_on_jax(
    shape: str | None,
    holes: list[str],
    payloads: list[str],
    planners: list[str],
    repeat: int,
    hardware: str | None,
    json: bool,
) -> None:
    """Time `psum`, every planner and what a job takes; print a table or JSON.

    With a shape, on virtual CPU devices; without one, on the devices that JAX has and that know where they are. What is
    wrong with the options is said here, before the other process starts.
    """
    require("jax", "optax", needed_for="This measurement", extra="jax")
    words = ["-m", "meshmend.bench.jax_allreduce", "--json", "--repeat", str(repeat)]
    environment = jax_environment()
    if shape is not None:
        environment = virtual_devices(Mesh(shape).fail(*holes).n_chips)
        words += ["--shape", shape]
    if hardware is not None:
        find_hardware(hardware)
        words += ["--hardware", hardware]
    for name in planners:
        make_planner(name)
    sizes = ", ".join(format_bytes(read_payload(text)) for text in payloads)
    repeated = {"--fail": holes, "--payload": payloads, "--planner": planners}
    words += [word for option, values in repeated.items() for value in values for word in (option, value)]
    with working(f"all-reduces of {sizes}", json):
        facts, failure = ask(words, environment, TIMEOUT_S)
    if failure is not None:
        raise LabError(f"The measurement failed: {failure}")
    if json:
        print_json(facts)
        return
    columns = [(name, itemgetter(number)) for number, name in enumerate(COLUMNS)]
    print_rows(table_rows(facts), columns, title=title(facts), names=N_NAMES)
    print_facts("choices and predictions", summary(facts))
