"""`meshmend lab bench jax`: all-reduces on the devices that JAX has, or on virtual ones.

The measurement has a process of its own, because JAX reads its number of devices once.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Annotated

from meshmend.cli.common import print_facts, print_json
from meshmend.cli.options import FailOption, JsonOption, hardware_option, option
from meshmend.cli.terminal import print_rows, working
from meshmend.cost import find_hardware
from meshmend.cost.units import format_bytes
from meshmend.doctor.examine import ask, jax_environment, virtual_devices
from meshmend.extras import require
from meshmend.planning import make_planner
from meshmend.topology import Mesh
from meshmend_lab.errors import LabError
from meshmend_lab.timing.report import COLUMNS, N_NAMES, read_payload, summary, table_rows, title

TIMEOUT_S = 3600.0
DEFAULT_PAYLOAD = "4MB"


def command(
    shape: Annotated[
        str | None, option("--shape", "SHAPE", "Virtual CPU devices in this mesh.", show_default="the devices of JAX")
    ] = None,
    fail: FailOption = None,
    payload: Annotated[
        list[str] | None,
        option("--payload", "BYTES", "Bytes per chip, as in 32MB. Repeatable.", show_default=DEFAULT_PAYLOAD),
    ] = None,
    planner: Annotated[
        list[str] | None, option("--planner", "NAME", "Only these. Repeatable.", show_default="all")
    ] = None,
    repeat: Annotated[int, option("--repeat", "N", "Runs per case; the best counts.", min=1)] = 3,
    hardware: Annotated[str | None, hardware_option("measured first")] = None,
    json: JsonOption = False,
) -> None:
    """Time JAX's own psum, every plan, and what a job would run, on the same devices in the same run.

    Measured times stand beside predicted ones. Without --shape the devices are those that JAX has, which must know
    where they are, as TPUs do.

    Example: meshmend lab bench jax --shape 4x4 --fail 2x2@0,0 --payload 4MB
    """
    holes, payloads, planners = fail or [], payload or [DEFAULT_PAYLOAD], planner or []
    require("jax", "optax", needed_for="This measurement", extra="jax")
    words = ["-m", "meshmend_lab.timing.devices", "--json", "--repeat", str(repeat)]
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
