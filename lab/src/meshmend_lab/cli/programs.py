"""`meshmend lab programs`: a saved plan as one program per device of a machine."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from meshmend.cli.common import check_output, print_result
from meshmend.cli.options import IntendedOption, JsonOption
from meshmend.cli.terminal import plain, working
from meshmend.schedule.serialize import load
from meshmend_lab.tenstorrent import chip_programs
from meshmend_lab.tenstorrent.numbered import read_numbered


def command(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan that `plan --machine FILE --save PLAN` wrote.")],
    machine: Annotated[
        Path, typer.Option("--machine", metavar="FILE", help="A cluster descriptor, whose devices are named.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="F", help="Output file: .json.")],
    intended: IntendedOption = None,
    json: JsonOption = False,
) -> None:
    """Write what each device of a Tenstorrent machine does in a plan, as JSON for an engine of the machine.

    The plan sends between neighbours only: `weave`, `hamiltonian`, or `auto` with --neighbours-only.

    Example: meshmend lab programs plan.npz --machine today.yaml --intended healthy.yaml -o programs.json
    """
    check_output("--output", output, [".json"])
    schedule = load(plan)
    with working("proving and writing", json):
        programs = chip_programs(schedule, read_numbered(machine, intended=intended))
        output.write_text(dumps(programs), encoding="utf-8")
    facts = {"file": str(output), "planner": schedule.planner, "steps": schedule.n_steps}
    shown = {"file": plain(output), "devices": f"{len(programs['chips']):,}", "steps": f"{schedule.n_steps:,}"}
    print_result(json, {**facts, "devices": len(programs["chips"])}, f"{schedule.planner} on {schedule.mesh}", shown)
