"""`meshmend report`: one page for the decision-maker, on what failures cost and what each policy is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshmend.availability.report import write_report
from meshmend.cli.availability import study_facts
from meshmend.cli.common import print_json
from meshmend.cli.options import JsonOption, MachineOptions, OptionalShapeArgument
from meshmend.cli.outputs import check_output
from meshmend.cli.studies import StudyOptions
from meshmend.cli.terminal import plain, print_line

PAGES = (".html", ".htm")


def command(
    machine: MachineOptions,
    options: StudyOptions,
    shape: OptionalShapeArgument = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="F", help="Where to write the page: .html.")] = Path(
        "report.html"
    ),
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="What the machine is called on the page.")] = "",
    json: JsonOption = False,
) -> None:
    """Write one HTML page on what failures of a machine cost, and what each policy to them is worth.

    The study of `meshmend availability`, with the same options: the machine, the policies, the price of a failure, a
    sweep of failure rates, and every assumption with its source. The page needs no other file and no network, and
    prints well. Example: meshmend report 32x32 --price 3 --out report.html
    """
    options.check()
    check_output("--out", out, PAGES)
    assumptions, _ = options.assumptions(machine, shape)
    study, swept = options.simulate(assumptions, swept=True, as_json=json)
    out.write_text(write_report(study, swept, name=name), encoding="utf-8")
    if json:
        print_json({"out": str(out), **study_facts(study)})
    else:
        print_line(f"Written to {plain(out)}.")
